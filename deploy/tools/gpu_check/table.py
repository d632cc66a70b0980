"""The results as a table of text or of Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from mobula.deploy.tools.gpu_check.registry import STAGES
from mobula.deploy.tools.gpu_check.results import CheckedMachine, CheckResults, Outcome, StageResult

WIDTH = 38  # of a title


def row(title: str, result: StageResult) -> str:
    """One line: title, outcome, seconds, and figures or the cause."""
    text = result.cause if result.outcome is not Outcome.PASSED else figures(result.figures)
    return f"{title:<{WIDTH}}  {result.outcome:<8}  {result.seconds:6.1f} s  {text}".rstrip()


def figures(values: Mapping[str, float | int | str]) -> str:
    """`name value` pairs, numbers with three digits."""
    return ", ".join(f"{name} {v if isinstance(v, str) else f'{v:,.3g}'}" for name, v in values.items())


def table(results: CheckResults) -> str:
    """All finished stages in their order, under a line about the machine."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    gpus = f"{machine.num_gpus} x {machine.name}" if machine.num_gpus else machine.name
    lines = [f"{gpus}; Python {machine.python}, {packages}"]
    lines += [row(stage.title, results.stages[stage.name]) for stage in STAGES if stage.name in results.stages]
    return "\n".join(lines)


def status_rows(all_results: list[CheckResults]) -> str:
    """The Markdown table of docs/supported.md: each stage, and where, when and at which commit it passed."""
    lines = ["| stage | passed on | failed on |", "|---|---|---|"]
    for stage in STAGES:
        found = [
            (results.machine, results.stages[stage.name]) for results in all_results if stage.name in results.stages
        ]
        cells = [
            "; ".join(_cell(machine, result) for machine, result in found if result.outcome is outcome)
            for outcome in (Outcome.PASSED, Outcome.FAILED)
        ]
        missing = stage.missing or "nowhere yet"
        lines.append(f"| {stage.title} | {cells[0] or missing} | {cells[1] or '-'} |")
    return "\n".join(lines)


def _cell(machine: CheckedMachine, result: StageResult) -> str:
    """Machine, torch, day and commit."""
    gpus = f" x {machine.num_gpus}" if machine.num_gpus > 1 else ""
    when = ", ".join(filter(None, (result.finished_at[:10], result.commit)))
    return f"{machine.name}{gpus}, torch {machine.packages['torch']} ({when})"
