"""The warm start teaches right answers until the policy is right often enough, and not longer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from metrics_data import FakeClock, digit_image, make_metrics

from mobula.cluster.errors import DatasetError
from mobula.cluster.failures import cause_in_one_line
from mobula.cluster.metrics.report.run_folder import SKIPPED_FILE, SUMMARY_FILE
from mobula.cluster.metrics.summary import read_summary
from mobula.configs.load import load_config
from mobula.deploy.host.run_folder import make_run_folder
from mobula.deploy.run.run_report import leave_behind
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.warm_start import warm_start
from mobula.learner.supervised import SupervisedExample


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("warm")
    paths = [f"policy.model={folder / 'model'}", f"data.path={folder / 'digits'}", f"folder={folder / 'runs'}"]
    steps = [
        "num_steps=10",
        "num_rows=0",
        "batch_size=4",
        "check_interval=3",
        "max_checks_rows=5",
        "target_accuracy=0.5",
    ]
    return prepare(load_config(["experiment=digits", *paths, *(f"warm_start.{word}" for word in steps)]), lambda m: m)


class FakeLearner:
    """Gets better by `gain` a step."""

    def __init__(self, gain: float) -> None:
        self.batches: list[Sequence[SupervisedExample]] = []
        self.checks: list[Sequence[SupervisedExample]] = []
        self._gain = gain

    async def supervised_step(self, examples: Sequence[SupervisedExample]) -> Mapping[str, float]:
        self.batches.append(examples)
        return {"loss": 1.0}

    async def answer_accuracy(self, examples: Sequence[SupervisedExample]) -> float:
        self.checks.append(examples)
        return self._gain * len(self.batches)


async def test_it_ends_at_the_first_check_that_reaches_the_target(prepared: Prepared) -> None:
    learner = FakeLearner(gain=0.1)
    assert await warm_start(prepared, learner) == pytest.approx(0.6)
    assert (len(learner.batches), len(learner.checks)) == (6, 2)


async def test_it_gives_up_after_its_last_step_and_returns_how_far_it_came(prepared: Prepared) -> None:
    learner = FakeLearner(gain=0.01)
    assert await warm_start(prepared, learner) == pytest.approx(0.1)
    assert (len(learner.batches), len(learner.checks)) == (10, 4)


async def test_examples_are_train_rows_with_their_right_answer_and_eos(prepared: Prepared) -> None:
    learner = FakeLearner(gain=0.01)
    await warm_start(prepared, learner)
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
    learner = FakeLearner(gain=0.01)
    await warm_start(prepared, learner)
    validation = [row.sample_id for row in prepared.splits["validation"].rows[:5]]
    assert [[e.prompt.sample_id for e in checked] for checked in learner.checks] == [validation] * 4


async def test_rl_does_not_start_with_the_prompts_of_the_warm_start(prepared: Prepared) -> None:
    from mobula.actors.datasets.prompts import PromptSource

    learner = FakeLearner(gain=0.01)
    await warm_start(prepared, learner)
    taught = [example.prompt.sample_id for batch in learner.batches for example in batch]
    rl = PromptSource(
        prepared.splits["train"].rows, prepared.preparation, seed=prepared.config.seed, split_name="train"
    )
    assert [rl.next().sample_id for _ in taught] != taught


async def test_num_rows_limits_what_it_learns_from_and_the_seed_chooses_them(prepared: Prepared) -> None:
    warm = prepared.config.warm_start.model_copy(update={"num_rows": 6})
    limited = replace(prepared, config=prepared.config.model_copy(update={"warm_start": warm}))
    seen = []
    for _ in range(2):
        learner = FakeLearner(gain=0.01)
        await warm_start(limited, learner)
        seen.append({example.prompt.sample_id for batch in learner.batches for example in batch})
    assert len(seen[0]) == 6 and seen[0] == seen[1]


async def test_rows_are_spread_over_the_answers(prepared: Prepared) -> None:
    """An answer that no row teaches has probability 0 ever after: no sample finds it, and its digit is lost."""
    warm = prepared.config.warm_start.model_copy(update={"num_rows": 15, "num_steps": 4})
    learner = FakeLearner(gain=0.01)
    await warm_start(
        replace(prepared, config=prepared.config.model_copy(update={"warm_start": warm})),
        learner,
    )
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
        await warm_start(prepared, FakeLearner(gain=0.1))
    make_run_folder(run)
    cause = cause_in_one_line(ended.value)
    summary = leave_behind(prepared, make_metrics([], FakeClock()), "failed", 1.0, cause)
    assert read_summary(run.run_folder / SUMMARY_FILE).error.startswith("DatasetError: no row of the split train")
    assert summary.skipped == {"bad_media": 3}
    named = json.loads((run.run_folder / SKIPPED_FILE).read_text())
    assert {row["sample_id"] for row in named} == {"r0", "r1", "r2"}
