"""Memory of models that make images, against real passes on CPU, and plans with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scored_rows import kept_bytes

from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.trajectory import NO_IDS, Prompt
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import described_nodes
from mobula.deploy.planning.images import policy_image_shape
from mobula.deploy.planning.memory import policy_shape, worker_memory
from mobula.deploy.planning.plan_command import plan_memory
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.family import ImageSize
from mobula.learner.policies.flow.policy import CONDITION, WHERE, Denoising
from mobula.learner.policies.flow.tiny import TINY_FLOW, write_tiny_flow
from mobula.learner.policies.flow.tiny.patches import write_tiny_patches
from mobula.learner.policies.shapes import ImageShape
from mobula.learner.policies.trained import as_policy, collate_rows, scoring_of, unread_trained_model

TOLERANCE = 0.15
SIDE, TEXT = 32, 16


def config_of(folder: Path, *words: str) -> RunConfig:
    size = (f"sampler.flow.height={SIDE}", f"sampler.flow.width={SIDE}", f"sampler.flow.max_text_tokens={TEXT}")
    fixed = ("experiment=own", "algorithm=flow_grpo", "resources.reference.num_workers=0", "learner=fsdp2")
    return load_config([*fixed, f"policy.model={folder}", *size, *words], is_complete=False)


def flow_config(folder: Path, *words: str) -> RunConfig:
    family = FlowCheckpoint(str(folder)).family
    own = (f"sampler.flow.num_images={family.num_images[0]}", f"sampler.flow.num_frames={5 if family.is_video else 1}")
    return config_of(folder, "sampler=flow", *own, *words)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flow")
    return {name: write_tiny_flow(name, root / name) for name in TINY_FLOW}


class Reader(MediaReader):
    def __init__(self, condition: ProcessedMedia) -> None:
        self._condition = condition

    def read(self, handles: Any) -> list[ProcessedMedia]:
        return [self._condition] * len(handles)


def encoded(checkpoint: FlowCheckpoint, num_images: int, frames: int) -> dict[str, torch.Tensor]:
    from PIL import Image

    pipeline, family = checkpoint.encoder(), checkpoint.family
    images = [Image.new("RGB", (SIDE, SIDE))] * num_images
    with torch.no_grad():
        found = family.encode_with(pipeline, "a red circle", images, TEXT)
        if images:
            pixels, size = np.stack([np.asarray(image) for image in images]), ImageSize(SIDE, SIDE, frames)
            found |= family.encode_conditions(pipeline, checkpoint.vae(torch.float32), pixels, size)
    return found


@pytest.mark.parametrize("name", TINY_FLOW)
def test_encoded_prompts_have_the_shapes_that_are_planned(name: str, folders: dict[str, Path]) -> None:
    checkpoint = FlowCheckpoint(str(folders[name]))
    frames = 5 if checkpoint.family.is_video else 1
    for num_images in {checkpoint.family.num_images[0], min(1, checkpoint.family.num_images[-1])}:
        how = Denoising.of(flow_config(folders[name]).sampler.flow)
        how = replace(how, num_images=num_images, num_frames=frames)
        if checkpoint.family.starts_from_image and num_images:
            how = replace(how, strength=0.5, window_start=how.num_steps - 4, window_end=how.num_steps - 1)
        planned = checkpoint.encoded_shapes(how, TEXT)
        real = {key: tuple(value.shape[1:]) for key, value in encoded(checkpoint, num_images, frames).items()}
        if name == "wan-i2v":  # its CLIP sees 16 patches
            real["encoder_hidden_states_image"] = (257, 32)
        assert planned == real


@pytest.mark.parametrize("name", ["sd3", "flux2", "qwen-image", "z-image", "sana", "wan2.2", "cosmos2.5"])
def test_a_pass_keeps_what_is_planned(name: str, folders: dict[str, Path]) -> None:
    """Of a real pass on CPU; both count all tensors that autograd saves, and at its end a few more are there."""
    config = flow_config(folders[name])
    shape = policy_image_shape(config)
    checkpoint = FlowCheckpoint(str(folders[name]))
    model = checkpoint.transformer(torch.float32)
    policy, scoring = as_policy(model, config).train(), scoring_of(config, ())
    frames = config.sampler.flow.num_frames
    inputs = {key: value.numpy() for key, value in encoded(checkpoint, config.sampler.flow.num_images, frames).items()}
    number = 1 + checkpoint.takes_negatives(config.sampler.flow.guidance)
    handles = tuple(MediaHandle(str(n), CONDITION, 0, None) for n in range(number))
    prompt = Prompt("", "", "", NO_IDS, NO_IDS, handles, (WHERE,) * number)
    rows = [scoring.canary_row(prompt)] * shape.least_rows
    batch = collate_rows(rows, Reader(ProcessedMedia(CONDITION, inputs)), torch.device("cpu"))
    real = kept_bytes(lambda: policy(batch, scoring.canary).logprobs, model.parameters())
    assert shape.kept * shape.least_rows == pytest.approx(real, rel=TOLERANCE)


def test_a_two_transformer_model_is_planned_with_both(folders: dict[str, Path]) -> None:
    shape, one = (policy_image_shape(flow_config(folders[name])) for name in ("wan2.2", "wan"))
    assert shape.num_parameters == 2 * one.num_parameters
    assert shape.kept == one.kept, "a row is in one of them at a time"
    names = {spec.name for spec in shape.manifest.tensors}
    model, _ = FlowCheckpoint(str(folders["wan2.2"])).unread_transformer()
    assert names == {name for name, _ in model.named_parameters()}


def test_tokens_of_images_are_planned_with_their_caches(tmp_path: Path) -> None:
    folder = write_tiny_patches(tmp_path / "nextstep")
    config = config_of(folder, "sampler=image_patches")
    shape = policy_image_shape(config)
    plain = policy_image_shape(config_of(folder, "sampler=image_patches", "sampler.flow.guidance=1"))
    assert shape.sampled > plain.sampled
    model, _ = unread_trained_model(config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    memory = worker_memory(config, shape, "learner")
    ranks = config.resources.learner.num_workers
    assert memory.largest["optimizer"] == pytest.approx(8 * trained / ranks, rel=0.01)


def test_plans_count_encoders_rows_and_recomputed_blocks(folders: dict[str, Path]) -> None:
    words = ("learner.tokens_per_microbatch=1", "policy.lora.rank=4", "policy.lora.target_modules=[to_q,to_k,to_v]")
    config = flow_config(folders["sd3"], *words)
    shape = policy_shape(config)
    assert isinstance(shape, ImageShape)
    plan = plan_memory(config, shape, described_nodes("1x0x24GB"))
    assert not plan.shortfalls
    checkpoint = FlowCheckpoint(str(folders["sd3"]))
    encoder = checkpoint.encoder()
    real = sum(
        p.numel()
        for part in encoder.components.values()
        if isinstance(part, torch.nn.Module)
        for p in part.parameters()
    )
    assert shape.num_encoders == real - sum(p.numel() for p in encoder.transformer.parameters())
    more = flow_config(folders["sd3"], *words[1:], f"learner.tokens_per_microbatch={8 * shape.row_tokens}")
    few, many = (worker_memory(c, shape, "learner").largest["activations"] for c in (config, more))
    assert (few, many) == (shape.least_rows * shape.kept_inputs, 8 * shape.kept_inputs)


def test_a_short_window_makes_short_rows(folders: dict[str, Path]) -> None:
    whole, short = (policy_image_shape(flow_config(folders["flux"], *w)) for w in ((), ("sampler.flow.window_size=2",)))
    assert short.row_tokens == 2 * whole.row_tokens // 9 and short.kept < whole.kept / 4


def test_a_missing_tiny_model_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shape = policy_shape(load_config(["experiment=edit_recolour"], is_complete=False))
    assert isinstance(shape, ImageShape) and shape.num_parameters > 400_000
    assert not list(tmp_path.iterdir())
