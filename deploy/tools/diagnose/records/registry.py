"""The checks of `mobula diagnose`, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material


class Needs(StrEnum):
    """What a check reads; the value says what is missing."""

    CONFIG = ""
    STEPS = "the run has no finished step"
    ANSWERS = "samples.jsonl has no drawn answers"
    DATA = "the data are not on this machine"
    MODEL = "the files of policy.model are not on this machine"


@dataclass(frozen=True)
class Check:
    """One check. `measure` returns a finding without reading anything but the material; `subject` completes
    "checks ..."."""

    name: str
    subject: str
    needs: Needs
    measure: Callable[[Material], RunFinding]


def run_checks(checks: tuple[Check, ...], material: Material) -> Iterator[RunFinding]:
    """Yields the finding of each check; `not measured` where its material is missing or the check fails."""
    for check in checks:
        if _is_there(check.needs, material):
            try:
                yield check.measure(material)
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
