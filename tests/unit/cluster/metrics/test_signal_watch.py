"""A run that learns nothing says so within its first steps, with the cause and samples, and at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest
from metrics_data import FACTS, REPLAY, FakeClock, fetch_value, make_group

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.guard_events import NUM_IDLE, SignalWatch, idle_cause
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.metrics.summary import summarize
from mobula.cluster.records.trajectory import FinishReason, ScoredGroup
from mobula.cluster.roles import UpdateReport

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
        MetricName.REWARD_MIN: 0.0,
        MetricName.REWARD_MAX: 1.0,
        MetricName.UNIFORM_FRACTION: 0.5,
        MetricName.TRUNCATED_FRACTION: 0.0,
        MetricName.NUM_SAMPLES: 2.0,
        MetricName.NUM_TOKENS: 8.0,
    }
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
