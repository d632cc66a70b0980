"""The checks of `mobula diagnose`, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from mobula.cluster.metrics.report.findings import SERIOUS, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material

SYMPTOMS = (
    "reward_parser", "truncation", "end_of_text", "answers_and_labels", "uniform_groups", "variety", "language_mix",
    "kl", "entropy", "clipped_tokens", "rejected_groups", "skipped_steps", "reward_exploitation", "reward_trend",
)  # fmt: skip
"""What a policy shows that has lost its form, whatever the cause."""
NOTHING_TO_COMPARE = ("uniform_groups", "skipped_steps", "rejected_groups", "answers_and_labels", "reward_trend")


class Needs(StrEnum):
    """What a check reads; the value says what is missing."""

    CONFIG = ""
    STEPS = "the run has no finished step"
    ANSWERS = "samples.jsonl has no drawn answers"
    DATA = "the data are not on this machine"
    MODEL = "the files of policy.model are not on this machine"


@dataclass(frozen=True)
class Check:
    """One check. `measure` returns a finding without reading anything but the material."""

    name: str
    needs: Needs
    measure: Callable[[Material], RunFinding]
    explains: tuple[str, ...] = ()  # checks that find what follows from a fault or warning of this one


def run_checks(checks: tuple[Check, ...], material: Material) -> Iterator[RunFinding]:
    """Yields the finding of each check; `not measured` where its material is missing or the check fails."""
    for check in checks:
        if _is_there(check.needs, material):
            try:
                found = check.measure(material)
                yield (
                    found if found.explains or found.verdict not in SERIOUS else replace(found, explains=check.explains)
                )
            except (ArithmeticError, KeyError, IndexError, ValueError) as error:
                # A check of a broken run meets values that no run writes. The other checks still count.
                yield RunFinding(check.name, RunVerdict.NOT_MEASURED, f"the check failed: {error!r}")
        else:
            yield RunFinding(check.name, RunVerdict.NOT_MEASURED, str(check.needs))


def not_measured(name: str, reason: str) -> RunFinding:
    return RunFinding(name, RunVerdict.NOT_MEASURED, reason)


def _is_there(needs: Needs, material: Material) -> bool:
    match needs:
        case Needs.CONFIG:
            return True
        case Needs.STEPS:
            return bool(material.steps)
        case Needs.ANSWERS:
            return bool(material.answers)
        case Needs.DATA:
            return material.data is not None
        case Needs.MODEL:
            return material.model is not None
