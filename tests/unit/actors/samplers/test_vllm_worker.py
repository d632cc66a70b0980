"""Parts of vLLM's workers that this project replaces: images, experts, transfer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.sched import output

from mobula.actors.samplers.vllm.patches import engine as core_process
from mobula.actors.samplers.vllm.patches import inproc
from mobula.actors.samplers.vllm.patches.engine import keep_images
from mobula.actors.samplers.vllm.weights import MobulaWeightTransferEngine, _experts_packed_again

NUM_TOKENS = 20  # of the prompt; the image takes the tokens from 2 to 10


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function is put back after the test."""
    monkeypatch.setattr(output, "strip_covered_mm_data", output.strip_covered_mm_data)


def _request(num_computed_tokens: int) -> SimpleNamespace:
    pixels = MultiModalFieldElem(data=torch.ones(4), field=MultiModalBatchedField())
    grid = MultiModalFieldElem(data=torch.tensor([1, 2, 2]), field=MultiModalBatchedField(keep_on_cpu=True))
    image = MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": grid}),
        modality="image",
        identifier="image",
        mm_position=PlaceholderRange(offset=2, length=8),
    )
    others = dict.fromkeys(("sampling_params", "pooling_params", "lora_request", "prompt_embeds"))
    return SimpleNamespace(
        request_id="7",
        prompt_token_ids=list(range(NUM_TOKENS)),
        mm_features=[image],
        num_computed_tokens=num_computed_tokens,
        prompt_is_token_ids=None,
        replay_start=0,
        **others,
    )


def _sent(num_computed_tokens: int) -> output.NewRequestData:
    return output.NewRequestData.from_request(_request(num_computed_tokens), ([0, 1],), uses_mrope=True)


@pytest.mark.parametrize("num_computed_tokens", [0, 9])
def test_a_request_whose_image_is_not_covered_is_sent_as_by_vllm(unpatched: None, num_computed_tokens: int) -> None:
    before = _sent(num_computed_tokens)
    keep_images()
    assert _sent(num_computed_tokens) == before


def test_a_covered_image_is_sent_and_all_else_is_as_in_vllm(unpatched: None) -> None:
    before = _sent(16)
    keep_images()
    after = _sent(16)
    assert list(before.mm_features[0].data) == ["image_grid_thw"], "vLLM leaves the pixels out: the patch is needed"
    assert sorted(after.mm_features[0].data) == ["image_grid_thw", "pixel_values"]
    others = [field.name for field in fields(after) if field.name != "mm_features"]
    assert [getattr(after, name) for name in others] == [getattr(before, name) for name in others]


def _core(failures: Connection, answers: Connection) -> None:
    """In the spawned process: `run_core` with a function in place of vLLM's loop."""
    core_process.RUN_ENGINE_CORE = lambda: answers.send(output.strip_covered_mm_data.__module__)
    core_process.run_core(failures)


@pytest.mark.slow
def test_the_core_of_a_process_of_its_own_keeps_images() -> None:
    """The workers, which import `weights`, are other processes if `tensor_parallel` is above 1."""
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    failures, failure = context.Pipe(duplex=False)
    process = context.Process(target=_core, args=(failure, answer))
    process.start()
    assert answers.poll(120)
    assert answers.recv() == keep_images.__module__
    process.join(60)
    assert (process.exitcode, failures.poll()) == (0, False)


def test_the_core_of_an_engine_in_process_keeps_images(unpatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(arguments: object, stat_loggers: list[Callable] | None) -> str:
        return output.strip_covered_mm_data.__module__

    monkeypatch.setattr(inproc.AsyncLLM, "from_engine_args", made)
    assert inproc.in_process_engine(SimpleNamespace()) == keep_images.__module__


def model() -> nn.Module:
    found = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    found[0].quant_method = SimpleNamespace(moe_kernel="kernel")
    found[1].quant_method = SimpleNamespace()
    return found


@pytest.mark.parametrize(("device", "inside"), [("cpu", None), ("cuda", "kernel")])
def test_kernels_are_made_again_in_host_memory_alone(device: str, inside: str | None) -> None:
    experts = model()
    with _experts_packed_again(experts, torch.device(device)):
        assert experts[0].quant_method.moe_kernel == inside
        experts[0].quant_method.moe_kernel = "another"
    assert experts[0].quant_method.moe_kernel == ("kernel" if device == "cpu" else "another")


def test_a_reload_that_fails_leaves_the_kernel() -> None:
    experts = model()
    with pytest.raises(RuntimeError), _experts_packed_again(experts, torch.device("cpu")):
        raise RuntimeError
    assert experts[0].quant_method.moe_kernel == "kernel"


class Group:
    """A transfer group that notes whether it was left."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_whose_reload_fails_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(info: Any) -> None:
        raise ValueError("a layer refuses its weights")

    engine, group = object.__new__(MobulaWeightTransferEngine), Group()
    engine._group = group
    monkeypatch.setattr(engine, "parse_update_info", lambda info: info)
    monkeypatch.setattr(engine, "receive_weights", fail)
    with pytest.raises(ValueError, match="a layer refuses"):
        engine.update_weights({})
    assert group.is_closed and engine._group is None
