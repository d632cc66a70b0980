"""Whether the siblings of a group differ."""

from __future__ import annotations

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.samples import AnswerGroup
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import not_measured

NAME = "variety"
ALL, MOST = 0.97, 0.8
MIN_GROUPS = 8


def check_variety(material: Material) -> RunFinding:
    """Share of drawn groups whose responses are equal, early and late."""
    groups = [group for group in material.answers if len(group.answers) > 1]
    if len(groups) < MIN_GROUPS or not any(answer.text for group in groups for answer in group.answers):
        return not_measured(NAME, f"{len(groups)} of {MIN_GROUPS} drawn groups that it needs have text")
    size = max(4, len(groups) // 4)
    early, late = (mean([float(_is_equal(group)) for group in part]) for part in (groups[:size], groups[-size:]))
    repeated = mean([answer.repetition for group in groups[-size:] for answer in group.answers])
    numbers = {"equal_early": early, "equal_late": late, "repetition_late": repeated}
    measured = (
        f"all siblings are equal in {early:.1%} of the early and {late:.1%} of the late drawn groups; {repeated:.1%} "
        "of the word 4-grams of late responses are repetitions"
    )
    temperature = material.config.sampler.temperature
    action = f"raise sampler.temperature above {temperature:g}; add algorithm.entropy.bonus, or use algorithm=dapo"
    if early >= ALL and late >= ALL:
        return RunFinding(NAME, RunVerdict.FAULT, measured, numbers, action, _shown(groups[0]))
    if late >= MOST and not material.is_learning:
        return RunFinding(NAME, RunVerdict.WARNING, measured, numbers, action, _shown(groups[-1]))
    return RunFinding(NAME, RunVerdict.NOTICE if late >= ALL else RunVerdict.OK, measured, numbers)


def _is_equal(group: AnswerGroup) -> bool:
    return len({(answer.text, answer.num_tokens) for answer in group.answers}) == 1


def _shown(group: AnswerGroup) -> tuple[Evidence, ...]:
    return (Evidence(f"{len(group.answers)} siblings of {group.sample_id}: {group.answers[0].text!r}"),)
