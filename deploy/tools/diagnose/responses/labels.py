"""Whether answers agree with the labels of their prompts more often than by chance."""

from __future__ import annotations

import re
from collections import Counter

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.records.trends import Agreement

NAME = "answers_and_labels"
MIN_PROMPTS = 40
MIN_STEPS = 15
FEW = 0.02  # of the answers are labels
OFTEN = 0.5
NUM_SHOWN = 5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def check_labels(material: Material) -> RunFinding:
    """Compares the answers of the later half of the drawn groups with their labels, and both distributions."""
    groups = material.answers[len(material.answers) // 2 :]
    pairs = [(group.references[0], [answer.text for answer in group.answers]) for group in groups if group.references]
    labels = [label.strip().casefold() for label, _ in pairs]
    if len(labels) < MIN_PROMPTS or not any(text for _, texts in pairs for text in texts):
        return not_measured(NAME, f"{len(labels)} of {MIN_PROMPTS} drawn prompts that it needs have a label and text")
    are_numbers = all(_NUMBER.fullmatch(label) for label in labels)
    answers = [[short_answer(text, are_numbers) for text in texts] for _, texts in pairs]
    agreement = Agreement.of(list(zip(labels, answers, strict=True)))
    if agreement is None:
        return not_measured(NAME, "the drawn prompts have one label")
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
    return RunFinding(NAME, verdict, measured, numbers, action, () if verdict is RunVerdict.OK else evidence)


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
    return ", ".join(f"{name[:40]!r} {num / counts.total():.0%}" for name, num in counts.most_common(NUM_SHOWN))
