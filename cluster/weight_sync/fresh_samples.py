"""FreshSamples: responses of the newest weights, for steps that train older tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import SamplingSettings

FIRST = -1  # priority of these requests: the learner waits for them


class SamplingEngine(Protocol):
    """A rollout actor."""

    def begin_sample(self, prompt: Prompt, settings: SamplingSettings) -> Any:
        """Begins to sample `prompt`; returns a reference to the `TrajectoryGroup` to be."""
        ...


class FreshSamples:
    """Has one engine after the other sample the probe prompt, while the learner computes the step's gradient.

    The learner scores these tokens before its weights move, so the log-prob gap is measured in every step, also where
    all of the step's groups are of older weights.
    """

    def __init__(
        self, engines: Callable[[int], Sequence[SamplingEngine]], prompt: Prompt, settings: SamplingSettings
    ) -> None:
        """`engines` returns the engines that serve a version, or will after a push in progress."""
        self._engines = engines
        self._prompt = prompt
        self._settings = settings

    def begin(self, version: int, groups: Sequence[ScoredGroup]) -> Any | None:
        """A reference to responses of `version`; None where the groups of the step have tokens of it, or
        no engine gets it: a resume repeats steps before its first push."""
        engines = self._engines(version)
        if not engines or any(group.summary.tokens_by_version.get(version, 0) > 0 for group in groups):
            return None
        settings = replace(self._settings, seed=self._settings.seed + version, min_version=version, priority=FIRST)
        return engines[version % len(engines)].begin_sample(self._prompt, settings)
