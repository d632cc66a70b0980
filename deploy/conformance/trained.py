"""Accuracy and wall time of runs that trained a tiny model, for docs/models.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, SUMMARY_FILE
from mobula.cluster.metrics.summary import read_summary
from mobula.configs.load import load_resolved

TRAINED = "trained"  # folder of the records


@dataclass(frozen=True)
class TrainedRun:
    """One finished run."""

    experiment: str
    model: str  # a tiny model
    accuracy_before: float
    accuracy_after: float
    num_steps: int
    samples_per_step: int
    learning_rate: float
    wall_s: float
    logprob_gap_mean: float | None


def record_run(run: Path, folder: Path) -> TrainedRun:
    """Stores a run's figures below `folder`; replaces an earlier run of the same experiment and model.

    Raises:
        ValueError: the run is not done, or had no two evaluations.
    """
    summary, config = read_summary(run / SUMMARY_FILE), load_resolved(run / CONFIG_FILE)
    if summary.status != "done" or summary.accuracy_before is None or summary.accuracy_after is None:
        raise ValueError(f"{run} is {summary.status}: give a run that ended and was evaluated at both ends")
    record = TrainedRun(
        experiment=config.data.path.name,
        model=config.policy.tiny,
        accuracy_before=summary.accuracy_before,
        accuracy_after=summary.accuracy_after,
        num_steps=summary.num_steps,
        samples_per_step=config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt,
        learning_rate=config.learner.learning_rate,
        wall_s=summary.wall_s,
        logprob_gap_mean=summary.logprob_gap_mean,
    )
    (folder / TRAINED).mkdir(parents=True, exist_ok=True)
    file = folder / TRAINED / f"{record.experiment}-{record.model}.json"
    file.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    return record


def recorded_runs(folder: Path) -> list[TrainedRun]:
    """Reads the runs stored by `record_run`, ordered by experiment and model."""
    files = sorted((folder / TRAINED).glob("*.json"))
    return [TrainedRun(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
