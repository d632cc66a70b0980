"""What is written down around the learner, and the gate in front of a model type that no conformance run covers."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FakeLearner, make_scored, stop_request
from family_prompts import family_prompts
from metrics_data import FakeClock, make_metrics

from mobula.cluster.errors import CanaryError
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import GroupOutcome, Prompt, Reward
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.resume import JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.journal_writer import JournalWriter, NoJournal
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.parity import ParityGate
from mobula.deploy.wiring.persistence import (
    RunContext,
    build_journal_writer,
    build_recovery,
    recovered,
    step_learner,
    trajectory_log,
)
from mobula.learner.policies.families import family_at
from mobula.learner.policies.tiny import TINY, write_tiny


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(["experiment=digits", f"folder={folder}", "name=job", *overrides])


def build(run: RunConfig, learner: FakeLearner, metrics: Metrics) -> tuple[StepLearner, Recovery]:
    nothing = SimpleNamespace()
    context = RunContext(run, metrics, stop_request())
    steps = step_learner(context, learner, nothing)
    return steps, build_recovery(context, steps, nothing, nothing, nothing)


async def test_the_journal_leads_from_a_checkpoint_to_the_last_step_that_was_written_down(tmp_path: Path) -> None:
    run = config(tmp_path)
    writer = build_journal_writer(run)
    assert isinstance(writer, JournalWriter)
    groups = [make_scored("0/0/s0"), make_scored("0/1/s1")]
    for version, group in enumerate(groups, start=6):
        await writer.finished(group)
        await writer.trained(version, [group])
    await writer.close()
    assert recovered(run, 5).reached == 7
    assert recovered(config(tmp_path, "replay.journal=false"), 5).reached == 5
    assert recovered(config(tmp_path, "learner.learning_rate=0.5"), 5).reached == 5, "its updates would be others"


async def killed_during_the_evaluation(folder: Path, interval: int = 5, has_evaluated: bool = False) -> RunConfig:
    """A run whose step 6 was written while version 5 was evaluated."""
    run = config(folder, f"evaluation.interval_steps={interval}")
    writer = build_journal_writer(run)
    group, outcome = make_scored("0/0/s0"), GroupOutcome("0/9/s9", (Reward(1.0),), 2, 6)
    await writer.finished(group)
    await writer.rejected(outcome, "uniform")
    if has_evaluated:
        await writer.evaluated(5, {"results": [], "rewards": []})
    await writer.trained(6, [group], {"wait_for_rollouts": 2.5})
    await writer.close()
    return run


async def test_a_step_that_was_trained_beside_an_evaluation_is_left_to_the_loop_until_the_evaluation_is_there(
    tmp_path: Path,
) -> None:
    found = recovered(await killed_during_the_evaluation(tmp_path / "a"), 5)
    assert (found.reached, [g.group_id for g in found.finished]) == (5, ["0/0/s0"])
    assert [(a.group_id, a.reason) for a in found.arrivals] == [("0/0/s0", None), ("0/9/s9", "uniform")]
    assert found.arrivals[1].read() == GroupOutcome("0/9/s9", (Reward(1.0),), 2, 6)
    assert found.arrivals[0].read() == make_scored("0/0/s0").outcome
    whole = recovered(await killed_during_the_evaluation(tmp_path / "b", has_evaluated=True), 5)
    assert (whole.reached, whole.finished, list(whole.evaluations)) == (6, (), [5])
    assert (whole.steps[0].seconds, len(whole.steps[0].arrivals)) == ({"wait_for_rollouts": 2.5}, 2)
    not_due = await killed_during_the_evaluation(tmp_path / "c", interval=4)
    assert recovered(not_due, 5).reached == 6


async def test_a_run_without_a_journal_writes_none(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.journal=false"), FakeLearner()
    steps, recovery = build(run, learner, make_metrics([], FakeClock()))
    assert (await steps.update([make_scored("0/0/s0")])).version == 1
    assert isinstance(recovery, NoRecovery)
    assert isinstance(build_journal_writer(run), NoJournal)


async def test_steps_are_logged_whether_the_loop_or_a_recovery_takes_them(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.trajectory_log=true"), FakeLearner()
    steps, recovery = build(run, learner, make_metrics([], FakeClock()))
    assert isinstance(recovery, JournalRecovery)
    await recovery._learner.repeat([make_scored("0/0/s0")])
    (tmp_path / "state").mkdir()
    await steps.save(tmp_path / "state")
    assert trajectory_log(run.run_folder, run).steps() == [1]


def test_what_came_back_is_counted_by_kind(tmp_path: Path) -> None:
    metrics = make_metrics([], FakeClock())
    _, recovery = build(config(tmp_path), FakeLearner(), metrics)
    recovery._on_recovered({"steps": 2, "groups": 3, "stale": 1})
    assert metrics.counts(CounterName.RECOVERED) == {"steps": 2, "groups": 3, "stale": 1}


class Scores:
    """Engine or learner: log-probs of -1, and `off` at the last token of a prompt with two images."""

    def __init__(self, off: float = 0.0) -> None:
        self._off = off
        self.num_asked = 0

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        self.num_asked += 1
        logprobs = np.full(prompt.num_tokens - 1, -1.0, dtype=np.float32)
        logprobs[-1] += self._off if len(prompt.media) == 2 else 0.0
        return logprobs

    prompt_logprobs = sequence_logprobs


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> dict[str, Prompt]:
    folder = TINY["llava"](tmp_path_factory.mktemp("tiny") / "model")
    assert family_at(str(folder)).needs_gate
    cases = family_prompts(folder, folder.parent).cases
    return {name: cases[name].prompt for name in ("text", "one image", "two images")}


async def test_agreement_passes_once_with_a_note(prompts: dict[str, Prompt], caplog) -> None:
    learner, engine = Scores(), Scores(1e-6)
    gate = ParityGate("llava", learner, lambda: [engine], prompts, Tolerance(1e-4, 0.0))
    with caplog.at_level(logging.INFO):
        await gate(0)
        await gate(0)
    assert (learner.num_asked, engine.num_asked) == (3, 3)
    assert (
        "llava trains because engine and learner agree (text: 0 nat in the mean, 0 at most, one image: 0" in caplog.text
    )


@pytest.mark.parametrize("off", [0.03, np.nan])
async def test_a_gap_is_refused_with_its_size(prompts: dict[str, Prompt], off: float) -> None:
    gate = ParityGate("llava", Scores(), lambda: [Scores(off)], prompts, Tolerance(1e-4, 0.0))
    with pytest.raises(CanaryError, match=rf"model type llava.*two images: .* {off:.3g} at most.*cannot be trained"):
        await gate(0)


async def test_a_measured_family_is_not_compared(tmp_path: Path) -> None:
    folder = write_tiny("qwen3", tmp_path / "model")
    assert not family_at(str(folder)).needs_gate
    learner = Scores()
    await ParityGate("qwen3", learner, lambda: [Scores(1.0)], {}, Tolerance(1e-4, 0.0))(0)
    assert learner.num_asked == 0
