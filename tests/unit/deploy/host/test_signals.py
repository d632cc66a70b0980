"""Signals that ask a run to end are interrupts; those that its parent ignores stay ignored."""

from __future__ import annotations

import os
import signal

import pytest

from deploy.host.signals import ending_signals, signals_raise


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), signals_raise():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_under_nohup_a_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGTERM,)
        with signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
