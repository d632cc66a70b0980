"""Which requests share a call of the learner, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mobula.cluster.training_service.interfaces import AdapterSpec
from mobula.deploy.training_service.store import Kind, ModelRecord, RequestRecord
from mobula.deploy.training_service.training.execution import ModelQueue
from mobula.deploy.training_service.training.scheduler import Scheduler

SPEC = AdapterSpec(rank=4, alpha=32.0, seed=0)


class RecordedExecution:
    """Finishes every request and records the calls; calls in `lost` lose the learner."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.calls: list[list[str]] = []
        self.steps: list[str] = []
        self._lost = lost

    def pause_s(self) -> float:
        return 0.0

    def is_loaded(self, queue: ModelQueue) -> bool:
        return queue.loaded_in == 0

    async def restore(self, queue: ModelQueue) -> None:
        queue.loaded_in = 0

    async def compute(self, batch: Sequence[tuple[ModelQueue, Sequence[RequestRecord]]]) -> None:
        self.calls.append([request.request_id for _, requests in batch for request in requests])
        for queue, requests in batch:
            if len(self.calls) in self._lost:
                queue.num_lost += 1
                continue
            for request in requests:
                queue.pop(request)

    async def run(self, queue: ModelQueue, request: RequestRecord) -> None:
        self.steps.append(request.request_id)
        queue.pop(request)


def queue_of(tenant: str, name: str, kinds: str) -> ModelQueue:
    """A queue of f (forward_backward) and s (step) requests; a dot is one that has not arrived."""
    record = ModelRecord(name, tenant, "session", SPEC, 0.0)
    names = {"f": Kind.FORWARD_BACKWARD, "s": Kind.STEP}
    requests = [RequestRecord(name, n, names[k], b"x" * 10) for n, k in enumerate(kinds) if k != "."]
    return ModelQueue(record, 0, {request.seq_id: request for request in requests})


async def run(queues: Sequence[ModelQueue], budget: int, lost: Sequence[int] = ()) -> RecordedExecution:
    """Runs until every request that can run has finished."""
    execution = RecordedExecution(lost)
    by_name = {queue.model_id: queue for queue in queues}
    scheduler = Scheduler(by_name, execution, max_batch_tokens=budget, count=len)  # type: ignore[arg-type]
    scheduler.wake()
    task = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(10):
        while any(queue.head is not None for queue in queues):
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return execution


async def test_models_of_several_tenants_share_a_call() -> None:
    found = await run([queue_of("ada", "a", "ffs"), queue_of("bob", "b", "fs")], budget=100)
    assert found.calls == [["a:0", "a:1", "b:0"]]
    assert sorted(found.steps) == ["a:2", "b:1"]


async def test_tenants_take_turns_when_the_budget_is_small() -> None:
    queues = [queue_of("ada", name, "ff") for name in ("a", "b", "c")] + [queue_of("bob", "d", "ff")]
    found = await run(queues, budget=20)
    assert "d:0" in found.calls[1], "the second tenant is served second, whatever the first has queued"


async def test_a_request_waits_for_the_one_before_it() -> None:
    found = await run([queue_of("ada", "a", "f.f")], budget=100)
    assert found.calls == [["a:0"]]


async def test_a_request_larger_than_the_budget_runs_alone() -> None:
    found = await run([queue_of("ada", "a", "f"), queue_of("bob", "b", "f")], budget=5)
    assert sorted(found.calls) == [["a:0"], ["b:0"]]


async def test_requests_that_lost_the_learner_twice_run_alone() -> None:
    found = await run([queue_of("ada", "a", "f"), queue_of("bob", "b", "f")], budget=100, lost=(1, 2))
    assert [sorted(call) for call in found.calls[:2]] == [["a:0", "b:0"]] * 2
    assert sorted(found.calls[2:]) == [["a:0"], ["b:0"]]
