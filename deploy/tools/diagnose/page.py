"""The findings of `mobula diagnose` in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict

STYLES = {
    RunVerdict.FAULT: "bold red",
    RunVerdict.WARNING: "yellow",
    RunVerdict.NOTICE: "cyan",
    RunVerdict.OK: "green",
    RunVerdict.NOT_MEASURED: "dim",
}


def show(title: str, findings: Sequence[RunFinding], console: Console) -> None:
    """Prints one row a finding, with its next action and its evidence below it."""
    counts = Counter(finding.verdict for finding in findings)
    console.print(
        f"{title}: " + ", ".join(f"{counts[v]} {v}" for v in RunVerdict if counts[v]), markup=False, highlight=False
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), finding.name, _details(finding))
    console.print(table)


def _details(finding: RunFinding) -> Text:
    text = Text(finding.measured)
    if finding.action:
        text.append(f"\n-> {finding.action}", style="bold")
    if finding.verdict in (RunVerdict.FAULT, RunVerdict.WARNING):
        for evidence in finding.evidence:
            text.append(f"\n   {evidence.text}", style="dim")
            for image in evidence.images:
                text.append(f"\n   picture: {image}", style="dim")
    return text
