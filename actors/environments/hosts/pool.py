"""Pool of environments: in processes, in Ray actors, behind servers."""

from __future__ import annotations

import asyncio
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import httpx

from mobula.actors.environments.base import (
    ROLES_OF_RESET,
    ROLES_OF_STEP,
    Action,
    Demonstrator,
    Environment,
    EnvironmentSpec,
    EpisodeError,
    Json,
    Reset,
    Step,
    action_to_json,
    checked_observation,
    reset_from_json,
    spec_from_json,
    step_from_json,
)
from mobula.actors.environments.hosts import child
from mobula.actors.environments.hosts.child import HostedEnvironment
from mobula.actors.environments.registry import build_environment
from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.cluster.runtime.child_process import ChildProcess, RaisedError
from mobula.cluster.runtime.ray_actors import OwnedActor
from mobula.configs.schema.data import EnvironmentConfig

T = TypeVar("T")


class _Hosted(ABC):
    """Base of environments in another process: each method runs there within a time limit."""

    spec: EnvironmentSpec

    def __init__(self, name: str, start: str, *, start_timeout_s: float, reset_timeout_s: float, step_s: float) -> None:
        """`start` is the method that starts the environment."""
        self._name = name
        self._timeouts = {start: start_timeout_s, "reset": reset_timeout_s, "step": step_s, "demonstrate": step_s}

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return self._called("reset", seed, dict(options))

    def step(self, action: Action) -> Step:
        return self._called("step", action)

    def demonstrate(self) -> str:
        return self._called("demonstrate")

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _called(self, method: str, *args: Any) -> Any: ...


class RayEnvironment(_Hosted):
    """Implements `Environment`. A failed call kills the actor."""

    def __init__(self, name: str, options: Mapping[str, Any], *, num_cpus: float, **limits: float) -> None:
        super().__init__(name, "spec", **limits)
        self._actor = OwnedActor(HostedEnvironment, name, dict(options), name=f"environment {name}", num_cpus=num_cpus)
        self.spec = self._called("spec")

    def close(self) -> None:
        self._actor.kill()

    def _called(self, method: str, *args: Any) -> Any:
        problem: Exception
        try:
            return self._actor.call(method, *args, timeout_s=self._timeouts[method])
        except DeadlineError as error:
            kind, problem = "timed_out", error
        except WorkerDiedError as error:
            kind, problem = "process_died", error
        except Exception as error:  # any error of an environment fails the episode, never the run
            kind, problem = "raised", error
        self._actor.kill()
        raise EpisodeError(kind, f"environment {self._name} in {method}: {type(problem).__name__}: {problem}")


class ProcessEnvironment(_Hosted):
    """Implements `Environment`. A failed call kills the subprocess."""

    def __init__(self, name: str, options: Mapping[str, Any], **limits: float) -> None:
        super().__init__(name, "make", **limits)
        self._child = ChildProcess()
        self.spec = self._called("make", name, dict(options))

    def close(self) -> None:
        """Kills the subprocess and its children, and reaps it."""
        self._child.close()

    def _called(self, method: str, *args: Any) -> Any:
        timeout_s, name = self._timeouts[method], self._name
        try:
            if method == "make":
                return self._child.call(timeout_s, child.make, *args)
            return self._child.call(timeout_s, child.call, method, *args)
        except BaseException as error:
            self.close()  # the state of the environment is unknown
            if isinstance(error, DeadlineError):
                raise EpisodeError("timed_out", f"waited {timeout_s:g} s for {method} of environment {name}") from error
            if isinstance(error, WorkerDiedError):
                raise EpisodeError("process_died", f"environment {name} in {method}: {error}") from error
            if isinstance(error, EpisodeError | RaisedError):
                kind = error.kind if isinstance(error, EpisodeError) else "raised"
                raise EpisodeError(kind, f"environment {name} raised in {method}: {error}") from error
            raise


PAUSE_S, MAX_PAUSE_S = 0.1, 2.0  # delay between attempts: random up to PAUSE_S, doubled up to MAX_PAUSE_S
QUOTED_CHARS = 300


class RemoteEnvironment(_Hosted):
    """One session on the server. A call without a reply is retried until the timeout, under the same number."""

    def __init__(self, name: str, url: str, *, token_env: str, **limits: float) -> None:
        super().__init__(name, "start", **limits)
        self._url = url.rstrip("/")
        self._client = httpx.Client(headers=_headers(token_env), trust_env=False)
        self._call = 0
        try:
            opened = self._post("start", "/v1/sessions", {})
            if opened["name"] != name:
                raise EpisodeError("server_refused", f"{url} serves environment {opened['name']}, not {name}")
        except BaseException:
            self._client.close()
            raise
        self._session = f"/v1/sessions/{opened['session']}"
        self.spec = spec_from_json(opened["spec"])

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return reset_from_json(self._called("reset", {"seed": seed, "options": dict(options)}))

    def step(self, action: Action) -> Step:
        return step_from_json(self._called("step", {"action": action_to_json(action)}))

    def demonstrate(self) -> str:
        return str(self._called("demonstrate", {}))

    def close(self) -> None:
        try:
            self._client.delete(f"{self._url}{self._session}", timeout=self._timeouts["step"])
        except httpx.HTTPError:
            """The server ends sessions without calls."""
        self._client.close()

    def _called(self, method: str, *args: Any) -> Any:
        [given] = args
        self._call += 1
        return self._post(method, f"{self._session}/{method}", {"call": self._call, **given})["result"]

    def _post(self, what: str, path: str, body: Json) -> Json:
        deadline = time.monotonic() + self._timeouts[what]
        pause_s = PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                reply = self._client.post(f"{self._url}{path}", json=body, timeout=max(0.01, left_s))
            except httpx.TimeoutException as error:
                raise EpisodeError(
                    "timed_out", f"waited {self._timeouts[what]:g} s for {what} at {self._url}"
                ) from error
            except httpx.HTTPError as error:
                problem = EpisodeError("server_unreachable", f"{self._url} cannot be reached ({error!r})")
            else:
                if reply.status_code == 200:
                    return self._read(reply)
                kind = "session_lost" if reply.status_code == 404 else "server_refused"
                problem = EpisodeError(kind, f"{self._url} answered {reply.status_code}: {reply.text[:QUOTED_CHARS]}")
                if reply.status_code < 500:
                    raise problem
            if time.monotonic() + pause_s >= deadline:
                raise problem
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def _read(self, reply: httpx.Response) -> Json:
        try:
            content = reply.json()
        except ValueError as error:
            raise EpisodeError("server_refused", f"{self._url} answered no JSON ({error})") from error
        if not isinstance(content, dict):
            raise EpisodeError("server_refused", f"{self._url} answered {type(content).__name__}, not an object")
        if "failure" in content:
            raise EpisodeError(str(content["failure"]["kind"]), f"at {self._url}: {content['failure']['detail']}")
        return content


def _headers(token_env: str) -> dict[str, str]:
    if not token_env:
        return {}
    token = os.environ.get(token_env, "")
    if not token:
        raise EpisodeError("no_token", f"environment.token_env={token_env} is not set in the environment: set it")
    return {"Authorization": f"Bearer {token}"}


GRACE_S = 1.0  # the host kills a process at the timeout and reports it within this time


@dataclass(eq=False)
class EnvironmentSession:
    """One environment for one episode. Checks all results."""

    environment: Environment
    run: Callable[..., Awaitable[Any]]
    config: EnvironmentConfig
    takes_images: bool

    def __post_init__(self) -> None:
        most = self.config.max_observation_bytes
        self._checked = partial(checked_observation, max_bytes=most, takes_images=self.takes_images)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environment.spec

    async def reset(self, seed: int, options: Mapping[str, Any] = MappingProxyType({})) -> Reset:
        """Raises: EpisodeError: the environment raised, timed out, or returned an invalid result."""
        call = partial(self.environment.reset, seed=seed, options=dict(options))
        start = Reset(*await self.run(call, self.config.reset_timeout_s, "reset"))
        return start._replace(observation=self._checked(start.observation, ROLES_OF_RESET))

    async def step(self, action: Action) -> Step:
        """Raises: EpisodeError: as `reset`."""
        result = Step(*await self.run(partial(self.environment.step, action), self.config.step_timeout_s, "step"))
        return result._replace(observation=self._checked(result.observation, ROLES_OF_STEP))

    async def demonstrate(self) -> str:
        """The text of a good next turn; requires `spec.demonstrates`."""
        demonstrator = cast("Demonstrator", self.environment)
        text = await self.run(demonstrator.demonstrate, self.config.step_timeout_s, "demonstrate")
        if not isinstance(text, str) or not text:
            raise EpisodeError("bad_demonstration", f"demonstrate() gave {text!r:.40}: return the text of a turn")
        return text


PROCESSES_A_CORE = 4  # that one pool starts: most of the time a process waits for the policy


def num_concurrent(config: EnvironmentConfig, num_cores: int) -> int:
    """The number of environments of one pool: `environment.max_concurrent`, bounded by the cores with processes."""
    most = PROCESSES_A_CORE * num_cores if config.host == "process" else config.max_concurrent
    return min(config.max_concurrent, most)


class EnvironmentPool:
    """A pool of equal environments. Environments are reused after successful episodes and closed after failed ones.

    With `environment.host=process`, `ray` and `remote`, a subprocess, Ray actor or server kills an environment at a
    timeout. An inline environment cannot be killed: the episode ends at the timeout, and the thread is blocked until
    the call returns.
    """

    def __init__(self, config: EnvironmentConfig, *, takes_images: bool) -> None:
        self._config = config
        self._takes_images = takes_images
        self._idle: list[Environment] = []
        num = num_concurrent(config, len(os.sched_getaffinity(0)))
        self._slots = asyncio.Semaphore(num)
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="environment")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Waits for a free slot and yields an environment for one episode."""
        async with self._slots:
            if self._idle:
                environment = self._idle.pop()
            else:
                environment = await self._run(partial(_made, self._config), self._config.start_timeout_s, "start")
            try:
                yield EnvironmentSession(environment, self._run, self._config, self._takes_images)
            except BaseException:
                self._threads.submit(environment.close)
                raise
            self._idle.append(environment)

    def close(self) -> None:
        """Closes all idle environments."""
        for environment in self._idle:
            environment.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)  # threads may still close environments of failed episodes

    async def _run(self, call: Callable[[], T], timeout_s: float, what: str) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.wait_for(running, timeout_s + GRACE_S)
        except TimeoutError as error:
            detail = f"waited {timeout_s:g} s for {what} of environment {self._config.name}"
            raise EpisodeError("timed_out", detail) from error
        except EpisodeError:
            raise
        except Exception as error:  # any error of an environment fails the episode, never the run
            detail = f"environment {self._config.name} raised in {what}: {type(error).__name__}: {error}"
            raise EpisodeError("raised", detail) from error


def _made(config: EnvironmentConfig) -> Environment:
    limits = {
        "start_timeout_s": config.start_timeout_s,
        "reset_timeout_s": config.reset_timeout_s,
        "step_s": config.step_timeout_s,
    }
    match config.host:
        case "inline":
            return build_environment(config.name, config.arguments)
        case "process":
            return ProcessEnvironment(config.name, config.arguments, **limits)
        case "ray":
            return RayEnvironment(config.name, config.arguments, num_cpus=config.ray_num_cpus, **limits)
        case "remote":
            return RemoteEnvironment(config.name, config.url, token_env=config.token_env, **limits)
