"""Whether siblings get different rewards, by difficulty of the prompts."""

from __future__ import annotations

from collections import Counter

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured

NAME = "uniform_groups"
MOST, MANY = 0.9, 0.6
TOO_EASY = (
    "prompts are too easy: use harder rows, leave out what is solved (algorithm.drop_uniform_groups=true), or raise "
    "sampler.temperature"
)
TOO_HARD = (
    "prompts are too hard, or the reward does not recognise right answers: check findings on the parser and on labels "
    "first, then use easier rows (data.curriculum), a warm start, or more algorithm.samples_per_prompt"
)
EQUAL = "the reward is constant within a group: check rewards.components and `mobula score`"


def check_groups(material: Material) -> RunFinding:
    """Share of groups with equal rewards, early and late, and which of them are right and wrong."""
    early, late = (look(MetricName.UNIFORM_FRACTION) for look in (material.early, material.late))
    if early is None or late is None:
        return not_measured(NAME, "no step has the share of uniform groups")
    right = material.late(MetricName.UNIFORM_RIGHT_FRACTION)
    wrong = material.late(MetricName.UNIFORM_WRONG_FRACTION)
    numbers = {"uniform_early": early, "uniform_late": late}
    measured = f"{early:.1%} of the early and {late:.1%} of the late groups have equal rewards"
    if right is not None and wrong is not None:
        numbers |= {"right_late": right, "wrong_late": wrong}
        measured += f" (late: {right:.1%} right, {wrong:.1%} wrong)"
    verdict = _verdict(material, early, late)
    action = "" if verdict is RunVerdict.OK else _action(material, right, wrong)
    return RunFinding(NAME, verdict, measured, numbers, action, _by_difficulty(material))


def _verdict(material: Material, early: float, late: float) -> RunVerdict:
    if early >= MOST and late >= MOST:
        return RunVerdict.FAULT
    if late < MANY:
        return RunVerdict.OK
    if material.is_learning:  # solved groups are uniform
        return RunVerdict.NOTICE
    return RunVerdict.WARNING


def _action(material: Material, right: float | None, wrong: float | None) -> str:
    highest = material.series(MetricName.REWARD_MAX)
    lowest = material.series(MetricName.REWARD_MIN)
    if highest and max(highest) == min(lowest):
        return EQUAL
    if right is None or wrong is None:
        return f"{TOO_HARD}; or {TOO_EASY}"
    return TOO_EASY if right >= wrong else TOO_HARD


def _by_difficulty(material: Material) -> tuple[Evidence, ...]:
    """Distribution of the drawn groups over the share of right siblings."""
    component = material.config.rewards.accuracy_component
    shares = []
    for group in material.answers:
        marks = [answer.components[component] for answer in group.answers if component in answer.components]
        if marks:
            shares.append(sum(marks) / len(marks))
    if not shares:
        return ()
    bins = Counter("none" if s <= 0 else "all" if s >= 1 else "under half" if s < 0.5 else "over half" for s in shares)
    names = ("none", "under half", "over half", "all")
    text = ", ".join(f"{name} {bins[name]}" for name in names)
    return (Evidence(f"drawn groups by the share of right siblings: {text}"),)
