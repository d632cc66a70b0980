"""CommandPrograms: any program that calls an OpenAI-compatible endpoint, started once an episode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from uuid import uuid4

from mobula.actors.environments.programs.base import Outcome
from mobula.cluster.proxies import bypass_loopback
from mobula.cluster.records.json_lines import BYTE_ORDER_MARK, parse_json, read_lines

URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"  # as the clients of OpenAI read them
TAIL = 500  # characters of stderr that an error repeats


class CommandPrograms:
    """Each line of the JSONL file `tasks` is a task. A program gets its line on stdin and the endpoint in
    `OPENAI_BASE_URL`; the last line of its stdout is what came of it: `{"reward": 1.0}` or `{"rewards": {NAME: 1.0}}`,
    with `"is_truncated": true` if it gave up at a limit of its own.

    A program runs in a process group of its own, which ends with its episode. One whose rollout actor is lost gets no
    further answer.

    Raises:
        ValueError: the file cannot be read, or a line of it is no JSON.
    """

    def __init__(self, command: Sequence[str], tasks: str) -> None:
        if not command:
            raise ValueError("environment.options.command is empty: give the program and its arguments")
        try:
            numbered = [(number, line.removeprefix(BYTE_ORDER_MARK)) for number, line in read_lines(Path(tasks))]
        except (OSError, ValueError) as error:
            raise ValueError(f"environment.options.tasks={tasks} cannot be read: {error}") from error
        for number, line in numbered:
            try:
                parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} of environment.options.tasks={tasks} is no JSON: {error}") from error
        lines = [line.decode().strip() for _, line in numbered]
        self.num_tasks = len(lines)
        self._command, self._tasks = list(command), lines
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._lock = Lock()

    def play(self, task: int, base_url: str) -> tuple[str, Future[Outcome]]:
        """Begin a task; the episode's id, and what comes of it."""
        name, outcome = uuid4().hex, Future[Outcome]()
        environment = {**os.environ, URL: base_url, KEY: "policy"}
        bypass_loopback(environment)  # the endpoint
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            outcome.set_result({"error": f"{self._command[0]} cannot be started: {error}"})
            return name, outcome
        with self._lock:
            self._running[name] = process
        watch = Thread(target=self._watch, args=(name, process, f"{self._tasks[task]}\n", outcome), daemon=True)
        watch.start()
        return name, outcome

    def cancel(self, name: str) -> None:
        """Kill the episode's process group, if it still runs; its outcome does not come."""
        with self._lock:
            process = self._running.pop(name, None)
        if process is not None:
            _kill(process)

    def _watch(self, name: str, process: subprocess.Popen[str], task: str, outcome: Future[Outcome]) -> None:
        said, complained = process.communicate(task)
        with self._lock:
            is_wanted = self._running.pop(name, None) is not None
        if is_wanted:
            _kill(process)  # what it started and left
            outcome.set_result(_outcome(process.returncode, said, complained))


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(code: int, said: str, complained: str) -> Outcome:
    if code != 0:
        return {"error": f"the program ended with {code}: {complained.strip()[-TAIL:] or 'it wrote nothing to stderr'}"}
    lines = said.strip().splitlines()
    try:
        found: Any = json.loads(lines[-1]) if lines else None
        rewards = found["rewards"] if "rewards" in found else {"reward": found["reward"]}
        return {"rewards": dict(rewards), "is_truncated": bool(found.get("is_truncated", False))}
    except (ValueError, KeyError, TypeError, AttributeError):
        last = lines[-1][:TAIL] if lines else ""
        return {"error": f'the last line of stdout has no reward: it is {last!r}, not {{"reward": NUMBER}}'}
