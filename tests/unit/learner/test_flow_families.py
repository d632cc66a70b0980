"""Families of flow models: shapes, noise levels, guidance, and what of a checkpoint is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import httpx
import numpy as np
import pytest
import torch
from flow_run import DENOISING, encoded_prompts, flow_sampler, sample
from huggingface_hub.errors import GatedRepoError
from PIL import Image

from benchmarks.conformance.flow.plain import CALLS
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.learner.policies.adapters import adapted_modules
from mobula.learner.policies.checkpoint import pushed_manifest
from mobula.learner.policies.flow import checkpoint as checkpoint_module
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import FAMILIES, REFUSED, flow_family_at
from mobula.learner.policies.flow.family import ImageSize, packed, unpacked
from mobula.learner.policies.flow.policy import velocities
from mobula.learner.policies.flow.tiny import TINY_FLOW, write_tiny_flow
from mobula.learner.policies.sde import KERNELS, FlowStep, flow_level
from mobula.learner.policies.trained import unread_trained_model

TASKS = ("sd3_glyphs", "flux-kontext-letters", "wan2.2")  # models of families that have another tiny model
NO_REFERENCE = ("algorithm.kl.coef=0", "resources.reference.num_workers=0")
VAE = {"block_out_channels": [1, 1, 1, 1], "temperal_downsample": [False, True, True], "z_dim": 16}
VAE |= {"encoder_block_out_channels": [1] * 6}
MODEL = {"patch_size": 2, "in_channels": 64, "pos_embed_max_size": 96}
VIDEO = MODEL | {"patch_size": [1, 2, 2], "in_channels": 16, "rope_max_seq_len": 1024}
COSMOS = MODEL | {"patch_size": [1, 2, 2], "max_size": [128, 240, 240]}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flow("flux", tmp_path_factory.mktemp("flux") / "model")


@pytest.mark.parametrize(
    ("pipeline", "size", "expected"),
    [
        ("StableDiffusion3Pipeline", ImageSize(512, 768), (64, 64, 96)),
        ("FluxPipeline", ImageSize(512, 768), (16, 64, 96)),
        ("Flux2KleinPipeline", ImageSize(512, 768), (64, 32, 48)),
        ("ZImagePipeline", ImageSize(512, 768), (64, 64, 96)),
        ("QwenImagePipeline", ImageSize(512, 768), (16, 64, 96)),
        ("SanaPipeline", ImageSize(512, 768), (64, 16, 24)),
        ("WanPipeline", ImageSize(480, 832, 81), (16, 21, 60, 104)),
        ("WanImageToVideoPipeline", ImageSize(480, 832, 81), (16, 21, 60, 104)),
        ("Cosmos2TextToImagePipeline", ImageSize(768, 1360), (16, 1, 96, 170)),
        ("Cosmos2_5_PredictBasePipeline", ImageSize(704, 1280, 93), (16, 24, 88, 160)),
    ],
)
def test_latents_have_the_shape_of_the_released_models(pipeline: str, size: ImageSize, expected: tuple) -> None:
    family = FAMILIES[pipeline]
    video = COSMOS if pipeline.startswith("Cosmos") else VIDEO
    model = video if len(expected) == 4 else MODEL | {"patch_size": 1 if pipeline == "SanaPipeline" else 2}
    assert family.latent_shape(model, VAE, size) == expected
    with pytest.raises(ValueError, match="each side must be a multiple of"):
        family.latent_shape(model, VAE, replace(size, height=size.height + 1))


@pytest.mark.parametrize("num_frames", [4, 6, 4 * 1024 + 1])
def test_a_video_has_a_multiple_of_four_frames_and_one_more(num_frames: int) -> None:
    with pytest.raises(ValueError, match=f"num_frames={num_frames}: a video has a multiple of 4 frames and one more"):
        FAMILIES["WanPipeline"].latent_shape(VIDEO, VAE, ImageSize(32, 32, num_frames))


def test_each_family_has_a_tiny_model_a_preset_and_a_plain_call() -> None:
    assert CALLS.keys() == FAMILIES.keys() and not FAMILIES.keys() & REFUSED.keys()
    names = [name for name in TINY_FLOW if name not in TASKS]
    for name, family in zip(names, FAMILIES.values(), strict=True):
        preset = f"policy=tiny_{name.replace('-', '_').replace('.', '_')}"
        policy = load_config([preset, "sampler=flow", *NO_REFERENCE], is_complete=False).policy
        assert policy.tiny == name and policy.lora.target_modules == family.lora_targets


def test_tokens_of_2_x_2_are_those_of_the_pipelines() -> None:
    latents = torch.randn(2, 16, 6, 8)
    expected = diffusers.FluxPipeline._pack_latents(latents, 2, 16, 6, 8)
    assert torch.equal(packed(latents), expected)
    assert torch.equal(unpacked(expected, 6, 8), latents)


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


@pytest.mark.parametrize(
    ("scheduler", "first"),
    [
        (diffusers.UniPCMultistepScheduler(**FLOW), 0.999999),
        (diffusers.DPMSolverMultistepScheduler(**FLOW), 0.999666),
        (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), 1.0),
    ],
    ids=lambda given: type(given).__name__,
)
def test_schedulers_of_released_checkpoints_give_levels_of_a_flow(scheduler: object, first: float) -> None:
    """Those of UniPC and DPMSolver begin just below 1: `test_flow_policy.py` bounds their first step."""
    found = FAMILIES["WanPipeline"].schedule(scheduler, 10, (16, 1, 4, 4))
    assert len(found.sigmas) == 11 and len(found.timesteps) == 10
    assert found.sigmas[0].item() == pytest.approx(first, abs=1e-6) and found.sigmas[-1] == 0
    assert (found.sigmas.diff() < 0).all()
    torch.testing.assert_close(found.timesteps, 1000 * found.sigmas[:-1], rtol=0, atol=1.0)


@pytest.mark.parametrize("name", [name for name in TINY_FLOW if name not in TASKS])
def test_latents_of_images_are_those_of_plain_diffusers_and_are_decoded_as_by_it(name: str, tmp_path: Path) -> None:
    checkpoint = FlowCheckpoint(str(write_tiny_flow(name, tmp_path / name)))
    own, vae = checkpoint.family, checkpoint.vae(torch.float32).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    given = diffusers.image_processor.VaeImageProcessor().preprocess(list(map(Image.fromarray, pixels)))
    with torch.no_grad():
        latents = own.encode_images(vae, pixels)
        assert latents.shape == (2, *checkpoint.latent_shape(replace(DENOISING, num_images=own.num_images[0])))
        if hasattr(vae, "bn"):  # of FLUX.2, with a normalisation of tiles
            raw = vae.encode(given).latent_dist.mode()
            tiles = diffusers.Flux2KleinPipeline._patchify_latents(raw)
            expected = tiles / np.sqrt(1 + vae.config.batch_norm_eps)
        elif hasattr(vae.config, "scaling_factor") and getattr(vae.config, "latents_mean", None) is None:
            found, shift = vae.encode(given), vae.config.get("shift_factor") or 0
            raw = found.latent if hasattr(found, "latent") else found.latent_dist.mode()
            expected = (raw - shift) * vae.config.scaling_factor
        else:
            raw = vae.encode(given.unsqueeze(2)).latent_dist.mode()
            mean, std = (
                torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
            )
            expected = (raw - mean) / std
        torch.testing.assert_close(latents, expected.view_as(latents), atol=1e-5, rtol=1e-5)
        again = own.decode(vae, latents)
        back = vae.decode(raw).sample
        back = (back if back.ndim == 5 else back.unsqueeze(2)).permute(0, 2, 3, 4, 1)
        whole = ((back / 2 + 0.5).clamp(0, 1) * 255).round().numpy()
    assert again.shape == (2, 1, 32, 32, 3)
    assert np.abs(again.astype(float) - whole).max() <= 1


def test_a_scheduler_with_other_levels_is_refused(flux: Path, tmp_path: Path) -> None:
    checkpoint = FlowCheckpoint(str(write_tiny_flow("wan", tmp_path / "wan")))
    diffusers.UniPCMultistepScheduler().save_pretrained(tmp_path / "wan" / "scheduler")
    checkpoint._index["scheduler"] = ["diffusers", "UniPCMultistepScheduler"]
    with pytest.raises(ValueError, match="do not fall from 1 to 0 in sampler.flow.num_steps=6 steps: set use_flow_"):
        checkpoint.schedule(replace(DENOISING, num_frames=5))


@pytest.mark.parametrize(
    ("name", "scheduler"), [("wan", "UniPCMultistepScheduler"), ("sana", "DPMSolverMultistepScheduler")]
)
async def test_tiny_models_with_the_released_scheduler_sample_within_bounds(
    name: str, scheduler: str, tmp_path: Path
) -> None:
    folder = write_tiny_flow(name, tmp_path / name)
    assert json.loads((folder / "model_index.json").read_text())["scheduler"] == ["diffusers", scheduler]
    how = replace(DENOISING, num_frames=5 if name == "wan" else 1, guidance=1.0)
    [prompt] = encoded_prompts(folder, ["71"], with_negative=False)
    for own in await sample(await flow_sampler(folder, how), prompt):
        assert own.actions.sigmas[0] < 1
        assert 0.5 < own.actions.latents.std(axis=tuple(range(1, own.actions.latents.ndim))).max() < 2


def test_more_pixels_shift_the_levels_of_flux(flux: Path) -> None:
    checkpoint = FlowCheckpoint(str(flux))
    small, large = (checkpoint.schedule(replace(DENOISING, height=side, width=side)).sigmas for side in (32, 512))
    assert small[0] == large[0] == 1 and (large[1:-1] > small[1:-1]).all()


def test_an_euler_step_of_edm_is_one_of_the_flow() -> None:
    """y + (s' - s) noise, with the network's own conversion of its velocity, and the same of the mapped latents."""
    generator = torch.Generator().manual_seed(0)
    edm = torch.randn(2, 4, 3, generator=generator).double()
    velocity, sigma, following = torch.randn(2, 4, 3, generator=generator).double(), 7.0, 2.5
    level = sigma / (1 + sigma)
    clean = (1 - level) * edm - level * velocity  # as Cosmos2TextToImagePipeline has it
    moved = edm + (following - sigma) * (edm - clean) / sigma
    sigmas = flow_level(torch.tensor([[sigma] * 2, [following] * 2]))
    step = FlowStep(edm / (1 + sigma), velocity, sigmas[0], sigmas[1], sigmas[0])
    torch.testing.assert_close(KERNELS["ddim"](step, 0.0).mean, (moved / (1 + following)).float())


def test_the_levels_of_cosmos_2_are_those_of_its_pipeline() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    found = FAMILIES["Cosmos2TextToImagePipeline"].schedule(scheduler, 5, (16, 1, 4, 4))
    ends = torch.tensor([80.0, 0.002]) ** (1 / 7)
    karras = (ends[0] + torch.linspace(0, 1, 5) * (ends[1] - ends[0])) ** 7
    torch.testing.assert_close(found.sigmas, torch.cat([karras / (1 + karras), torch.zeros(1)]))
    assert found.initial_std == pytest.approx(80 / 81) and torch.equal(found.timesteps, found.sigmas[:-1])


def test_guidance_has_the_meaning_of_the_pipelines() -> None:
    own, empty = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 4, 4)
    assert torch.equal(FAMILIES["WanPipeline"].guided(own, empty, 5.0), empty + 5.0 * (own - empty))
    torch.testing.assert_close(
        FAMILIES["Cosmos2TextToImagePipeline"].guided(own, empty, 7.0), own + 7.0 * (own - empty)
    )
    kept = FAMILIES["QwenImagePipeline"].guided(own, empty, 4.0)
    torch.testing.assert_close(packed(kept).norm(dim=-1), packed(own).norm(dim=-1))


def test_a_model_with_embedded_guidance_takes_no_negative_prompt(flux: Path) -> None:
    checkpoint = FlowCheckpoint(str(flux))
    assert not checkpoint.takes_negatives(3.5)
    config = json.loads((flux / "transformer" / "config.json").read_text())
    assert FAMILIES["FluxPipeline"].embeds_guidance(config)
    assert not FAMILIES["FluxPipeline"].embeds_guidance(config | {"guidance_embeds": False})


def test_an_image_model_makes_no_videos(flux: Path) -> None:
    with pytest.raises(ValueError, match=r"a FluxPipeline, which makes images: set sampler\.flow\.num_frames=1"):
        FlowCheckpoint(str(flux)).latent_shape(replace(DENOISING, num_frames=5))


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_known_pipeline_that_cannot_be_trained_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ValueError, match=name) as error:
        flow_family_at(tmp_path)
    assert REFUSED[name] in str(error.value)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["flux", "z-image"])
def test_a_row_does_not_depend_on_how_many_there_are(name: str, tmp_path: Path) -> None:
    checkpoint = FlowCheckpoint(str(write_tiny_flow(name, tmp_path / name)))
    model, shape = checkpoint.transformer(torch.float32).eval(), checkpoint.latent_shape(DENOISING)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    latents, times = torch.randn(24, *shape), torch.full((24,), 500.0)
    with torch.no_grad():
        given = checkpoint.family.encode(checkpoint.encoder(), "a red cube", 32)

        def of(num: int) -> torch.Tensor:
            conditions = {key: value.expand(num, *value.shape[1:]) for key, value in given.items()}
            return velocities(model, checkpoint.family, latents[:num], times[:num], conditions, None, 1.0)

        for num in (1, 4, 7, 11, 13):
            assert torch.equal(of(num), of(24)[:num])


@pytest.fixture(scope="module")
def wan2_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flow("wan2.2", tmp_path_factory.mktemp("wan2.2") / "model")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("times", [(999.0, 875.0, 874.0, 500.0), (1.0,) * 4, (900.0,) * 4], ids=str)
def test_each_row_is_computed_by_the_transformer_of_its_noise_level(wan2_2: Path, times: tuple) -> None:
    both = FlowCheckpoint(str(wan2_2)).transformer(torch.float32).train()
    latents, text = torch.randn(4, 16, 1, 4, 4), torch.randn(4, 8, 32)
    found = both(hidden_states=latents, timestep=torch.tensor(times), encoder_hidden_states=text, return_dict=False)[0]
    for n, time in enumerate(times):
        network = both.get_submodule("transformer" if time >= 875 else "transformer_2")
        one = slice(n, n + 1)
        [expected] = network(latents[one], torch.tensor([time]), text[one], return_dict=False)
        torch.testing.assert_close(found[one], expected)
    found.sum().backward()
    missing = [name for name, parameter in both.named_parameters() if parameter.grad is None]
    assert not [name for name in missing if "norm2" not in name], "ranks gather the parameters of both"
    both.eval()
    found = both(hidden_states=latents, timestep=torch.tensor(times), encoder_hidden_states=text, return_dict=False)[0]
    assert len(found) == 4


@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_two_transformers_is_trained(wan2_2: Path, rank: int) -> None:
    words = ["policy=tiny_wan2_2", f"policy.model={wan2_2}", "sampler=flow", *NO_REFERENCE, f"policy.lora.rank={rank}"]
    config = load_config([*words, "policy.freeze=[transformer_2.]"], is_complete=False)
    manifest = checkpoint_manifest(FlowCheckpoint(str(wan2_2)).weights_folder, "float32")
    names = {spec.name for spec in manifest.tensors}
    model, weights = unread_trained_model(config)
    assert names == {name for name, _ in weights} == set(model.state_dict())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and trained == {name for name in names if name.startswith("transformer.")}
    sent = (
        adapted_modules(manifest, config.policy)
        if rank
        else [t.name for t in pushed_manifest(manifest, config).tensors]
    )
    assert sent and all(name.startswith("transformer.") for name in sent)


def test_a_missing_part_is_named(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text((flux / "model_index.json").read_text())
    with pytest.raises(
        ValueError, match="has no folder .*text_encoder_2.*vae.*: copy or download the whole checkpoint"
    ):
        FlowCheckpoint(str(tmp_path))


def test_a_gated_checkpoint_is_named_with_the_next_action(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(source: str, *, allow_patterns: list[str] | None) -> str:
        raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "https://hub/x")))

    monkeypatch.setattr(checkpoint_module, "snapshot_download", gated)
    message = r"policy\.model=some/gated is gated: accept its license on the hub and set HF"
    with pytest.raises(ValueError, match=message):
        FlowCheckpoint("some/gated")


def test_a_stable_diffusion_3_without_its_t5_is_read(tmp_path: Path) -> None:
    folder = write_tiny_flow("sd3", tmp_path / "sd3")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    checkpoint = FlowCheckpoint(str(folder))
    encoded = checkpoint.family.encode(checkpoint.encoder(), "71", 16)
    assert encoded["encoder_hidden_states"].shape == (1, 77 + 16, 64)


def test_a_model_that_predicts_its_variance_gives_the_velocity_alone() -> None:
    class Doubled(torch.nn.Module):
        config = {"timestep_scale": 1.0}

        def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
            return (torch.cat([hidden_states, -hidden_states], 1),)

    latents = torch.randn(1, 8, 4, 4)
    assert torch.equal(FAMILIES["SanaPipeline"].velocity(Doubled(), latents, torch.ones(1), {}, 1.0), latents)
