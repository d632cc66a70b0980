"""The replay client speaks to the real buffer, and each call has the deadline that it needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import make_scored
from handles import LocalHandle, never

from cluster.errors import DeadlineError
from cluster.replay.buffer import ReplayBuffer
from cluster.replay.client import ReplayClient, ReplayDeadlines
from cluster.replay.ledger import Holdings


def client(role: object, call_s: float = 5, *, is_journalled: bool = True) -> ReplayClient:
    deadlines = ReplayDeadlines(call_s, call_s, reserve_s=call_s, sign_s=call_s, stop_s=call_s)
    return ReplayClient(LocalHandle(role), deadlines, is_journalled=is_journalled)


async def test_groups_go_in_and_come_out_in_order_and_are_forgotten_when_released() -> None:
    buffer = ReplayBuffer()
    replay = client(buffer)
    for n in range(3):
        await replay.make_ready([make_scored(f"0/{n}/s{n}")], [f"0/{n}/s{n}"])
    await replay.reject("0/3/s3", "uniform")
    for _ in range(2):  # what is leased stays so
        await replay.lease(["0/0/s0", "0/1/s1"])
    stats = await buffer.stats()
    assert (stats.num_ready, stats.num_taken, stats.num_rejected) == (1, 2, {"uniform": 1})
    assert [group.summary.group_id for group in await buffer.take(1)] == ["0/2/s2"]
    await replay.end_leases(["0/0/s0", "0/1/s1", "0/2/s2"])
    assert (await buffer.stats()).num_taken == 0


@pytest.mark.parametrize("is_journalled", [False, True])
async def test_a_buffer_that_keeps_no_journal_holds_no_references(is_journalled: bool) -> None:
    buffer = ReplayBuffer()
    replay = client(buffer, is_journalled=is_journalled)
    groups = {group_id: make_scored(group_id) for group_id in ("0/0/s0", "0/1/s1", "0/2/s2")}
    await replay.reserve(groups["0/0/s0"])
    await replay.reserve_all([groups["0/1/s1"]])
    await replay.make_ready([groups["0/2/s2"]], list(groups))
    taken = await buffer.take(3)
    assert [group.summary for group in taken] == [group.summary for group in groups.values()]
    assert [group.group is not None for group in taken] == [is_journalled] * 3
    replacement = ReplayBuffer()
    await client(replacement, is_journalled=is_journalled).restore(Holdings(ready=tuple(groups.values())))
    assert [group.group is not None for group in await replacement.take(3)] == [is_journalled] * 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.make_ready([make_scored("0/0/s0")], ["0/0/s0"]), "replay/0 to store 1 groups, the first 0/0/s0"),
        (lambda c: c.reject("0/0/s0", "stale"), "replay/0 to count rejected group 0/0/s0"),
        (lambda c: c.end_leases(["0/0/s0"]), "replay/0 to release 1 groups"),
        (lambda c: c.reserve(make_scored("0/0/s0")), r"make room for group 0/0/s0 \(timeouts.backpressure_s\)"),
        (lambda c: c.commit(4, []), "replay/0 to write down what makes version 4"),
        (lambda c: c.resume(4, ["0/0/s0"]), "replay/0 to go on from version 4"),
        (lambda c: c.abort([make_scored("0/0/s0")]), "replay/0 to take 1 groups back"),
        (lambda c: c.restore(Holdings()), "replay/0 to take over the groups of the buffer before it"),
        (lambda c: c.start(), r"replay/0 to start \(timeouts.start_s\)"),
        (lambda c: c.is_alive(), "replay/0 to answer that it is alive"),
        (lambda c: c.forget(4), "replay/0 to forget what led to version 4"),
    ],
)
async def test_a_buffer_that_does_not_answer_is_named_with_what_it_was_asked(call, said: str) -> None:
    calls = ("make_ready", "reject", "end_leases", "reserve", "commit", "resume", "forget", "abort", "restore", "ping")
    silent = SimpleNamespace(**dict.fromkeys((*calls, "is_alive"), never))
    with pytest.raises(DeadlineError, match=said):
        await call(client(silent, call_s=0.05))
