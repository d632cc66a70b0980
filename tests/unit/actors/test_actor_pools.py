"""Pools of processors and of reference scorers: order, shares, media by reference, losses repaired or named."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import AT_ONCE, FakeHosts, LocalHandle, make_scored, never, settle
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from benchmarks.reference_quantisation import num_weight_bytes
from mobula.actors.datasets.prompts import InDriver, PromptSource, fixed_prompts
from mobula.actors.datasets.rows import Row, Split
from mobula.actors.processors.pool import DIED, HUNG, MAX_LOSSES, ProcessorPool
from mobula.actors.processors.worker import CallMedia, Made, ProcessorWorker
from mobula.actors.reference.pool import DIED as SCORER_DIED
from mobula.actors.reference.pool import HUNG as SCORER_HUNG
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.actors.reference.scorer import ReferenceScorer, quantise
from mobula.cluster.errors import DeadlineError, MediaError, ScoringError, WorkerDiedError
from mobula.cluster.records.media import MediaKeeper, MediaSpan, MediaStore, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

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
    **more: Any,
) -> ProcessorPool:
    least = {"start_s": 5, "alive_s": 0.05, "timeout_s": 5, "object_s": 5, "on_lost": lambda kind: None}
    return ProcessorPool(
        [LocalHandle(worker) for worker in workers],
        store or MediaStore(lambda value: value, 1 << 20),
        lambda row: len(_names(row)),
        hosts=FakeHosts(lambda index: LocalHandle(start(index)), booked=len(workers)),
        restarts=AT_ONCE,
        **least | more,
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


FOLDER = Path("run/reference")


class FakeScorer:
    """Scores each token with the negative length of the group's id."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.scored: list[list[str]] = []

    def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        assert self.loaded, "a scorer is asked only once it has its policy"
        self.scored.append([group.summary.group_id for group in groups])
        return [expected(group) for group in groups]

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        return self.score([group])[0]

    def ping(self) -> bool:
        return True


def expected(group: ScoredGroup) -> list[np.ndarray]:
    """One array a trajectory."""
    value = -float(len(group.summary.group_id))
    return [np.full(trajectory.num_steps, value) for trajectory in group.group.trajectories]


def no_scorer(index: int) -> Any:
    raise AssertionError(f"scorer {index} was replaced")


def pool(scorers: Sequence[object], start: Callable[[int], Any] = no_scorer, **more: Any) -> ReferencePool:
    least = {"alive_s": 0.05, "timeout_s": 5, "max_attempts": 1, "on_lost": lambda kind: None}
    return ReferencePool(
        [LocalHandle(scorer) for scorer in scorers],
        FOLDER,
        hosts=FakeHosts(lambda index: LocalHandle(start(index)), booked=len(scorers)),
        restarts=AT_ONCE,
        **{"on_retry": lambda kind: None, **least, **more},
    )


@pytest.mark.parametrize("num_scorers", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 7])
async def test_every_group_gets_one_array_a_trajectory_in_order(num_scorers: int, num_groups: int) -> None:
    scorers = [FakeScorer() for _ in range(num_scorers)]
    groups = [make_scored(f"0/{n}/" + "s" * (n + 1)) for n in range(num_groups)]
    scored = await pool(scorers).score(groups)
    assert [g.summary.group_id for g in scored] == [g.summary.group_id for g in groups]
    for group in scored:
        found = await group.reference_logprobs.future()
        assert len(found) == len(group.group.trajectories)
        for ours, theirs in zip(found, expected(group), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    shares = [len(share) for scorer in scorers for share in scorer.scored]
    assert sum(shares) == num_groups
    assert max(shares) - min(shares) <= 1


async def test_the_frozen_policy_is_loaded_once_by_every_scorer() -> None:
    scorers = [FakeScorer(), FakeScorer()]
    reference = pool(scorers)
    for _ in range(3):
        await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert [scorer.loaded for scorer in scorers] == [[FOLDER], [FOLDER]]


@pytest.mark.parametrize(
    ("method", "message"),
    [("score_one", r"waited 0\.05 s for reference/0 to score 1 groups"), ("load", "reference/0 to load run/reference")],
)
async def test_a_scorer_that_does_not_answer_is_named(method: str, message: str) -> None:
    silent = type("Silent", (FakeScorer,), {method: staticmethod(never), "ping": staticmethod(never)})
    with pytest.raises(DeadlineError, match=message):
        await pool([silent()], timeout_s=0.05).score([make_scored("0/0/s0")])


class Dying(FakeScorer):
    """Its process ends whenever it is asked."""

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        raise WorkerDiedError("its process ended")


class Newcomers:
    """Scorers that are made while the run goes on."""

    def __init__(self) -> None:
        self.scorers: list[FakeScorer] = []

    def start(self, index: int) -> FakeScorer:
        self.scorers.append(FakeScorer())
        return self.scorers[-1]


async def test_a_lost_scorer_is_replaced_and_its_groups_are_scored_by_another() -> None:
    newcomers, healthy, restarts, retries = Newcomers(), FakeScorer(), [], []
    reference = pool(
        [Dying(), healthy], start=newcomers.start, max_attempts=2, on_lost=restarts.append, on_retry=retries.append
    )
    groups = [make_scored(f"0/{n}/s{n}") for n in range(5)]
    scored = await reference.score(groups)
    assert [group.summary.group_id for group in scored] == [group.summary.group_id for group in groups]
    for group in scored:
        for ours, theirs in zip(await group.reference_logprobs.future(), expected(group), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert reference.losses == {SCORER_DIED: 1, SCORER_HUNG: 0}
    assert (restarts, retries) == ([SCORER_DIED], ["WorkerDiedError"])
    await settle()
    assert [worker.num_restarts for worker in reference.pool.status()] == [1, 0]
    assert newcomers.scorers[0].loaded == [FOLDER], "it has the frozen policy before it is given work"


class LosesReplies(FakeScorer):
    """The first `num` replies are lost, and it is free again."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self._num = num

    async def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        logprobs = super().score_one(group)
        return await never() if len(self.scored) <= self._num else logprobs


async def test_a_scorer_that_loses_a_reply_is_not_replaced_and_its_groups_are_scored_again() -> None:
    forgetful, retries = LosesReplies(1), []
    reference = pool([forgetful], timeout_s=0.05, max_attempts=2, on_retry=retries.append)
    await reference.score([make_scored("0/0/s0")])
    assert (forgetful.loaded, forgetful.scored) == ([FOLDER], [["0/0/s0"]] * 2)
    assert reference.losses == {SCORER_DIED: 0, SCORER_HUNG: 0}
    assert retries == ["LostReplyError"]


async def test_groups_that_kill_every_scorer_end_in_an_error_not_in_a_loop() -> None:
    reference = pool([Dying()], start=lambda index: Dying(), max_attempts=3)
    with pytest.raises(WorkerDiedError, match="its process ended"):
        await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert reference.losses[SCORER_DIED] == 3


async def test_a_scorer_that_cannot_get_at_its_groups_is_not_replaced() -> None:
    class Starved(FakeScorer):
        def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
            raise ScoringError("waited 60 s for trajectory groups")

    reference = pool([Starved()], max_attempts=3)
    with pytest.raises(ScoringError, match="trajectory groups"):
        await reference.score([make_scored("0/0/s0")])
    assert reference.losses == {SCORER_DIED: 0, SCORER_HUNG: 0}


async def test_the_shares_follow_the_number_of_scorers() -> None:
    newcomers, first = Newcomers(), FakeScorer()
    reference = pool([first], start=newcomers.start)
    groups = [make_scored(f"0/{n}/s{n}") for n in range(4)]
    await reference.score(groups)
    await reference.pool.scale(2)
    await settle()
    assert newcomers.scorers[0].loaded == [FOLDER]
    await reference.score(groups)
    await reference.pool.scale(1)
    await settle()
    await reference.score(groups)
    assert [len(share) for share in first.scored] == [4, 2, 4]
    assert [len(share) for share in newcomers.scorers[0].scored] == [2]
    assert newcomers.scorers[0].loaded == [FOLDER]


async def test_a_scorer_that_joins_before_there_is_a_frozen_policy_loads_it_when_it_is_asked() -> None:
    newcomers = Newcomers()
    reference = pool([FakeScorer()], start=newcomers.start)
    await reference.pool.scale(2)
    await settle()
    assert newcomers.scorers[0].loaded == []
    await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert (newcomers.scorers[0].loaded, len(newcomers.scorers[0].scored)) == ([FOLDER], 1)


async def test_without_a_reference_groups_pass_as_they_are() -> None:
    groups = [make_scored("0/0/s0")]
    assert await NullReference().score(groups) == groups
    assert groups[0].reference_logprobs is None


KL = ("algorithm.kl.coef=0.01",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchao")
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=False)


def test_a_scorer_in_8_bits_is_close_to_one_in_full_precision_and_smaller(folder: Path) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 2)  # none, one and two images
    found, sizes = {}, {}
    for kind in ("none", "int8"):
        scorer = ReferenceScorer(tiny_config(folder, *KL, f"reference.scorers.quantisation={kind}"), ())
        scorer.load(folder)
        found[kind] = np.concatenate([row for rows in scorer.score(groups) for row in rows])
        sizes[kind] = num_weight_bytes(scorer._policy)
    error = np.abs(found["int8"] - found["none"])
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.3
    assert sizes["int8"] < 0.8 * sizes["none"], "the vocabulary's two matrices, which stay, are much of a tiny model"


def test_rows_are_rounded_to_127_steps_of_their_largest_value(folder: Path) -> None:
    """The definition: w is within half a step of what it was, the step being max |w| / 127 of its row (symmetric)."""
    model, plain = (load_policy_model(tiny_config(folder).policy, torch.float32) for _ in range(2))
    quantise(model, "int8")
    weights = dict(plain.named_parameters())
    num_rounded = 0
    for name, parameter in model.named_parameters():
        if type(parameter.data) is torch.Tensor:
            torch.testing.assert_close(parameter, weights[name], atol=0, rtol=0)
            continue
        num_rounded += 1
        step = weights[name].abs().amax(dim=1, keepdim=True) / 127
        assert ((parameter.dequantize() - weights[name]).abs() <= 0.51 * step + 1e-9).all(), name
    assert num_rounded >= 10
    assert type(model.get_output_embeddings().weight.data) is torch.Tensor
