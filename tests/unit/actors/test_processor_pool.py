"""Prompts from processor workers: the same ones in the same order, media by reference, losses repaired or named."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import AT_ONCE, FakeHosts, LocalHandle

from mobula.actors.datasets.prompts import InDriver, PromptSource, fixed_prompts
from mobula.actors.datasets.rows import Row, Split
from mobula.actors.processors.pool import DIED, HUNG, MAX_LOSSES, ProcessorPool
from mobula.actors.processors.worker import CallMedia, Made, ProcessorWorker
from mobula.cluster.errors import MediaError, WorkerDiedError
from mobula.cluster.records.media import MediaKeeper, MediaSpan, MediaStore, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt

NUM_ROWS = 12


class Images:
    """A processor: each name in a question is an image, `bad` ones cannot be used."""

    def __init__(self, media: MediaKeeper) -> None:
        self.media = media
        self.processed: list[str] = []

    def num_media(self, row: Row) -> int:
        return len(row.question.split())

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        handles = tuple(self.media.get_or_add(f"key of {n}", n, lambda n=n: self._process(n)) for n in _names(row))
        ids = np.arange(3, dtype=np.int32)
        spans = tuple(MediaSpan(place, place + 1) for place in range(len(handles)))
        return Prompt(prompt_id, row.sample_id, row.question, ids, ids, handles, spans)

    def _process(self, name: str) -> ProcessedMedia:
        if name == "bad":
            raise MediaError(f"{name} is corrupt")
        self.processed.append(name)
        return ProcessedMedia("image", {"pixel_values": np.full(2, len(self.processed), dtype=np.float32)})


def _names(row: Row) -> list[str]:
    return row.question.split()


class Worker(ProcessorWorker):
    """A worker with `Images`, which fails with what `fate` makes of a row."""

    def __init__(self, fate: Callable[[Row], Exception | None] = lambda row: None) -> None:
        self._media = CallMedia()
        self._processor = Images(self._media)
        self._fate = fate

    @property
    def processed(self) -> list[str]:
        return self._processor.processed

    async def prepare(self, row: Row, prompt_id: str, known: frozenset[str]) -> list[Made | ProcessedMedia | None]:
        await asyncio.sleep(0.001 * (hash(row.sample_id) % 5))  # so that prompts come in another order
        error = self._fate(row)
        if isinstance(error, TimeoutError):
            await asyncio.Event().wait()
        if error is not None:
            raise error
        return super().prepare(row, prompt_id, known)

    async def prepare_text(self, row: Row, prompt_id: str) -> Made:
        return (await self.prepare(row, prompt_id, frozenset()))[0]


def rows(*images: str) -> tuple[Row, ...]:
    return tuple(Row(f"r{place}", names, "1", "1") for place, names in enumerate(images))


MIXED = rows(*(f"p{place}" for place in range(NUM_ROWS - 4)), "", "shared shared", "p1 shared", "bad")


def make_pool(
    workers: Sequence[Worker],
    store: MediaStore | None = None,
    start: Callable[[int], Worker] = lambda index: Worker(),
    on_lost: Callable[[str], None] = lambda kind: None,
    timeout_s: float = 5,
) -> ProcessorPool:
    return ProcessorPool(
        [LocalHandle(worker) for worker in workers],
        store or MediaStore(lambda value: value, 1 << 20),
        lambda row: len(_names(row)),
        hosts=FakeHosts(lambda index: LocalHandle(start(index)), booked=len(workers)),
        restarts=AT_ONCE,
        start_s=5,
        alive_s=0.05,
        timeout_s=timeout_s,
        object_s=5,
        on_lost=on_lost,
    )


def asked(source: PromptSource, num: int) -> list[Prompt]:
    return [source.next() for _ in range(num)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
async def test_workers_give_the_prompts_of_the_driver_in_its_order(num_workers: int) -> None:
    store = MediaStore(lambda value: value, 1 << 20)
    expected = PromptSource(MIXED, InDriver(Images(store)), seed=3, split_name="train")
    pool = make_pool([Worker() for _ in range(num_workers)])
    found = PromptSource(MIXED, pool, seed=3, split_name="train")
    want = asked(expected, 2 * NUM_ROWS)
    got = await asyncio.to_thread(asked, found, 2 * NUM_ROWS)
    assert [p.prompt_id for p in got] == [p.prompt_id for p in want]
    assert [p.media for p in got] == [p.media for p in want]
    assert all(handle.reference is not None and handle.num_bytes == 8 for p in got for handle in p.media)
    assert (found.cursor, found.skipped) == (expected.cursor, expected.skipped)
    assert [s.reason for s in found.skipped] == ["bad_media"]
    await pool.pool.close()


async def test_a_row_that_comes_again_is_not_processed_again_nor_what_rows_share() -> None:
    worker, store = Worker(), MediaStore(lambda value: value, 1 << 20)
    pool = make_pool([worker], store)
    shared = rows(*(f"p{place} logo" for place in range(8)))
    source = PromptSource(shared, pool, seed=0, split_name="train")
    first = await asyncio.to_thread(asked, source, 8)
    again = await asyncio.to_thread(asked, source, 40)
    counts = Counter(worker.processed)
    # While they were under way none knew of the others, those of the next epoch among them.
    assert 8 <= sum(counts[f"p{place}"] for place in range(8)) <= 8 + pool.num_ahead < 48
    assert counts["logo"] <= 1 + pool.num_ahead
    assert len({id(p.media[1].reference) for p in (*first, *again)}) == 1
    assert store.num_bytes_unique == 8 * 9
    await pool.pool.close()


async def test_a_row_whose_worker_dies_is_prepared_by_another() -> None:
    died: list[str] = []

    def fate(row: Row) -> Exception | None:
        if row.sample_id == "r2" and not died:
            died.append(row.sample_id)
            return WorkerDiedError("it was killed")
        return None

    kinds: list[str] = []
    pool = make_pool([Worker(fate), Worker(fate)], on_lost=kinds.append)
    source = PromptSource(MIXED, pool, seed=0, split_name="train")
    got = await asyncio.to_thread(asked, source, NUM_ROWS - 1)
    assert sorted(p.sample_id for p in got) == sorted(row.sample_id for row in MIXED if row.question != "bad")
    assert died and kinds == [DIED]
    await pool.pool.close()


async def test_a_row_that_ends_every_worker_is_skipped_by_name() -> None:
    def fate(row: Row) -> Exception | None:
        return WorkerDiedError("a segmentation fault") if row.sample_id == "r0" else None

    kinds: list[str] = []
    pool = make_pool([Worker(fate)] * 2, start=lambda index: Worker(fate), on_lost=kinds.append)
    held_out = await asyncio.to_thread(fixed_prompts, Split("test", MIXED[:3], ()), pool, 3)
    assert [p.sample_id for p in held_out.prompts] == ["r1", "r2"]
    [skipped] = held_out.skipped
    assert (skipped.sample, skipped.reason) == ("r0", "killed_processors")
    assert "segmentation fault" in skipped.detail and kinds == [DIED] * MAX_LOSSES
    await pool.pool.close()


async def test_a_worker_that_hangs_is_replaced() -> None:
    hung: list[str] = []

    def fate(row: Row) -> Exception | None:
        return TimeoutError() if row.sample_id == "r1" and not hung and not hung.append("r1") else None

    class Hanging(Worker):
        async def ping(self) -> bool:
            if hung:
                await asyncio.Event().wait()
            return True

    kinds: list[str] = []
    pool = make_pool([Hanging(fate)], on_lost=kinds.append, timeout_s=0.1)
    prompt = await pool.prepare(MIXED[1], "0/1/r1")
    assert isinstance(prompt, Prompt) and prompt.media[0].key == "key of p1"
    assert kinds == [HUNG]
    await pool.pool.close()


async def test_a_restored_source_begins_at_its_pending_prompts() -> None:
    pool = make_pool([Worker(), Worker()])
    source = PromptSource(MIXED, pool, seed=1, split_name="train")
    first = await asyncio.to_thread(asked, source, 5)
    source.restore(cursor=source.cursor, pending=[first[3].prompt_id, first[1].prompt_id])
    again = await asyncio.to_thread(asked, source, 4)
    assert [p.prompt_id for p in again[:2]] == [first[3].prompt_id, first[1].prompt_id]
    assert {p.prompt_id for p in again[2:]}.isdisjoint(p.prompt_id for p in first)
    await pool.pool.close()
