"""A conversation with a Ray cluster in a process of its own, so that a dead or silent cluster costs a deadline at most.

Connecting can wait for minutes, and Ray's own threads end the whole process when a cluster vanishes under it; both stay
in the side process. Its caller keeps its terminal, and never imports ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

from cluster.errors import DeadlineError, MobulaError, WorkerDiedError

P = ParamSpec("P")
T = TypeVar("T")


def in_side_process(work: Callable[P, T], timeout_s: float, what: str, *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args, **kwargs)`, a function of some module, and its result or the `MobulaError` that it raised.

    Raises:
        DeadlineError: no result within `timeout_s`; the message names `what`.
        WorkerDiedError: the process ended without a result, or `work` raised something unexpected.
    """
    context = get_context("spawn")  # a fork would share our threads and open files
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, work, args, kwargs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise DeadlineError(f"waited {timeout_s:g} s for {what}")
        result, error = ours.recv()
    except EOFError as error:
        raise WorkerDiedError(f"what waited for {what} ended without a word: its cluster is gone") from error
    finally:
        process.kill()
        process.join()
        ours.close()
    if error is not None:
        raise error
    return result


def _run(pipe: Connection, work: Callable[..., object], args: tuple, kwargs: dict) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # Ray writes to both from its own threads
        os.dup2(silence, stream)
    try:
        pipe.send((work(*args, **kwargs), None))
    except MobulaError as error:
        pipe.send((None, error))
    except Exception as error:  # it travels as its text: its class may not be known on the other side
        pipe.send((None, WorkerDiedError(f"{type(error).__name__}: {error}")))
