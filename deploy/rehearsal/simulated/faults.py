"""PlannedFault schedules of a rehearsal: lost, preempted and slow nodes, and full disks."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from mobula.cluster.errors import PreflightError

Kind = Literal["node_loss", "preemption", "slow_node", "full_disk"]
WORD = re.compile(r"^(?P<kind>\w+)(?::(?P<node>[\w.-]+))?@(?P<at>\d+)(?:x(?P<factor>[\d.]+))?(?:\+(?P<for>[\d.]+)s?)?$")
HOW = (
    "write KIND[:NODE]@STEP[xFACTOR][+SECONDS], as node_loss:node-1@3, preemption:node-1@3+600, slow_node:node-0@2x1.5 "
    f"or full_disk@4, where KIND is one of {', '.join(get_args(Kind))}"
)
RESTORED_S = 300.0  # a preempted node is back after this time


@dataclass(frozen=True)
class PlannedFault:
    """One fault, which happens in the middle of step `step`."""

    kind: Kind
    step: int
    node_id: str = ""  # empty: the last node
    factor: float = 2.0  # on the seconds of a slow node
    seconds: float = 0.0  # until a preempted or slow node, or the disk, is as before; 0: for ever, or its default


def read_faults(words: Sequence[str], file: Path | None = None) -> tuple[PlannedFault, ...]:
    """Reads a schedule from words and from a YAML file, a list of words or of mappings with a fault's fields.

    Raises:
        PreflightError: an entry cannot be read.
    """
    entries: list[Any] = list(words)
    if file is not None:
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise PreflightError(f"--faults {file} cannot be read ({error}): {HOW}") from error
        if not isinstance(content, list):
            raise PreflightError(f"--faults {file} holds no list of faults: {HOW}")
        entries += content
    return tuple(_fault(entry) for entry in entries)


def disk_error() -> OSError:
    """The error of a write to a full disk."""
    return OSError(errno.ENOSPC, "No space left on device")


def _fault(entry: Any) -> PlannedFault:
    if isinstance(entry, Mapping):
        try:
            fault = PlannedFault(**entry)
        except TypeError as error:
            raise PreflightError(f"a fault {dict(entry)} has unknown or missing keys ({error}): {HOW}") from error
    else:
        match = WORD.match(str(entry))
        if match is None:
            raise PreflightError(f"--fault {entry} is no fault: {HOW}")
        factor, seconds = match["factor"], match["for"]
        kind: Any = match["kind"]
        fault = PlannedFault(kind, int(match["at"]), match["node"] or "", float(factor or 2), float(seconds or 0))
    if fault.kind not in get_args(Kind):
        raise PreflightError(f"a fault of kind {fault.kind} is unknown: {HOW}")
    return fault
