"""Runs vLLM's engine core in a child process, which sends its last exception to the actor and keeps images.

Replaces `EngineCoreProc.run_engine_core` while an engine starts, and `EngineCoreProc._send_engine_dead` in the core's
process. vLLM 0.32 logs the exception of a core in the core's process only; the client gets an `EngineDeadError`
without a cause. `run_core` sends the exception through a pipe before vLLM reports the death. The scheduler runs in this
process, so the patch of `patches.images` is applied here.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc

from mobula.actors.samplers.vllm.patches.images import keep_images
from mobula.cluster.errors import EngineDiedError
from mobula.cluster.failures import Failure

EXIT_S = 2.0  # wait for the exit code of a dead core
RUN_ENGINE_CORE = EngineCoreProc.run_engine_core  # vLLM's original


def engine_in_its_own_process(arguments: AsyncEngineArgs, *, stat_loggers: list[Any] | None = None) -> AsyncLLM:
    """Builds an `AsyncLLM` in a running event loop. `core_failure` returns the reason if its core dies.

    Raises:
        ValueError: the core refused its arguments, such as a KV cache that does not fit.
        EngineDiedError: the core failed to start.
    """
    failures, sender = multiprocessing.Pipe(duplex=False)
    try:
        with sender, _run_by(partial(run_core, sender)):
            engine = AsyncLLM.from_engine_args(arguments, stat_loggers=stat_loggers)
    except Exception as error:
        if (failure := _sent(failures)) is None:
            raise
        if failure.summary.startswith(f"{ValueError.__name__}:"):
            raise ValueError(failure.summary.partition(": ")[2]) from error
        raise EngineDiedError("the engine failed to start", failure) from error
    core = engine.engine_core
    core.failures = failures
    core.processes = list(core.resources.engine_manager.processes)
    return engine


def core_failure(engine: AsyncLLM) -> Failure:
    """Returns why the core of `engine_in_its_own_process` died; call it once."""
    core = engine.engine_core
    if (failure := _sent(core.failures)) is not None:
        return failure
    for process in core.processes:
        process.join(EXIT_S)
        if process.exitcode:
            return Failure.of_exit(process.exitcode, f"the engine's process {process.pid}")
    return Failure.of_exit(None, "the engine's process")


def run_core(sender: Connection, *args: Any, **kwargs: Any) -> None:
    """Runs `EngineCoreProc.run_engine_core` in the core's process; sends the exception that ends it to `sender`."""
    keep_images()
    send_dead = EngineCoreProc._send_engine_dead
    is_sent = False

    def send(error: BaseException | None) -> None:
        nonlocal is_sent
        if error is not None and not is_sent:
            is_sent = True
            sender.send(Failure.of(error))

    def send_failure_first(core: EngineCoreProc) -> None:
        send(sys.exception())  # before vLLM reports the death, so that the client can read it
        send_dead(core)

    EngineCoreProc._send_engine_dead = send_failure_first
    try:
        RUN_ENGINE_CORE(*args, **kwargs)
    except Exception as error:
        send(error)
        raise


def _sent(failures: Connection) -> Failure | None:
    """Returns the failure sent by the core, or None."""
    try:
        return failures.recv() if failures.poll() else None
    except EOFError:  # the process ended without a failure
        return None


@contextmanager
def _run_by(run: Callable[..., None]) -> Iterator[None]:
    """Replaces the method that vLLM's core process runs, for which vLLM has no parameter."""
    EngineCoreProc.run_engine_core = staticmethod(run)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(RUN_ENGINE_CORE)
