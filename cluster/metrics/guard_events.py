"""GuardLog: the guard's actions in `guard.jsonl` of the run folder, each on disk before its weights are pushed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mobula.cluster.metrics.files import write_atomically

GUARD_FILE = "guard.jsonl"  # of the run folder


@dataclass(frozen=True)
class GuardEvent:
    """What the guard did after the step that made `version`."""

    version: int
    sign: str
    action: str  # warn, raise_kl, rollback or stop
    strength: float  # of the alarm, in critical values
    agreeing: int  # newest version without a divergence
    text: str
    kl_scale: float  # factor of algorithm.kl.coef from the next step on
    restored: int | None = None  # version of the checkpoint that a rollback loaded


class GuardLog:
    """Appends events to a file, and keeps those of the run's earlier part for steps that a resume repeats."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events: list[GuardEvent] = list(read_events(path))

    def append(self, event: GuardEvent) -> None:
        """Adds an event. Returns once it is on disk. Raises: OSError: it cannot be written."""
        self.events.append(event)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(event))
            file.flush()
            os.fsync(file.fileno())

    def at(self, version: int) -> list[GuardEvent]:
        """Returns the events of one version."""
        return [event for event in self.events if event.version == version]

    def forget_from(self, version: int) -> None:
        """Removes the events of `version` and later: these steps are trained again."""
        kept = [event for event in self.events if event.version < version]
        if len(kept) < len(self.events):
            self.events = kept
            write_atomically(self._path, "".join(map(_line, kept)))


def read_events(path: Path) -> Sequence[GuardEvent]:
    """Reads the events of a run, in order; none if the file does not exist. A partial last line is ignored.

    Raises:
        ValueError: an earlier line is broken.
    """
    if not path.exists():
        return []
    *whole, partial = path.read_text(encoding="utf-8").split("\n")
    del partial  # empty, or cut off by a kill
    try:
        return [GuardEvent(**json.loads(line)) for line in whole]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} holds a line that is no event of the guard ({error}): restore or remove it"
        ) from error


def _line(event: GuardEvent) -> str:
    return json.dumps({**asdict(event), "strength": min(event.strength, 1e9)}) + "\n"
