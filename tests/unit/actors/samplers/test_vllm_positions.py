"""Siblings share the M-RoPE positions of their prompt, others do not; a step's positions are those of vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from actors.samplers.vllm.patches import positions as vllm_positions

PICTURE = MultiModalFeatureSpec(data=None, modality="image", identifier="a", mm_position=PlaceholderRange(1, 4))


def request(ids: list[int] | None, *pictures: MultiModalFeatureSpec) -> Any:
    return SimpleNamespace(
        prompt_token_ids=ids, mm_features=list(pictures), mrope_positions=None, mrope_position_delta=0
    )


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests whose positions were computed; the n-th one's are all n."""
    seen: list[Any] = []

    def compute(runner: Any, request: Any) -> None:
        seen.append(request)
        request.mrope_positions, request.mrope_position_delta = torch.full((3, 2), len(seen)), -len(seen)

    monkeypatch.setattr(vllm_positions, "_compute", compute)
    return seen


def test_siblings_have_the_positions_of_the_first(computed: list[Any]) -> None:
    runner = SimpleNamespace()
    siblings = [request([1, 2, 3], PICTURE) for _ in range(4)]
    for sibling in siblings:
        vllm_positions._shared(runner, sibling)
    assert computed == siblings[:1]
    assert all(sibling.mrope_positions is siblings[0].mrope_positions for sibling in siblings)
    assert [sibling.mrope_position_delta for sibling in siblings] == [-1] * 4


@pytest.mark.parametrize(
    "other",
    [
        request([1, 2, 4], PICTURE),
        request([1, 2, 3]),
        request([1, 2, 3], replace(PICTURE, identifier="b")),
        request([1, 2, 3], replace(PICTURE, mm_position=PlaceholderRange(2, 4))),
        request([1, 2, 3], PICTURE, PICTURE),
        request(None, PICTURE),
    ],
    ids=["ids", "no picture", "another picture", "another place", "two pictures", "embeddings"],
)
def test_another_prompt_has_its_own(computed: list[Any], other: Any) -> None:
    runner, first = SimpleNamespace(), request([1, 2, 3], PICTURE)
    for asked in (first, other):
        vllm_positions._shared(runner, asked)
    assert computed == [first, other]
    assert other.mrope_position_delta == -2


def test_another_engine_has_its_own(computed: list[Any]) -> None:
    for _ in range(2):
        vllm_positions._shared(SimpleNamespace(), request([1, 2, 3], PICTURE))
    assert len(computed) == 2


def decoding(num_known: list[int], num_scheduled: list[int]) -> tuple[Any, Any]:
    """A worker with a request of four prompt tokens for each entry, and what a step schedules of them."""
    names = [str(index) for index in range(len(num_known))]
    positions = torch.arange(12).reshape(3, 4)
    requests = {
        name: SimpleNamespace(
            mrope_positions=positions + 100 * index,
            mrope_position_delta=-index,
            prompt_token_ids=[1, 2, 3, 4],
            prompt_embeds=None,
        )
        for index, name in enumerate(names)
    }
    batch = SimpleNamespace(
        req_ids=names,
        num_reqs=len(names),
        num_computed_tokens_cpu=np.array([*num_known, 77], dtype=np.int32),  # there is room for more
        num_prompt_tokens=np.full(len(names) + 1, 4, dtype=np.int32),
    )
    space = torch.full((3, 16), -1)
    runner = SimpleNamespace(
        input_batch=batch, requests=requests, mrope_positions=SimpleNamespace(cpu=space, np=space.numpy())
    )
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict(zip(names, num_scheduled, strict=True)),
        total_num_scheduled_tokens=sum(num_scheduled),
    )
    return runner, scheduled


@pytest.mark.parametrize(
    ("num_known", "num_scheduled"),
    [
        ([4, 7, 5], [1, 1, 1]),
        ([4], [1]),
        ([0, 7, 5], [4, 1, 1]),
        ([3, 7, 5], [1, 1, 1]),
        ([4, 7], [2, 1]),
        ([3, 7], [3, 1]),
    ],
    ids=["all decode", "one", "a whole prompt", "the end of a prompt", "a drafted token", "over a prompt's end"],
)
def test_positions_of_a_step_are_those_of_vllm(num_known: list[int], num_scheduled: list[int]) -> None:
    ours, theirs = (decoding(num_known, num_scheduled) for _ in range(2))
    vllm_positions._filled(*ours)
    vllm_positions._fill(*theirs)
    assert torch.equal(ours[0].mrope_positions.cpu, theirs[0].mrope_positions.cpu)


def test_the_step_of_an_engine_that_decodes_is_filled_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_positions, "_fill", None)
    runner, scheduled = decoding([4, 7, 5], [1, 1, 1])
    vllm_positions._filled(runner, scheduled)
    assert runner.mrope_positions.np[:, :4].tolist() == [[4, 6, 3, -1]] * 3
