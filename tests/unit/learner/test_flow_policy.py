"""A flow model as a policy: its rows, losses, log-probs and divergence, training, and steps by the papers' formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from flow_run import (
    CPU,
    DENOISING,
    SIGMAS,
    encoded_prompts,
    latent_actions,
    latent_group,
    latent_prompt,
    write_loud_sd3,
)
from group_data import image_prompt
from scored_rows import reader
from torch.distributions import Normal, kl_divergence

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import MediaSpan, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import LoRAConfig
from mobula.learner.algorithms.flow_losses import grpo_guard, nft
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES
from mobula.learner.backends.native import SingleBackend
from mobula.learner.batch import LearnerItem, collate_items, fetch_items
from mobula.learner.policies.adapters import adapted_modules, add_adapters, as_merged
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import flow_family_at
from mobula.learner.policies.flow.policy import (
    CONDITION,
    CleanSequence,
    FlowPolicy,
    LatentBatch,
    Noising,
    StepRescoring,
    canary_actions,
    collate_noised,
)
from mobula.learner.policies.loading import checkpoint_names
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.sde import KERNELS, FlowStep, gaussian_kl, guided
from mobula.learner.policies.trained import collate_rows, row_of

SCHEDULE = np.array([1.0, 0.95, 0.86, 0.7, 0.5, 0.2, 0.0], dtype=np.float32)
REPLAY = StepRescoring(DENOISING, "none")
SHAPE = (16, 16, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud_sd3(tmp_path_factory.mktemp("flow") / "sd3")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return encoded_prompts(folder, ["71", "8"])


def policy(folder: Path, *, rank: int = 0) -> FlowPolicy:
    """In training mode; with adapters of this rank at `to_q` and `to_out.0`, whose B is not 0."""
    model = FlowCheckpoint(str(folder)).transformer(torch.float32).train()
    if rank:
        names = [name for name, _ in model.named_modules() if name.endswith((".attn.to_q", ".attn.to_out.0"))]
        add_adapters(model, names, LoRAConfig(rank=rank, alpha=8.0, target_modules=("to_q", "to_out.0")), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return FlowPolicy(model, flow_family_at(folder))


def batch_of(prompts: list[Prompt], *windows: tuple[int, int]) -> LatentBatch:
    """Random steps of each prompt."""
    rows = []
    for prompt, (start, end) in zip(prompts, windows, strict=True):
        denoising = replace(DENOISING, window_start=start, window_end=end)
        rows.append(row_of(prompt, canary_actions(denoising, SHAPE, SCHEDULE, 1000 * SCHEDULE[:-1])))
    return collate_rows(rows, reader(), CPU)


def by_hand(own: FlowPolicy, prompt: Prompt, actions: LatentActions) -> tuple[np.ndarray, np.ndarray]:
    """(means, deviations) of each step, in double precision from the velocity of two plain forwards of all steps."""
    means, stds = [], []
    encoded = [m.reference.inputs for m in prompt.media]
    num = actions.num_steps
    with torch.no_grad():
        velocities = [
            own.model(
                hidden_states=torch.from_numpy(actions.latents[:-1]),
                timestep=torch.from_numpy(actions.timesteps),
                encoder_hidden_states=torch.from_numpy(c["encoder_hidden_states"]).expand(num, -1, -1),
                pooled_projections=torch.from_numpy(c["pooled_projections"]).expand(num, -1),
                return_dict=False,
            )[0].double()
            for c in encoded
        ]
    guided = velocities[1] + DENOISING.guidance * (velocities[0] - velocities[1])
    for step, v in zip(range(num), guided.numpy(), strict=True):
        x, sigma, following = actions.latents[step].astype(float), *map(float, actions.sigmas[step : step + 2])
        rate = 0.7 * np.sqrt(sigma / (1 - (float(actions.sigmas[1]) if sigma == 1 else sigma)))
        drift = v + rate**2 / (2 * sigma) * (x + (1 - sigma) * v)
        means.append(x + drift * (following - sigma))
        stds.append(rate * np.sqrt(sigma - following))
    return np.array(means), np.array(stds)


def test_log_probs_and_entropy_are_those_of_the_gaussians(folder: Path, prompts: list[Prompt]) -> None:
    own, batch = policy(folder), batch_of(prompts[:1], (0, 5))
    actions = canary_actions(DENOISING, SHAPE, SCHEDULE, 1000 * SCHEDULE[:-1])
    output = own(batch, REPLAY)
    means, stds = by_hand(own, prompts[0], actions)
    for t, (mean, std) in enumerate(zip(means, stds, strict=True)):
        normal = Normal(torch.tensor(mean), torch.tensor(std))
        expected = normal.log_prob(torch.tensor(actions.latents[t + 1], dtype=torch.float64)).mean().item()
        assert output.logprobs[0, t].item() == pytest.approx(expected, rel=1e-4)
        assert output.entropy[0, t].item() == pytest.approx(Normal(0.0, std).entropy().item(), abs=1e-5)
    assert output.divergence is None


def test_rows_of_different_lengths_are_filled_up_with_nothing(folder: Path, prompts: list[Prompt]) -> None:
    own = policy(folder)
    together = own(batch_of(prompts, (0, 3), (2, 4)), REPLAY).logprobs
    alone = [
        own(batch_of([prompt], window), REPLAY).logprobs
        for prompt, window in zip(prompts, ((0, 3), (2, 4)), strict=True)
    ]
    assert together.shape == (2, 3) and together[1, 2] == 0
    assert together[0].tolist() == alone[0][0].tolist()
    assert together[1, :2].tolist() == alone[1][0].tolist()


@pytest.mark.parametrize("kind", ["exact", "per_time"])
def test_the_divergence_is_that_from_the_model_without_adapters(folder: Path, prompts: list[Prompt], kind: str) -> None:
    own, batch = policy(folder, rank=2), batch_of(prompts[:1], (0, 5))
    output = own(batch, StepRescoring(DENOISING, kind))
    actions = canary_actions(DENOISING, SHAPE, SCHEDULE, 1000 * SCHEDULE[:-1])
    (means, stds), (base, _) = by_hand(own, prompts[0], actions), by_hand(policy(folder), prompts[0], actions)
    for t in range(5):
        step = 1.0 if kind == "exact" else float(actions.sigmas[t] - actions.sigmas[t + 1])
        std = torch.tensor(stds[t])
        expected = kl_divergence(Normal(torch.tensor(means[t]), std), Normal(torch.tensor(base[t]), std)).mean() * step
        assert output.divergence[0, t].item() == pytest.approx(expected.item(), rel=1e-3)
    output.divergence.sum().backward()
    gradients = {name: p.grad for name, p in own.model.named_parameters() if p.requires_grad}
    assert gradients and all(".lora_" in name and grad.abs().sum() > 0 for name, grad in gradients.items())
    assert own(batch, REPLAY).logprobs.tolist() == output.logprobs.tolist()  # its adapters are on again


def test_without_adapters_there_is_nothing_to_diverge_from(folder: Path, prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match=r"compared with itself without adapters: set policy\.lora\.rank above 0"):
        policy(folder)(batch_of(prompts[:1], (0, 5)), StepRescoring(DENOISING, "exact"))


def test_a_gradient_step_makes_what_was_done_likelier(folder: Path, prompts: list[Prompt]) -> None:
    config = load_config(["experiment=digits", "learner=single", "resources.learner.num_workers=1"]).learner
    backend = SingleBackend(CPU, torch.float32, config)
    own = backend.wrap(policy(folder, rank=2))
    optimizer, batch = backend.optimizer(), batch_of(prompts, (0, 5), (0, 5))
    optimizer.param_groups[0]["lr"] = 1e-3
    before = own(batch, REPLAY).logprobs
    backend.backward(-before.sum(), is_last=True)
    assert backend.step(optimizer, max_grad_norm=1.0) > 0
    assert (own(batch, REPLAY).logprobs.sum() > before.sum()).item()


def test_names_are_the_checkpoints_and_merged_adapters_change_the_adapted_weights_alone(folder: Path) -> None:
    plain, adapted = FlowCheckpoint(str(folder)).transformer(torch.float32), policy(folder, rank=2).model
    assert checkpoint_names(plain) == {name: name for name in plain.state_dict()}
    merged = dict(as_merged(adapted.state_dict().items(), 4.0))
    assert merged.keys() == plain.state_dict().keys()
    changed = [name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, merged[name])]
    assert changed and all(name.endswith((".attn.to_q.weight", ".attn.to_out.0.weight")) for name in changed)


def test_adapters_go_to_layers_of_numbered_lists_by_name(folder: Path) -> None:
    manifest = checkpoint_manifest(folder / "transformer", "float32")
    config = load_config(["experiment=digits", "policy.lora.rank=2", "policy.lora.target_modules=[to_q,to_out.0]"])
    found = adapted_modules(manifest, config.policy)
    assert {name.split(".attn", 1)[1].lstrip("2") for name in found} == {".to_q", ".to_out.0"}
    unknown = load_config(["experiment=digits", "policy.lora.rank=2", "policy.lora.target_modules=[to_nothing]"])
    with pytest.raises(ValueError, match="no matrix of the model is called to_nothing; there are .*to_out.0"):
        adapted_modules(manifest, unknown.policy)


def test_blocks_are_what_may_be_sharded_by_itself(folder: Path) -> None:
    own = policy(folder)
    assert list(own.blocks()) == list(own.model.transformer_blocks)


LEVELS = np.array([1.0, 0.8, 0.5, 0.2], dtype=np.float32)
NO_IDS = np.empty(0, dtype=np.int32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_nft_is_the_weighted_sum_of_both_errors(beta: float) -> None:
    predicted, old, clean, noise = (random(2, 3, 1, 4, 4, seed=n) for n in range(4))
    sigmas = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64).view(1, 3, 1, 1, 1).expand(2, 3, 1, 1, 1)
    noised = (1 - sigmas) * clean + sigmas * noise
    advantages = torch.tensor([[2.5], [-9.0]], dtype=torch.float64)
    found = nft(predicted, old, noised, clean, sigmas, advantages, beta=beta, max_advantage=5.0)
    for row, share in enumerate((0.75, 0.0)):
        expected = []
        for k in range(3):
            x, sigma = noised[row, k], float(sigmas[row, k])
            errors = []
            for sign in (1, -1):
                velocity = old[row, k] + sign * beta * (predicted[row, k] - old[row, k])
                difference = x - sigma * velocity - clean[row, k]
                errors.append(float((difference**2).mean() / difference.abs().mean()))
            expected.append(5.0 / beta * (share * errors[0] + (1 - share) * errors[1]))
        assert float(found.loss[row]) == pytest.approx(np.mean(expected))
    assert found.is_clipped.tolist() == [[False], [True]]


def test_nft_pulls_towards_good_images_and_pushes_away_from_bad_ones() -> None:
    clean, noise, sigmas = random(1, 1, 1, 4, 4), random(1, 1, 1, 4, 4, seed=1), torch.full((1, 1, 1, 1, 1), 0.5)
    old = random(1, 1, 1, 4, 4, seed=2)
    wanted = noise - clean

    def along(advantage: float) -> float:
        """How far a step down the gradient goes towards the velocity of the image."""
        predicted = old.clone().requires_grad_()
        noised = (1 - sigmas) * clean + sigmas * noise
        advantages = torch.tensor([[advantage]])
        nft(predicted, old, noised, clean, sigmas, advantages, beta=1.0, max_advantage=5.0).loss.sum().backward()
        return float((-predicted.grad * (wanted - old)).sum())

    assert along(3.0) > 0 > along(-3.0)
    assert along(0.0) == pytest.approx(0, abs=1e-9)


def test_guard_is_the_clipped_ratio_without_its_drift_at_one_scale() -> None:
    logprobs, old, advantages = random(2, 3), random(2, 3, seed=1), random(2, 3, seed=2)
    std, length, drift = (random(2, 3, seed=n).abs() + 0.1 for n in (3, 4, 5))
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    found = grpo_guard(logprobs, old, advantages, std, length, drift, **bounds)
    plain = POLICY_LOSSES["ppo_clip"](std * (logprobs - old + drift), torch.zeros(2, 3), advantages, None, **bounds)
    torch.testing.assert_close(found.loss, plain.loss / length)
    torch.testing.assert_close(found.ratio, plain.ratio)


def named_prompt(name: str) -> Prompt:
    processed = ProcessedMedia(CONDITION, {"text": np.full((1, 2), len(name), np.float32)})
    handle = MediaHandle(name, CONDITION, processed.num_bytes, processed, name)
    return Prompt(f"0/0/{name}", name, name, NO_IDS, NO_IDS, (handle,), (MediaSpan(0, 0),))


def last_step(seed: int) -> LatentActions:
    latents = np.random.default_rng(seed).standard_normal((2, 1, 4, 4), dtype=np.float32)
    return LatentActions(latents, np.array([3], np.int32), 1000 * LEVELS[3:], np.append(LEVELS, 0).astype(np.float32))


def test_noise_of_an_image_depends_on_nothing_beside_it() -> None:
    noising = Noising(LEVELS, 1000 * LEVELS, "uniform", 3)
    rows = [CleanSequence.of_response(noising, named_prompt(name), last_step(n)) for n, name in enumerate("abb")]
    together, alone = (collate_noised(some, reader(), CPU) for some in (rows, rows[1:2]))
    assert together.clean.shape == (9, 1, 4, 4) and together.condition_rows.tolist() == [0] * 3 + [1] * 6
    for name in ("clean", "noise", "sigmas", "timesteps", "noised"):
        torch.testing.assert_close(getattr(together, name)[3:6], getattr(alone, name), rtol=0, atol=0)
    torch.testing.assert_close(together.timesteps, 1000 * together.sigmas)
    assert not torch.equal(together.noise[3:6], together.noise[6:9]), "siblings have noise of their own"
    assert rows[0].num_targets == 1 and rows[0].num_tokens == 48 and together.old is None
    old = [row.with_old(np.full((3, 1, 4, 4), n, np.float32)) for n, row in enumerate(rows)]
    assert collate_noised(old, reader(), CPU).old[:, 0, 0, 0].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def test_logit_normal_levels_are_in_the_middle_more_often() -> None:
    table = np.linspace(1, 0, 1000, endpoint=False, dtype=np.float32)
    generator = torch.Generator().manual_seed(0)
    places = Noising(table, table, "logit_normal", 20000).levels(generator).numpy() / 1000
    assert np.median(places) == pytest.approx(0.5, abs=0.02)
    assert np.mean((places > 0.25) & (places < 0.75)) == pytest.approx(0.728, abs=0.02)  # |N(0, 1)| < ln 3


def items_of(version: int, *groups: TrajectoryGroup) -> list[LearnerItem]:
    rewards = [tuple(Reward(float(n)) for n in range(len(group.trajectories))) for group in groups]
    scored = [ScoredGroup(group.summary(), group, own) for group, own in zip(groups, rewards, strict=True)]
    return [item for row in fetch_items(scored, version, 1.0) for item in row]


def test_items_of_denoising_steps_become_one_batch_of_all_their_steps() -> None:
    two = [latent_actions(0), latent_actions(1, first=2, num_steps=2, dtype=np.float16)]
    one = [latent_actions(2, first=1, num_steps=1)]
    items = items_of(2, latent_group(latent_prompt("71", ""), two), latent_group(latent_prompt("8", ""), one))
    batch = collate_items(items, reader(), CPU)
    found, actions = batch.inputs, [*two, *one]
    assert batch.loss_mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert found.target_mask.tolist() == batch.loss_mask.tolist()
    assert batch.ages[0].tolist() == [2, 2, 2]
    for name, expected in {
        "latents": np.concatenate([a.latents[:-1] for a in actions]),
        "next_latents": np.concatenate([a.latents[1:] for a in actions]),
        "timesteps": 1000 * SIGMAS[[0, 1, 2, 2, 3, 1]],
        "sigmas": SIGMAS[[0, 1, 2, 2, 3, 1]],
        "next_sigmas": SIGMAS[[1, 2, 3, 3, 4, 2]],
        "max_sigmas": np.full(6, SIGMAS[1]),
    }.items():
        tensor = getattr(found, name)
        assert tensor.dtype == torch.float32, name
        np.testing.assert_array_equal(tensor.numpy(), expected.astype(np.float32))


def test_each_condition_is_read_once_and_found_by_each_step() -> None:
    groups = [latent_group(latent_prompt(t, ""), [latent_actions(n, num_steps=2)]) for n, t in enumerate(("71", "8"))]
    found = collate_items(items_of(1, *groups), reader(), CPU).inputs
    encoded = found.conditions["encoder_hidden_states"]
    assert encoded.shape == (3, 3, 8)  # two prompts and the negative prompt that they share
    for n, group in enumerate(groups):
        own, negative = (handle.reference.inputs["encoder_hidden_states"] for handle in group.prompt.media)
        for step in (2 * n, 2 * n + 1):
            np.testing.assert_array_equal(encoded[found.condition_rows[step]].numpy(), own[0])
            np.testing.assert_array_equal(encoded[found.negative_rows[step]].numpy(), negative[0])


def test_without_guidance_there_is_no_negative_prompt() -> None:
    items = items_of(1, latent_group(latent_prompt("71"), [latent_actions(0)]))
    assert collate_items(items, reader(), CPU).inputs.negative_rows is None


def test_a_micro_batch_holds_as_many_places_of_latent_images_as_it_may() -> None:
    asked = latent_prompt("71")
    rows = [row_of(asked, latent_actions(n)) for n in range(4)]  # 3 steps of 2 x 2 places each
    assert [row.num_tokens for row in rows] == [12] * 4
    config = load_config(["experiment=digits", "learner.tokens_per_microbatch=24"]).learner
    [plan] = split_microbatches(rows, config, 1)
    assert [len(part) for part in plan] == [2, 2]


def test_denoising_steps_of_a_prompt_that_was_not_encoded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has the media \['image'\]: denoising steps need its encoded text"):
        row_of(image_prompt(), latent_actions(0))


STOCHASTIC = ("flow_grpo", "sde", "dance", "cps")
# 10 steps with a shift of 3, and s sqrt(-dt) of flow_grpo at a noise level of 0.7.
TABLED_SIGMAS = (1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0)
TABLED_DEVIATIONS = (0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063)
LEVEL = 0.7


def schedule() -> np.ndarray:
    """float64 [11]: what a scheduler with a shift of 3 makes of 1000 training steps in 10."""
    flat = np.linspace(1.0, 3 * 0.001 / (1 + 2 * 0.001), 10)
    return np.append(3 * flat / (1 + 2 * flat), 0.0)


def steps(seed: int = 0, sigmas: np.ndarray | None = None) -> tuple[FlowStep, np.ndarray, np.ndarray, np.ndarray]:
    """All steps of a schedule at once, and latents, velocities and next latents in double precision."""
    levels = schedule() if sigmas is None else sigmas
    rng, num = np.random.default_rng(seed), len(levels) - 1
    x, v, following = rng.normal(size=(3, num, 2, 3, 3))

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32)

    highest = tensor(np.full(num, levels[1]))
    step = FlowStep(tensor(x), tensor(v), tensor(levels[:-1]), tensor(levels[1:]), highest)
    return step, x, v, following


def rate_of(kind: str, sigma: float, max_sigma: float) -> float:
    """The noise for a unit of time."""
    if kind == "flow_grpo":
        return LEVEL * math.sqrt(sigma / (1 - (max_sigma if sigma == 1 else sigma)))
    return LEVEL * max_sigma * sigma if kind == "sde" else LEVEL


def move_by_hand(kind: str, x: np.ndarray, v: np.ndarray, sigma: float, following: float, max_sigma: float):
    """(mean, std) of one step, from the predicted clean image, the score and the drift of the reverse SDE."""
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    if kind == "cps":
        std = following * math.sin(LEVEL * math.pi / 2)
        return (1 - following) * clean + math.sqrt(following**2 - std**2) * noise, std
    rate, dt = rate_of(kind, sigma, max_sigma), following - sigma
    score = -(x - (1 - sigma) * clean) / sigma**2
    return x + (v - rate**2 / 2 * score) * dt, rate * math.sqrt(-dt)


def test_the_schedule_and_its_deviations_are_those_of_the_table() -> None:
    np.testing.assert_allclose(schedule(), TABLED_SIGMAS, atol=5e-7)
    step, *_ = steps()
    np.testing.assert_allclose(KERNELS["flow_grpo"](step, LEVEL).std.flatten(), TABLED_DEVIATIONS, atol=5e-4, rtol=0)


def test_the_schedule_is_that_of_diffusers() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    np.testing.assert_allclose(scheduler.sigmas, TABLED_SIGMAS, atol=5e-7)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_steps_equal_their_formulas(kind: str) -> None:
    step, x, v, following = steps()
    levels, found = schedule(), KERNELS[kind](step, LEVEL)
    logprobs = found.logprobs(torch.tensor(following, dtype=torch.float32))
    for i in range(9 if kind == "cps" else 10):
        mean, std = move_by_hand(kind, x[i], v[i], levels[i], levels[i + 1], levels[1])
        np.testing.assert_allclose(found.mean[i], mean, atol=2e-5, rtol=2e-5)
        assert found.std[i].item() == pytest.approx(std, rel=2e-5)
        if kind == "cps":
            expected = -((following[i] - mean) ** 2).mean()
        else:
            expected = Normal(torch.tensor(mean), std).log_prob(torch.tensor(following[i])).mean().item()
            rate = rate_of(kind, levels[i], levels[1])
            assert found.rate[i].item() == pytest.approx(rate, rel=2e-5)
        assert logprobs[i].item() == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_without_noise_every_step_is_the_ode_step(kind: str) -> None:
    step, x, v, _ = steps()
    levels = schedule()
    expected = x + v * np.diff(levels)[:, None, None, None]
    for found in (KERNELS[kind](step, 0.0), KERNELS["ddim"](step, LEVEL)):
        np.testing.assert_allclose(found.mean, expected, atol=1e-5)
        assert not found.std.any()


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
LEVELS_BELOW_1 = (  # UniPC as Wan 2.1 and Cosmos Predict 2.5 have it, DPMSolver as Sana has it
    diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0),
    diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=5.0),
    diffusers.UniPCMultistepScheduler(**FLOW, use_karras_sigmas=True, sigma_max=200.0, sigma_min=0.01),
    diffusers.DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0),
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
)


@pytest.mark.parametrize("scheduler", LEVELS_BELOW_1, ids=lambda own: type(own).__name__)
@pytest.mark.parametrize(("kind", "level"), [("flow_grpo", 0.7), ("sde", 0.7), ("dance", 0.3), ("cps", 0.7)])
@pytest.mark.parametrize("num_steps", [10, 20])
def test_latents_stay_within_the_flow_where_a_schedule_begins_just_below_1(
    scheduler: Any, kind: str, level: float, num_steps: int
) -> None:
    """Along an exact velocity, images and noise of a deviation of 1: that of the latents is within 0.6 to 1.2."""
    scheduler.set_timesteps(num_steps)
    sigmas, generator = scheduler.sigmas, torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 1, 10_000, generator=generator)
    x = (1 - sigmas[0]) * clean + sigmas[0] * noise
    for i in range(num_steps - 1):
        step = FlowStep(x, (x - clean) / sigmas[i], sigmas[i : i + 1], sigmas[i + 1 : i + 2], sigmas[1:2])
        move = KERNELS[kind](step, level)
        x = move.mean + move.std * torch.randn(x.shape, generator=generator)
        assert move.std.item() < 1.2 * level if kind != "cps" else move.std.item() < 1
        assert 0.6 < x.std().item() < 1.2, f"after step {i}"


def test_a_schedule_that_begins_at_1_has_the_published_rate_bit_for_bit() -> None:
    step, *_ = steps()
    below_1 = torch.where(step.sigmas == 1, step.max_sigmas, step.sigmas)  # flow_grpo's sd3_sde_with_logprob
    assert step.sigmas[0] == 1
    assert torch.equal(
        KERNELS["flow_grpo"](step, LEVEL).rate.flatten(), LEVEL * torch.sqrt(step.sigmas / (1 - below_1))
    )


def test_an_ode_step_has_no_density() -> None:
    step, *_ = steps()
    with pytest.raises(ValueError, match="a ddim step has no density"):
        KERNELS["ddim"](step, LEVEL).logprobs(step.latents)


@pytest.mark.parametrize("kind", ("flow_grpo", "sde", "dance"))
def test_a_model_that_is_right_keeps_the_marginals(kind: str) -> None:
    """x0 is N(2, 0.5^2) and the velocity exact: after many small steps mean and deviation are those of the flow."""
    generator, num, levels = torch.Generator().manual_seed(0), 50_000, torch.linspace(0.8, 0.4, 201)

    def deviation(sigma: float) -> float:
        return math.sqrt(((1 - sigma) * 0.5) ** 2 + sigma**2)

    x = 2 * 0.2 + deviation(0.8) * torch.randn(num, 1, generator=generator)
    for sigma, following in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        clean = 2 + (1 - sigma) * 0.25 / deviation(sigma) ** 2 * (x - 2 * (1 - sigma))  # E[x0 | x]
        rows = [torch.full((num,), value) for value in (sigma, following, 0.9)]
        move = KERNELS[kind](FlowStep(x, (x - clean) / sigma, *rows), 0.3)
        x = move.mean + move.std * torch.randn(num, 1, generator=generator)
    assert x.mean().item() == pytest.approx(2 * 0.6, abs=0.015)
    assert x.std().item() == pytest.approx(deviation(0.4), rel=0.015)


def test_cps_keeps_the_coefficients_of_image_and_noise() -> None:
    noise, fresh = torch.randn(2, 100_000, 1, generator=torch.Generator().manual_seed(0))
    rows = [torch.full((100_000,), value) for value in (0.8, 0.5, 0.9)]
    move = KERNELS["cps"](FlowStep(0.2 * 2 + 0.8 * noise, noise - 2, *rows), LEVEL)
    x = move.mean + move.std * fresh
    assert (x.mean().item(), x.std().item()) == (pytest.approx(0.5 * 2, abs=0.01), pytest.approx(0.5, abs=0.005))


def test_the_divergence_of_two_means_is_that_of_two_gaussians() -> None:
    mean, reference = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    std = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)
    expected = [kl_divergence(Normal(m, s), Normal(r, s)).mean() for m, r, s in zip(mean, reference, std, strict=True)]
    torch.testing.assert_close(gaussian_kl(mean, reference, std.view(3, 1, 1)), torch.stack(expected))


def test_guidance_goes_beyond_the_conditional_velocity() -> None:
    conditional, unconditional = torch.tensor([2.0]), torch.tensor([1.0])
    assert [guided(conditional, unconditional, scale).item() for scale in (0.0, 1.0, 4.5)] == [1.0, 2.0, 5.5]


def test_the_density_has_a_gradient_for_the_velocity_and_none_for_what_was_sampled() -> None:
    step, _, _, following = steps()
    velocity, latents = step.velocity.requires_grad_(), torch.tensor(following, requires_grad=True)
    KERNELS["flow_grpo"](step, LEVEL).logprobs(latents).sum().backward()
    assert velocity.grad.abs().sum() > 0 and latents.grad is None
