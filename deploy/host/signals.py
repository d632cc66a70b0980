"""Signals that ask this process to end: SIGTERM, and SIGHUP of a terminal that closes unless nohup ignores it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals beside SIGINT that end a run in order; those that the parent process ignores stay ignored."""
    found = (signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in found if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def signals_raise() -> Iterator[None]:
    """In the body they raise KeyboardInterrupt, as SIGINT does, so that what was begun is undone or closed.

    Handlers that the body sets are replaced by those from before it, that of SIGINT too.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread alone
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in ending_signals()}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From now on none ends this process: it closes what it began, which is bounded. Call it in `signals_raise`."""
    for number in (signal.SIGINT, *ending_signals()):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def sigterm_stays_ours() -> Iterator[None]:
    """In the body a library may set a handler of SIGTERM; one that this module has set comes back afterwards.

    Ray takes the signal when it starts, and gives it the default action when it ends.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_ours = before in (signal.SIG_IGN, _interrupt) and threading.current_thread() is threading.main_thread()
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
