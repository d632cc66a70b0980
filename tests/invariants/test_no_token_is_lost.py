"""However often and wherever a group is interrupted, it ends with the tokens that it would have had without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes import make_prompt
from hypothesis import given
from hypothesis import strategies as st
from interrupted import KnownSampler, content

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequest, InFlightRequests

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
PROMPT = make_prompt("0/0/s0")


def settings(lengths: list[int]) -> SamplingSettings:
    return SamplingSettings(len(lengths), 0.0, max_tokens=40, seed=0)


async def attempt(
    in_flight: InFlightRequest, lengths: list[int], chunk: int, dies_at: int | None, version: int, num_reports: int
) -> list[SampledSequence] | None:
    """One try, on an engine that dies before its step `dies_at`; of what it reports the first `num_reports` arrive."""
    attempt, reports = in_flight.next_attempt(), []

    async def before_step(step: int) -> None:
        if step == dies_at:
            raise WorkerDiedError("SIGKILL")

    def emit(chunks: list[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        if len(reports) < num_reports:
            reports.append(chunks)
            for new_chunk in chunks:
                in_flight.add(new_chunk)

    engine = KnownSampler(lengths, chunk, before_step, version)
    try:
        return await engine.sample(PROMPT, (), settings(lengths), attempt, emit)
    except WorkerDiedError:
        return None


@given(
    lengths=LENGTHS,
    chunk=st.integers(1, 12),
    deaths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6),
)
def test_interrupted_groups_equal_the_uninterrupted_one(
    lengths: list[int], chunk: int, deaths: list[tuple[int, int]]
) -> None:
    async def go() -> None:
        whole = await KnownSampler(lengths, chunk).sample(
            PROMPT, (), settings(lengths), Attempt("whole"), lambda chunks, siblings: None
        )
        in_flight_requests, group, version = InFlightRequests(chunk), None, 0
        with in_flight_requests.held(PROMPT, settings(lengths)) as in_flight:
            for version, (dies_at, num_reports) in enumerate(deaths):
                known = in_flight.num_tokens
                group = await attempt(in_flight, lengths, chunk, dies_at, version, num_reports)
                assert in_flight.num_tokens >= known
                if group is not None:
                    break
            else:
                version = len(deaths)
                group = await attempt(in_flight, lengths, chunk, None, version, 99)
        assert [content(s) for s in group] == [content(s) for s in whole]
        for sequence in group:
            versions = [span.version for span in sequence.weight_spans]
            assert versions == sorted(set(versions)) and versions[-1] <= version
        assert in_flight_requests.resumed[PROMPTS] == version
        assert in_flight_requests.resumed[TOKENS_KEPT] <= sum(lengths)

    asyncio.run(go())


@given(lengths=LENGTHS, chunk=st.integers(1, 12), dies_at=st.integers(0, 39))
def test_a_death_costs_less_than_one_chunk_of_each_response(lengths: list[int], chunk: int, dies_at: int) -> None:
    async def go() -> None:
        in_flight_requests = InFlightRequests(chunk)
        with in_flight_requests.held(PROMPT, settings(lengths)) as in_flight:
            if await attempt(in_flight, lengths, chunk, dies_at, 0, 99) is not None:
                return
            lost = [min(dies_at, n) - s.num_tokens for n, s in zip(lengths, in_flight.siblings, strict=True)]
            assert all(0 <= tokens < chunk for tokens in lost)
            in_flight.next_attempt()
            assert in_flight_requests.resumed[TOKENS_KEPT] + sum(lost) == sum(min(dies_at, n) for n in lengths)
            assert sum(lost) <= in_flight_requests.resumed[TOKENS_LOST]

    asyncio.run(go())


@pytest.mark.parametrize("chunk", [1, 3])
def test_siblings_that_run_side_by_side_are_reported_together(chunk: int) -> None:
    reports: list[list[TokenChunk]] = []
    engine = KnownSampler([12] * 8, chunk)
    asyncio.run(
        engine.sample(
            PROMPT, (), settings([12] * 8), Attempt("a"), lambda new_chunk, siblings: reports.append(new_chunk)
        )
    )
    assert len(reports) == 11 // chunk
    assert all({new_chunk.sibling for new_chunk in report} == set(range(8)) for report in reports)
