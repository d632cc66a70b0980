"""How busy every process of a run is, by role: CPU seconds as the system counts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray._private.state import actors  # the public API of the same table needs the dashboard

ROLES = {
    "RolloutActor": "rollout",
    "Learner": "learner",
    "ReferenceScorer": "reference",
    "RewardWorker": "reward",
}
DRIVER = "driver"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One worker's process."""

    role: str
    process_id: int
    node_id: str


def processes() -> list[Process]:
    """Of every role's workers that live on the connected cluster, and the driver."""
    alive = [row for row in actors(actor_state_name="ALIVE").values() if row["ActorClassName"] in ROLES]
    found = [Process(ROLES[row["ActorClassName"]], row["Pid"], row["Address"]["NodeID"]) for row in alive]
    return [*found, Process(DRIVER, os.getpid(), "")]


def cpu_seconds(process_id: int) -> float | None:
    """User and system time of all threads; None once the process is gone."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) * TICK_S


def snapshot() -> dict[Process, float]:
    """CPU seconds of every process so far."""
    return {process: used for process in processes() if (used := cpu_seconds(process.process_id)) is not None}


def idle_shares(before: Mapping[Process, float], after: Mapping[Process, float], seconds: float) -> dict[str, float]:
    """Role -> share of one core's time that its processes did not use, on average, over those that lived throughout."""
    used: dict[str, list[float]] = {}
    for process in before.keys() & after.keys():
        used.setdefault(process.role, []).append((after[process] - before[process]) / seconds)
    return {role: max(0.0, 1 - sum(shares) / len(shares)) for role, shares in sorted(used.items())}
