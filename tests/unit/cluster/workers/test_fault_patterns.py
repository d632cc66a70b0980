"""What deaths have in common is found, and nothing is found where they have nothing in common."""

from __future__ import annotations

import pytest

from mobula.cluster.workers.fault_patterns import MAX_PUSHES, AfterPushes, Death, FaultPatterns, OnePrompt

CAUSE = "RuntimeError|model.py:7"
OTHER = "ValueError|model.py:9"
POISON = "0/7/s7"
MANY = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 163))])


def runs_until_found(patterns: FaultPatterns, in_flight: frozenset[str], *, killers: frozenset[str]) -> list[object]:
    """Engines that die of `killers`: what is found at each death while prompts run as the patterns allow."""
    found: list[object] = []
    finding = None
    while finding is None and len(found) < 20:
        limit = patterns.max_suspects_in_flight
        suspects = [prompt_id for prompt_id in in_flight if patterns.is_suspect(prompt_id)]
        suspects.sort(key=lambda prompt_id: prompt_id not in killers)  # never alone before the patterns single it out
        batch = frozenset(suspects[:limit]) if suspects else in_flight
        if batch & killers:
            finding = patterns.died(Death(CAUSE, 0, batch))
            found.append(finding)
        else:
            for prompt_id in batch:
                patterns.finished(prompt_id)
            in_flight -= batch
    return found


@pytest.mark.parametrize(("num_beside", "num_deaths"), [(0, 3), (1, 3), (3, 3), (7, 4), (63, 4)])
def test_a_prompt_that_ends_every_engine_is_found_within_four_deaths(num_beside: int, num_deaths: int) -> None:
    in_flight = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 100 + num_beside))])
    found = runs_until_found(FaultPatterns(), in_flight, killers=frozenset([POISON]))
    assert found == [None] * (num_deaths - 1) + [OnePrompt(POISON, num_deaths)]


def test_two_prompts_that_end_engines_are_found_one_after_the_other() -> None:
    patterns, killers = FaultPatterns(), frozenset([POISON, "0/150/s150"])
    *_, first = runs_until_found(patterns, MANY, killers=killers)
    *_, second = runs_until_found(patterns, MANY - {first.prompt_id}, killers=killers - {first.prompt_id})
    assert {first.prompt_id, second.prompt_id} == killers


def test_a_prompt_is_not_found_guilty_beside_another_one() -> None:
    patterns = FaultPatterns()
    for _ in range(5):
        assert patterns.died(Death(CAUSE, 0, frozenset([POISON, "0/8/s8"]))) is None
    assert patterns.run_alone


def test_deaths_without_a_prompt_in_common_find_none() -> None:
    patterns = FaultPatterns()
    for n in range(10):
        assert patterns.died(Death(CAUSE, 0, frozenset([f"0/{n}/s"]))) is None
    assert patterns.max_suspects_in_flight is None


def test_suspects_that_all_finish_are_cleared() -> None:
    patterns = FaultPatterns()
    both = frozenset([POISON, "0/8/s8"])
    for _ in range(2):
        patterns.died(Death(CAUSE, 0, both))
    assert all(patterns.is_suspect(prompt_id) for prompt_id in both)
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.max_suspects_in_flight is None
    assert patterns.died(Death(CAUSE, 0, both)) is None
    assert not patterns.is_suspect(POISON), "one death makes no suspects"


def test_what_is_ended_from_outside_is_no_pattern_and_breaks_none() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    for _ in range(20):
        assert patterns.died(Death(None, 1, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) is None
    assert patterns.died(Death(None, 0, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) == OnePrompt(POISON, 3)


def test_another_cause_begins_another_series() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    causes = [CAUSE, CAUSE, OTHER, CAUSE, CAUSE]
    assert [patterns.died(Death(cause, 1, alone)) for cause in causes] == [None] * 5


def test_engines_that_do_not_outlive_a_push_are_found_at_the_third_one() -> None:
    patterns = FaultPatterns()
    deaths = [Death(CAUSE, 1, frozenset([f"0/{n}/s"])) for n in range(3)]
    assert [patterns.died(death) for death in deaths] == [None, None, AfterPushes(3)]


def test_a_death_between_pushes_belongs_to_the_series() -> None:
    """A prompt that goes on from its known tokens may meet what a push makes others meet."""
    patterns = FaultPatterns()
    deaths = [Death(CAUSE, num, frozenset([f"0/{n}/s"])) for n, num in enumerate([MAX_PUSHES + 1, 1, 0, 1])]
    assert [patterns.died(death) for death in deaths] == [None, None, None, AfterPushes(3)]


def test_engines_that_outlive_some_pushes_are_not_found_nor_those_that_saw_none() -> None:
    patterns = FaultPatterns()
    pushes = [1, 1, MAX_PUSHES + 1, 1, 0, MAX_PUSHES + 1, 0, 0, 0, 1]
    assert [patterns.died(Death(CAUSE, num, frozenset())) for num in pushes] == [None] * len(pushes)


def test_prompts_in_common_that_are_cleared_leave_the_push() -> None:
    patterns, both = FaultPatterns(), frozenset([POISON, "0/8/s8"])
    for _ in range(3):
        assert patterns.died(Death(CAUSE, 1, both)) is None, "one of them may be the cause"
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.died(Death(CAUSE, 1, frozenset(["0/9/s9"]))) == AfterPushes(4)


def test_a_common_prompt_is_looked_at_before_a_common_push() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    assert [patterns.died(Death(CAUSE, 1, alone)) for _ in range(3)] == [None, None, OnePrompt(POISON, 3)]
