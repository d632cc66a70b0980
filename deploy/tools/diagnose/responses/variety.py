"""Whether the siblings of a group differ, and whether sampled responses are as good as greedy ones."""

from __future__ import annotations

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.samples import AnswerGroup
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import SYMPTOMS, not_measured

NAME, SAMPLING = "variety", "greedy_and_sampled"
ALL, MOST = 0.97, 0.8
FAR, LOST = 0.2, 0.5  # difference of accuracies; share of the greedy accuracy that sampling loses
OTHER_ROWS = (
    "greedy answers to held-out rows are right far less often than sampled ones to training rows: compare labels and "
    "form of the two splits (`mobula data inspect`), and the limits of evaluation with those of sampler"
)
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


def check_sampling(material: Material) -> RunFinding:
    """Compares the greedy accuracy of a version on held-out rows with the accuracy of what it sampled for its step."""
    config = material.config
    steps = {record.step: record.accuracy for record in material.steps}
    pairs = [
        (evaluation.accuracy, sampled)
        for evaluation in (material.run.evaluations if material.run else ())
        if _is_greedy(evaluation, config.evaluation.temperature)
        and (sampled := steps.get(evaluation.version + 1)) is not None
    ]
    if not pairs or config.sampler.is_flow:
        return not_measured(SAMPLING, "no version has a greedy evaluation (evaluation.temperature=0) and a step")
    greedy, sampled = mean([pair[0] for pair in pairs]), mean([pair[1] for pair in pairs])
    temperature = config.sampler.temperature
    numbers = {"greedy": greedy, "sampled": sampled, "temperature": temperature}
    measured = (
        f"{greedy:.1%} of the greedy held-out answers and {sampled:.1%} of those that the same weights sampled for "
        f"training are right (sampler.temperature={temperature:g}, {len(pairs)} versions)"
    )
    if greedy - sampled >= FAR and sampled <= LOST * greedy:
        action = f"lower sampler.temperature={temperature:g} (1 is usual), or set sampler.top_p below 1"
        verdict = RunVerdict.FAULT if sampled <= LOST * LOST * greedy else RunVerdict.WARNING
        return RunFinding(SAMPLING, verdict, measured, numbers, action, (), SYMPTOMS)
    if sampled - greedy >= FAR and greedy <= LOST * sampled:
        return RunFinding(SAMPLING, RunVerdict.WARNING, measured, numbers, OTHER_ROWS, (), ("reward_exploitation",))
    return RunFinding(SAMPLING, RunVerdict.OK, measured, numbers)


def _is_greedy(evaluation: EvaluationRecord, configured: float) -> bool:
    return float(evaluation.identity.get("temperature", configured)) == 0
