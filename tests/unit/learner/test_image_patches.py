"""Continuous image tokens: the flow head's steps, the released layout, and rows in batches of any composition."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from mobula.cluster.records.actions import PatchActions, to_bfloat16
from mobula.configs.schema.rollout import ImagePatchesConfig
from mobula.learner.policies.flow.codec import RELEASED, ImageCodec
from mobula.learner.policies.flow.family import packed, unpacked
from mobula.learner.policies.flow.patches import (
    PatchPolicy,
    PatchSequence,
    codec_folder,
    collate_patches,
    negative_ids,
    patch_schedule,
)
from mobula.learner.policies.flow.policy import Denoising, StepRescoring
from mobula.learner.policies.flow.tiny.patches import write_tiny_patches
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.nextstep.model import NextStep, NextStepConfig, grid_positions
from mobula.learner.policies.sde import KERNELS, FlowStep

CPU = torch.device("cpu")
LENGTH, SIZE = 16, 16  # tokens of an image, numbers of a token
DENOISING = Denoising(16, 16, 5, 1.0, "langevin", 1.0, 1, 4, "float32")

# Of the public module tree of NextStep-1.1, with one layer and one block.
ATTENTION = [f"{p}_proj.{k}" for p in "qkv" for k in ("weight", "bias")] + ["o_proj.weight"]
NAMES = {
    "embed_tokens.weight", "norm.weight", "lm_head.weight",
    *(f"layers.0.self_attn.{name}" for name in ATTENTION),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
    *(f"{layer}.{kind}" for kind in ("weight", "bias") for layer in (
        "image_in_projector", "image_out_projector", "image_head.net.time_embed.mlp.0", "image_head.net.cond_embed",
        "image_head.net.time_embed.mlp.2", "image_head.net.input_proj", "image_head.net.res_blocks.0.in_ln",
        "image_head.net.res_blocks.0.mlp.0", "image_head.net.res_blocks.0.mlp.2",
        "image_head.net.res_blocks.0.adaLN_modulation.1", "image_head.net.final_layer.linear",
        "image_head.net.final_layer.adaLN_modulation.1",
    )),
}  # fmt: skip
RELEASED_CONFIG = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "vae_name_or_path": "vae/", "latent_size": 32,
    "latent_patch_size": 2, "latent_channels": 16, "boi": 151667, "eoi": 151668, "image_placeholder_id": 151669,
    "pad_token_id_added": None, "lm_loss_weight": 0.01, "im_loss_weight": 1.0, "fm_head_dim": 1536,
    "fm_head_layers": 12, "fm_head_batch_mul": 4, "attention_bias": True, "o_attention_bias": False,
}  # fmt: skip


def random_step(num: int, sigma: float, following: float) -> tuple[FlowStep, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, u, after = (torch.randn(num, 64, generator=generator) for _ in range(3))
    levels = (torch.full((num,), level) for level in (sigma, following, 0.95))
    return FlowStep(x, -u, *levels), u, after


@pytest.mark.parametrize(("t", "dt"), [(0.0, 0.05), (0.4, 0.1), (0.95, 0.05)])
def test_a_langevin_step_is_that_of_the_released_sampler(t: float, dt: float) -> None:
    """score = (t u - x) / (1 - t), drift = u + (1 - t) score: written out as in the public head."""
    step, u, after = random_step(3, 1 - t, 1 - t - dt)
    x = step.latents.double()
    variance = (1 - t) ** 2 + t * (1 - t)
    score = (t * u.double() - x) / variance
    expected = Normal(x + (u.double() + (1 - t) * score) * dt, math.sqrt(2 * (1 - t) * dt))
    moved = KERNELS["langevin"](step, 1.0)
    torch.testing.assert_close(moved.mean.double(), expected.mean, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(moved.logprobs(after).double(), expected.log_prob(after).mean(1), atol=2e-4, rtol=1e-5)


def test_schedules_are_those_of_the_released_samplers() -> None:
    newer = patch_schedule(20, ImagePatchesConfig(shift=3.0))
    times = [n / 20 / (3 - 2 * n / 20) for n in range(20)]
    np.testing.assert_allclose(newer.timesteps, times, atol=1e-6)
    np.testing.assert_allclose(newer.sigmas, [*(1 - t for t in times), 0], atol=1e-6)
    first = patch_schedule(20, ImagePatchesConfig(last_step=0.04))
    np.testing.assert_allclose(first.timesteps, np.linspace(0, 0.96, 20), atol=1e-6)
    assert first.sigmas[-1] == pytest.approx(0, abs=1e-6) and first.sigmas[-2] == pytest.approx(0.04, abs=1e-6)
    step = FlowStep(
        *(torch.zeros(1, 64),) * 2, *(patch_schedule(20, ImagePatchesConfig()).sigmas[[n]] for n in (19, 20, 1))
    )
    assert float(KERNELS["langevin"](step, 1.0).std) == pytest.approx(math.sqrt(2) / 20, rel=1e-4)


def test_the_released_layout() -> None:
    own = {"num_hidden_layers": 1, "fm_head_layers": 1, "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64}
    config = NextStepConfig(**{**RELEASED_CONFIG, **own, "num_attention_heads": 4, "num_key_value_heads": 2})
    with torch.device("meta"):
        assert set(NextStep(config).state_dict()) == NAMES
        model = NextStep(NextStepConfig(**RELEASED_CONFIG))
    assert model.config.rope_parameters["rope_theta"] == 1e6 and model.config.token_size == 64
    assert model.image_head["net"].input_proj.weight.shape == (1536, 64)
    assert 14e9 < sum(parameter.numel() for parameter in model.parameters()) < 16e9
    with pytest.raises(ValueError, match="biases on q, k and v alone"):
        NextStepConfig(**{**RELEASED_CONFIG, "o_attention_bias": True})


def test_tokens_are_tiles_of_channels_row_by_row() -> None:
    latents = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).float()
    tokens = packed(latents, 2)
    assert tokens.shape == (2, 6, 12)
    expected = torch.einsum("nchpwq->nhwcpq", latents.reshape(2, 3, 2, 2, 3, 2)).reshape(2, 6, 12)
    assert torch.equal(tokens, expected) and torch.equal(unpacked(tokens, 4, 6), latents)


def test_positions_are_sines_of_the_column_and_of_the_row() -> None:
    found = grid_positions(32, 16)[32 * 3 + 5].numpy()  # row 3, column 5
    rates = 10_000 ** (-np.arange(4) / 4)
    expected = np.concatenate([f(place * rates) for place in (5, 3) for f in (np.sin, np.cos)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def released_names(stages: int, blocks: int) -> set[str]:
    """Modules of the public VAE with parameters."""
    resnet = ("norm1", "conv1", "norm2", "conv2")
    found = set()
    for side, levels, number in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        found |= {f"{side}.{name}" for name in ("conv_in", "norm_out", "conv_out")}
        found |= {f"{side}.mid.block_{n}.{name}" for n in (1, 2) for name in resnet}
        found |= {f"{side}.mid.attn_1.{name}" for name in ("norm", "q", "k", "v", "proj_out")}
        found |= {f"{side}.{levels}.{i}.block.{n}.{m}" for i in range(stages) for n in range(number) for m in resnet}
    found |= {f"encoder.down.{i}.downsample.conv" for i in range(stages - 1)}
    return found | {f"decoder.up.{i}.upsample.conv" for i in range(1, stages)}


def test_a_released_vae_is_read(tmp_path: Path) -> None:
    """Written with the names of the public modules; every tensor arrives, and images have the expected size."""
    settings = '{"ch": 32, "ch_mult": [1, 1], "num_res_blocks": 1, "z_channels": 16, "encoder_norm": true, "psz": 2}'
    (tmp_path / "config.json").write_text(settings)
    generator, state = torch.Generator().manual_seed(0), {}
    for name in released_names(2, 1):
        out = {"encoder.conv_out": 32, "decoder.conv_out": 3}.get(name, 32)
        into = {"encoder.conv_in": 3, "decoder.conv_in": 16}.get(name, 32)
        kernel = 1 if ".attn_1." in name else 3
        shape = (out,) if "norm" in name else (out, into, kernel, kernel)
        state[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
        state[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.1
    torch.save(state, tmp_path / RELEASED)
    codec = ImageCodec(tmp_path, 2, torch.float32)
    up = codec.vae.decoder.up_blocks[0].resnets[1].conv1.weight  # of the last level, which comes first
    assert torch.equal(up, state["decoder.up.1.block.1.conv1.weight"])
    query = codec.vae.decoder.mid_block.attentions[0].to_q.weight
    assert torch.equal(query, state["decoder.mid.attn_1.q.weight"][:, :, 0, 0])
    tokens = codec.encode(np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3), dtype=np.uint8))
    assert tokens.shape == (2, 6, 64)
    scaled = tokens / codec.vae.config.scaling_factor + codec.vae.config.shift_factor
    np.testing.assert_allclose(scaled.mean(-1), 0, atol=1e-5)
    assert codec.decode(tokens, 2).shape == (2, 8, 12, 3)
    del state["decoder.conv_out.bias"]
    torch.save(state, tmp_path / RELEASED)
    with pytest.raises(ValueError, match="1 tensors are missing"):
        ImageCodec(tmp_path, 2, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_patches(tmp_path_factory.mktemp("nextstep"))


def loud(folder: Path) -> NextStep:
    """The tiny model, with random numbers in each matrix."""
    model, generator = load_model(str(folder), torch.float32, "sdpa").eval(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    return model


def policy_of(folder: Path) -> PatchPolicy:
    return PatchPolicy(loud(folder), negative_ids(str(folder), "", DENOISING.size), 100)


def rows_of(num: int, how: Denoising = DENOISING, longest: int = 40) -> list[PatchSequence]:
    """Random images behind prompts of different lengths."""
    schedule, rng = patch_schedule(how.num_steps, ImagePatchesConfig()), np.random.default_rng(0)
    index = np.arange(how.window_start, how.window_end, dtype=np.int32)
    rows = []
    for n in range(num):
        latents = rng.normal(size=(len(index) + 1, LENGTH, SIZE)).astype(np.float32)
        tokens = rng.normal(size=(LENGTH, SIZE)).astype(np.float32)
        actions = PatchActions(latents, index, schedule.timesteps.numpy()[index], schedule.sigmas.numpy(), tokens)
        rows.append(PatchSequence(actions, (), prompt_ids=rng.integers(0, 256, 5 + n * longest // num)))
    return rows


@torch.no_grad()
def logprobs_of(policy: PatchPolicy, rows: list[PatchSequence], how: Denoising = DENOISING) -> np.ndarray:
    return policy(collate_patches(rows, CPU), StepRescoring(how, "none")).logprobs.numpy()


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_row_has_the_same_log_probs_in_every_batch(one_thread: None, folder: Path, guidance: float) -> None:
    how, policy = replace(DENOISING, guidance=guidance), policy_of(folder)
    rows = rows_of(7)
    whole = logprobs_of(policy, rows, how)
    assert whole.shape == (7, LENGTH * 3)
    for part in (slice(0, 1), slice(1, 3), slice(3, 7)):
        np.testing.assert_array_equal(logprobs_of(policy, rows[part], how), whole[part])
    assert np.abs(logprobs_of(policy, rows, replace(how, guidance=2.0)) - whole).max() > 1e-3


def test_log_probs_are_those_of_single_tokens(one_thread: None, folder: Path) -> None:
    """The last step of a window, token by token, from a pass over the tokens before it alone."""
    policy, [row] = policy_of(folder), rows_of(1)
    found, model = logprobs_of(policy, [row]).reshape(LENGTH, 3), policy.model
    actions, step = row.actions, 2
    t, sigmas = actions.timesteps[step], actions.sigmas[actions.step_index[step] :][:2]
    for token in (0, 1, LENGTH - 1):
        embeds = model.embed_tokens(torch.from_numpy(row.prompt_ids)[None])
        images = model.image_in_projector(torch.from_numpy(actions.tokens[None, :token]))
        state = model(inputs_embeds=torch.cat([embeds, images], 1), use_cache=False).last_hidden_state[:, -1:]
        x, after = (torch.from_numpy(actions.latents[n, token][None]) for n in (step, step + 1))
        u = model.velocity(x, torch.tensor([t]), model.conditions(state, token)[:, 0])
        dt = float(sigmas[0] - sigmas[1])
        expected = Normal(x + ((1 + t) * u - x) * dt, math.sqrt(2 * (1 - t) * dt)).log_prob(after).mean()
        assert found[token, step] == pytest.approx(expected.item(), abs=2e-5)


def test_vrl_takes_all_steps_again_and_sums(one_thread: None, folder: Path) -> None:
    """Its public formula: K - 1 Euler steps from the stored noise, then a Gaussian of std a / sqrt(K)."""
    how = replace(DENOISING, kernel="vrl", noise_level=0.7, window_start=4, window_end=5)
    policy, [row] = policy_of(folder), rows_of(1, how)
    found, model = logprobs_of(policy, [row], how)[0], policy.model
    x, token = (torch.from_numpy(row.actions.latents[n]) for n in (0, 1))
    with torch.no_grad():
        batch = collate_patches([row], CPU)
        conditions = model.conditions(batch.images.states(model))[0]
        for k in range(5):
            mean = x + model.velocity(x, torch.full((LENGTH,), k / 5), conditions) / 5
            x = mean
    expected = Normal(mean, 0.7 * math.sqrt(1 / 5)).log_prob(token).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bfloat16_stays_near_float32(one_thread: None, folder: Path) -> None:
    policy, rows = policy_of(folder), rows_of(4)
    exact = logprobs_of(policy, rows)
    policy.model.to(torch.bfloat16)
    gap = np.abs(logprobs_of(policy, rows) - exact)
    assert 0 < gap.mean() < 0.02 and gap.max() < 0.2, (gap.mean(), gap.max())


def test_actions_in_pieces_and_in_bfloat16() -> None:
    [row] = rows_of(1)
    actions = row.actions
    first, rest = actions.stretch(0, 6), actions.stretch(6, actions.num_steps)
    assert (first.num_steps, rest.num_steps) == (6, LENGTH * 3 - 6)
    for one, other in zip(first.followed_by(rest).content(), actions.content(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="cut a token"):
        actions.stretch(0, 4)
    rounded = replace(actions, latents=to_bfloat16(actions.latents), tokens=to_bfloat16(actions.tokens))
    np.testing.assert_allclose(rounded.token_values, actions.tokens, rtol=1 / 128)
    steps = rounded.scored()
    np.testing.assert_allclose(steps.before[4], actions.latents[1, 1], rtol=1 / 128)
    np.testing.assert_allclose(steps.after[3], actions.latents[1, 1], rtol=1 / 128)
    assert steps.index[:4].tolist() == [1, 2, 3, 1]


def test_a_checkpoint_without_its_vae_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="write the folder of the VAE there"):
        codec_folder(str(tmp_path))
