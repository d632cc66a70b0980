"""Signals that ask this process to end: SIGTERM, and SIGHUP of a terminal that closes unless nohup ignores it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals besides SIGINT that end a run in order, without those that the parent process ignores."""
    candidates = (signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in candidates if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Makes the ending signals raise KeyboardInterrupt in the body, so that context managers and `finally` blocks run.

    Restores the earlier handlers afterwards, also the handler of SIGINT.
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
    """Ignores the ending signals while the process closes its resources. Call it in `signals_raise`."""
    for number in (signal.SIGINT, *ending_signals()):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def sigterm_stays_ours() -> Iterator[None]:
    """Restores this module's SIGTERM handler after the body.

    Ray replaces the handler when it starts, and sets the default action when it ends.
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
