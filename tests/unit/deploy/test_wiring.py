"""Wiring of a run: persistence of steps, parity, evaluation and warm start."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from fakes import FakeLearner, make_scored, stop_request
from metrics_data import FakeClock, digit_image, make_metrics
from scored_rows import family_prompts

from mobula.cluster.errors import CanaryError, DatasetError
from mobula.cluster.failures import cause_in_one_line
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.report.run_folder import SKIPPED_FILE, SUMMARY_FILE
from mobula.cluster.metrics.summary import read_summary
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import GroupOutcome, Prompt, Reward
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.resume import JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.journal_writer import GroupJournal, JournalWriter
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.parity import ParityGate
from mobula.deploy.host.run_folder import make_run_folder
from mobula.deploy.run.run_report import leave_behind
from mobula.deploy.wiring import warm_start as taught_by
from mobula.deploy.wiring.evaluation import identity_of
from mobula.deploy.wiring.persistence import (
    RunContext,
    build_journal_writer,
    build_recovery,
    recovered,
    step_learner,
    trajectory_log,
)
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.warm_start import warm_start
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


async def test_a_step_beside_an_evaluation_is_left_to_the_loop_until_the_evaluation_is_there(tmp_path: Path) -> None:
    found = recovered(await killed_during_the_evaluation(tmp_path / "a"), 5)
    assert (found.reached, [g.group_id for g in found.finished]) == (5, ["0/0/s0"])
    assert [(a.group_id, a.reason) for a in found.arrivals] == [("0/0/s0", None), ("0/9/s9", "uniform")]
    assert found.arrivals[1].outcome() == GroupOutcome("0/9/s9", (Reward(1.0),), 2, 6)
    assert found.arrivals[0].outcome() == make_scored("0/0/s0").outcome
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
    assert type(build_journal_writer(run)) is GroupJournal


async def test_steps_are_logged_whether_the_loop_or_a_recovery_takes_them(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.trajectory_log=true"), FakeLearner()
    steps, recovery = build(run, learner, make_metrics([], FakeClock()))
    assert isinstance(recovery, JournalRecovery)
    await recovery.learner.repeat([make_scored("0/0/s0")])
    (tmp_path / "state").mkdir()
    await steps.save(tmp_path / "state")
    assert trajectory_log(run.run_folder, run).steps() == [1]


def test_what_came_back_is_counted_by_kind(tmp_path: Path) -> None:
    metrics = make_metrics([], FakeClock())
    _, recovery = build(config(tmp_path), FakeLearner(), metrics)
    recovery.on_recovered({"steps": 2, "groups": 3, "stale": 1})
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
    agreed = "engine and learner agree (text: 0 nat in the mean, 0 at most, one image: 0"
    assert f"llava trains because {agreed}" in caplog.text


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


PROMPT = Prompt("test/0/a", "a", "user: 1+1? Answer in a box.", np.arange(3), np.arange(3), references=("2",))
SETTINGS = SamplingSettings(num_samples=1, temperature=0.0, max_tokens=8, seed=0)
WORDS = ["experiment=own", "policy.model=m", "data.path=d"]


def identity(words: list[str] | None = None, prompt: Prompt = PROMPT, split: str = "test", **settings: object) -> dict:
    return identity_of(load_config([*WORDS, *(words or [])]), split, [prompt], replace(SETTINGS, **settings))


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        (identity(split="validation"), {"split"}),
        (identity(num_samples=4), {"num_samples"}),
        (identity(temperature=1.0), {"temperature"}),
        (identity(top_p=0.9), {"top_p"}),
        (identity(max_tokens=9), {"max_tokens"}),
        (identity(stop_strings=(".",)), {"stop_strings"}),
        (identity(prompt=replace(PROMPT, text="user: 1+1?")), {"prompts"}),  # template, suffix, system prompt
        (identity(prompt=replace(PROMPT, references=("3",))), {"rows"}),
        (identity(prompt=replace(PROMPT, metadata={"label": "sums"})), {"rows"}),
        (identity(["rewards=exact_match"]), {"rewards"}),
        (identity(["evaluation.correct_from=0.5"]), {"correct_from"}),
    ],
)
def test_what_changes_the_numbers_changes_the_identity(changed: dict, keys: set[str]) -> None:
    own = identity()
    assert {key for key in own | changed if own.get(key) != changed.get(key)} == keys


def test_seeds_ids_weights_of_components_and_speed_change_nothing() -> None:
    own = identity()
    assert identity(seed=7) == identity(priority=3) == own
    assert identity(prompt=replace(PROMPT, prompt_id="x", sample_id="b")) == own
    assert identity(["sampler=huggingface", "num_steps=7", "rewards.components.0.weight=0.5"]) == own
    assert json.loads(json.dumps(own)) == own, "it survives a checkpoint"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("warm")
    paths = [f"policy.model={folder / 'model'}", f"data.path={folder / 'digits'}", f"folder={folder / 'runs'}"]
    steps = [
        "num_steps=10", "num_rows=0", "batch_size=4", "check_interval=3", "max_checks_rows=5", "target_accuracy=0.5",
    ]  # fmt: skip
    return prepare(load_config(["experiment=digits", *paths, *(f"warm_start.{word}" for word in steps)]), lambda m: m)


class Taught(NamedTuple):
    """Replaces `Example`, which has no prompt."""

    prompt: Prompt
    answer_ids: np.ndarray
    answer_mask: np.ndarray

    @classmethod
    def of_answer(cls, prompt: Prompt, actions: TokenActions, mask: np.ndarray) -> Taught:
        return cls(prompt, actions.token_ids, mask)


@pytest.fixture(autouse=True)
def _with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taught_by, "Example", Taught)


class WarmStartLearner:
    """Gets better by `gain` a step."""

    def __init__(self, gain: float) -> None:
        self.batches: list[Sequence[Taught]] = []
        self.checks: list[Sequence[Taught]] = []
        self._gain = gain

    async def supervised_step(self, examples: Sequence[Taught]) -> Mapping[str, float]:
        self.batches.append(examples)
        return {"loss": 1.0}

    async def answer_accuracy(self, examples: Sequence[Taught]) -> float:
        self.checks.append(examples)
        return self._gain * len(self.batches)


async def warmed(prepared: Prepared) -> WarmStartLearner:
    """A learner that never reaches the target, after its warm start."""
    learner = WarmStartLearner(gain=0.01)
    await warm_start(prepared, learner)
    return learner


async def test_it_ends_at_the_first_check_that_reaches_the_target(prepared: Prepared) -> None:
    learner = WarmStartLearner(gain=0.1)
    assert await warm_start(prepared, learner) == pytest.approx(0.6)
    assert (len(learner.batches), len(learner.checks)) == (6, 2)


async def test_it_gives_up_after_its_last_step_and_returns_how_far_it_came(prepared: Prepared) -> None:
    learner = WarmStartLearner(gain=0.01)
    assert await warm_start(prepared, learner) == pytest.approx(0.1)
    assert (len(learner.batches), len(learner.checks)) == (10, 4)


async def test_examples_are_train_rows_with_their_right_answer_and_eos(prepared: Prepared) -> None:
    learner = await warmed(prepared)
    train = {row.sample_id: row for row in prepared.splits["train"].rows}
    seen = [example for batch in learner.batches for example in batch]
    assert len({example.prompt.sample_id for example in seen}) == 40, "no row comes twice within an epoch"
    for example in seen:
        row = train[example.prompt.sample_id]
        assert prepared.processor.decode(example.answer_ids) == row.solution == rf"\boxed{{{row.answer}}}"
        assert example.answer_ids[-1] == prepared.processor.eos_token_ids[0]
        assert example.answer_mask.all()
        assert len(example.prompt.media) == 1


async def test_checks_are_the_same_validation_rows_every_time(prepared: Prepared) -> None:
    learner = await warmed(prepared)
    validation = [row.sample_id for row in prepared.splits["validation"].rows[:5]]
    assert [[e.prompt.sample_id for e in checked] for checked in learner.checks] == [validation] * 4


async def test_rl_does_not_start_with_the_prompts_of_the_warm_start(prepared: Prepared) -> None:
    from mobula.actors.datasets.prompts import PromptSource

    learner = await warmed(prepared)
    taught = [example.prompt.sample_id for batch in learner.batches for example in batch]
    rows, seed = prepared.splits["train"].rows, prepared.config.seed
    rl = PromptSource(rows, prepared.preparation, seed=seed, split_name="train")
    assert [rl.next().sample_id for _ in taught] != taught


async def test_num_rows_limits_what_it_learns_from_and_the_seed_chooses_them(prepared: Prepared) -> None:
    warm = prepared.config.warm_start.model_copy(update={"num_rows": 6})
    limited = replace(prepared, config=prepared.config.model_copy(update={"warm_start": warm}))
    seen = []
    for _ in range(2):
        learner = await warmed(limited)
        seen.append({example.prompt.sample_id for batch in learner.batches for example in batch})
    assert len(seen[0]) == 6 and seen[0] == seen[1]


async def test_rows_are_spread_over_the_answers(prepared: Prepared) -> None:
    """An answer that no row teaches has probability 0 ever after: no sample finds it, and its digit is lost."""
    warm = prepared.config.warm_start.model_copy(update={"num_rows": 15, "num_steps": 4})
    learner = await warmed(replace(prepared, config=prepared.config.model_copy(update={"warm_start": warm})))
    rows = {e.prompt.sample_id: e.prompt.references[0] for batch in learner.batches for e in batch}
    counts = Counter(rows.values())
    assert sorted(counts) == list("0123456789")
    assert sorted(counts.values()) == [1] * 5 + [2] * 5


async def test_a_run_that_ends_because_every_image_is_damaged_names_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "cut.png").write_bytes(digit_image("3")[:-40])
    rows = [{"id": f"r{n}", "question": "<image>Which?", "answer": "3", "image": "cut.png"} for n in range(3)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "validation.jsonl").write_text('{"question": "1 + 1?", "answer": 2}')
    paths = [f"policy.model={tmp_path / 'model'}", f"data.path={data}", f"folder={tmp_path / 'runs'}"]
    run = load_config(["experiment=digits", "data=jsonl", "name=cut", "evaluation.split=validation", *paths])
    prepared = prepare(run, lambda m: m)
    with pytest.raises(DatasetError, match="no row of the split train is usable") as ended:
        await warm_start(prepared, WarmStartLearner(gain=0.1))
    make_run_folder(run)
    cause = cause_in_one_line(ended.value)
    summary = leave_behind(prepared, make_metrics([], FakeClock()), "failed", 1.0, cause)
    assert read_summary(run.run_folder / SUMMARY_FILE).error.startswith("DatasetError: no row of the split train")
    assert summary.skipped == {"bad_media": 3}
    named = json.loads((run.run_folder / SKIPPED_FILE).read_text())
    assert {row["sample_id"] for row in named} == {"r0", "r1", "r2"}
