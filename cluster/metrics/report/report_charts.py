"""The curves of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mobula.cluster.metrics.definitions import METRICS, MetricName
from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.report.charts import Chart, Curve, Point, curve
from mobula.cluster.metrics.report.units import TOKEN, counted_in
from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord, difference, distinct_identities

_PHASE_LABELS = {
    "wait_for_rollouts": "waiting for rollouts",
    "reference": "reference",
    "update": "update",
    "weight_sync": "weight sync",
    "other": "everything else",
}
_OTHER_COLOUR = 6


def accuracy_chart(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Chart:
    """Returns the chart of training accuracy and of held-out accuracy with 95 % intervals."""
    text = "Trained: sampled responses that were trained on. Held out: held-out prompts with 95 % intervals."
    series = [curve("trained", 1, _values(steps, MetricName.ACCURACY))]
    if any(record.accuracy != record.values.get(MetricName.ACCURACY) for record in steps):
        text += " Sampled: all sampled responses, with groups that were not trained."
        series.append(curve("sampled", 3, _values(steps, MetricName.SAMPLED_ACCURACY)))
    for n, identity in enumerate(identities := distinct_identities(evaluations)):
        label = "held out" + (f" ({difference(identities[0], identity)})" if n else "")
        points = [Point(e.version, e.accuracy, e.low, e.high) for e in evaluations if e.identity == identity]
        series.append(Curve(label, (2, 4, 5)[n % 3], points))
    return Chart("accuracy", "Accuracy", text, series, domain=(0.0, 1.0))


def curves(steps: Sequence[StepRecord], unit: str = TOKEN) -> list[Chart]:
    """Returns the other charts in reading order, without empty charts. `unit` is the unit of response lengths."""
    charts = [
        _reward(steps),
        _preference(steps),
        _turns(steps),
        _single(steps, MetricName.LOSS, "Loss", 5),
        _single(steps, MetricName.KL, "KL to the reference", 4),
        _single(steps, MetricName.ENTROPY, "Entropy", 3),
        _single(steps, MetricName.RESPONSE_LENGTH, "Response length", 1),
        _staleness(steps),
        _logprob_gap(steps),
        _single(steps, MetricName.TOKENS_PER_S, "Throughput", 3),
        _single(steps, MetricName.GRAD_NORM, "Gradient norm", 5),
        _single(steps, MetricName.CLIP_FRACTION, "Clipped tokens", 2),
        _single(steps, MetricName.VALUE_LOSS, "Value loss", 5),
        _single(steps, MetricName.EXPLAINED_VARIANCE, "Explained variance", 4),
    ]
    return [_counted_in(unit, chart) for chart in charts if chart.has_values]


def _counted_in(unit: str, chart: Chart) -> Chart:
    title, text, of = (counted_in(unit, words) for words in (chart.title, chart.help, chart.unit))
    series = [replace(line, label=counted_in(unit, line.label)) for line in chart.series]
    return replace(chart, title=title, help=text, unit=of, series=series)


def guard_charts(steps: Sequence[StepRecord], events: Sequence[GuardEvent]) -> list[Chart]:
    """Returns the chart of the trained reward and the judge, with a line at each action of the guard; none without a
    judge and without an action."""
    series = [
        Curve(label, colour, [_with_error(record, name) for record in steps if name in record.values])
        for label, colour, name in (
            ("trained reward", 1, MetricName.GUARD_REWARD),
            ("judge (not trained)", 3, MetricName.GUARD_JUDGE),
        )
    ]
    if not any(line.has_values for line in series):
        series = [curve("trained reward", 1, _values(steps, MetricName.REWARD_MEAN))]
        if not events:
            return []
    marks = [(float(event.version), f"{event.action} ({event.sign})") for event in events]
    done = [f"Step {event.version}, {event.action}: {event.text}." for event in events]
    text = "Group means with one standard error; a dashed line is an action of the guard."
    return [Chart("guard", "Reward and judge", " ".join([text, *done]), series, marks=marks)]


def _with_error(record: StepRecord, name: MetricName) -> Point:
    value, error = record.values[name], record.values[f"{name}_se"]
    return Point(record.step, value, value - error, value + error)


def phases_chart(steps: Sequence[StepRecord]) -> Chart:
    """Returns the stacked chart of the seconds of each phase."""
    series = [curve(phase_label(name), colour, values) for name, colour, values in _phase_seconds(steps)]
    text = "Wall time of each step, split by what it was spent on. Steps that take far longer than most are cut off."
    return Chart("seconds", "Seconds per phase", text, series, "s", is_stacked=True)


def phase_label(name: str) -> str:
    """Returns the label of a phase; an unknown phase keeps its name."""
    return _PHASE_LABELS[name] if name in _PHASE_LABELS else name


def phase_colours(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Returns the colour of each phase in the order of the loop; `other` is last and grey."""
    names = dict.fromkeys(name for record in steps for name in record.phases if name != "other")
    return {name: 1 + i % 5 for i, name in enumerate(names)} | {"other": _OTHER_COLOUR}


def _phase_seconds(steps: Sequence[StepRecord]) -> list[tuple[str, int, list[tuple[int, float]]]]:
    """Returns per phase the colour and (step, seconds); 0 s for a step without the phase."""
    return [
        (name, colour, [(r.step, r.phases[name] if name in r.phases else 0.0) for r in steps])
        for name, colour in phase_colours(steps).items()
    ]


def _reward(steps: Sequence[StepRecord]) -> Chart:
    """Returns the chart of the reward, and of its components if there are several."""
    series = []
    names = list(dict.fromkeys(name for record in steps for name in record.components))
    if len(names) > 1:
        for i, name in enumerate(names[:4]):
            values = [(r.step, r.components[name]) for r in steps if name in r.components]
            series.append(curve(name, 2 + i, values))
    series.append(curve("reward", 1, _values(steps, MetricName.REWARD_MEAN)))
    return Chart("reward", "Reward", METRICS[MetricName.REWARD_MEAN].help, series)


def _turns(steps: Sequence[StepRecord]) -> Chart:
    """Chart of the environment's rewards for the first turns of an episode."""
    names = {f"turn {n}": f"turn_reward_{n}" for n in range(1, 6)}
    series = [
        curve(label, n, [(r.step, r.values[name]) for r in steps if name in r.values])
        for n, (label, name) in enumerate(names.items(), start=1)
    ]
    text = "Mean of what the environment paid for a turn; 0 for episodes that ended before it."
    return Chart("turns", "Reward of turns", text, series)


def _preference(steps: Sequence[StepRecord]) -> Chart:
    """Chart of the rewards of chosen and rejected answers in an offline job."""
    names = {"chosen": MetricName.CHOSEN_REWARD, "rejected": MetricName.REJECTED_REWARD, "margin": MetricName.MARGIN}
    series = [curve(label, n, _values(steps, name)) for n, (label, name) in enumerate(names.items(), start=1)]
    return Chart("preference", "Chosen and rejected answers", METRICS[MetricName.MARGIN].help, series)


def _single(steps: Sequence[StepRecord], name: MetricName, title: str, colour: int) -> Chart:
    metric = METRICS[name]
    return Chart(name, title, metric.help, [curve(title.lower(), colour, _values(steps, name))], metric.unit)


def _staleness(steps: Sequence[StepRecord]) -> Chart:
    mean, largest = MetricName.STALENESS, MetricName.STALENESS_MAX
    return _pair(steps, "staleness", "Staleness", "version lag", mean, largest, is_log=False)


def _logprob_gap(steps: Sequence[StepRecord]) -> Chart:
    mean, largest = MetricName.LOGPROB_GAP_MEAN, MetricName.LOGPROB_GAP_MAX
    return _pair(steps, "logprob_gap", "Log-prob gap", "nat", mean, largest, is_log=True)


def _pair(
    steps: Sequence[StepRecord],
    key: str,
    title: str,
    unit: str,
    mean: MetricName,
    largest: MetricName,
    *,
    is_log: bool,
) -> Chart:
    """Returns the chart of a mean and the largest value."""
    series = [
        curve("largest", 2, _values(steps, largest), keeps_peaks=True),
        curve("mean", 1, _values(steps, mean)),
    ]
    text = METRICS[mean].help + (" (logarithmic axis)" if is_log else "")
    return Chart(key, title, text, series, unit, is_log=is_log)


def _values(steps: Sequence[StepRecord], name: MetricName) -> list[tuple[int, float]]:
    return [(record.step, record.values[name]) for record in steps if name in record.values]
