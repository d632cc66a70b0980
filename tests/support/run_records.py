"""The record that a run leaves in its folder while it goes on, with a driver that lives, is dead or is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_folder import RECORD_FILE, RunMark, RunRecord


def go_on(folder: Path, *, start_ticks_off: int = 0, host: str | None = None) -> None:
    """Leave the record of a run whose driver is this process, or was one before it."""
    here = ProcessId.of(os.getpid())
    assert here is not None
    driver = ProcessId(host or here.host, here.pid, here.start_ticks + start_ticks_off)
    mark = RunMark(f"{folder.name}/1", driver)
    RunRecord(folder.name, folder, mark, "10.0.0.1:6379", f"of {folder.name}", None).write(folder / RECORD_FILE)
