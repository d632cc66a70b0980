"""Experiment trackers by name. Each is one module of this package, with a library that is an optional extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.user_code import chosen, is_user_code

TRACKERS: Mapping[str, str] = {
    "mlflow": "mobula.cluster.metrics.sinks.mlflow_runs:MlflowSink",
    "trackio": "mobula.cluster.metrics.sinks.trackio_runs:TrackioSink",
    "wandb": "mobula.cluster.metrics.sinks.wandb_runs:WandbSink",
}
"""Name of the tracker, its library and its extra -> class of the sink, created with a `TrackedRun`."""


@dataclass(frozen=True)
class TrackedRun:
    """Identity of a run in a tracker: `run_id`. A resumed run continues under its id; another run of the same name has
    another id."""

    run_id: str
    name: str
    project: str
    folder: Path  # run folder; local files are below it
    address: str  # of the tracker's server; empty: local files only
    config: Mapping[str, Any]  # resolved


def refuse_missing(names: Sequence[str]) -> None:
    """Raises:
    PreflightError: the library of a tracker is not installed.
    """
    missing = [name for name in names if not is_user_code(name) and find_spec(name) is None]
    if missing:
        extras = ",".join(missing)
        raise PreflightError(
            f"metrics.trackers={list(names)} needs {', '.join(missing)}, which is not installed: "
            f"`pip install 'mobula[{extras}]'` on the machine of the driver, or take it out of metrics.trackers"
        )


def tracker(name: str) -> Callable[[TrackedRun], Sink]:
    """Returns the class of a tracker's sink."""
    return chosen({}, TRACKERS.get(name, name), "metrics.trackers", ("run",))
