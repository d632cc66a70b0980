"""ProcessEnvironment: an environment in a process of its own, which is killed at the deadline of a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from typing import Any

from actors.environments.base import Action, EnvironmentSpec, EpisodeError, Reset, Step


class ProcessEnvironment:
    """The process is a fresh interpreter, not a fork: the parent holds threads, an event loop and an engine.

    After a call that failed the process is gone and `is_usable` is False.
    """

    spec: EnvironmentSpec

    def __init__(
        self, name: str, options: Mapping[str, Any], *, start_timeout_s: float, reset_timeout_s: float, step_s: float
    ) -> None:
        self._name = name
        self._timeouts = {"make": start_timeout_s, "reset": reset_timeout_s, "step": step_s, "demonstrate": step_s}
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "actors.environments.hosts.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.is_usable = True
        self.spec = self._exchange("make", {"name": name, "options": dict(options)})

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return self._exchange("reset", {"seed": seed, "options": dict(options)})

    def step(self, action: Action) -> Step:
        return self._exchange("step", {"action": action})

    def demonstrate(self) -> str:
        return self._exchange("demonstrate", {})

    def close(self) -> None:
        """Kill the process and its children, and reap it."""
        self.is_usable = False
        self._connection.close()
        if self._process.returncode is None:  # not collected, so the number of its group is its own
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _exchange(self, method: str, arguments: dict[str, Any]) -> Any:
        timeout_s = self._timeouts[method]
        try:
            self._connection.send((method, arguments, timeout_s))
            if not self._connection.poll(timeout_s):
                raise EpisodeError("timed_out", f"waited {timeout_s:g} s for {method} of environment {self._name}")
            succeeded, result = self._connection.recv()
        except EpisodeError:
            self.close()
            raise
        except (EOFError, OSError) as error:
            self.close()
            detail = f"the process of environment {self._name} ended in {method} ({self._process.returncode})"
            raise EpisodeError("process_died", detail) from error
        except BaseException:
            self.close()
            raise
        if not succeeded:
            self.close()  # its state is unknown
            kind, detail = result
            raise EpisodeError(kind, f"environment {self._name} raised in {method}: {detail}")
        return result
