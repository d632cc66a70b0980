"""Siblings share the M-RoPE positions of their prompt; whatever differs in ids, pictures or places does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from actors.samplers import vllm_positions

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
