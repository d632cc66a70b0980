"""Runs over seeds, and claims about such runs: `mobula train seeds=[0,1,2]` and `mobula claims`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.metrics.summary import mean_and_error, student_interval
from mobula.configs.load import dump_config, load_config
from mobula.configs.overrides import nearest
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import Resume
from mobula.deploy.run.apart import run_apart
from mobula.deploy.run.overview import cpu_name

SHIPPED = Path(__file__).parents[2] / "examples" / "claims"
FOLDER = Path("runs") / "claims"
LATE = "late."  # measures of steps: the mean of a metric over the last quarter
Number = int | float


def train_seeds(config: RunConfig, console: Console) -> int:
    """Trains a configuration with each seed of `seeds`, one after the other, and prints what the runs show together.
    Runs that are done are not repeated, an interrupted one goes on."""
    runs = [trained(config, seed) for seed in config.seeds]
    names = ("accuracy_before", "accuracy_after", "values_after.gain_over_best_control")
    view = Table("held out", "mean", "standard error", "range", "by seed")
    for name in names:
        values = [value for run in runs if (value := measured(run, name, is_optional=True)) is not None]
        if len(values) == len(runs):
            mean, error = mean_and_error(values)
            shown = ", ".join(f"{value:.3f}" for value in values)
            label = name.rpartition(".")[2].replace("_", " ")
            view.add_row(label, f"{mean:.3f}", f"{error:.3f}", f"{min(values):.3f} to {max(values):.3f}", shown)
    console.print(view)
    console.print(
        f"runs of the seeds {list(config.seeds)}: {', '.join(str(config.folder / run.name) for run in runs)}",
        soft_wrap=True,
    )
    return 0


def trained(config: RunConfig, seed: int) -> RunFolder:
    """Returns the run of a configuration with a seed, which it trains unless it is done. Its name has a digest of the
    configuration, so another one is another run."""
    own = config.model_copy(update={"seeds": (), "seed": seed, "resume": Resume.AUTO})
    digest = sha256(dump_config(own.model_copy(update={"name": "", "folder": Path(), "seed": 0})).encode()).hexdigest()
    own = own.model_copy(update={"name": f"{config.name}-{digest[:6]}-seed{seed}"})
    if not own.run_folder.is_dir() or not _is_done(read_run_folder(own.run_folder)):
        run_apart("train", own, [])
    return read_run_folder(own.run_folder)


def _is_done(run: RunFolder) -> bool:
    return run.summary is not None and run.summary.status == "done"


def measured(run: RunFolder, name: str, *, is_optional: bool = False) -> float | None:
    """Returns a number of a run: a dotted key of `summary.json`, or `late.METRIC`.

    Raises:
        PreflightError: the run has no such number, and it is not optional.
    """
    found: Any
    if name.startswith(LATE):
        steps = run.steps
        late = [step.values.get(name.removeprefix(LATE)) for step in steps[-max(1, len(steps) // 4) :]]
        values = [value for value in late if value is not None]
        found = sum(values) / len(values) if values else None
    else:
        found = reduce(_at, name.split("."), asdict(run.summary) if run.summary else {})
    if isinstance(found, Number):
        return float(found)
    if is_optional:
        return None
    raise PreflightError(f"run {run.name} has no number {name}: name a key of its summary.json, or late.METRIC")


def _at(values: Any, key: str) -> Any:
    if isinstance(values, Mapping):
        return values.get(key)
    if isinstance(values, Sequence) and key.isdigit() and int(key) < len(values):
        return values[int(key)]
    return None


@dataclass(frozen=True)
class Claim:
    """A statement about runs: `measure` of `run` stands in `relation` to that of `against`, by more than `margin`.

    `against` is a number, another measure of the same run, or the words of another run. `=` says that both differ by
    less than `margin`. The file has these fields; `name` is that of the file.
    """

    name: str
    statement: str
    run: tuple[str, ...]
    measure: str
    relation: Literal[">", "<", "="]
    against: float | str | tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    margin: float = 0.0
    source: str = ""  # the paper

    def holds(self, low: float, high: float) -> bool:
        """Whether it holds if the difference lies in [low, high]."""
        if self.relation == ">":
            return low > self.margin
        return high < -self.margin if self.relation == "<" else -self.margin < low and high < self.margin


@dataclass(frozen=True)
class ClaimVerdict:
    """What the runs of a claim show; `low` and `high` bound the difference, as the 95 % interval over seeds."""

    name: str
    statement: str
    holds: bool
    values: tuple[float, ...]  # by seed
    against: tuple[float, ...]
    difference: float
    low: float
    high: float
    wanted: str
    source: str
    date: str
    cpu: str

    def __str__(self) -> str:
        shown = [", ".join(f"{value:.3g}" for value in values) for values in (self.values, self.against)]
        return (
            f"{'holds' if self.holds else 'does not hold'}: {self.statement} {shown[0]} against {shown[1]}: difference "
            f"{self.difference:+.3g} (95 % {self.low:+.3g} to {self.high:+.3g}), wanted {self.wanted}"
        )


def read_claims(names: Sequence[str], folder: Path) -> list[Claim]:
    """Reads claims by name, or all of `folder`. Raises: PreflightError: there is no such claim, or a file is none."""
    paths = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    for name in names:
        if name not in paths:
            near = nearest(name, list(paths))
            raise PreflightError(
                f"{folder} has no claim {name}: " + (f"did you mean {near}?" if near else f"it has {', '.join(paths)}")
            )
    return [_read(paths[name]) for name in names or paths]


def _read(path: Path) -> Claim:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(Claim).validate_python({"name": path.stem, **fields})
    except (ValidationError, yaml.YAMLError, TypeError) as error:
        fields = ", ".join(Claim.__dataclass_fields__)
        raise PreflightError(f"{path} is no claim, which has the fields {fields}: {error}") from error


def check_claims(claims: Sequence[Claim], words: Sequence[str], results: Path | None, console: Console) -> int:
    """Trains the runs of each claim and prints its verdict; returns 1 if a claim does not hold. `words` are for every
    run; verdicts are added to the file `results`."""
    all_hold = True
    for claim in claims:
        verdict = judged(claim, words)
        all_hold &= verdict.holds
        console.print(f"{claim.name} {verdict}", style=None if verdict.holds else "yellow", soft_wrap=True)
        if results is not None:
            known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
            rows = {row["name"]: row for row in known} | {claim.name: strict(asdict(verdict))}
            write_atomically(results, json.dumps([rows[name] for name in sorted(rows)], indent=1) + "\n")
    return 0 if all_hold else 1


def judged(claim: Claim, words: Sequence[str]) -> ClaimVerdict:
    values, against = zip(*_pairs(claim, words), strict=True)
    differences = [value - other for value, other in zip(values, against, strict=True)]
    low, high = student_interval(differences)
    other = claim.measure if isinstance(claim.against, tuple) else claim.against
    wanted = f"{claim.measure} {claim.relation} {other}" + (f" by {claim.margin:g}" if claim.margin else "")
    date, mean = datetime.now(UTC).isoformat(timespec="seconds"), mean_and_error(differences)[0]
    verdict = (claim.holds(low, high), values, against, mean, low, high, wanted, claim.source, date, cpu_name())
    return ClaimVerdict(claim.name, claim.statement, *verdict)


def _pairs(claim: Claim, words: Sequence[str]) -> Iterator[tuple[float, float]]:
    config = _config(claim.run, words)
    for seed in claim.seeds:
        run = trained(config, seed)
        value = measured(run, claim.measure)
        if isinstance(claim.against, tuple):
            other = measured(trained(_config(claim.against, words), seed), claim.measure)
        else:
            other = measured(run, claim.against) if isinstance(claim.against, str) else claim.against
        assert value is not None and other is not None, "a number that is not optional"
        yield value, other


def _config(own: Sequence[str], words: Sequence[str]) -> RunConfig:
    return load_config([f"folder={FOLDER}", *own, *words])
