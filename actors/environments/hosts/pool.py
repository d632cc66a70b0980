"""EnvironmentPool: a limited number of concurrent sessions with environments, with a timeout for each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

from mobula.actors.environments.base import (
    ROLES_OF_RESET,
    ROLES_OF_STEP,
    Action,
    Demonstrator,
    Environment,
    EnvironmentSpec,
    EpisodeError,
    Reset,
    Step,
    checked_observation,
)
from mobula.actors.environments.hosts.process import ProcessEnvironment
from mobula.actors.environments.hosts.ray_actor import RayEnvironment
from mobula.actors.environments.hosts.remote import RemoteEnvironment
from mobula.actors.environments.registry import build_environment
from mobula.configs.schema.environment import EnvironmentConfig

T = TypeVar("T")

GRACE_S = 1.0  # the host kills a process at the timeout and reports it within this time


class EnvironmentSession:
    """One environment for one episode. Checks all results."""

    def __init__(
        self,
        environment: Environment,
        run: Callable[..., Awaitable[Any]],
        config: EnvironmentConfig,
        *,
        takes_images: bool,
    ) -> None:
        self._environment = environment
        self._run = run
        self._config = config
        self._checked = partial(checked_observation, max_bytes=config.max_observation_bytes, takes_images=takes_images)

    @property
    def spec(self) -> EnvironmentSpec:
        return self._environment.spec

    async def reset(self, seed: int, options: Mapping[str, Any] = MappingProxyType({})) -> Reset:
        """Raises: EpisodeError: the environment raised, timed out, or returned an invalid result."""
        call = partial(self._environment.reset, seed=seed, options=dict(options))
        start = Reset(*await self._run(call, self._config.reset_timeout_s, "reset"))
        return start._replace(observation=self._checked(start.observation, ROLES_OF_RESET))

    async def step(self, action: Action) -> Step:
        """Raises: EpisodeError: as `reset`."""
        call = partial(self._environment.step, action)
        result = Step(*await self._run(call, self._config.step_timeout_s, "step"))
        return result._replace(observation=self._checked(result.observation, ROLES_OF_STEP))

    async def demonstrate(self) -> str:
        """The text of a good next turn; requires `spec.demonstrates`.

        Raises:
            EpisodeError: the environment raised, timed out, or returned no text.
        """
        demonstrator = cast("Demonstrator", self._environment)
        text = await self._run(demonstrator.demonstrate, self._config.step_timeout_s, "demonstrate")
        if not isinstance(text, str) or not text:
            raise EpisodeError("bad_demonstration", f"demonstrate() gave {text!r:.40}: return the text of a turn")
        return text


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
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="environment")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Waits for a free slot and yields an environment for one episode."""
        async with self._slots:
            if self._idle:
                environment = self._idle.pop()
            else:
                environment = await self._run(partial(_made, self._config), self._config.start_timeout_s, "start")
            try:
                yield EnvironmentSession(environment, self._run, self._config, takes_images=self._takes_images)
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
    """Builds an environment in the host `environment.host`."""
    limits = {
        "start_timeout_s": config.start_timeout_s,
        "reset_timeout_s": config.reset_timeout_s,
        "step_s": config.step_timeout_s,
    }
    match config.host:
        case "inline":
            return build_environment(config.name, config.options)
        case "process":
            return ProcessEnvironment(config.name, config.options, **limits)
        case "ray":
            return RayEnvironment(config.name, config.options, num_cpus=config.ray_num_cpus, **limits)
        case "remote":
            return RemoteEnvironment(config.name, config.url, token_env=config.token_env, **limits)
