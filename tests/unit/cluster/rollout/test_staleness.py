"""The gate's formula, and the order that makes its bound hard."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.rollout.staleness import Admission, AgeLimit, OvertakingOrder, StalenessGate, StepOrder

SIZES = st.fixed_dictionaries(
    {"prompts_per_step": st.integers(1, 4), "max_staleness": st.integers(0, 3), "max_concurrent": st.integers(1, 20)}
)
TIMING = st.integers(0, 2**32)


def make_gate(**changes: int) -> StalenessGate:
    least = {"prompts_per_step": 4, "max_staleness": 0, "max_concurrent": 100, "total_steps": 1000}
    return StalenessGate(**{**least, **changes})


def start_all(gate: StalenessGate) -> list[Admission]:
    return [gate.start() for _ in range(max(0, gate.capacity))]


@pytest.mark.parametrize(("max_staleness", "expected"), [(0, 4), (1, 8), (3, 16)])
def test_a_new_run_admits_the_steps_within_the_bound(max_staleness: int, expected: int) -> None:
    assert make_gate(max_staleness=max_staleness).capacity == expected


def test_no_more_groups_run_at_once_than_max_concurrent() -> None:
    gate = make_gate(max_staleness=3, max_concurrent=5)
    first, *_ = start_all(gate)
    assert (len(gate.running), gate.capacity) == (5, 0)
    gate.accept(first)
    assert gate.capacity == 1


def test_an_accepted_group_keeps_its_slot_until_a_version_is_published_and_others_give_it_back_at_once() -> None:
    gate = make_gate()
    rejected, *others = start_all(gate)
    gate.reject(rejected)
    assert gate.capacity == 1
    for admission in (*others, gate.start()):
        gate.accept(admission)
    assert gate.capacity == 0
    gate.drop()
    assert gate.capacity == 1
    gate.accept(gate.start())
    gate.advance(1)
    assert gate.capacity == 4


def test_nothing_is_admitted_for_a_step_past_the_last() -> None:
    gate = make_gate(max_staleness=3, total_steps=2)
    assert gate.capacity == 2 * 4
    gate.resume(2)
    assert gate.capacity == 0


def test_after_a_resume_the_gate_admits_what_a_new_run_would() -> None:
    gate = make_gate(max_staleness=1)
    gate.resume(40)
    assert (gate.version, gate.capacity) == (40, make_gate(max_staleness=1).capacity)


async def test_two_waiters_never_share_one_slot() -> None:
    gate = make_gate()
    first, *_ = start_all(gate)

    async def start() -> Admission:
        await gate.wait_for_slot()
        return gate.start()

    waiters = [asyncio.create_task(start()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.reject(first)
    done, pending = await asyncio.wait(waiters, timeout=0.05)
    assert (len(done), len(pending), gate.capacity) == (1, 1, 0)
    pending.pop().cancel()


def test_an_overtaken_group_is_trained_when_it_comes() -> None:
    gate = make_gate(prompts_per_step=1, max_staleness=1)
    order: OvertakingOrder[int] = OvertakingOrder(gate)
    slow, *_ = start_all(gate)
    for step in (0, 1):
        fast = gate.running[1]
        gate.accept(fast)
        order.add(fast, fast.number)
        assert order.pop_step() == [fast.number]
        gate.advance(step + 1)
        start_all(gate)
    gate.accept(slow)
    order.add(slow, slow.number)
    assert order.remove(lambda number: False) == []
    assert (order.next_step, order.pop_step()) == (2, [slow.number])


def test_only_groups_that_may_hold_over_age_tokens_are_asked_whether_they_are_too_old() -> None:
    gate = make_gate(prompts_per_step=3, max_staleness=2)
    order: StepOrder[int] = StepOrder(gate)
    order.resume(5)
    for number, version in enumerate([2, 4, 2, 3]):
        order.add(Admission(version, number), number)
    asked: list[int] = []
    assert order.remove(lambda number: asked.append(number) or number == 0) == [0]
    assert set(asked) == {0, 2}
    assert order.pop_step() == [2, 3, 1]


def test_a_step_waits_for_no_one_when_only_finished_groups_are_late() -> None:
    gate = make_gate(prompts_per_step=1, max_staleness=1)
    order: StepOrder[int] = StepOrder(gate)
    order.resume(5)
    for number in range(3):
        order.add(Admission(3, number), number)
    assert [order.pop_step() for _ in range(4)] == [[0], [1], [2], []]


def test_a_group_is_too_old_once_its_newest_token_is_or_its_oldest_one_if_only_whole_groups_count() -> None:
    tokens = {3: 10, 5: 1}
    assert [AgeLimit(2).drops(tokens, step) for step in (5, 7, 8)] == [False, False, True]
    assert [AgeLimit(2, is_whole=True).drops(tokens, step) for step in (5, 6, 7)] == [False, True, True]


def is_ready(gate: StalenessGate, finished: list[Admission], next_step: int) -> bool:
    """The rule of the order in words: what the next step leaves must fit B a step into the steps after it."""
    size = gate.prompts_per_step
    left = sorted([*gate.running, *sorted(finished)[size:]])
    fits = all(next_step + 1 + i // size <= a.version + gate.max_staleness for i, a in enumerate(left))
    return len(finished) >= size and fits


@given(sizes=SIZES, timing=TIMING)
def test_a_step_is_popped_exactly_when_the_rule_lets_it(sizes: dict[str, int], timing: int) -> None:
    choose = random.Random(timing)
    gate = make_gate(**sizes)
    order: StepOrder[Admission] = StepOrder(gate)
    finished: list[Admission] = []
    for _ in range(60):
        for _ in range(choose.randint(0, max(0, gate.capacity))):
            gate.start()
        if gate.running:
            admission = choose.choice(gate.running[choose.randrange(len(gate.running)) :])  # young ones overtake
            gate.accept(admission)
            order.add(admission, admission)
            finished.append(admission)
        if choose.random() < 0.8:
            expected = sorted(finished)[: gate.prompts_per_step] if is_ready(gate, finished, order.next_step) else []
            step = order.pop_step()
            assert step == expected
            finished = [admission for admission in finished if admission not in step]
        if order.next_step > gate.version and choose.random() < 0.8:
            gate.advance(gate.version + 1)
    assert dict(gate.running_by_version) == Counter(admission.version for admission in gate.running)


def test_a_group_from_before_a_resume_is_due_before_one_that_is_started_after_it() -> None:
    gate = make_gate(prompts_per_step=1, max_staleness=1)
    order: StepOrder[str] = StepOrder(gate)
    gate.resume(5, num_finished=1, num_started=2)
    order.resume(5)
    order.add(Admission(4, number=1), "before")
    again = gate.start(0)
    assert again == Admission(5, number=0)
    gate.accept(again)
    order.add(again, "again")
    assert order.pop_step() == ["before"], "step 5 is the last one in which it is young enough"
    gate.advance(6)
    assert gate.start() == Admission(6, number=2), "the numbers of prompts that were handed out are taken"
    assert order.pop_step() == ["again"]


@given(sizes=SIZES, num_moves=st.integers(1, 120), timing=TIMING)
def test_after_a_kill_finished_groups_and_new_ones_are_neither_over_age_nor_in_each_others_way(
    sizes: dict[str, int], num_moves: int, timing: int
) -> None:
    choose = random.Random(timing)
    gate = make_gate(**sizes)
    finished, under_way, trained = live(gate, StepOrder(gate), choose, num_moves, sizes["max_concurrent"])
    resumed_at = gate.version + (trained > gate.version)  # a step may be written down whose weights were not pushed yet
    again = make_gate(**sizes)
    again.resume(resumed_at, num_finished=len(finished), num_started=len(finished) + under_way)
    order: StepOrder[Admission] = StepOrder(again)
    order.resume(resumed_at)
    numbers = choose.sample(range(len(finished) + under_way), len(finished) + under_way)
    for admission in finished:
        kept = Admission(admission.version, numbers.pop())
        order.add(kept, kept)
    while numbers and again.capacity > 0:
        again.start(numbers.pop())
    live(again, order, choose, 60, sizes["max_concurrent"])


def live(
    gate: StalenessGate, order: StepOrder[Admission], choose: random.Random, num_moves: int, max_concurrent: int
) -> tuple[list[Admission], int, int]:
    """Play so many moves of a run; returns the finished groups that no step trained, how many run, and the version."""
    ready: list[list[Admission]] = []
    waiting: list[Admission] = []
    trained = gate.version
    for _ in range(num_moves):
        start_all(gate)
        assert len(gate.running) <= max_concurrent
        while step := order.pop_step():
            assert all(trained + len(ready) - admission.version <= gate.max_staleness for admission in step)
            assert len(step) == gate.prompts_per_step
            ready.append(step)
        if ready and (trained == gate.version or not gate.running) and choose.random() < 0.7:
            waiting = [admission for admission in waiting if admission not in ready[0]]
            ready.pop(0)
            trained += 1
        elif trained > gate.version:
            gate.advance(trained)
        elif gate.running:
            admission = choose.choice(gate.running)
            if choose.random() < 0.2:
                gate.reject(admission)
            else:
                gate.accept(admission)
                order.add(admission, admission)
                waiting.append(admission)
        else:
            assert ready, "nothing runs and no step can be made: the run would wait for ever"
    return waiting, len(gate.running), trained
