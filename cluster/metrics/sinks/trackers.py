"""Trackers of experiments by name: each is one file beside this one, with a library that is installed as an extra."""

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
"""Name, which is also the library's and the extra's -> the class of the sink, made with a `TrackedRun`."""


@dataclass(frozen=True)
class TrackedRun:
    """How a run is found in a tracker. A run that is resumed goes on under the same name."""

    name: str
    project: str
    folder: Path  # of the run: what is kept on this machine lies below it
    address: str  # of the tracker's server; empty keeps everything on this machine
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
    """The class of the sink of one tracker.

    Raises:
        ValueError: it is the user's own, and cannot be called.
    """
    return chosen({}, TRACKERS.get(name, name), "metrics.trackers", ("run",))
