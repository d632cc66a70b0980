"""Bounds on the log-prob gap of engine and learner, samples that measure it, and classes of the tokens of the probe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.interfaces import Sender

_logger = logging.getLogger(__name__)

FIRST = -1  # priority of these requests: the learner waits for them


class SamplingEngine(Protocol):
    """A rollout actor."""

    def begin_sample(self, prompt: Prompt, settings: SamplingSettings) -> Any:
        """Begins to sample `prompt`; returns a reference to the `TrajectoryGroup` to be."""


@dataclass(eq=False)
class FreshSamples:
    """Has one engine after the other sample the probe prompt, while the learner computes the step's gradient.

    The learner scores these tokens before its weights move, so the log-prob gap is measured in every step, also where
    all of the step's groups are of older weights.
    """

    # returns those that serve a version, or will after a push in progress
    engines: Callable[[int], Sequence[SamplingEngine]]
    prompt: Prompt
    settings: SamplingSettings

    def begin(self, version: int, groups: Sequence[ScoredGroup]) -> Any | None:
        """A reference to responses of `version`; None where the groups of the step have tokens of it, or
        no engine gets it: a resume repeats steps before its first push."""
        engines = self.engines(version)
        if not engines or any(group.summary.tokens_by_version.get(version, 0) > 0 for group in groups):
            return None
        settings = replace(self.settings, seed=self.settings.seed + version, min_version=version, priority=FIRST)
        return engines[version % len(engines)].begin_sample(self.prompt, settings)


BATCH_TOKENS = 1024  # of copies of the probe in one batch: kernels take several rows of few tokens as they take one
MIN_COPIES = 4
FACTOR = 10.0  # engine and learner differ by 2 to 4 times as much as two batches of the learner


class Rounding:
    """Rounding of a dtype in which kernels agree to far below any limit, such as float32."""

    nat = 0.0  # mean difference of log-probs

    async def measure(self, learner: Sender, probe: Prompt) -> None:
        """Called at the start of a run; nothing is measured."""

    def widened(self, limit: float) -> float:
        """`limit`, or `FACTOR` times the measured rounding where that is more."""
        return max(limit, FACTOR * self.nat)


class MeasuredRounding(Rounding):
    """Rounding of the run's model and dtype: the learner scores the probe alone, and copies of it in one batch.

    Kernels add up in another order where a batch has another shape, so the two differ as two kernels do: in bfloat16 by
    0.02 nat in the mean with SmolLM2-135M, where two attention kernels differ by 0.02 and vLLM and learner by 0.05.
    """

    _is_measured = False

    async def measure(self, learner: Sender, probe: Prompt) -> None:
        if self._is_measured:
            return
        alone = await learner.sequence_logprobs(probe)
        in_batch = await learner.sequence_logprobs(probe, num_copies(probe))
        rounding = float(np.abs(in_batch - alone).mean())
        self._is_measured = True
        if math.isfinite(rounding):
            self.nat = rounding
        _logger.info(
            "log-probs of the probe differ by %.3g nat in the mean between two batches of the learner", rounding
        )


def num_copies(probe: Prompt) -> int:
    """Copies of the probe in the batch that rounding is measured with."""
    return max(MIN_COPIES, BATCH_TOKENS // max(1, probe.num_tokens))


@dataclass(frozen=True)
class Tolerance:
    """A bound of the mean difference, and of the share of tokens that differ by more.

    In bfloat16 two kernels of one trained model differ by over 1 nat at some token, so the largest difference proves
    nothing there. In float32 no token may differ by more: the share is 0.
    """

    nat: float
    share: float
    rounding: Rounding = Rounding()  # by which the bound may be wider

    def accepts(self, differences: np.ndarray) -> bool:
        """Whether these absolute differences are within the tolerance; a NaN is not."""
        bound = self.rounding.widened(self.nat)
        is_beyond = ~(differences <= bound)
        return bool(differences.mean() <= bound and is_beyond.mean() <= self.share)

    def __str__(self) -> str:
        bound = self.rounding.widened(self.nat)
        measured = "" if bound == self.nat else f", widened to {bound:.3g} by the rounding of the model"
        return f"weight_sync.canary_tolerance={self.nat:g}{measured}, canary_share={self.share:g}"


@dataclass(frozen=True)
class Gap:
    """Absolute log-prob differences of engine and learner, in nat."""

    mean: float
    max: float

    @classmethod
    def of(cls, differences: np.ndarray) -> Gap:
        return cls(float(differences.mean()), float(differences.max()))

    def __str__(self) -> str:
        return f"{self.mean:.3g} nat in the mean, {self.max:.3g} at most"


MEDIA, TEMPLATE, TEXT = "media", "template", "text"


def classes_of(probe: Prompt, others: Sequence[Prompt]) -> Mapping[str, np.ndarray]:
    """Returns for each class that occurs which log-probs it has, bool [P - 1].

    Media are the placeholders of images, videos and sounds. The template are the tokens with which the probe and all
    of `others` begin and end, including a question that all of them have.
    """
    ids = np.asarray(probe.expanded_ids)
    is_media, is_shared = np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.bool_)
    for span in probe.media_spans:
        is_media[span.start : span.end] = True
    if others:
        start = min(_num_equal(ids, np.asarray(other.expanded_ids)) for other in others)
        end = min(_num_equal(ids[::-1], np.asarray(other.expanded_ids)[::-1]) for other in others)
        is_shared[:start] = True
        is_shared[len(ids) - end :] = True
    found = {MEDIA: is_media, TEMPLATE: is_shared & ~is_media, TEXT: ~is_shared & ~is_media}
    return {name: mask[1:] for name, mask in found.items() if mask[1:].any()}  # the first token has no log-prob


def _num_equal(ids: np.ndarray, others: np.ndarray) -> int:
    num = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:num] != others[:num])
    return int(differs[0]) if len(differs) else num
