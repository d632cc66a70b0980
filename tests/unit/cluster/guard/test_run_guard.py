"""The guard: signs and their tests, actions at an alarm, and the chart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes import make_scored
from scipy import stats

from mobula.cluster.errors import RewardHackingError
from mobula.cluster.guard.guard import Alarm, GuardAction, KLScale, RaiseKL, Rollback, RunGuard, Stop, Warn, Watch
from mobula.cluster.guard.signs import (
    DRIFTS,
    Divergence,
    Level,
    Moments,
    Observer,
    Quantity,
    Series,
    Sign,
    Window,
    difference,
    script_mix,
)
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, GuardLog, read_events
from mobula.cluster.metrics.report.samples import repeated_words
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.deploy.pages.report import guard_charts

NUM_GROUPS = 8

HONEST, HACKED = [(0.3, 0.6), (0.5, 0.8)], [(0.9, 0.1), (0.8, 0.0)]  # (trained reward, judge) of two responses


class Restored:
    """A learner that only loads states."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []

    async def restore(self, folder: Path, version: int) -> None:
        self.loads.append((folder.name, version))


class Bench:
    """A guard with windows of two steps and checkpoints of all even versions."""

    def __init__(
        self, folder: Path, action: str = "warn", *, identity: str = "same", is_held_out: bool = False
    ) -> None:
        self.learner, self.kl_scale, self.counted = Restored(), KLScale(), []
        rollback = Rollback(self.learner, self.newest, max_actions=2)
        actions: dict[str, GuardAction] = {
            "warn": Warn(),
            "raise_kl": RaiseKL(self.kl_scale, factor=3, max_actions=2),
            "rollback": rollback,
            "stop": Stop(),
        }
        signs: list[Sign] = [Divergence(0.1)]
        observer = Observer(
            quantities=frozenset({Quantity.REWARD, Quantity.JUDGE}), judge_weights={"exact": 1.0}, format_components=(),
            num_text_groups=4, ngram=2, fetch=lambda *args, **more: [], timeout_s=1,
        )  # fmt: skip
        self.path = folder / GUARD_FILE
        self.guard = RunGuard(
            watch=Watch([] if is_held_out else signs, Series(2), 0.01),
            held_out=Watch(signs, Series(1), 0.01) if is_held_out else None,
            observer=observer,
            actions={"judge": actions[action]},
            rollback=rollback,
            log=GuardLog(self.path),
            kl_scale=self.kl_scale,
            identity=identity,
            on_event=lambda event: self.counted.append((event.version, event.action)),
        )

    def newest(self, version: int) -> tuple[int, Path] | None:
        usable = [v for v in range(0, version + 1, 2) if not self.guard.is_discarded(v)]
        return (max(usable), Path(f"step-{max(usable)}")) if usable else None

    async def go(self, *courses: list[tuple[float, float]], start: int = 1) -> list[dict[str, float]]:
        """Inspects a step of each course; returns the metrics of each."""
        return [dict((await self.step(start + n, course)).metrics) for n, course in enumerate(courses)]

    async def step(self, version: int, course: list[tuple[float, float]]) -> UpdateReport:
        return await self.guard.inspect(groups_of(version, course), UpdateReport(version, {"loss": 1.0}))


def groups_of(version: int, course: list[tuple[float, float]]) -> list[ScoredGroup]:
    """Groups that differ a little, sampled by the weights before `version`."""
    groups = []
    for n in range(NUM_GROUPS):
        scored = make_scored(f"0/{version * NUM_GROUPS + n}/s")
        rewards = tuple(Reward(r + 0.01 * n, {"exact": j + 0.01 * (n % 3), "loophole": r}) for r, j in course)
        summary = scored.summary.__class__(**{**vars(scored.summary), "tokens_by_version": {version - 1: 6}})
        groups.append(ScoredGroup(summary, scored.group, rewards))
    return groups


async def test_a_healthy_run_is_left_alone_and_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "stop")
    metrics = await bench.go(*[HONEST] * 8)
    assert bench.counted == []
    assert not bench.path.exists()
    assert metrics[0]["loss"] == 1.0
    assert metrics[0]["guard_judge"] == pytest.approx(0.7 + 0.01 * (0 + 1 + 2 + 0 + 1 + 2 + 0 + 1) / 8)
    assert metrics[0]["guard_reward"] == pytest.approx(0.4 + 0.035)
    assert (metrics[-1]["guard_groups"], metrics[-1][MetricName.GUARD_KL_SCALE]) == (NUM_GROUPS, 1.0)
    assert metrics[-1][MetricName.GUARD_STRENGTH] < 1


async def test_a_warning_is_given_once_and_names_the_figures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    metrics = await bench.go(HONEST, HONEST, HACKED, HACKED, HACKED, HACKED, HACKED, HACKED)
    assert bench.counted == [(4, "warn")]
    assert metrics[3][MetricName.GUARD_STRENGTH] >= 1
    [event] = read_events(bench.path)
    assert (event.version, event.sign, event.agreeing) == (4, "judge", 1)
    assert "from steps 1 to 2 to steps 3 to 4 the trained reward rose from 0.435" in caplog.text


async def test_the_kl_factor_rises_at_each_alarm_up_to_a_number_and_then_the_run_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "raise_kl")
    metrics = await bench.go(HONEST, HONEST, *[HACKED] * 5)
    assert [bench.kl_scale.at(version) for version in range(4, 9)] == [1, 3, 3, 9, 9]
    assert [m[MetricName.GUARD_KL_SCALE] for m in metrics[3:6]] == [3, 3, 9]
    with pytest.raises(RewardHackingError, match=r"step 8: .*after 2 raises of the KL coefficient"):
        await bench.step(8, HACKED)
    assert [event.action for event in read_events(bench.path)] == ["raise_kl", "raise_kl", "stop"]


async def test_a_rollback_loads_the_newest_agreeing_checkpoint_and_never_a_discarded_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollback")
    await bench.go(*[HONEST] * 6, HACKED, HACKED)
    assert bench.learner.loads == [("step-4", 8)]  # steps 5 and 6 agree: sampled with versions 4 and 5
    assert bench.guard.kept(range(9)) == [4]
    assert [v for v in range(12) if bench.guard.is_discarded(v)] == [5, 6, 7]
    await bench.go(HACKED, HACKED, start=9)
    assert bench.learner.loads == [("step-4", 8), ("step-4", 10)]
    with pytest.raises(RewardHackingError, match="after 2 rollbacks"):
        await bench.go(HACKED, HACKED, start=11)


async def test_groups_that_discarded_weights_sampled_are_not_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollback")
    await bench.go(*[HONEST] * 4, HACKED, HACKED)
    late = await bench.guard.inspect(groups_of(6, HACKED), UpdateReport(7, {}))  # sampled with version 5
    assert "guard_judge" not in late.metrics
    await bench.go(*[HONEST] * 6, start=8)
    assert len(bench.learner.loads) == 1


async def test_an_alarm_stops_the_run_with_the_newest_agreeing_version(tmp_path: Path) -> None:
    with pytest.raises(RewardHackingError, match=r"The newest version without this divergence is 3"):
        await Bench(tmp_path, "stop").go(*[HONEST] * 4, HACKED, HACKED)


@pytest.mark.parametrize("action", ["raise_kl", "rollback"])
async def test_a_resumed_run_repeats_the_recorded_actions_and_goes_on(tmp_path: Path, action: str) -> None:
    courses = [*[HONEST] * 6, *[HACKED] * 4]
    whole = Bench(tmp_path / "whole", action)
    whole.path.parent.mkdir()
    await whole.go(*courses)
    part = Bench(tmp_path, action)
    await part.go(*courses[:5])
    state = part.guard.state()
    await part.go(*courses[5:8], start=6)  # the alarm of step 8, after the checkpoint of step 5
    again = Bench(tmp_path, "warn" if action == "rollback" else action)  # also with another action by now
    again.guard.restore(5, state)
    for version, course in enumerate(courses[5:8], start=6):
        await again.guard.repeat(groups_of(version, course), UpdateReport(version, {}))
    assert again.counted == []
    assert again.learner.loads == part.learner.loads
    assert again.guard.state() == part.guard.state()
    resumed = Bench(tmp_path, action)
    resumed.guard.restore(8, again.guard.state())
    await resumed.go(*courses[8:], start=9)
    assert read_events(resumed.path) == read_events(whole.path)
    assert resumed.guard.state() == whole.guard.state()


async def test_actions_of_steps_that_are_trained_again_are_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "raise_kl")
    await bench.go(HONEST, HONEST, HACKED, HACKED)
    again = Bench(tmp_path, "raise_kl")
    await again.go(HONEST, HONEST, HONEST, HONEST)
    assert (read_events(bench.path), again.kl_scale.newest) == ([], 1.0)


async def test_windows_of_another_reward_are_not_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "raise_kl")
    await bench.go(HONEST, HONEST, HACKED, HACKED)
    changed = Bench(tmp_path, "raise_kl", identity="another")
    changed.guard.restore(4, bench.guard.state())
    await changed.go(HACKED, HACKED, HACKED, HACKED, start=5)
    assert (changed.counted, changed.kl_scale.newest) == ([], 3)


async def test_a_held_out_judge_is_compared_evaluation_by_evaluation(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollback", is_held_out=True)
    for version, course in ((0, HONEST), (2, HONEST), (4, HACKED)):
        bench.guard.evaluated(version, [group.scored_rewards for group in groups_of(version + 1, course)])
        await bench.step(version + 1, HACKED)  # its own groups are not judged
    assert bench.learner.loads == [("step-2", 5)]


@pytest.mark.parametrize(
    ("text", "mix"), [("", 0.0), ("12 + 3", 0.0), ("plain words", 0.0), ("слово word", 4 / 9), ("字word", 1 / 5)]
)
def test_the_script_mix_is_the_share_of_letters_outside_the_main_script(text: str, mix: float) -> None:
    assert script_mix(text) == pytest.approx(mix)


@pytest.mark.parametrize(
    ("text", "share"), [("a b c", 0.0), ("a b", 0.0), ("a b a b a b", 3 / 5), ("one two three one two", 1 / 4)]
)
def test_repetition_is_the_share_of_n_grams_that_occurred_before(text: str, share: float) -> None:
    assert repeated_words(text, 2) == pytest.approx(share)


@pytest.mark.parametrize("killed_after", [1, 2, 3])
async def test_evaluations_after_the_checkpoint_are_shown_to_a_resumed_guard(tmp_path: Path, killed_after: int) -> None:
    def judge(bench: Bench, version: int) -> None:
        bench.guard.evaluated(version, [group.scored_rewards for group in groups_of(version + 1, HONEST)])

    whole = Bench(tmp_path / "whole", is_held_out=True)
    saved: dict[str, object] = {}
    for version in range(5):
        judge(whole, version)
        if version == 1:
            saved = json.loads(json.dumps(whole.guard.state()))  # before the step that looks at the evaluation
        await whole.step(version + 1, HONEST)
    again = Bench(tmp_path / "again", is_held_out=True)
    again.guard.restore(1, saved)
    for version in range(1, 5):
        judge(again, version)
        groups, update = groups_of(version + 1, HONEST), UpdateReport(version + 1, {})
        take = again.guard.repeat if version < 1 + killed_after else again.guard.inspect
        await take(groups, update)
    assert again.guard.state() == whole.guard.state()


WINDOW = 5

NUM_STEPS = 60


def recorded(
    random: np.random.Generator, judge: Callable[[float], float], reward: Callable[[float], float], *, num_groups: int
) -> list[Window]:
    """A run whose groups of 8 binary judgements have the mean `judge(step)`, with prompts of different difficulty."""
    steps = []
    for step in range(1, NUM_STEPS + 1):
        logit = math.log(judge(step) / (1 - judge(step))) + random.normal(0, 1, num_groups)
        judged = random.binomial(8, 1 / (1 + np.exp(-logit))) / 8
        rewards = reward(step) + random.normal(0, 0.2, num_groups)
        values = {Quantity.REWARD: Moments.of(rewards.tolist()), Quantity.JUDGE: Moments.of(judged.tolist())}
        steps.append(Window(step, step, values))
    return steps


def alarms(steps: list[Window], sign: Sign, rate: float = 0.01) -> list[Alarm]:
    watch = Watch([sign], Series(WINDOW), rate)
    return [alarm for values in steps for alarm in watch.observe(values)]


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_judge_that_stays_gives_false_alarms_in_at_most_the_stated_share_of_runs(share: float) -> None:
    """The reward always rises, so the test of the judge alone is measured: at most the share 0.2 of 150 runs."""
    random, rate, num_runs = np.random.default_rng(0), 0.2, 150
    runs = [recorded(random, lambda step: share, lambda step: step / 20, num_groups=16) for _ in range(num_runs)]
    num = sum(bool(alarms(steps, Divergence(0.0), rate)) for steps in runs)
    # 99.9 % quantile of false alarms at the stated rate; above 0, or the test would never fire.
    assert 0 < num <= stats.binom.ppf(0.999, num_runs, rate)
    assert not any(alarms(steps, Divergence(0.1)) for steps in runs)  # the defaults


def test_a_judge_that_falls_is_found_within_three_windows_of_the_fall_and_the_moment_is_named() -> None:
    random = np.random.default_rng(1)
    found = []
    for _ in range(40):
        fallen = recorded(random, lambda step: 0.6 if step <= 20 else 0.35, lambda step: step / 20, num_groups=32)
        found.append(alarms(fallen, Divergence(0.1))[:1])
    first = [alarm for of_run in found for alarm in of_run if alarm.step <= 20 + 3 * WINDOW]
    assert len(first) >= 38, "power of at least 0.95 for a fall by 0.25 with 32 groups a step"
    assert all(alarm.agreeing <= 20 for alarm in first)
    assert np.median([alarm.agreeing for alarm in first]) >= 10


def test_a_slow_fall_is_found_by_the_pooled_windows() -> None:
    random = np.random.default_rng(2)
    steps = recorded(random, lambda step: 0.6 - 0.2 * step / NUM_STEPS, lambda step: step / 20, num_groups=64)
    assert alarms(steps, Divergence(0.1))


@pytest.mark.parametrize(
    ("judge", "reward"),
    [
        (lambda step: 0.3 + step / 120, lambda step: step / 20),  # both rise
        (lambda step: 0.8 - step / 120, lambda step: -step / 20),  # both fall: worse, but nothing is gamed
        (lambda step: 0.6, lambda step: step / 20),  # the reward alone
    ],
)
def test_other_courses_are_no_hacking(judge: Callable[[float], float], reward: Callable[[float], float]) -> None:
    random = np.random.default_rng(3)
    assert not any(alarms(recorded(random, judge, reward, num_groups=32), Divergence(0.1)) for _ in range(20))


def test_the_levels_of_all_looks_sum_to_the_false_alarm_rate() -> None:
    spent = sum(3 * Level(0.01, look).of(3) for look in range(2, 100_000))
    assert spent == pytest.approx(0.01, rel=1e-4)


def test_the_difference_is_welchs_t() -> None:
    random = np.random.default_rng(4)
    a, b = random.normal(0, 1, 20), random.normal(0.5, 3, 30)
    expected = stats.ttest_ind(b, a, equal_var=False)
    ours = difference(Moments.of(a.tolist()), Moments.of(b.tolist()))
    assert (ours.t, ours.degrees) == pytest.approx((expected.statistic, expected.df))
    assert ours.strength(expected.pvalue / 2) == pytest.approx(1.0)  # one-sided: its own level is the critical one


def test_equal_groups_differ_only_by_more_than_rounding() -> None:
    ones, tenths = Moments.of([0.1 + 0.2] * 10), Moments.of([0.3] * 10)
    assert difference(ones, tenths).t == difference(tenths, ones).t == 0
    assert difference(tenths, Moments.of([0.4] * 10)).t == math.inf


def test_windows_pool_groups_as_if_they_were_of_one_step() -> None:
    random = np.random.default_rng(5)
    parts = [random.normal(n, 1, 3 + n) for n in range(4)]
    steps = [Window(n, n, {Quantity.LENGTH: Moments.of(part.tolist())}) for n, part in enumerate(parts)]
    window = Window.pooled(steps)
    whole = np.concatenate(parts)
    pooled = window.moments[Quantity.LENGTH]
    assert (window.first, window.last, pooled.num) == (0, 3, whole.size)
    assert (pooled.mean, pooled.standard_error) == pytest.approx((whole.mean(), stats.sem(whole)))


@pytest.mark.parametrize(
    ("name", "limit", "quantity", "start", "inside", "outside"),
    [
        ("length", 2.0, Quantity.LENGTH, 50, 95, 130),
        ("length", 2.0, Quantity.LENGTH, 50, 30, 15),
        ("repetition", 0.2, Quantity.REPETITION, 0.1, 0.25, 0.5),
        ("language", 0.1, Quantity.SCRIPT_MIX, 0.0, 0.05, 0.2),
        ("format", 0.2, Quantity.FORMAT, 0.9, 0.75, 0.5),
    ],
)
def test_a_quantity_that_leaves_its_limit_is_an_alarm(
    name: str, limit: float, quantity: Quantity, start: float, inside: float, outside: float
) -> None:
    random, sign = np.random.default_rng(6), DRIFTS[name](limit)

    def run(end: float) -> list[Alarm]:
        means = [start if step < 20 else end for step in range(40)]
        noise = random.normal(0, 0.1 * max(start, 0.1), (40, 8))
        values = [{quantity: Moments.of((mean + noise[step]).tolist())} for step, mean in enumerate(means)]
        return alarms([Window(step, step, of_step) for step, of_step in enumerate(values)], sign)

    assert run(inside) == []
    found = run(outside)
    assert found[0].step == 24
    assert found[0].agreeing == 19
    assert f"guard.limits.{name}" in found[0].text


def test_steps_without_a_judge_are_left_out_of_windows() -> None:
    series = Series(2)
    empty = Window(1, 1, {})
    full = {Quantity.JUDGE: Moments.of([1.0, 0.0])}
    assert [series.add(v) for v in (Window(1, 1, full), empty, Window(3, 3, full))] == [False, False, True]
    assert series.windows[0].shown_steps == "steps 1 to 3"


def record(step: int, **values: float) -> StepRecord:
    return StepRecord(step, {}, {"reward_mean": 1.0, **values}, {}, {}, {})


EVENT = GuardEvent(12, "judge", "rollback", 1.4, 5, "the judge fell", 1.0, 4)


def test_one_chart_has_reward_and_judge_with_errors_and_marks_each_action() -> None:
    values = {"guard_reward": 0.5, "guard_reward_se": 0.1, "guard_judge": 0.8, "guard_judge_se": 0.02}
    [chart] = guard_charts([record(1, **values), record(2)], [EVENT])
    data = chart.data
    assert data["marks"] == [(12.0, "rollback (judge)")]
    reward, judge = data["curves"]
    assert (reward["values"], reward["low"], reward["high"]) == ([0.5], [0.4], [0.6])
    assert (judge["label"], judge["steps"], judge["low"]) == ("judge (not trained)", [1], [0.78])
    assert "Step 12, rollback: the judge fell." in chart.help
    assert "rollback (judge) at step 12" in chart.label


def test_without_a_judge_the_trained_reward_carries_the_marks_of_drift() -> None:
    [chart] = guard_charts([record(1), record(2)], [EVENT])
    assert [curve["label"] for curve in chart.data["curves"]] == ["trained reward"]
    assert guard_charts([record(1), record(2)], []) == []
