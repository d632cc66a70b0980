"""Programs that run the tasks of an `AgentEnvironment`: a command for each episode, or a process of verifiers."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from mobula.cluster.proxies import bypass_loopback
from mobula.cluster.records.json_lines import BYTE_ORDER_MARK, parse_json, read_lines

Outcome = Mapping[str, Any]
"""`rewards` by name and `is_truncated` of an episode; or `error`, if there is no reward."""


class AgentPrograms(Protocol):
    """Runs a program for each task; the program calls the policy at an endpoint."""

    num_tasks: int

    def play(self, task: int, base_url: str) -> tuple[str, Future[Outcome]]:
        """Starts a task; returns the episode's id and the future outcome."""

    def cancel(self, name: str) -> None:
        """Ends an episode; the future outcome is never set."""


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
        name, outcome = uuid4().hex, Future[Outcome]()
        with self._lock:
            self._playing[name] = outcome
        self._write({"id": name, "task": task, "base_url": base_url})
        return name, outcome

    def cancel(self, name: str) -> None:
        with self._lock:
            self._playing.pop(name, None)
        self._write({"id": name, "is_cancelled": True})

    def close(self, *, grace_s: float = 5.0) -> None:
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
