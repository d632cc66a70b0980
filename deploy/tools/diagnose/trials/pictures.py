"""Picture ablation: whether right responses become less likely with the pictures of another prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.object_store import fetch
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.trials.recorded import TrialGroup, TrialLearner, response_logprob

NAME = "picture_ablation"
MAX_PAIRS, MIN_PAIRS = 24, 8
SURE = 3.0  # standard errors
NUM_SHOWN = 3  # pairs in the evidence
FETCH_S = 30.0


async def ablate_pictures(learner: TrialLearner, groups: Sequence[TrialGroup]) -> RunFinding:
    """Compares the log-prob of each group's best response with its own pictures and with those of another prompt."""
    pairs = list(_pairs(groups))[:MAX_PAIRS]
    if len(pairs) < MIN_PAIRS:
        return not_measured(NAME, f"{len(pairs)} of {MIN_PAIRS} pairs of prompts have pictures of equal size")
    drops: list[float] = []
    shown: list[Evidence] = []
    for group, swapped in pairs:
        best = group.trajectories[group.best]
        own = await response_logprob(learner, group.prompt, best)
        drops.append(own - await response_logprob(learner, swapped, best))
        if len(shown) < NUM_SHOWN:
            text = (
                f"{group.prompt.sample_id}: own picture, then the one of another prompt; {drops[-1]:+.3g} nat a token"
            )
            shown.append(Evidence(text, pngs=(*_thumbnails(group.prompt), *_thumbnails(swapped))))
    drop, error = float(np.mean(drops)), float(np.std(drops, ddof=1) / math.sqrt(len(drops)))
    numbers = {"drop": drop, "error": error, "num_prompts": float(len(drops))}
    measured = (
        f"with the pictures of another prompt the log-prob of the best responses falls by {drop:.3g} ± {error:.2g} nat "
        f"a token ({len(drops)} prompts)"
    )
    if drop > SURE * error:
        return RunFinding(NAME, RunVerdict.OK, measured, numbers)
    action = (
        "the policy does not look at the pictures: check that pictures belong to their rows (`mobula data inspect`), "
        "the chat template, policy.freeze (vision, connector), and data.max_pixels"
    )
    return RunFinding(NAME, RunVerdict.WARNING, measured, numbers, action, tuple(shown))


def _thumbnails(prompt: Prompt) -> list[bytes]:
    """Returns small PNGs of the pictures of a prompt; none of media without a reference."""
    references = [handle.reference for handle in prompt.media if handle.reference is not None]
    media = fetch(references, timeout_s=FETCH_S, what=f"the pictures of {prompt.sample_id}")
    return [each.thumbnail for each in media if each.thumbnail]


def _pairs(groups: Sequence[TrialGroup]) -> Iterator[tuple[TrialGroup, Prompt]]:
    """Yields groups with a right response, each with its prompt with the pictures of the next one of another label."""
    right = [group for group in groups if group.prompt.media and max(group.advantages, default=0) >= 0]
    for index, group in enumerate(right):
        for other in right[index + 1 :] + right[:index]:
            if _can_swap(group.prompt, other.prompt):
                yield group, replace(group.prompt, media=other.prompt.media)
                break


def _can_swap(prompt: Prompt, other: Prompt) -> bool:
    """Whether two prompts of different labels have different pictures of the same sizes at the same places."""
    return (
        prompt.media_spans == other.media_spans
        and [handle.num_bytes for handle in prompt.media] == [handle.num_bytes for handle in other.media]
        and prompt.media != other.media
        and prompt.references != other.references
    )
