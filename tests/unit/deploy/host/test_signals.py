"""Signals that ask a run to end are interrupts; those that its parent ignores stay ignored."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mobula.deploy.host.signals import ending_signals, ignore_signals, signals_raise, sigterm_stays_ours
from mobula.deploy.run.runtime import _until_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), signals_raise():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_under_nohup_a_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGTERM,)
        with signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


async def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)


def test_signals_that_come_while_a_run_closes_end_nothing() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with signals_raise():
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(_until_signal(interrupted()))
        for number in numbers:  # the summary is being written
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_library_does_not_keep_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_raise():
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        ignore_signals()
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_of_a_library_stays_where_there_was_none_of_ours() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
