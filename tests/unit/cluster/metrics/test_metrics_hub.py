"""The metrics hub: values of a step, times of the start, and warnings of idle steps."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from metrics_data import (
    FACTS,
    REPLAY,
    FakeClock,
    MemorySink,
    digit_image,
    fetch_value,
    make_group,
    make_keeper,
    make_metrics,
    write_run,
)

from mobula.cluster.errors import RunStopped
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.guard_events import NUM_IDLE, SignalWatch, idle_cause
from mobula.cluster.metrics.hub import Metrics, StartUp
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.sinks.jsonl import JsonlSink, read_records
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord, from_line, to_line
from mobula.cluster.metrics.summary import Summary, read_summary, summarize, write_summary
from mobula.cluster.records.trajectory import FinishReason, GroupOutcome, Reward, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.group_observers import RejectionCounts
from mobula.cluster.workers.status import Progress
from mobula.deploy.pages.report import write_report


class FullDisk(MemorySink):
    """Fails on every record."""

    name = "full_disk"

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def emit(self, record: StepRecord) -> None:
        self.num_calls += 1
        raise OSError("no space left on device")


def run_step(metrics: Metrics, clock: FakeClock, step: int, groups: list, gap: float = 1e-7, replay=REPLAY) -> None:
    with metrics.step(step) as scope:
        with scope.timed("wait_for_rollouts"):
            clock.pass_s(1.0)
        with scope.timed("update"):
            clock.pass_s(2.0)
        clock.pass_s(0.5)
        update = {"logprob_gap_mean": gap, "logprob_gap_max": 3 * gap, "num_tokens": 1.0, "ratio_max": 1.5}
        scope.record(groups, UpdateReport(step, update), replay)


def recorded_hub() -> tuple[FakeClock, MemorySink, Metrics]:
    clock, sink = FakeClock(), MemorySink()
    return clock, sink, make_metrics([sink], clock)


def test_a_step_becomes_one_record_with_its_phases_values_and_components() -> None:
    clock, sink = FakeClock(), MemorySink()
    cut = make_group("b", [0.0, 0.0, 0.0], spans=((4, 5),), finish_reason=FinishReason.LENGTH)
    run_step(make_metrics([sink], clock), clock, 5, [make_group("a", [1.0, 0.0], spans=((4, 6), (3, 2))), cut])
    (record,) = sink.records
    assert record.seconds == {"wait_for_rollouts": 1.0, "update": 2.0, "other": 0.5, "total": 3.5}
    assert record.values[MetricName.REWARD_MEAN] == pytest.approx(0.2)
    assert record.values[MetricName.REWARD_STD] == pytest.approx(0.4)
    assert record.values[MetricName.ACCURACY] == pytest.approx(0.2)
    assert record.components == {"answer": pytest.approx(0.2), "format": 1.0}
    assert record.values[MetricName.RESPONSE_LENGTH] == pytest.approx((2 * 8 + 3 * 5) / 5)
    assert record.values[MetricName.TOKENS_PER_S] == pytest.approx(31 / 3.5)
    assert record.values[MetricName.UNIFORM_FRACTION] == 0.5
    assert record.values[MetricName.NUM_TOKENS] == 31, "those generated, though the learner counts otherwise"
    assert record.values[MetricName.TRUNCATED_FRACTION] == 0.6
    assert record.staleness == {0: 27, 1: 4}, "by their lag behind the version trained from"
    assert record.values[MetricName.STALENESS] == pytest.approx(4 / 31)
    assert record.values[MetricName.STALENESS_MAX] == 1
    assert record.values[MetricName.QUEUE_READY] == 3
    assert record.values["ratio_max"] == 1.5  # what only the learner measures is kept


def test_means_over_all_sampled_groups_hold_the_rejected_ones_of_a_step() -> None:
    """One of 8 sampled responses is right; the trained group alone has 0.5."""
    clock, sink, metrics = recorded_hub()
    counts = RejectionCounts(metrics)
    for name in ("b", "c", "d"):
        counts.rejected(make_group(name, [0.0, 0.0]).outcome, "uniform")
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0])])
    unscored = replace(make_group("f", [1.0, 1.0]), rewards=(None, Reward(1.0, {"answer": 1.0})))
    counts.rejected(unscored.outcome, "uniform")
    run_step(metrics, clock, 2, [make_group("e", [1.0, 0.0])])
    first, second = (record.values for record in sink.records)
    assert (first[MetricName.ACCURACY], first[MetricName.SAMPLED_ACCURACY]) == (0.5, 0.125)
    assert (first[MetricName.REWARD_MEAN], first[MetricName.SAMPLED_REWARD_MEAN]) == (0.5, 0.125)
    names = (MetricName.UNIFORM_FRACTION, MetricName.UNIFORM_WRONG_FRACTION, MetricName.UNIFORM_RIGHT_FRACTION)
    assert [first[name] for name in names] == [0.75, 0.75, 0.0]
    assert [second[name] for name in names] == [0.5, 0.0, 0.5]
    assert (first[MetricName.NUM_SAMPLED_GROUPS], second[MetricName.NUM_SAMPLED_GROUPS]) == (4, 2)
    assert (first[MetricName.UNSCORED_FRACTION], second[MetricName.UNSCORED_FRACTION]) == (0, 0.25)
    assert sink.records[1].counters["rejected_responses"] == {"uniform": 8}
    assert sink.records[0].accuracy == 0.125


def test_the_hub_returns_the_phase_that_runs_and_for_how_long() -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    clock.pass_s(30.0)
    assert metrics.progress() == Progress(0, "starting", 30.0)
    with metrics.step(1) as scope:
        with scope.timed("wait_for_rollouts"):
            clock.pass_s(1.0)
            assert metrics.progress() == Progress(1, "wait_for_rollouts", 1.0)
        clock.pass_s(0.5)
        assert metrics.progress() == Progress(1, "other", 0.5)
        scope.record([make_group("a", [1.0, 0.0])], UpdateReport(1, {}), REPLAY)
    clock.pass_s(2.0)
    ending = metrics.progress()
    assert (ending.step, ending.phase, ending.seconds) == (1, "ending", 2.0)
    assert ending.step_s == metrics.totals.seconds["total"] and ending.tokens_per_s is not None


def test_a_phase_that_fails_is_over() -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    with pytest.raises(KeyError), metrics.step(1) as scope, scope.timed("update"):
        raise KeyError
    assert metrics.progress().phase == "ending"


def test_nothing_is_emitted_or_counted_for_a_step_that_raised() -> None:
    clock, sink, metrics = recorded_hub()
    with pytest.raises(RuntimeError, match="learner died"), metrics.step(1) as scope:
        scope.record([make_group("a", [1.0, 0.0])], UpdateReport(1, {}), REPLAY)
        raise RuntimeError("learner died")
    assert sink.records == [] and metrics.totals.num_steps == 0


def test_a_step_that_was_recorded_before_a_stop_is_emitted() -> None:
    clock, sink, metrics = recorded_hub()
    with pytest.raises(RunStopped), metrics.step(1) as scope:
        scope.record([make_group("a", [1.0, 0.0])], UpdateReport(1, {}), REPLAY)
        raise RunStopped
    with pytest.raises(RunStopped), metrics.step(2):
        raise RunStopped
    assert [record.step for record in sink.records] == [1] and metrics.totals.version == 1


def test_a_step_that_an_earlier_part_of_the_run_recorded_is_not_recorded_again() -> None:
    clock, sink, metrics = recorded_hub()
    for step in (1, 2, 1, 2, 3):
        run_step(metrics, clock, step, [make_group("a", [1.0, 0.0])])
    assert [record.step for record in sink.records] == [1, 2, 3]
    assert metrics.totals.num_steps == 3


def test_a_step_that_recorded_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="step 3 ended without"), make_metrics([], FakeClock()).step(3):
        pass


def test_a_step_in_which_no_recipe_has_the_accuracy_component_has_no_accuracy() -> None:
    clock = FakeClock()
    sink = MemorySink()
    metrics = Metrics([sink], clock, accuracy_component="boxes")
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0])])
    [record] = sink.records
    assert "accuracy" not in record.values and record.components.keys() == {"answer", "format"}


def test_the_mean_log_prob_gap_of_a_run_weighs_every_token_the_same() -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0], spans=((0, 10),))], gap=1e-6)
    run_step(metrics, clock, 2, [make_group("b", [1.0, 0.0], spans=((1, 30),))], gap=3e-6)
    assert metrics.totals.logprob_gap_mean == pytest.approx((20 * 1e-6 + 60 * 3e-6) / 80)
    assert metrics.totals.maximum(MetricName.LOGPROB_GAP_MAX) == pytest.approx(9e-6)


def test_a_gap_that_is_not_a_number_is_not_hidden_by_later_steps() -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    for step, gap in [(1, 1e-6), (2, math.nan), (3, 1e-6)]:
        run_step(metrics, clock, step, [make_group("a", [1.0, 0.0])], gap=gap)
    assert math.isnan(metrics.totals.maximum(MetricName.LOGPROB_GAP_MAX))
    assert math.isnan(metrics.totals.logprob_gap_mean)


def test_a_sink_that_fails_is_logged_once_counted_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    clock, broken, sink = FakeClock(), FullDisk(), MemorySink()
    metrics = make_metrics([broken, sink], clock)
    with caplog.at_level(logging.ERROR):
        for step in (1, 2):
            run_step(metrics, clock, step, [make_group("a", [1.0, 0.0])])
    metrics.close()
    assert broken.num_calls == 1
    assert [r.step for r in sink.records] == [1, 2] and sink.is_closed
    assert len([r for r in caplog.records if "full_disk" in r.message]) == 1
    assert metrics.counts(CounterName.DROPPED_SINKS) == {"full_disk": 1}


def test_what_is_kept_of_a_step_goes_to_the_sinks_that_show_responses(tmp_path: Path) -> None:
    class Shown(MemorySink):
        def __init__(self) -> None:
            super().__init__()
            self.samples: list[SampleRecord] = []

        def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
            self.samples += samples

    clock, plain, shown = FakeClock(), MemorySink(), Shown()
    keeper = make_keeper(tmp_path / "samples.jsonl", limit=6, num_steps=4)
    metrics = Metrics([plain, shown], clock, accuracy_component="answer", samples=[keeper])
    image = digit_image("7")
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0], text="seven", images=[image])])
    run_step(metrics, clock, 2, [make_group("a", [1.0, 0.0])])
    found = [(s.step, s.kind, s.reward) for s in shown.samples if s.kind != "random"]
    assert found == [(1, "best", 1.0), (1, "worst", 0.0)]
    assert shown.samples[0].response == "seven" and shown.samples[0].images == (image,)
    assert len(plain.records) == len(shown.records) == 2


def test_a_report_sample_that_cannot_be_kept_is_counted_and_the_step_goes_on() -> None:
    class LostSamples:
        def offer(self, step: int, groups: object) -> None:
            raise TimeoutError("object lost")

    clock, sink = FakeClock(), MemorySink()
    metrics = Metrics([sink], clock, accuracy_component="answer", samples=[LostSamples()])
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0])])
    assert metrics.counts(CounterName.DROPPED_SAMPLES) == {"error": 1} and len(sink.records) == 1


def test_rejections_go_on_from_a_checkpoint_and_not_from_the_last_record() -> None:
    first, metrics = RejectionCounts(make_metrics([], FakeClock())), make_metrics([], FakeClock())
    first.rejected(GroupOutcome("a", (), 2, 300), "over_age")
    first.rejected(GroupOutcome("b"), "killed_engines")
    metrics.count(CounterName.REJECTED, "over_age", 9)  # of a record that is no longer there
    second = RejectionCounts(metrics)
    second.restore(3, json.loads(json.dumps(first.state())))
    second.rejected(GroupOutcome("c", (), 2, 500), "over_age")
    assert metrics.counts(CounterName.REJECTED) == {"over_age": 2, "killed_engines": 1}
    assert metrics.counts(CounterName.REJECTED_RESPONSES) == {"over_age": 4}
    assert metrics.counts(CounterName.REJECTED_TOKENS) == {"over_age": 800}
    assert metrics.observed(MetricName.DROPPED_LENGTH) == 200.0


def test_totals_of_a_role_that_was_started_again_add_up() -> None:
    metrics = make_metrics([], FakeClock())
    for totals in ({"late": 2}, {"late": 5, "lost": 1}, {"late": 1}):
        metrics.count_up_to(CounterName.REWARD_FAILURES, totals)
    assert metrics.counts(CounterName.REWARD_FAILURES) == {"late": 6, "lost": 1}


def test_a_repeated_step_without_a_record_takes_as_long_as_its_first_computation() -> None:
    def recorded(seconds: dict[str, float]) -> StepRecord:
        clock, sink = FakeClock(), MemorySink()
        metrics = make_metrics([sink], clock)
        with metrics.step(1) as scope:
            scope.include(seconds)
            if not seconds:
                with scope.timed("wait_for_rollouts"):
                    clock.pass_s(8.0)
                assert metrics.seconds() == {"wait_for_rollouts": 8.0}
            with scope.timed("update"):
                clock.pass_s(2.0)
            scope.record([make_group("a", [1.0, 0.0])], UpdateReport(1, {}), REPLAY)
        return sink.records[0]

    assert recorded({"wait_for_rollouts": 8.0}) == recorded({})


def test_gauges_last_over_a_resume() -> None:
    clock, sink = FakeClock(), MemorySink()
    first = make_metrics([sink], clock)
    first.observe(MetricName.HELD_OUT_LOSS, 0.25)
    run_step(first, clock, 1, [make_group("a", [1.0, 0.0])])
    second = make_metrics([sink], clock)
    second.resume(list(sink.records))
    run_step(second, clock, 2, [make_group("b", [1.0, 0.0])])
    assert [record.values[MetricName.HELD_OUT_LOSS] for record in sink.records] == [0.25, 0.25]


def test_the_summary_sets_the_length_of_what_was_dropped_beside_that_of_what_was_trained() -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    for reason, num, tokens in [("over_age", 2, 900), ("uniform", 4, 40), ("over_age", 2, 1100)]:
        metrics.count(CounterName.REJECTED_RESPONSES, reason, num)
        metrics.count(CounterName.REJECTED_TOKENS, reason, tokens)
    group = make_group("a", [1.0, 0.0])
    run_step(metrics, clock, 1, [group])
    summary = summarize(metrics, FACTS, status="done", version=1, wall_s=1.0)
    assert summary.rejected_length == {"over_age": 500.0, "uniform": 10.0}
    assert summary.response_length == group.summary.num_tokens / 2


def test_the_summary_of_a_resumed_run_equals_that_of_an_undisturbed_one(tmp_path: Path) -> None:
    def go(metrics: Metrics, clock: FakeClock, steps: range) -> None:
        for step in steps:
            metrics.count(CounterName.WEIGHT_SYNCS, "published")
            run_step(metrics, clock, step, [make_group("a", [1.0, 0.0], spans=((step - 1, step),))], gap=step * 1e-7)
            metrics.record_evaluation(EvaluationRecord(step, step / 10, 0.0, 1.0, 8))

    clock = FakeClock()
    whole = make_metrics([], clock)
    go(whole, clock, range(1, 7))
    first = make_metrics([JsonlSink(tmp_path / "metrics.jsonl", version=0)], clock)
    go(first, clock, range(1, 6))  # killed at 5, its checkpoint is that of 3
    sink = JsonlSink(tmp_path / "metrics.jsonl", version=3)
    second = make_metrics([sink], clock)
    second.resume(sink.kept)
    go(second, clock, range(4, 7))
    second.close()
    assert second.totals.version == 6
    asked = {"status": "done", "version": 6, "wall_s": 1.0}
    assert summarize(second, FACTS, **asked) == summarize(whole, FACTS, **asked)
    assert [r.step for r in read_records(tmp_path / "metrics.jsonl") if isinstance(r, StepRecord)] == [1, 2, 3, 4, 5, 6]


def test_the_summary_holds_what_the_issue_asks_for_and_survives_the_file(tmp_path: Path) -> None:
    clock = FakeClock()
    metrics = make_metrics([], clock)
    metrics.record_evaluation(EvaluationRecord(0, 0.5, 0.4, 0.6, 100))
    metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, 100.0)
    metrics.count(CounterName.WEIGHT_SYNCS, "published", 2)
    run_step(metrics, clock, 1, [make_group("a", [1.0, 0.0], images=[b"an image"])])
    metrics.record_evaluation(EvaluationRecord(1, 0.9, 0.8, 0.95, 100))
    summary = summarize(metrics, FACTS, status="done", version=1, wall_s=9.0)
    write_summary(tmp_path / "summary.json", summary)
    row = json.loads((tmp_path / "summary.json").read_text())
    assert (row["accuracy_before"], row["accuracy_after"], row["weight_syncs"]) == (0.5, 0.9, 2)
    assert (row["media_bytes_unique"], row["media_bytes_referenced"]) == (100, 2 * len(b"an image"))
    assert row["staleness"] == {"0": 8} and row["seconds"]["total"] == 3.5
    assert read_summary(tmp_path / "summary.json") == summary


def test_a_resumed_run_that_has_stored_few_images_again_keeps_what_it_had_stored(tmp_path: Path) -> None:
    clock = FakeClock()
    first = make_metrics([JsonlSink(tmp_path / "metrics.jsonl", version=0)], clock)
    first.observe(MetricName.MEDIA_BYTES_UNIQUE, 100.0)
    run_step(first, clock, 1, [make_group("a", [1.0, 0.0])])
    first.close()
    second = make_metrics([], clock)
    second.resume(JsonlSink(tmp_path / "metrics.jsonl", version=1).kept)
    for stored, kept in ((10.0, 100), (130.0, 130)):
        second.observe(MetricName.MEDIA_BYTES_UNIQUE, stored)
        assert summarize(second, FACTS, status="done", version=1, wall_s=9.0).media_bytes_unique == kept


def test_a_run_without_a_step_has_a_summary_of_nothing_measured(tmp_path: Path) -> None:
    summary = summarize(make_metrics([], FakeClock()), FACTS, status="failed", version=0, wall_s=1.0)
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary
    assert summary.accuracy_before is None and summary.tokens_per_s is None and summary.num_steps == 0


def test_a_summary_with_a_missing_key_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({field.name: 0 for field in fields(Summary) if field.name != "seed"}))
    with pytest.raises(ValueError, match="seed"):
        read_summary(path)


def test_metrics_and_report_load_neither_ray_nor_torch() -> None:
    names = "hub, report.samples, summary, sinks.jsonl, sinks.console, sinks.trackers".split(", ")
    modules = [*(f"mobula.cluster.metrics.{name}" for name in names), "mobula.deploy.pages.report"]
    imports = "; ".join(f"import {module}" for module in modules)
    check = f"{imports}; import sys; assert not {{'ray', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_a_step_has_correlations_within_groups_reasons_and_the_sides_of_uniform_groups() -> None:
    sink = MemorySink()
    metrics = make_metrics([sink], FakeClock())
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0]), make_group("c", [0.0, 0.0])]
    with metrics.step(1) as step:
        step.record(groups, UpdateReport(1, {}), REPLAY)
    [record] = sink.records
    assert record.values[MetricName.UNIFORM_RIGHT_FRACTION] == record.values[MetricName.UNIFORM_WRONG_FRACTION] == 1 / 3
    assert record.correlations == {"answer": pytest.approx(1.0)}, "neither length nor format varies within a group"
    assert record.counters[CounterName.REWARD_REASONS] == {"answer: not equal": 3}
    read = from_line(to_line(record))
    assert isinstance(read, StepRecord) and read.correlations == record.correlations


def test_reasons_of_rewards_are_counted_under_few_names() -> None:
    sink = MemorySink()
    metrics = make_metrics([sink], FakeClock())
    for number in range(1, 41):
        reward = Reward(0.0, {"answer": 0.0}, {"answer": f"{'x' * number} of {number} words"})
        group = replace(make_group("a", [0.0]), rewards=(reward,))
        with metrics.step(number) as step:
            step.record([group], UpdateReport(number, {}), REPLAY)
    counted = sink.records[-1].counters[CounterName.REWARD_REASONS]
    assert len(counted) <= 25 and sum(counted.values()) == 40 and "answer: xx of # words" in counted


def test_phases_in_turns_and_side_by_side_are_measured_until_the_first_response() -> None:
    clock = FakeClock()
    start_up = StartUp(clock(), clock)
    clock.pass_s(3)
    start_up.ended("imports")

    async def loads(seconds: float, after: asyncio.Event, done: asyncio.Event) -> None:
        await after.wait()
        clock.pass_s(seconds)
        done.set()

    async def side_by_side() -> None:
        begun, learner, engines = asyncio.Event(), asyncio.Event(), asyncio.Event()
        begun.set()
        phases = {"engines": loads(4, learner, engines), "learner": loads(2, begun, learner)}
        await asyncio.gather(*(start_up.timing(name, work) for name, work in phases.items()))

    asyncio.run(side_by_side())
    for response in range(2):
        clock.pass_s(1)
        start_up.ended("first push", 0.5)
        clock.pass_s(response + 1)
        start_up.responded()
    phases = {"imports": 3, "learner": 2, "engines": 6, "first push": 0.5, "first response": 1, "total": 11}
    assert start_up.seconds == phases
    assert list(start_up.seconds) == list(phases)


def test_a_phase_that_fails_has_no_seconds() -> None:
    clock = FakeClock()
    start_up = StartUp(clock(), clock)
    with pytest.raises(ValueError, match="model"), start_up.timed("learner"):
        raise ValueError("no model")
    assert start_up.seconds == {}


def test_the_report_lists_the_phases(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", num_steps=2)
    assert 'id="start-up"' not in write_report(tmp_path / "digits").read_text(encoding="utf-8")
    summary = read_run_folder(tmp_path / "digits").summary
    assert summary is not None
    summary = replace(summary, start_up={"imports": 4.24, "total": 21.0})
    text = write_report(tmp_path / "digits", summary).read_text(encoding="utf-8")
    assert '<th scope="row">imports</th><td>4.2</td>' in text
    assert '<th scope="row">total</th><td>21.0</td>' in text


LEARNS = {MetricName.GRAD_NORM: 0.7, MetricName.LEARNING_RATE: 1e-6, MetricName.OPTIMIZER_STEPS: 1.0}


def hub(*, learns_from_rewards: bool = True) -> Metrics:
    watch = SignalWatch(learns_from_rewards=learns_from_rewards, fetch=fetch_value, timeout_s=1)
    return Metrics([], FakeClock(), accuracy_component="answer", signal=watch)


def run(metrics: Metrics, step: int, rewards: Sequence[Sequence[float]], **changes: float) -> None:
    groups = [make_group(f"s{i}", of_one, text="It is 7.") for i, of_one in enumerate(rewards)]
    finish(metrics, step, groups, changes)


def finish(metrics: Metrics, step: int, groups: Sequence[ScoredGroup], changes: Mapping[str, float]) -> None:
    with metrics.step(step) as scope:
        scope.record(groups, UpdateReport(step, {**LEARNS, **changes}), REPLAY)


def test_rewards_that_are_all_zero_are_named_with_cause_and_samples(caplog: pytest.LogCaptureFixture) -> None:
    metrics = hub()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            run(metrics, step, [[0.0, 0.0]] * 4, grad_norm=0.0)
    [message] = caplog.messages
    first, *samples = message.splitlines()
    assert first == (
        "nothing was learned in steps 1 to 3: every response has the reward 0 (answer 0, format 1); answer says 'not "
        "equal' of 8 of 8 responses: compare the prompt (data.prompt_suffix, data.system_prompt) with what the reward "
        "reads (rewards.components)"
    )
    assert len(samples) == 3 * 4
    assert samples[:4] == [
        "  sample s0: reward 0 (answer 0, format 1, answer: not equal)",
        "    prompt ends: '<|im_start|>user\\nWhich digit is this?<|im_end|>'",
        "    response (stop): 'It is 7.'",
        "    references: ('3',)",
    ]
    [warning] = summarize(metrics, FACTS, status="done", version=5, wall_s=1).warnings
    assert warning.startswith("nothing was learned in the last 5 of 5 steps: every response has the reward 0")


def test_a_run_that_learns_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    metrics = hub()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 12):
            is_idle = step % 3 != 0  # two idle steps in a row happen
            run(metrics, step, [[0.0, 0.0 if is_idle else 1.0]], grad_norm=0.0 if is_idle else 0.5)
        run(metrics, 12, [[1.0, 0.0]])
    assert caplog.messages == [] and metrics.warnings == ()


def test_a_run_of_two_idle_steps_is_named_at_its_end() -> None:
    metrics = hub()
    for step in (1, 2):
        run(metrics, step, [[1.0, 1.0]], grad_norm=0.0)
    assert "the last 2 of 2 steps: every response has the reward 1" in metrics.warnings[0]


def test_a_resumed_run_counts_the_steps_of_its_earlier_part() -> None:
    metrics = hub()
    metrics.resume([record(grad_norm=0.0)] * 2)
    run(metrics, 7, [[0.0, 0.0]], grad_norm=0.0)
    assert "the last 3 of 3 steps" in metrics.warnings[0]


def test_responses_that_are_all_cut_are_a_likely_cause(caplog: pytest.LogCaptureFixture) -> None:
    metrics = hub()
    with caplog.at_level(logging.WARNING):
        for step in range(1, NUM_IDLE + 1):
            groups = [make_group("a", [0.0, 0.0], finish_reason=FinishReason.LENGTH)]
            finish(metrics, step, groups, {MetricName.GRAD_NORM: 0.0})
    assert "100% of the responses were cut at their longest length: raise sampler.max_tokens" in caplog.messages[0]


def record(**values: float) -> StepRecord:
    least = {
        MetricName.REWARD_MIN: 0.0, MetricName.REWARD_MAX: 1.0, MetricName.UNIFORM_FRACTION: 0.5,
        MetricName.TRUNCATED_FRACTION: 0.0, MetricName.NUM_SAMPLES: 2.0, MetricName.NUM_TOKENS: 8.0,
    }  # fmt: skip
    return StepRecord(6, {"total": 1.0}, {**least, **LEARNS, **values}, {}, {"answer": 0.5}, {})


@pytest.mark.parametrize(
    ("values", "learns_from_rewards", "cause"),
    [
        ({}, True, None),
        ({"learning_rate": 0.0}, True, "the learning rate is 0: raise learner.learning_rate"),
        ({"optimizer_steps": 0.0}, True, "every optimizer step was skipped"),
        ({"reward_max": 0.0}, True, "every response has the reward 0 (answer 0.5)"),
        ({"reward_max": 0.0}, False, None),
        ({"grad_norm": 0.0, "uniform_fraction": 1.0}, True, "rewards within each group are equal (0 to 1 over all"),
        ({"grad_norm": 0.0}, True, "the gradient norm is 0: see policy.freeze"),
        ({"grad_norm": 0.0, "reward_max": 0.0, "uniform_fraction": 1.0}, False, "the gradient norm is 0: see policy."),
    ],
)
def test_a_step_that_trains_nothing_has_a_cause(
    values: dict[str, float], learns_from_rewards: bool, cause: str | None
) -> None:
    found = idle_cause(record(**values), learns_from_rewards=learns_from_rewards)
    assert found is None if cause is None else (found is not None and cause in found)
