"""An idle engine's first step has the whole burst: the core's loop on a clock of the test's, without an engine."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineShutdownState

from mobula.actors.samplers.vllm.patches import inproc
from mobula.actors.samplers.vllm.patches.inproc import BURST_GAP_S, BURST_S, InProcessClient, ThreadedCore

LONG_AGO_S = 10.0


class Burst(ThreadedCore):
    """Requests come at `times` while the core sleeps; `taken` is what it has taken in when it goes on to a step."""

    def __init__(self, times: list[float], *, max_num_seqs: int = 1_000, is_busy: bool = False) -> None:
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engines_running = is_busy
        self.batch_queue = None
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.taken), get_num_unfinished_requests=lambda: len(self.taken)
        )
        self.taken: list[float] = []
        self.now = 0.0
        self._times = list(times)
        self.sleep(0.0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._times and self._times[0] <= self.now:
            self.last_came = self._times.pop(0)
            self.input_queue.put(("request", self.last_came))

    def _notify_idle_state_callbacks(self) -> None:
        """No caller waits for an idle engine here."""

    def _handle_client_request(self, kind: str, request: float) -> None:
        self.taken.append(request)

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        monkeypatch.setattr(inproc, "time", self)
        self._process_input_queue()
        return self.taken


def test_requests_that_follow_each_other_closely_are_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [n * BURST_GAP_S * 0.9 for n in range(5)]
    burst = Burst([*times, times[-1] + 2 * BURST_GAP_S])
    assert burst.begin(monkeypatch) == times
    assert burst.now == pytest.approx(times[-1] + BURST_GAP_S)


def test_a_burst_that_is_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a push: what came while the engine stood still is all there."""
    burst = Burst([-LONG_AGO_S, -LONG_AGO_S, -BURST_GAP_S])
    assert len(burst.begin(monkeypatch)) == 3 and burst.now == 0.0


def test_a_burst_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    burst = Burst([n * BURST_GAP_S / 2 for n in range(1_000)])
    burst.begin(monkeypatch)
    assert burst.now == pytest.approx(BURST_S)


def test_a_full_step_and_a_busy_engine_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Burst([0.0, 0.0, BURST_GAP_S / 2], max_num_seqs=2)
    assert full.begin(monkeypatch) == [0.0, 0.0] and full.now == 0.0
    busy = Burst([0.0, BURST_GAP_S / 2], is_busy=True)
    assert busy.begin(monkeypatch) == [0.0] and busy.now == 0.0


def test_a_request_that_is_on_its_way_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arriving(Burst):
        """The one request that is known of comes at `comes_at`."""

        def __init__(self, times: list[float], comes_at: float) -> None:
            self._comes_at = comes_at
            super().__init__(times)

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.num_coming = int(self.now < self._comes_at)

    late = 5 * BURST_GAP_S
    burst = Arriving([0.0, late], comes_at=late)
    assert burst.begin(monkeypatch) == [0.0, late]
    assert burst.now == pytest.approx(late + BURST_GAP_S)
    never = Arriving([0.0], comes_at=2 * BURST_S)
    assert never.begin(monkeypatch) == [0.0] and never.now == pytest.approx(BURST_S)


def test_what_is_coming_counts_until_it_is_there_or_given_up() -> None:
    client = object.__new__(InProcessClient)
    client._core = core = SimpleNamespace(num_coming=0, last_came=0.0)
    with client.coming():
        with client.coming(), pytest.raises(OSError, match="unreadable"), client.coming():
            assert core.num_coming == 3
            raise OSError("unreadable")
        assert core.num_coming == 1
    assert core.num_coming == 0 and core.last_came > 0.0, "it is about to be added: the gap begins now"
