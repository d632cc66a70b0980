"""Images of a flow model: the policy scores their steps as they were sampled, and new weights change what follows."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from flow_run import CPU, DENOISING, SETTINGS, encoded_prompts, flow_sampler, sample, write_loud_sd3
from PIL import Image
from safetensors.torch import load_file

from mobula.actors.samplers.image_tokens import ImageRow
from mobula.cluster.errors import ManifestError, RolloutError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.manifest import Manifest, checkpoint_manifest
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import TRANSFORMER, flow_family_at
from mobula.learner.policies.flow.policy import Denoising, FlowPolicy, StepRescoring
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.trained import collate_rows, row_of
from mobula.learner.weight_publisher import WeightPublisher

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud_sd3(tmp_path_factory.mktemp("flow") / "sd3")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return encoded_prompts(folder, ["71", "a red cube"])


def policy(folder: Path) -> FlowPolicy:
    return FlowPolicy(FlowCheckpoint(str(folder)).transformer(torch.float32).train(), flow_family_at(folder))


def replayed(
    own: FlowPolicy, prompt: Prompt, sequences: list[SampledSequence], denoising: Denoising = DENOISING
) -> np.ndarray:
    """float32 [B, T]"""
    rows = [row_of(prompt, sequence.actions) for sequence in sequences]
    batch = collate_rows(rows, MediaReader(timeout_s=1, max_items=8), CPU)
    return own(batch, StepRescoring(denoising, "none")).logprobs.detach().numpy()


def assert_same(found: list[SampledSequence], expected: list[SampledSequence]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.actions.latents, other.actions.latents)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.images == other.images


@pytest.mark.parametrize(
    "own",
    [
        {},
        *({"dtype": dtype} for dtype in ("float16", "bfloat16")),
        *({"kernel": kernel} for kernel in ("cps", "sde", "dance")),
        {"guidance": 1.0},
        {"window_start": 2, "window_end": 4},
        {"window_end": 6},
    ],
    ids=str,
)
async def test_steps_are_scored_exactly_as_they_were_sampled(folder: Path, own: dict) -> None:
    denoising = replace(DENOISING, **own)
    [prompt] = encoded_prompts(folder, ["71"], with_negative=denoising.guidance != 1)
    found = await sample(await flow_sampler(folder, denoising), prompt)
    logprobs = np.stack([sequence.logprobs for sequence in found])
    assert np.abs(logprobs).max() > 0.1 and np.isfinite(logprobs).all()
    assert len({sequence.actions.latents.tobytes() for sequence in found}) == SETTINGS.num_samples
    model = policy(folder)
    for rows in (found, found[:1], found[:2], found[::-1]):
        expected = np.stack([sequence.logprobs for sequence in rows])
        np.testing.assert_array_equal(replayed(model, prompt, rows, denoising), expected)


async def test_latents_of_bfloat16_are_half_the_bytes_and_the_values_that_are_denoised(
    folder: Path, prompts: list[Prompt]
) -> None:
    [found, *_] = await sample(await flow_sampler(folder, replace(DENOISING, dtype="bfloat16")), prompts[0])
    [whole, *_] = await sample(await flow_sampler(folder), prompts[0])
    actions = found.actions
    assert actions.latents.dtype == np.uint16 and 2 * actions.latents.nbytes == whole.actions.latents.nbytes
    stored = torch.from_numpy(actions.latents.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(stored.float(), torch.from_numpy(actions.values))
    first = torch.from_numpy(whole.actions.latents[0]).bfloat16()
    assert torch.equal(stored[0], first), "the same noise, rounded"


async def test_a_sibling_does_not_depend_on_those_beside_it(folder: Path, prompts: list[Prompt]) -> None:
    whole = await sample(await flow_sampler(folder), prompts[0])
    parts = await flow_sampler(folder, max_num_seqs=2)
    assert_same(whole, await sample(parts, prompts[0]))
    others = await sample(parts, prompts[1])
    assert not np.array_equal(others[0].actions.latents[-1], whole[0].actions.latents[-1])


async def test_prompts_that_wait_share_a_batch_and_get_the_images_that_each_gets_alone(
    folder: Path, prompts: list[Prompt]
) -> None:
    sampler, num = await flow_sampler(folder, max_num_seqs=2 * SETTINGS.num_samples), SETTINGS.num_samples
    sizes, made = [], sampler._made
    sampler._made = lambda rows: sizes.append(len(rows)) or made(rows)
    alone = [await sample(sampler, prompt) for prompt in prompts]
    greedy = replace(SETTINGS, temperature=0.0)
    *together, other = await asyncio.gather(
        *(sample(sampler, prompt) for prompt in prompts), sample(sampler, prompts[0], greedy)
    )
    assert sizes == [num, num, 2 * num, num], "greedy images have other steps, and are made apart"
    for found, expected in zip((*together, other), (*alone, await sample(sampler, prompts[0], greedy)), strict=True):
        assert_same(found, expected)


async def test_a_prompt_that_fails_in_a_batch_fails_alone(
    folder: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await flow_sampler(folder, max_num_seqs=2 * SETTINGS.num_samples)
    made = sampler._made

    def refusing(rows: list[ImageRow]) -> list[SampledSequence]:
        if any(row.request.prompt is prompts[1] for row in rows):
            raise RolloutError("the latents are not finite")
        return made(rows)

    monkeypatch.setattr(sampler, "_made", refusing)
    good, bad = await asyncio.gather(*(sample(sampler, prompt) for prompt in prompts), return_exceptions=True)
    assert len(good) == SETTINGS.num_samples and isinstance(bad, RolloutError)


async def test_without_noise_the_images_are_those_of_plain_diffusers(folder: Path) -> None:
    denoising = replace(DENOISING, window_end=6)
    sampler, [prompt] = await flow_sampler(folder, denoising), encoded_prompts(folder, ["71"])
    [found] = await sample(sampler, prompt, replace(SETTINGS, num_samples=1, temperature=0.0))
    assert found.logprobs.tolist() == [0.0] * 6
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    shared = {"prompt": "71", "negative_prompt": "", "height": 32, "width": 32, "guidance_scale": 4.5}
    shared |= {"num_inference_steps": 6, "max_sequence_length": 32}
    first = torch.from_numpy(found.actions.latents[:1].copy())
    clean = pipeline(**shared, latents=first, output_type="latent").images
    np.testing.assert_allclose(found.actions.latents[-1], clean[0], atol=1e-4)
    image = np.asarray(Image.open(io.BytesIO(found.images[0]))).astype(int)
    expected = np.asarray(pipeline(**shared, latents=first).images[0]).astype(int)
    assert image.shape == (32, 32, 3) and np.abs(image - expected).max() <= 1


async def test_evaluations_take_steps_of_their_own_number_and_training_does_not(folder: Path) -> None:
    [prompt] = encoded_prompts(folder, ["71"])
    both = await flow_sampler(folder, replace(DENOISING, evaluation_steps=9))
    plain = {num: await flow_sampler(folder, replace(DENOISING, num_steps=num)) for num in (6, 9)}
    for temperature, num in ((0.0, 9), (1.0, 6)):
        settings = replace(SETTINGS, temperature=temperature)
        found, expected = await sample(both, prompt, settings), await sample(plain[num], prompt, settings)
        assert [one.images for one in found] == [one.images for one in expected]
    assert found[0].actions.latents.shape == expected[0].actions.latents.shape


async def test_new_weights_are_taken_as_a_whole_and_stamped(
    folder: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    sampler = await flow_sampler(folder)
    newer = write_loud_sd3(tmp_path / "newer", seed=1)
    media = MediaReader(timeout_s=1, max_items=8).read(prompts[0].media)
    before = await sampler.prompt_logprobs(prompts[0], media)
    manifest = checkpoint_manifest(newer / TRANSFORMER, "float32")
    await sampler.check_manifest(manifest)
    with pytest.raises(ManifestError, match="missing"):
        await sampler.check_manifest(Manifest(manifest.tensors[1:]))
    state = load_file(newer / TRANSFORMER / "diffusion_pytorch_model.safetensors")
    named = [(spec.name, state[spec.name]) for spec in manifest.tensors]
    learner = {"rank": 0, "device": torch.device("cpu"), "transport": "gloo", "timeout_s": 1.0}
    publisher = WeightPublisher(manifest, lambda: iter(named), **learner)
    await sampler.load_weights(manifest, 1 << 20, publisher.export(1 << 20), 7)
    found = await sample(sampler, prompts[0])
    assert {span.version for sequence in found for span in sequence.weight_spans} == {7}
    np.testing.assert_array_equal(replayed(policy(newer), prompts[0], found), [s.logprobs for s in found])
    fresh = await (await flow_sampler(newer)).prompt_logprobs(prompts[0], media)
    np.testing.assert_array_equal(await sampler.prompt_logprobs(prompts[0], media), fresh)
    assert np.abs(fresh - before).max() > 0.01


async def test_latents_that_are_not_finite_are_refused(folder: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    sampler = await flow_sampler(folder)
    with torch.no_grad():
        sampler._model.proj_out.bias.fill_(float("nan"))
    with pytest.raises(RolloutError, match="prompt 0/0/71: the latents are not finite after 6 steps in float32"):
        await sample(sampler, prompts[0])


async def test_a_prompt_without_its_negative_is_refused(folder: Path) -> None:
    [prompt] = encoded_prompts(folder, ["71"], with_negative=False)
    with pytest.raises(RolloutError, match="has 1 conditions, and 2 are needed"):
        await sample(await flow_sampler(folder), prompt)


def test_a_window_must_lie_in_the_schedule_and_end_before_cps_adds_no_noise() -> None:
    with pytest.raises(ValueError, match=r"the stochastic steps \[3, 7\) are not within the steps \[0, 6\)"):
        replace(DENOISING, window_start=3, window_end=7)
    with pytest.raises(ValueError, match="the last step of cps adds no noise"):
        replace(DENOISING, kernel="cps", window_end=6)


def test_a_checkpoint_of_an_unknown_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no diffusers checkpoint"):
        flow_family_at(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "MochiPipeline"}')
    with pytest.raises(ValueError, match="is a MochiPipeline, which is not supported: choose a checkpoint of Cosm"):
        flow_family_at(tmp_path)


def test_the_tiny_model_is_a_whole_pipeline_and_follows_its_seed(folder: Path, tmp_path: Path) -> None:
    names = [write_tiny_flow("sd3", tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    weights = [(at / TRANSFORMER / "diffusion_pytorch_model.safetensors").read_bytes() for at in names]
    assert weights[0] == weights[1] != weights[2]
    model = SD3Transformer2DModel.from_pretrained(names[0], subfolder=TRANSFORMER)
    assert sum(p.numel() for p in model.parameters()) < 400_000


async def test_a_window_of_a_group_is_sampled_scored_and_stored_alone(folder: Path, prompts: list[Prompt]) -> None:
    how = replace(DENOISING, window_size=2)
    assert {how.for_group(seed, 0).window_start for seed in range(60)} == {0, 1, 2, 3}, "within the first five steps"
    sampler = await flow_sampler(folder, how)
    found = [await sample(sampler, prompts[0], replace(SETTINGS, seed=seed)) for seed in range(3)]
    starts = [how.for_group(seed, 0).window_start for seed in range(3)]
    for group, start in zip(found, starts, strict=True):
        assert {tuple(one.actions.step_index) for one in group} == {(start, start + 1)}, "the same for all siblings"
        assert all(one.actions.latents.shape[0] == 3 and (one.logprobs != 0).all() for one in group)
    again = replayed(policy(folder), prompts[0], found[0])
    np.testing.assert_array_equal(again, np.stack([one.logprobs for one in found[0]]))


def test_a_progressive_window_moves_with_the_versions_and_begins_again() -> None:
    how = replace(DENOISING, window_size=2, window_order="progressive", window_interval=3)
    starts = [how.for_group(0, version).window_start for version in range(0, 15)]
    assert starts == [0] * 3 + [2] * 3 + [3] * 3 + [0] * 3 + [2] * 3, "the last one ends with the window of all"
    assert replace(how, window_size=9).for_group(0, 4) == replace(how, window_size=9)


async def test_the_kernel_ddim_follows_the_ode_and_its_push_is_proven(folder: Path, prompts: list[Prompt]) -> None:
    how = replace(DENOISING, kernel="ddim", window_start=5, window_end=6)
    sampler = await flow_sampler(folder, how)
    drawn, greedy = [await sample(sampler, prompts[0], replace(SETTINGS, temperature=t)) for t in (1.0, 0.0)]
    for one, other in zip(drawn, greedy, strict=True):
        np.testing.assert_array_equal(one.actions.latents, other.actions.latents)
        assert one.logprobs.tolist() == [0.0]
    media = MediaReader(timeout_s=1, max_items=8).read(prompts[0].media)
    found = await sampler.prompt_logprobs(prompts[0], media)
    assert found.shape == (5,) and np.isfinite(found).all() and np.abs(found).max() < 1e4
