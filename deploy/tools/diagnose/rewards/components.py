"""What the reward depends on, within groups: its components, length, and properties of the response."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.samples import MAX_ANSWER_CHARACTERS, AnswerGroup, KeptAnswer
from mobula.cluster.metrics.step_values import LENGTH, TINY
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import SYMPTOMS, not_measured
from mobula.deploy.tools.diagnose.records.trends import SURE, Trend
from mobula.deploy.tools.diagnose.responses.labels import short_answer

COMPONENTS, PAID_LENGTH, NOISE = "reward_components", "reward_and_length", "reward_noise"
OPPOSED, CONFLICT = -0.5, -0.3
MUCH, SOME = 0.8, 0.5
MIN_PAIRS, MIN_RESPONSES, MIN_STEPS = 30, 100, 15
SAME, RARELY = 0.5, 0.1  # of the disagreement of different responses
NUM_SHOWN = 3
RANDOM = (
    "the reward is not a function of the response: check that rewards belong to their responses (order of a batch, "
    "cache, state of the function), and that a judge or model samples greedily; `mobula score` twice must agree"
)
UNRELATED = (
    "the reward varies within groups, follows nothing that was looked at, and does not rise: compare a few responses "
    "of one group with their rewards (`mobula score --results`)"
)
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


def check_noise(material: Material) -> RunFinding:
    """Compares the rewards of equal responses to one prompt, and the reward with properties of the response.

    Equal siblings have equal rewards if the reward is a function of prompt and response. An environment's episodes are
    left out: their rewards depend on more than the policy's text.
    """
    groups = [group for group in material.answers if any(answer.text for answer in group.answers)]
    pairs = [(group.sample_id, a, b) for group in groups for a, b in combinations(_scored(group), 2)]
    same = [pair for pair in pairs if _is_equal(*pair[1:])]
    noisy = [pair for pair in same if pair[1].reward != pair[2].reward]
    rows = [row for group in groups for row in _centred(group)]
    if material.config.environment.is_on or (len(same) < MIN_PAIRS and len(rows) < MIN_RESPONSES):
        return not_measured(NOISE, "the drawn answers are episodes, have no text, or are too few that repeat or differ")
    num_other, z = len(pairs) - len(same), _largest_correlation(np.array(rows)) if rows else 0.0
    of_same = len(noisy) / max(1, len(same))
    of_other = (sum(a.reward != b.reward for _, a, b in pairs) - len(noisy)) / max(1, num_other)
    numbers = {"equal_disagree": of_same, "different_disagree": of_other, "largest_z": z, "num_pairs": float(len(same))}
    measured = (
        f"rewards differ in {of_same:.1%} of {len(same)} pairs of equal responses to one prompt and in {of_other:.1%} "
        f"of {num_other} pairs of different ones; the largest correlation of the reward with length, repetition, "
        f"digits, truncation or the label is {z:.1f} standard errors"
    )
    if len(same) >= MIN_PAIRS and of_same > RARELY * max(of_other, RARELY):
        verdict = RunVerdict.FAULT if of_same >= SAME * of_other else RunVerdict.WARNING
        shown = [f"{name}: {a.text!r} has the rewards {a.reward} and {b.reward}" for name, a, b in noisy[:NUM_SHOWN]]
        return RunFinding(NOISE, verdict, measured, numbers, RANDOM, tuple(map(Evidence, shown)), SYMPTOMS)
    trend = material.trend(MetricName.REWARD_MEAN)
    is_unrelated = len(rows) >= MIN_RESPONSES and z < SURE and len(material.steps) >= MIN_STEPS
    if is_unrelated and trend is not None and not trend.rises:
        return RunFinding(NOISE, RunVerdict.WARNING, measured, numbers, UNRELATED, (), SYMPTOMS)
    return RunFinding(NOISE, RunVerdict.OK, measured, numbers)


def _scored(group: AnswerGroup) -> list[KeptAnswer]:
    return [answer for answer in group.answers if answer.reward is not None]


def _is_equal(a: KeptAnswer, b: KeptAnswer) -> bool:
    whole = len(a.text) < MAX_ANSWER_CHARACTERS  # longer texts are cut
    return whole and (a.text, a.num_tokens, a.finish_reason) == (b.text, b.num_tokens, b.finish_reason)


def _largest_correlation(rows: np.ndarray) -> float:
    """Returns the largest correlation of the first column with another one, in standard errors. `rows` is [N, K]."""
    products, norms = np.abs(rows[:, 0] @ rows[:, 1:]), np.sqrt(np.square(rows).sum(axis=0))
    return float((products / np.maximum(norms[0] * norms[1:], TINY)).max() * math.sqrt(len(rows)))


def _centred(group: AnswerGroup) -> np.ndarray:
    """Returns reward and properties of each sibling, less their means over the group; none if the rewards are equal."""
    rows = np.array([_properties(answer, group.references) for answer in _scored(group)])
    return rows - rows.mean(axis=0) if len(rows) and np.ptp(rows[:, 0]) > 0 else rows[:0]


def _properties(answer: KeptAnswer, references: Sequence[str]) -> list[float]:
    text, labels = answer.text, [reference.strip().casefold() for reference in references]
    is_label = any(short_answer(text, are_numbers) in labels for are_numbers in (False, True))
    contains = any(label and label in text.casefold() for label in labels)
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    ended = answer.finish_reason not in ("length", "truncated")
    return [answer.reward or 0.0, answer.num_tokens, len(text), answer.repetition, digits, is_label, contains, ended]
