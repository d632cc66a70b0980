"""CommandPrograms: starts a program for each episode, which calls an OpenAI-compatible endpoint."""

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

URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"  # environment variables of OpenAI's clients
TAIL = 500  # characters of stderr in an error


class CommandPrograms:
    """Implements `AgentPrograms`. Each line of the JSONL file `tasks` is a task.

    A program reads its line from stdin and the endpoint from `OPENAI_BASE_URL`. The last line of stdout is the outcome:
    `{"reward": 1.0}` or `{"rewards": {NAME: 1.0}}`, with `"is_truncated": true` if the program stopped at a limit.

    A program runs in a separate process group, which is killed at the end of the episode. If the rollout actor is lost,
    the endpoint stops to reply.
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
        """Starts a task; returns the episode's id and the future outcome."""
        name, outcome = uuid4().hex, Future[Outcome]()
        environment = {**os.environ, URL: base_url, KEY: "policy"}
        bypass_loopback(environment)  # no proxy for the endpoint
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
        """Kills the episode's process group, if it still runs; the future outcome is never set."""
        with self._lock:
            process = self._running.pop(name, None)
        if process is not None:
            _kill(process)

    def _watch(self, name: str, process: subprocess.Popen[str], task: str, outcome: Future[Outcome]) -> None:
        stdout, stderr = process.communicate(task)
        with self._lock:
            is_wanted = self._running.pop(name, None) is not None
        if is_wanted:
            _kill(process)  # children that the program left behind
            outcome.set_result(_outcome(process.returncode, stdout, stderr))


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(code: int, stdout: str, stderr: str) -> Outcome:
    if code != 0:
        return {"error": f"the program ended with {code}: {stderr.strip()[-TAIL:] or 'it wrote nothing to stderr'}"}
    lines = stdout.strip().splitlines()
    try:
        last_line: Any = json.loads(lines[-1]) if lines else None
        rewards = last_line["rewards"] if "rewards" in last_line else {"reward": last_line["reward"]}
        return {"rewards": dict(rewards), "is_truncated": bool(last_line.get("is_truncated", False))}
    except (ValueError, KeyError, TypeError, AttributeError):
        last = lines[-1][:TAIL] if lines else ""
        return {"error": f'the last line of stdout has no reward: it is {last!r}, not {{"reward": NUMBER}}'}
