"""Faults at an exact moment: a process that reaches a named moment signals a named victim, once.

    saboteur.plan("in_broadcast", victim="rollout/0", signal=signal.SIGKILL)

What no signal does, a role does to itself where `moment` returns True: `plan("replying", ...)` with NONE.

The plan is a file in a folder that all processes share; the first process at the moment takes the file and acts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SLOW_S = 1.5
NONE = 0  # the signal that does nothing


def is_running(process_id: int) -> bool:
    """Whether the process computes or could; one that is not reaped yet does not."""
    return _state(process_id) != "Z"


def _state(process_id: int) -> str:
    """As in /proc; one that is gone is like one that is not reaped yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@dataclass(frozen=True)
class Saboteur:
    """`folder` is the same for all processes of one run."""

    folder: Path

    def enlist(self, name: str, process_id: int | None = None) -> None:
        """The process, or this one, plays `name` from now on."""
        self._write(self._pid_file(name), str(process_id or os.getpid()))

    def plan(self, moment: str, *, victim: str, signal: int) -> None:
        """The next process that reaches `moment` signals `victim`; SIGCONT makes it slow: stopped, then continued."""
        assert not self.is_planned(moment), f"{moment} is planned already"
        self._write(self.folder / moment, json.dumps({"victim": victim, "signal": int(signal)}))

    def is_planned(self, moment: str) -> bool:
        return (self.folder / moment).exists()

    def is_there(self, name: str) -> bool:
        """Whether a process plays `name`, and is not stopped."""
        return self._pid_file(name).exists() and _state(self.process_id(name)) not in "ZT"

    def process_id(self, name: str) -> int:
        """Of the process that plays `name`, or did so last."""
        return int(self._pid_file(name).read_text())

    def moment(self, name: str, leaves: tuple[str, object] | None = None) -> bool:
        """Strike the victim that is planned for `name`, and return whether there was one.

        A victim that is being replaced stays planned. What the victim `leaves`, a name and a value for JSON, is
        written by the process that strikes: two that reach the moment at once leave one record.
        """
        taken = self.folder / f".{name}-{os.getpid()}"
        try:
            plan = json.loads((self.folder / name).read_text())
            process_id = self.process_id(plan["victim"])
            if not is_running(process_id):
                return False
            os.rename(self.folder / name, taken)
        except FileNotFoundError:
            return False
        if leaves is not None:
            self._write(self.folder / f"left-{leaves[0]}.json", json.dumps(leaves[1]))
        (self.folder / "struck").open("a").write(f"{name} {plan['victim']} {plan['signal']}\n")
        if plan["signal"] == signal.SIGCONT:
            self._slow_down(process_id)
        else:
            os.kill(process_id, plan["signal"])
        return True

    def left(self) -> dict[str, object]:
        """What processes left behind, by name."""
        files = self.folder.glob("left-*.json")
        return {file.stem.removeprefix("left-"): json.loads(file.read_text()) for file in files}

    @property
    def struck(self) -> list[str]:
        """Every fault that took place, in order."""
        file = self.folder / "struck"
        return file.read_text().splitlines() if file.exists() else []

    def _slow_down(self, process_id: int) -> None:
        if process_id == os.getpid():
            time.sleep(SLOW_S)
            return
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(SLOW_S)
        os.kill(process_id, signal.SIGCONT)

    def _pid_file(self, name: str) -> Path:
        return self.folder / f"pid-{name.replace('/', '-')}"

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(f".draft-{path.name}-{os.getpid()}")
        draft.write_text(text)
        os.rename(draft, path)
