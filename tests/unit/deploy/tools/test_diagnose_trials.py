"""Trials of `mobula diagnose --deep` on learners of known behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from metrics_data import make_group

from mobula.cluster.metrics.report.run_folder import RunVerdict
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.load import load_config
from mobula.deploy.report.diagnose.trials import TrialGroup, ablate_pictures, judged, memorise, scan


def trial_group(index: int, rewards: Sequence[float] = (0.0, 1.0, 0.0)) -> TrialGroup:
    """Three responses; the tokens of a response are its number in the group."""
    scored = make_group(f"s{index}", rewards)
    group = scored.group
    trajectories = tuple(
        replace(each, actions=replace(each.actions, token_ids=np.full(each.num_steps, n, dtype=np.int32)))
        for n, each in enumerate(group.trajectories)
    )
    media, spans = (MediaHandle(f"s{index}-0", "image", 4, None),), (MediaSpan(0, 1),)
    prompt = replace(group.prompt, references=(str(index % 3),), media=media, media_spans=spans)
    return TrialGroup(scored, prompt, trajectories)


class TableLearner:
    """A policy with one logit for each of three answers; an update moves the right one by `rate`."""

    def __init__(self, rate: float, *, looks: bool = True) -> None:
        self.logits = np.zeros(3)
        self._rate = rate
        self._looks = looks

    async def load(self, folder: Path) -> int:
        self.logits = np.zeros(3)
        return 0

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        self.logits[1] += self._rate
        return UpdateReport(1, {})

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        logprobs = self.logits - np.log(np.exp(self.logits).sum())
        own = prompt.sample_id.removeprefix("s")
        is_own = prompt.media[0].key.startswith(f"s{own}-")
        shift = 0.0 if is_own or not self._looks else 0.5 + 0.01 * int(own)
        return np.array([0.0, *(logprobs[token % 3] - shift for token in prompt.expanded_ids[1:])])


GROUPS = [trial_group(n) for n in range(16)]


def test_a_learner_that_learns_memorises_one_prompt_and_one_that_does_not_is_named() -> None:
    assert asyncio.run(memorise(TableLearner(0.2), GROUPS)).verdict is RunVerdict.OK
    still = asyncio.run(memorise(TableLearner(0.0), GROUPS))
    assert still.verdict is RunVerdict.WARNING and still.numbers["gain"] == pytest.approx(0)
    assert asyncio.run(memorise(TableLearner(-0.2), GROUPS)).verdict is RunVerdict.FAULT
    uniform = [trial_group(0, (1.0, 1.0, 1.0))]
    assert asyncio.run(memorise(TableLearner(0.2), uniform)).verdict is RunVerdict.NOT_MEASURED


def test_a_group_whose_best_response_is_likely_is_not_memorised() -> None:
    learner = TableLearner(-0.2)  # moves away from a likely response
    learner.logits[1] = 5.0
    assert asyncio.run(memorise(learner, GROUPS)).verdict is RunVerdict.NOT_MEASURED
    unlikely = [trial_group(0), trial_group(1, (1.0, 0.0, 0.0))]
    assert asyncio.run(memorise(learner, unlikely)).numbers["before"] < -4


def test_pictures_of_another_prompt_lower_the_log_prob_only_where_the_policy_looks() -> None:
    seen = asyncio.run(ablate_pictures(TableLearner(0.0), GROUPS))
    assert seen.verdict is RunVerdict.OK and seen.numbers["drop"] > 0.4
    blind = asyncio.run(ablate_pictures(TableLearner(0.0, looks=False), GROUPS))
    assert blind.verdict is RunVerdict.WARNING and blind.numbers["drop"] == 0
    assert asyncio.run(ablate_pictures(TableLearner(0.0), GROUPS[:2])).verdict is RunVerdict.NOT_MEASURED


def test_a_learning_rate_that_is_far_too_small_is_named_with_its_factor() -> None:
    async def start(factor: float) -> TableLearner:
        return TableLearner(0.001 * factor)

    found = asyncio.run(scan(start, GROUPS, Path("unused")))
    assert found.numbers["gain_x10"] > found.numbers["gain_x1"] > found.numbers["gain_x0.1"] > 0
    small = judged({0.1: (0.0, 1e-3), 1.0: (1e-3, 1e-3), 10.0: (0.1, 1e-2)})
    assert small.verdict is RunVerdict.WARNING and small.action == "try learner.learning_rate times 10"
    large = judged({0.1: (0.1, 1e-2), 1.0: (-0.5, 1e-2), 10.0: (-2.0, 1e-2)})
    assert large.verdict is RunVerdict.WARNING and large.action == "try learner.learning_rate times 0.1"
    assert judged({0.1: (0.01, 1e-3), 1.0: (0.1, 1e-3), 10.0: (0.3, 0.1)}).verdict is RunVerdict.OK


def test_trials_without_recorded_groups_say_what_is_missing(tmp_path: Path) -> None:
    from mobula.deploy.report.diagnose.deep import run_trials

    config = load_config(["experiment=digits"])
    assert {finding.measured for finding in run_trials(None, config)} == {"trials need the recorded groups of a run"}
    missing = {finding.measured for finding in run_trials(tmp_path, config)}
    assert missing == {"the run has no recorded step: run with replay.trajectory_log=true"}
