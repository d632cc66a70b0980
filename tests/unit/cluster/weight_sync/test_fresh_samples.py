"""Fresh samples are asked of one engine after the other, for steps without a token of the newest weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import make_prompt

from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.fresh_samples import FreshSamples

PROBE = make_prompt("0/0/probe")
SETTINGS = SamplingSettings(num_samples=1, temperature=0.8, max_tokens=16, seed=7, top_p=0.9, keeps_sets=True)


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name

    def begin_sample(self, prompt, settings):
        return self.name, prompt, settings


def step(*tokens_by_version: dict[int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(summary=SimpleNamespace(tokens_by_version=counts)) for counts in tokens_by_version]


def test_a_step_with_a_token_of_the_version_needs_none() -> None:
    fresh = FreshSamples(lambda: [Engine("a")], PROBE, SETTINGS)
    assert fresh.begin(3, step({2: 9}, {2: 8, 3: 1})) is None


def test_engines_take_turns_and_sample_as_the_run_does_with_the_version() -> None:
    fresh = FreshSamples(lambda: [Engine("a"), Engine("b")], PROBE, SETTINGS)
    found = [fresh.begin(version, step({version - 1: 9}, {version - 2: 4})) for version in (4, 5, 6)]
    assert [name for name, _, _ in found] == ["a", "b", "a"]
    assert all(prompt is PROBE for _, prompt, _ in found)
    assert [settings.min_version for _, _, settings in found] == [4, 5, 6]
    assert len({settings.seed for _, _, settings in found}) == 3
    assert all((s.temperature, s.top_p, s.max_tokens, s.keeps_sets) == (0.8, 0.9, 16, True) for _, _, s in found)


@pytest.mark.parametrize("version", [0, 5])
def test_without_an_engine_there_is_none(version: int) -> None:
    assert FreshSamples(list, PROBE, SETTINGS).begin(version, step({version - 1: 9})) is None
