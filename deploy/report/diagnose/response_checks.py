"""Checks of responses."""

from __future__ import annotations

import re
from collections import Counter

from mobula.cluster.guard.signs import script_mix
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.samples import AnswerGroup
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.deploy.report.diagnose.material import (
    NOTHING_TO_COMPARE,
    SYMPTOMS,
    Agreement,
    Material,
    Needs,
    by_share,
    check,
    finding,
    mean,
    unmeasured,
)

MIN_PROMPTS = 40
MIN_STEPS = 15
FEW = 0.02  # of the answers are labels
OFTEN = 0.5
LABELS_NUM_SHOWN = 5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@check("answers_and_labels", Needs.ANSWERS)
def check_labels(material: Material) -> RunFinding:
    """Compares the answers of the later half of the drawn groups with their labels, and both distributions."""
    groups = material.answers[len(material.answers) // 2 :]
    pairs = [(group.references[0], [answer.text for answer in group.answers]) for group in groups if group.references]
    labels = [label.strip().casefold() for label, _ in pairs]
    if len(labels) < MIN_PROMPTS or not any(text for _, texts in pairs for text in texts):
        return unmeasured(f"{len(labels)} of {MIN_PROMPTS} drawn prompts that it needs have a label and text")
    are_numbers = all(_NUMBER.fullmatch(label) for label in labels)
    answers = [[short_answer(text, are_numbers) for text in texts] for _, texts in pairs]
    agreement = Agreement.of(list(zip(labels, answers, strict=True)))
    if agreement is None:
        return unmeasured("the drawn prompts have one label")
    flat = Counter(answer for given in answers for answer in given)
    known = sum(num for answer, num in flat.items() if answer in set(labels)) / flat.total()
    numbers = {
        "agreement": agreement.observed,
        "by_chance": agreement.expected,
        "kappa": agreement.kappa,
        "error": agreement.error,
        "answers_in_labels": known,
    }
    measured = (
        f"{agreement.observed:.1%} of the late drawn answers equal their label, {agreement.expected:.1%} would by "
        f"chance (kappa {agreement.kappa:.2f} ± {agreement.error:.2f}, {agreement.num_prompts} prompts); {known:.1%} "
        "equal any label"
    )
    verdict, action = _verdict(material, agreement, known)
    evidence = (Evidence(f"labels: {_most(Counter(labels))}"), Evidence(f"answers: {_most(flat)}"))
    return finding(verdict, measured, numbers, action, () if verdict is RunVerdict.OK else evidence)


def _verdict(material: Material, agreement: Agreement, known: float) -> tuple[RunVerdict, str]:
    is_chance = agreement.kappa < 2 * agreement.error and known >= OFTEN and len(material.steps) >= MIN_STEPS
    if material.is_solved and is_chance:
        return RunVerdict.WARNING, (
            "the accuracy is high, and answers do not depend on the labels: check what rewards.accuracy_component reads"
        )
    if material.is_solved:
        return RunVerdict.OK, ""
    if known <= FEW and len(material.steps) >= MIN_STEPS:
        return RunVerdict.WARNING, (
            "hardly an answer is a label: check the column of the answer (data.columns.answer), and the form that the "
            "prompt asks for"
        )
    if is_chance:
        return RunVerdict.FAULT, (
            "answers do not depend on the labels: check that labels belong to their rows (`mobula data inspect`), that "
            "pictures belong to their questions and show something, and policy.freeze"
        )
    return RunVerdict.OK, ""


def short_answer(text: str, is_number: bool) -> str:
    """Returns the last number of a text if labels are numbers, else its last line, in lower case."""
    if is_number:
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else text.strip().casefold()
    return text.strip().rpartition("\n")[2].strip().casefold()


def _most(counts: Counter[str]) -> str:
    return ", ".join(f"{name[:40]!r} {num / counts.total():.0%}" for name, num in counts.most_common(LABELS_NUM_SHOWN))


LANGUAGE_SOME, LANGUAGE_MANY = 0.05, 0.15  # rise of the share of letters outside the most frequent script
MIN_ANSWERS = 32
LANGUAGE_NUM_SHOWN = 3

ACTION = (
    "the policy mixes languages: raise algorithm.kl.coef, add a component of the reward for the language, or let the "
    "guard act (guard.signs)"
)


@check("language_mix", Needs.ANSWERS)
def check_language(material: Material) -> RunFinding:
    """Share of letters outside a response's most frequent script, of early and late drawn responses with letters."""
    answers = [answer for answer in material.kept_answers if any(map(str.isalpha, answer.text))]
    if len(answers) < MIN_ANSWERS:
        return unmeasured(f"{len(answers)} of {MIN_ANSWERS} drawn responses that it needs have letters")
    size = len(answers) // 4
    early, late = (mean([script_mix(answer.text) for answer in part]) for part in (answers[:size], answers[-size:]))
    numbers = {"mix_early": early, "mix_late": late, "num_responses": float(len(answers))}
    measured = (
        f"{early:.1%} of the letters of early and {late:.1%} of those of late responses are outside the most frequent "
        f"script of their response ({len(answers)} drawn responses with letters)"
    )
    rise = late - early
    if rise < LANGUAGE_SOME:
        return finding(RunVerdict.OK, measured, numbers)
    verdict = RunVerdict.WARNING if rise >= LANGUAGE_MANY else RunVerdict.NOTICE
    worst = sorted(answers[-size:], key=lambda answer: -script_mix(answer.text))[:LANGUAGE_NUM_SHOWN]
    return finding(verdict, measured, numbers, ACTION, tuple(Evidence(repr(a.text)) for a in worst))


TRUNCATION_NUM_SHOWN = 2
CUT = ("length", "truncated")


@check("truncation", Needs.STEPS, ("end_of_text", "reward_parser", *NOTHING_TO_COMPARE))
def check_truncation(material: Material) -> RunFinding:
    """Share of responses that were cut at `sampler.max_tokens`."""
    late = material.late(MetricName.TRUNCATED_FRACTION)
    length = material.late(MetricName.RESPONSE_LENGTH)
    if late is None or length is None:
        return unmeasured("no step has the share of truncated responses")
    limit = material.config.sampler.max_tokens
    measured = (
        f"{late:.1%} of the late responses were cut at sampler.max_tokens={limit}; mean length {length:.4g} tokens"
    )
    verdict = by_share(late, fault=0.9, warning=0.3, notice=0.1)
    action = f"raise sampler.max_tokens above {limit}, or ask for shorter answers"
    cut = [answer for answer in reversed(material.kept_answers) if answer.finish_reason in CUT]
    evidence = tuple(
        Evidence(f"cut after {answer.num_tokens} tokens: {answer.text!r}") for answer in cut[:TRUNCATION_NUM_SHOWN]
    )
    numbers = {"truncated_fraction": late, "response_length": length}
    return finding(verdict, measured, numbers, action, evidence if verdict is not RunVerdict.OK else ())


@check("end_of_text", Needs.ANSWERS)
def check_end_of_text(material: Material) -> RunFinding:
    """Whether the policy ever samples the end of a response."""
    answers = material.kept_answers
    num_ended = sum(answer.finish_reason not in CUT for answer in answers)
    numbers = {"num_ended": float(num_ended), "num_responses": float(len(answers))}
    measured = f"{num_ended} of {len(answers)} drawn responses end by themselves"
    if num_ended:
        return finding(RunVerdict.OK, measured, numbers)
    action = (
        "the policy never samples an end of text: check eos_token_id in the generation_config.json of policy.model, "
        "the chat template, sampler.stop_strings, and raise sampler.max_tokens"
    )
    return finding(RunVerdict.FAULT, measured, numbers, action, (Evidence(repr(answers[-1].text)),))


ALL, VARIETY_MOST = 0.97, 0.8
FAR, LOST = 0.2, 0.5  # difference of accuracies; share of the greedy accuracy that sampling loses

OTHER_ROWS = (
    "greedy answers to held-out rows are right far less often than sampled ones to training rows: compare labels and "
    "form of the two splits (`mobula data inspect`), and the limits of evaluation with those of sampler"
)

MIN_GROUPS = 8


@check("variety", Needs.ANSWERS, ("entropy", "uniform_groups"))
def check_variety(material: Material) -> RunFinding:
    """Share of drawn groups whose responses are equal, early and late."""
    groups = [group for group in material.answers if len(group.answers) > 1]
    if len(groups) < MIN_GROUPS or not any(answer.text for group in groups for answer in group.answers):
        return unmeasured(f"{len(groups)} of {MIN_GROUPS} drawn groups that it needs have text")
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
        return finding(RunVerdict.FAULT, measured, numbers, action, _shown(groups[0]))
    if late >= VARIETY_MOST and not material.is_learning:
        return finding(RunVerdict.WARNING, measured, numbers, action, _shown(groups[-1]))
    return finding(RunVerdict.NOTICE if late >= ALL else RunVerdict.OK, measured, numbers)


def _is_equal(group: AnswerGroup) -> bool:
    return len({(answer.text, answer.num_tokens) for answer in group.answers}) == 1


def _shown(group: AnswerGroup) -> tuple[Evidence, ...]:
    return (Evidence(f"{len(group.answers)} siblings of {group.sample_id}: {group.answers[0].text!r}"),)


@check("greedy_and_sampled", Needs.STEPS)
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
        return unmeasured("no version has a greedy evaluation (evaluation.temperature=0) and a step")
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
        return finding(verdict, measured, numbers, action, (), SYMPTOMS)
    if sampled - greedy >= FAR and greedy <= LOST * sampled:
        return finding(RunVerdict.WARNING, measured, numbers, OTHER_ROWS, (), ("reward_exploitation",))
    return finding(RunVerdict.OK, measured, numbers)


def _is_greedy(evaluation: EvaluationRecord, configured: float) -> bool:
    return float(evaluation.identity.get("temperature", configured)) == 0
