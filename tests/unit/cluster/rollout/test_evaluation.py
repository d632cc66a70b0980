"""Evaluations on held-out prompts and rows, and the rows of offline jobs."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SETTINGS, FakeRewards, FakeRollouts, make_prompt, make_scored
from metrics_data import flat_image, write_run
from PIL import Image

from mobula.cluster.errors import DatasetError, RewardError, RolloutError
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, to_line
from mobula.cluster.metrics.summary import paired_gains
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import (
    Answers,
    Generated,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.rollout import row_stream
from mobula.cluster.rollout.evaluation import (
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    RowEvaluator,
    ScoredPrompt,
    Suite,
    mean_of_component,
)
from mobula.cluster.rollout.response_logs import ContactSheets
from mobula.cluster.rollout.row_stream import RowStream, stored
from mobula.deploy.pages.report import write_report

ONE = replace(SETTINGS, temperature=0.0, num_samples=1)


def make_evaluator(
    rollouts: FakeRollouts,
    results: list[EvaluationResult],
    values: Callable[[str], Sequence[float | None]] = lambda prompt_id: (0.0, 1.0),
    *,
    interval_steps: int = 0,
    **changes: Any,
) -> Evaluator:
    parts = {
        "schedule": EvaluationSchedule(interval_steps, total_steps=7),
        "suites": [Suite(HELD_OUT, [make_prompt(f"test/{i}/s{i}") for i in range(10)], ONE)],
        "rewards": FakeRewards(values),
        "accuracy_component": "accuracy",
        **changes,
    }
    return Evaluator(rollouts=rollouts, correct_from=1.0, max_concurrent=3, on_result=results.append, **parts)


async def test_accuracy_is_the_mean_over_all_held_out_prompts() -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, 1.0) if int(prompt_id.split("/")[1]) < 7 else (0.0, 0.0)

    rollouts = FakeRollouts()
    evaluator = make_evaluator(rollouts, [], values)
    [result] = await evaluator.run(3)
    assert (result.version, result.accuracy, result.num_scored, result.num_unscored) == (3, 0.7, 20, 0)
    assert 0 < result.low < result.accuracy < result.high < 1
    assert set(rollouts.settings.values()) == {ONE}
    assert len(rollouts.settings) == 10


@pytest.mark.parametrize(
    ("of_prompt", "mean"),
    [(lambda n: 1.0 if n < 3 else -1.0, -0.4), (lambda n: float(n + 1), 5.5), (lambda n: -1.0, -1.0)],
)
async def test_rewards_of_any_range_have_a_mean_and_an_interval(of_prompt: Callable[[int], float], mean: float) -> None:
    evaluator = make_evaluator(FakeRollouts(), [], lambda prompt_id: (of_prompt(int(prompt_id.split("/")[1])),) * 2)
    [result] = await evaluator.run(0)
    assert result.accuracy == pytest.approx(mean)
    assert result.low <= result.accuracy <= result.high
    assert (result.high - result.low > 0.1) == (len({of_prompt(n) for n in range(10)}) > 1)


async def test_no_more_prompts_are_in_flight_than_allowed() -> None:
    rollouts = FakeRollouts(pauses=lambda prompt_id: 5)
    await make_evaluator(rollouts, []).run(0)
    assert rollouts.max_in_flight == 3


@pytest.mark.parametrize(("interval_steps", "due"), [(0, [0, 7]), (2, [0, 2, 4, 6, 7]), (7, [0, 7])])
async def test_it_runs_before_after_and_at_the_interval(interval_steps: int, due: list[int]) -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts()
    evaluator = make_evaluator(rollouts, results, interval_steps=interval_steps)
    async with evaluator.evaluating():
        for version in range(8):
            await evaluator.finish()
            rollouts.version = version
            await evaluator.maybe_run(version)
    assert [result.version for result in results] == due


async def test_a_version_that_was_evaluated_before_a_resume_is_not_evaluated_again() -> None:
    first, results = make_evaluator(FakeRollouts(), []), []
    async with first.evaluating():
        await first.maybe_run(0)
    second = make_evaluator(FakeRollouts(), results)
    second.restore(0, first.state())
    async with second.evaluating():
        await second.maybe_run(0)
    assert results == []
    assert second.results == first.results


async def test_a_changed_suite_is_evaluated_again_and_its_gains_are_not_over_the_earlier_one() -> None:
    prompts = [make_prompt(f"test/{i}/s{i}") for i in range(4)]
    sampled = replace(SETTINGS, temperature=1.0, num_samples=2)
    first, results = make_evaluator(FakeRollouts(), [], suites=[Suite(HELD_OUT, prompts, sampled, {"split": "a"})]), []
    async with first.evaluating():
        await first.maybe_run(0)
    second = make_evaluator(FakeRollouts(), results, suites=[Suite(HELD_OUT, prompts, sampled, {"split": "b"})])
    second.restore(0, json.loads(json.dumps(first.state())))
    async with second.evaluating():
        await second.maybe_run(0)
    assert [result.identity for result in results] == [{"split": "b"}]
    assert "accuracy_mean" in results[0].values and "accuracy_gain" not in results[0].values


async def test_it_runs_beside_the_body_until_it_is_waited_for_and_the_last_one_is() -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts(pauses=lambda prompt_id: 3)
    evaluator = make_evaluator(rollouts, results)
    async with evaluator.evaluating():
        await evaluator.maybe_run(0)
        assert results == []
        while not rollouts.num_in_flight:
            await asyncio.sleep(0)
        await evaluator.finish()
        assert [result.version for result in results] == [0]
        rollouts.version = 7
        await evaluator.maybe_run(7)
        assert [result.version for result in results] == [0, 7], "a checkpoint of the last version holds its result"


async def test_it_takes_nothing_older_than_the_push_that_is_still_under_way() -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts()
    rollouts.version = 1
    evaluator = make_evaluator(rollouts, results, interval_steps=2)
    async with asyncio.timeout(5), evaluator.evaluating():
        await evaluator.maybe_run(2)
        await asyncio.sleep(0.01)
        assert rollouts.num_in_flight == 3 and results == []
        rollouts.version = 2
        await evaluator.finish()
    assert [(result.version, result.num_unscored) for result in results] == [(2, 0)]


async def test_one_that_fails_cancels_the_body_and_one_that_runs_is_cancelled_with_it() -> None:
    rollouts = FakeRollouts(fault=lambda prompt_id, attempt: RolloutError(prompt_id))
    with pytest.raises(RolloutError, match="test/"):
        failing = make_evaluator(rollouts, [])
        async with asyncio.timeout(5), failing.evaluating():
            await failing.maybe_run(0)
            await asyncio.Event().wait()
    endless = FakeRollouts(pauses=lambda prompt_id: 10**9)
    evaluator = make_evaluator(endless, [])
    with pytest.raises(KeyError):
        async with asyncio.timeout(5), evaluator.evaluating():
            await evaluator.maybe_run(0)
            while not endless.num_in_flight:
                await asyncio.sleep(0)
            raise KeyError("the learner failed")
    assert endless.num_in_flight == 0


async def test_a_response_of_newer_weights_is_left_out() -> None:
    rollouts = FakeRollouts(pauses=lambda prompt_id: 2)
    running = asyncio.ensure_future(make_evaluator(rollouts, []).run(0))
    while sum(rollouts.attempts.values()) < 6:
        await asyncio.sleep(0)
    rollouts.version = 1
    [result] = await running
    assert result.num_scored + result.num_unscored == 20
    assert 0 < result.num_unscored < 20


async def test_what_could_not_be_scored_is_left_out_and_counted() -> None:
    [result] = await make_evaluator(FakeRollouts(), [], lambda prompt_id: (1.0, None)).run(0)
    assert (result.accuracy, result.num_scored, result.num_unscored) == (1.0, 10, 10)


async def test_an_evaluation_without_any_score_is_an_error() -> None:
    with pytest.raises(RewardError, match="none of 20 responses could be scored"):
        await make_evaluator(FakeRollouts(), [], lambda prompt_id: (None, None)).run(0)


async def test_an_accuracy_component_that_no_held_out_response_has_names_those_that_it_has() -> None:
    with pytest.raises(RewardError, match=r"accuracy_component=correct is in no recipe of the 20 .*\['accuracy'\]"):
        await make_evaluator(FakeRollouts(), [], accuracy_component="correct").run(0)


def test_the_accuracy_is_of_the_responses_whose_recipe_has_its_component() -> None:
    components = [{"accuracy": 1.0}, {"boxes": 0.5}, {"accuracy": 0.5, "boxes": 0.5}]
    assert mean_of_component("accuracy", [Reward(0.5, of_one) for of_one in components]) == (0.75, 2)


async def test_suites_are_evaluated_beside_the_runs_own_with_their_own_settings() -> None:
    """Two responses to each prompt, of which the first is right on every second prompt: pass@1 0.25, pass@2 0.5."""

    def values(prompt_id: str) -> tuple[float, float]:
        return (float(int(prompt_id.split("/")[1]) % 2), 0.0)

    rollouts = FakeRollouts()
    sampled = replace(SETTINGS, temperature=1.0, num_samples=2, top_p=0.9)
    own = [make_prompt(f"test/{i}/s{i}") for i in range(4)]
    other = [make_prompt(f"high:test/{i}/s{i}") for i in range(4)]
    written: list[tuple[str, int, int]] = []

    class Log:
        async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
            written.append((suite, version, len(prompts)))

    suites = [Suite(HELD_OUT, own, replace(SETTINGS, temperature=0.0)), Suite("high", other, sampled)]
    evaluator = make_evaluator(rollouts, [], values, suites=suites, responses=Log())
    held_out, high = await evaluator.run(0)
    assert (held_out.suite, high.suite) == (HELD_OUT, "high")
    assert high.accuracy == high.values["pass_at_1"] == 0.25 and high.values["pass_at_2"] == 0.5
    assert 0 <= high.low < 0.25 < high.high <= 1
    assert high.values["response_length"] > 0
    assert {rollouts.settings[prompt.prompt_id].top_p for prompt in other} == {0.9}
    assert written == [(HELD_OUT, 0, 4), ("high", 0, 4)]
    second = make_evaluator(rollouts, [], values, suites=[Suite(HELD_OUT, own, SETTINGS)])
    second.restore(0, json.loads(json.dumps(evaluator.state())))
    assert second.results == evaluator.results


def scored(number: int, *levels: int) -> ScoredPrompt:
    prompt: Prompt = make_prompt(f"test/{number}/s{number}")
    responses = tuple(Response("", 1, False, (flat_image(level),)) for level in levels)
    answers = Answers(prompt, tuple(range(len(levels))), responses)
    return ScoredPrompt(prompt, [Reward(1.0)] * len(levels), Generated(None, None, answers))


async def test_a_sheet_has_all_images_and_the_report_shows_it_with_its_hash(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, num_steps=4)
    sheets = ContactSheets(folder / "evaluations", timeout_s=1)
    for version, level in ((0, 10), (2, 100), (4, 200)):
        await sheets.write(HELD_OUT, version, [scored(n, level, level + n) for n in range(7)])
    sheet = folder / "evaluations" / "held_out-4.png"
    pixels = np.asarray(Image.open(sheet).convert("L"))
    assert pixels.shape == (2 * 34 + 2, 12 * 34 + 2), "six prompts of two images in a row, each 32 pixels wide"
    assert (pixels[10, 10], pixels[10, 44], pixels[50, 10], pixels[50, 44]) == (200, 200, 200, 206)
    text = write_report(folder).read_text(encoding="utf-8")
    digest = hashlib.sha256(sheet.read_bytes()).hexdigest()
    assert digest in text and "Images before and after" in text
    rows = json.loads((folder / "evaluations" / "sheets.json").read_text())
    assert [row["version"] for row in rows] == [0, 2, 4] and rows[2]["sha256"] == digest
    assert rows[1]["sha256"] not in text, "the first and the last are shown"
    sheet.write_bytes(flat_image(0))
    with pytest.raises(ValueError, match="put the file of the run back"):
        write_report(folder)


async def test_a_sheet_shows_condition_images_before_the_images_made_of_them(tmp_path: Path) -> None:
    shown = scored(0, 100, 200)
    medium = ProcessedMedia("condition", {}, thumbnail=flat_image(10))
    handle = MediaHandle("key", "condition", 1, medium, "the text 'make it red'")
    prompt = replace(shown.prompt, media=(handle,), media_spans=(MediaSpan(0, 0),))
    await ContactSheets(tmp_path, timeout_s=1).write(HELD_OUT, 0, [replace(shown, prompt=prompt)])
    pixels = np.asarray(Image.open(tmp_path / "held_out-0.png").convert("L"))
    assert pixels.shape == (34 + 2, 3 * 34 + 2) and pixels[10, [10, 44, 78]].tolist() == [10, 100, 200]


async def test_an_excluded_prompt_has_no_images_and_no_images_no_sheet(tmp_path: Path) -> None:
    await ContactSheets(tmp_path, timeout_s=1).write(HELD_OUT, 0, [ScoredPrompt(make_prompt("a/0/b"), [None])])
    assert not list(tmp_path.iterdir())


def test_tables_have_a_row_for_each_step_and_each_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(to_line(EvaluationRecord(3, 0.5, 0.4, 0.6, 8, "other", {"ocr_gain": 0.25})) + "\n")
    write_report(tmp_path)
    steps = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["step"] for row in steps] == ["1", "2", "3"] and float(steps[0]["total_s"]) > 0
    assert any(name.startswith("r_") for name in steps[0])
    evaluations = list(csv.DictReader((tmp_path / "eval_metrics.csv").open()))
    assert evaluations[-1]["suite"] == "other" and evaluations[-1]["ocr_gain"] == "0.25"
    assert evaluations[0]["ocr_gain"] == ""


class Drifting:
    """Prompt i has i / 10, which grows by 0.2 with each version; the judge says half of that."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self._rollouts = rollouts

    async def score(self, group: TrajectoryGroup, group_id: str) -> list[Reward]:
        value = int(group_id.split("/")[1]) / 10 + 0.2 * self._rollouts.version
        return [Reward(value, {"ocr": value + d, "judge": value / 2}) for d in (-0.1, 0.1)]


async def test_gains_are_of_pairs_since_the_first_evaluation() -> None:
    rollouts = FakeRollouts()
    settings = replace(SETTINGS, temperature=1.0, num_samples=2)
    suites = [Suite(HELD_OUT, [make_prompt(f"test/{i}/s{i}") for i in range(5)], settings)]
    parts = {"rewards": Drifting(rollouts), "accuracy_component": "ocr"}
    evaluator = make_evaluator(rollouts, [], suites=suites, **parts)
    [first] = await evaluator.run(0)
    assert "ocr_gain" not in first.values
    assert first.values["ocr_mean"] == pytest.approx(0.2)
    assert first.values["ocr_se"] == pytest.approx(np.std([0, 0.1, 0.2, 0.3, 0.4], ddof=1) / np.sqrt(5))
    rollouts.version = 1
    [second] = await evaluator.run(1)
    assert second.values["ocr_gain"] == pytest.approx(0.2)
    assert second.values["ocr_gain_se"] == pytest.approx(0, abs=1e-9), "every prompt gains as much"
    assert second.values["judge_gain"] == pytest.approx(0.1)
    again = make_evaluator(rollouts, [], suites=[], **parts)
    again.restore(1, json.loads(json.dumps(evaluator.state())))
    assert again.results == evaluator.results


def test_a_component_that_a_prompt_lacks_has_no_gain() -> None:
    after = {"a": {"x": 1.0, "y": 1.0}, "b": {"x": 3.0}}
    found = paired_gains({"a": {"x": 0.0}}, after)
    assert found == {"x_mean": 2.0, "x_se": 1.0, "x_gain": 1.0, "x_gain_se": 0.0}
    assert paired_gains({}, {}) == {}


class Journal:
    """Keeps evaluations as JSON, as the journal of a run does."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}

    async def evaluated(self, version: int, evaluation: Mapping[str, Any]) -> None:
        self.rows[version] = json.dumps(evaluation)


async def test_evaluations_of_the_journal_are_results_of_the_resumed_run() -> None:
    journal, rollouts, results, again = Journal(), FakeRollouts(), [], []
    several = [Suite(HELD_OUT, [make_prompt(f"test/{i}/s{i}") for i in range(4)], replace(ONE, num_samples=2))]
    first = make_evaluator(rollouts, results, journal=journal, suites=several)
    second = make_evaluator(rollouts, again, suites=several)
    async with first.evaluating():
        await first.maybe_run(0)
        await first.finish()
        found = json.loads(journal.rows[0])
        assert [[reward["value"] for reward in rewards] for rewards in found["rewards"]] == [[0.0, 1.0]] * 4
        assert second.repeat(found["results"]) == results
        rollouts.version = 7
        async with second.evaluating():
            await second.maybe_run(0)
            await second.maybe_run(7)
        await first.maybe_run(7)
    assert again == results[1:], "version 0 is not evaluated again, and the gains since it are those of the whole run"
    assert any(name.endswith("_gain") for name in again[0].values)


class Source:
    """Rows that are called by their place."""

    def __init__(self, end: int = 1000) -> None:
        self.cursor = 0
        self._end = end

    def next(self) -> ScoredGroup:
        if self.cursor == self._end:
            raise DatasetError("no row is usable")
        self.cursor += 1
        return make_scored(str(self.cursor - 1))

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        assert not pending
        self.cursor = cursor


def names(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]


class Counting:
    """A learner and a reference that count their calls."""

    def __init__(self) -> None:
        self.num_scored = 0
        self.assessed: list[list[str]] = []

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        self.num_scored += len(groups)
        return [replace(group, reference_logprobs=[np.zeros(3)]) for group in groups]

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        assert all(group.reference_logprobs is not None for group in groups)
        self.assessed.append(names(groups))
        return {"loss": 1.0, "accuracy": 0.5}


async def test_steps_take_rows_in_order_as_of_the_version_that_trains_them() -> None:
    stream = RowStream(Source(), lambda group: group, Counting(), total_steps=3)
    async with stream.streaming():
        for version in range(3):
            groups = await stream.take(2)
            assert names(groups) == [str(2 * version), str(2 * version + 1)]
            assert [group.summary.tokens_by_version for group in groups] == [{version: 6}] * 2
            await stream.release(groups)


async def test_the_rows_of_the_next_step_are_scored_while_the_learner_trains() -> None:
    reference = Counting()
    stream = RowStream(Source(), lambda group: group, reference, total_steps=2)
    async with stream.streaming():
        groups = await stream.take(2)
        assert all(group.reference_logprobs is not None for group in groups)
        async with asyncio.timeout(5):
            while reference.num_scored < 4:
                await asyncio.sleep(0)
        await stream.take(2)
    assert reference.num_scored == 4, "there is no third step"


async def test_a_resumed_run_takes_the_rows_that_it_would_have_taken() -> None:
    """The step that was read ahead is not counted as taken."""
    first = RowStream(Source(), lambda group: group, Counting(), total_steps=5)
    async with first.streaming():
        await first.take(3)
        await first.take(3)
        state = first.state()
    second = RowStream(Source(), lambda group: group, Counting(), total_steps=5)
    second.restore(2, state)
    groups = await second.take(3)
    assert names(groups) == ["6", "7", "8"]
    assert groups[0].summary.tokens_by_version == {2: 6}


async def test_what_cannot_be_read_fails_the_step_that_takes_it() -> None:
    stream = RowStream(Source(end=3), lambda group: group, Counting(), total_steps=5)
    async with stream.streaming():
        assert names(await stream.take(2)) == ["0", "1"]
        with pytest.raises(DatasetError):
            await stream.take(2)


def test_a_stored_row_keeps_its_label_and_refers_to_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    small = stored(make_scored("a"), 7, lambda group: ("stored", group))
    assert small.group.trajectories[0].weight_spans == (WeightSpan(7, 0, 3),), "a small row is a value"
    monkeypatch.setattr(row_stream, "SMALL_BYTES", 0)
    found = stored(make_scored("a"), 7, lambda group: ("stored", group))
    assert found.rewards == small.rewards == make_scored("a").rewards
    assert found.group[0] == "stored"
    assert found.group[1].trajectories[0].weight_spans == (WeightSpan(7, 0, 3),)


async def test_held_out_rows_are_assessed_when_due_and_scored_once() -> None:
    role, seen = Counting(), []
    schedule = EvaluationSchedule(interval_steps=2, total_steps=5)
    evaluator = RowEvaluator(
        rows=[make_scored("a"), make_scored("b")], learner=role, reference=role, schedule=schedule,
        on_result=lambda version, metrics: seen.append(version),
    )  # fmt: skip
    async with evaluator.evaluating():
        for version in range(6):
            await evaluator.maybe_run(version)
            await evaluator.finish()
    assert seen == [0, 2, 4, 5]
    assert role.assessed == [["a", "b"]] * 4
    assert role.num_scored == 2
    again = RowEvaluator(rows=[], learner=role, reference=role, schedule=schedule, on_result=lambda v, m: None)
    again.restore(4, evaluator.state())
    await again.maybe_run(4)
    assert len(role.assessed) == 4, "a result that the checkpoint holds is not measured again"
