"""PreflightFinding: a mismatch between model, tokenizer, template, data and rewards, and the next action."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mobula.cluster.errors import PreflightError

_logger = logging.getLogger(__name__)


class Severity(StrEnum):
    REFUSE = "refuse"  # the run does not start
    WARN = "warn"  # the run starts and logs it
    NOTE = "note"  # as WARN, and nothing is wrong


@dataclass(frozen=True)
class PreflightFinding:
    """One mismatch: `problem` names the value, `action` the change to make."""

    key: str  # of the configuration
    problem: str
    action: str
    severity: Severity = Severity.REFUSE

    def __str__(self) -> str:
        return f"{self.problem}: {self.action}"


def refuse(findings: Iterable[PreflightFinding]) -> None:
    """Logs the warnings and notes among `findings`.

    Raises:
        PreflightError: at least one finding refuses the run; the message lists all of them.
    """
    refused = []
    for finding in findings:
        if finding.severity is Severity.REFUSE:
            refused.append(str(finding))
        else:
            _logger.log(logging.WARNING if finding.severity is Severity.WARN else logging.INFO, "%s", finding)
    if refused:
        raise PreflightError("; and ".join(refused))
