"""Correlations of reward components with the reward, with each other and with length, within groups."""

from __future__ import annotations

from collections.abc import Iterator

from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.cluster.metrics.step_values import LENGTH
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.records.trends import Trend

COMPONENTS, PAID_LENGTH = "reward_components", "reward_and_length"
OPPOSED, CONFLICT = -0.5, -0.3
MUCH, SOME = 0.8, 0.5
SHAPED = "use algorithm=dr_grpo or dapo, the reward overlong, or algorithm.shaping.length_penalty"


def check_components(material: Material) -> RunFinding:
    """Checks that the reward rises with the component of accuracy, and that components do not oppose each other."""
    found = {name: values for name, values in _columns(material) if name != LENGTH}
    if not found:
        return not_measured(COMPONENTS, "no component varied within a group")
    accuracy = material.config.rewards.accuracy_component
    numbers = {name: mean(values) for name, values in found.items()}
    measured = "correlation within groups: " + ", ".join(f"{name} {value:+.2f}" for name, value in numbers.items())
    own = numbers.get(accuracy)
    if own is not None and own < OPPOSED:
        action = f"the reward falls where {accuracy} rises: correct the sign of its weight (rewards.components)"
        return RunFinding(COMPONENTS, RunVerdict.FAULT, measured, numbers, action)
    pairs = [name for name, value in numbers.items() if "/" in name and value < CONFLICT]
    if own is not None and own < SOME and len(numbers) > 1:
        action = f"other components outweigh {accuracy}: change the weights in rewards.components"
        return RunFinding(COMPONENTS, RunVerdict.WARNING, measured, numbers, action)
    if pairs:
        action = f"{pairs[0]} oppose each other: change their weights in rewards.components, or gate one by the other"
        return RunFinding(COMPONENTS, RunVerdict.NOTICE, measured, numbers, action)
    return RunFinding(COMPONENTS, RunVerdict.OK, measured, numbers)


def check_length(material: Material) -> RunFinding:
    """Checks that the reward does not follow the length of the response."""
    values = dict(_columns(material)).get(LENGTH, [])
    if not values:
        return not_measured(PAID_LENGTH, "lengths or rewards did not vary within a group")
    correlation, length = mean(values), material.trend("response_length")
    numbers = {"correlation": correlation}
    measured = f"correlation of reward and length within groups: {correlation:+.2f}"
    if length is not None:
        numbers |= {"length_first": length.first, "length_last": length.last}
        measured += f"; mean length {length.first:.4g} to {length.last:.4g} tokens"
    return RunFinding(
        PAID_LENGTH, _verdict_of(correlation, length), measured, numbers, SHAPED if correlation > SOME else ""
    )


def _verdict_of(correlation: float, length: Trend | None) -> RunVerdict:
    grows = length is not None and length.rises
    if correlation >= MUCH or (correlation >= SOME and grows):
        return RunVerdict.WARNING
    shrinks = length is not None and length.falls and length.last < length.first / 2
    if correlation >= SOME or (correlation <= -SOME and shrinks):
        return RunVerdict.NOTICE
    return RunVerdict.OK


def _columns(material: Material) -> Iterator[tuple[str, list[float]]]:
    names = dict.fromkeys(name for step in material.steps for name in step.correlations)
    for name in names:
        yield name, [step.correlations[name] for step in material.steps if name in step.correlations]
