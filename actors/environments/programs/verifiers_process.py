"""VerifiersProcess: runs tasks of verifiers in a separate Python environment, against an endpoint of the policy."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar
from uuid import uuid4

from mobula.actors.environments.programs.base import Outcome

PROGRAM = Path(__file__).with_name("verifiers_rollouts.py")


class VerifiersProcess:
    """Implements `AgentPrograms`; runs any number of tasks concurrently. Ends with this process, at the end of
    stdin."""

    _shared: ClassVar[dict[str, VerifiersProcess]] = {}
    _making: ClassVar[Lock] = Lock()

    def __init__(self, python: str, env: Mapping[str, Any], *, import_path: Sequence[str], max_tasks: int) -> None:
        if not Path(python).is_file():
            raise ValueError(
                f"environment.options.python={python} is no Python with verifiers: make it with "
                "`deploy/environment.sh verifiers`, or name another one"
            )
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"PYTHONPATH": os.pathsep.join(import_path)} if import_path else {}
        self._process = subprocess.Popen(
            [python, "-P", str(PROGRAM), json.dumps({"env": env, "max_tasks": max_tasks})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            encoding="utf-8",
            bufsize=1,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._playing: dict[str, Future[Outcome]] = {}
        self._lock = Lock()
        first = self._stdout.readline()
        if not first:
            raise ValueError(
                f"verifiers ended with {self._process.wait()} before it had loaded environment.options.env={env}: see "
                "what it wrote to the log"
            )
        self.num_tasks: int = json.loads(first)["num_tasks"]
        Thread(target=self._read, daemon=True, name="verifiers outcomes").start()

    @classmethod
    def shared(
        cls, python: str, env: Mapping[str, Any], *, import_path: Sequence[str], max_tasks: int
    ) -> VerifiersProcess:
        """The process for these arguments; starts one if there is none or it has ended."""
        key = json.dumps([python, env, list(import_path), max_tasks], sort_keys=True)
        with cls._making:
            process = cls._shared.get(key)
            if process is None or not process.is_alive:
                process = cls._shared[key] = cls(python, env, import_path=import_path, max_tasks=max_tasks)
                atexit.register(process.close)
            return process

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def play(self, task: int, base_url: str) -> tuple[str, Future[Outcome]]:
        """Starts a task that calls the endpoint at `base_url`; returns the episode's id and the future outcome."""
        name, outcome = uuid4().hex, Future[Outcome]()
        with self._lock:
            self._playing[name] = outcome
        self._write({"id": name, "task": task, "base_url": base_url})
        return name, outcome

    def cancel(self, name: str) -> None:
        """Ends an episode; the future outcome is never set."""
        with self._lock:
            self._playing.pop(name, None)
        self._write({"id": name, "is_cancelled": True})

    def close(self, *, grace_s: float = 5.0) -> None:
        """Ends the process and all running tasks."""
        if self._process.poll() is None:
            self._stdin.close()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _write(self, line: Mapping[str, Any]) -> None:
        """Writes a line to the process. If it has ended, `_read` fails the other running tasks."""
        with self._lock:
            try:
                self._stdin.write(f"{json.dumps(line)}\n")
            except (BrokenPipeError, ValueError):
                if outcome := self._playing.pop(line["id"], None):
                    outcome.set_result({"error": "the process of verifiers has ended"})

    def _read(self) -> None:
        for line in self._stdout:
            result = json.loads(line)
            with self._lock:
                outcome = self._playing.pop(result.pop("id"), None)
            if outcome is not None:
                outcome.set_result(result)
        code = self._process.wait()
        with self._lock:
            left, self._playing = list(self._playing.values()), {}
        for outcome in left:
            outcome.set_result({"error": f"the process of verifiers ended with {code}"})
