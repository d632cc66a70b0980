"""Benchmarks beside other trainers: sides take turns, ratios go round by round, results survive their file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import peers
from benchmarks.harness.apart import apart
from benchmarks.peers.__main__ import left
from benchmarks.peers.rounds import MIB, Round, Side, counted, ratios, run_once, take_turns
from benchmarks.peers.skewed import write_questions
from benchmarks.peers.step_clock import HeldOut, Run, StepClock, rows_of
from benchmarks.peers.table import Result, markdown, read, write
from benchmarks.peers.works import WORKS

SIDES = [Side("ours", lambda folder: ()), Side("theirs", lambda folder: ())]


def test_sides_take_turns():
    order = []

    def measure(side: Side) -> Round:
        order.append(side.name)
        return Round(64, 512, 1, float(len(order)), 1.0)

    measured = take_turns(SIDES, 3, measure)

    assert order == ["ours", "theirs"] * 3
    assert [r.seconds for r in measured["theirs"]] == [2.0, 4.0, 6.0]


def test_a_ratio_is_of_the_two_runs_of_a_round():
    ours = [Round(100, 900, 1, 1.0, 1.0), Round(100, 900, 1, 4.0, 1.0)]
    theirs = [Round(100, 600, 1, 2.0, 1.0), Round(100, 600, 1, 8.0, 1.0)]

    assert ratios(ours, theirs, "samples") == [2.0, 2.0]
    assert ratios(ours, theirs, "tokens") == [3.0, 3.0]


def test_first_and_last_steps_do_not_count():
    run = Run(seconds=[9.0, 1.0, 2.0, 9.0], samples=[8, 8, 8, 8], tokens=[80, 81, 82, 83], reached_s=5.0)

    assert counted(run, 1, 1, 7.0) == Round(16, 163, 2, 3.0, 7.0, 5.0)
    with pytest.raises(ValueError, match="ask more"):
        counted(run, 3, 1, 7.0)


def test_a_side_runs_by_itself_and_its_memory_is_watched():
    code = (
        "import time; from benchmarks.peers.step_clock import Run; held = bytearray(64 * 2**20); time.sleep(1.5); "
        "Run([1.0, 2.0, 3.0], [4, 5, 6], [40, 50, 60]).print()"
    )

    measured = run_once(Side("one", lambda folder: (sys.executable, "-c", code)), 1)

    assert (measured.samples, measured.tokens, measured.steps, measured.seconds) == (5, 50, 1, 2.0)
    assert 64 < measured.peak_mib < 64 + 200_000_000 / MIB


def test_a_side_that_fails_says_why():
    with pytest.raises(RuntimeError, match="(?s)broken ended with 3 and 0 reports.*no memory"):
        run_once(Side("broken", lambda folder: (sys.executable, "-c", "print('no memory'); raise SystemExit(3)")), 0)


def test_the_clock_of_a_trainer_counts_each_step_by_itself():
    clock = StepClock()

    clock.on_train_begin(None, None, None)
    for samples in (3, 4):
        clock.counted(samples, 10 * samples)
        clock.on_step_end(None, None, None)
    clock.on_log(None, None, None)

    assert (clock.run.samples, clock.run.tokens, len(clock.run.seconds)) == ([3, 4], [30, 40], 2)


def test_training_ends_with_the_first_weights_of_the_accuracy_and_evaluations_are_in_no_step():
    accuracies = {2: 0.5, 4: 0.93}
    clock = StepClock(HeldOut(0.9, 2, lambda model: time.sleep(0.2) or accuracies[len(clock.run.seconds)]))
    control = SimpleNamespace(should_training_stop=False)

    clock.on_train_begin(None, None, control)
    for _ in range(4):
        assert not control.should_training_stop
        clock.on_step_end(None, None, control, model=None)

    assert control.should_training_stop and clock.run.reached_s == sum(clock.run.seconds) < 0.1


def test_works_have_a_side_of_the_peer_and_rows_of_skewed_lengths(tmp_path: Path):
    folder = Path(peers.__file__).parent
    assert {work.peer for work in WORKS.values()} == {path.stem for path in folder.glob("*.txt")}

    rows = rows_of(write_questions(tmp_path) / "train.jsonl")
    lengths = [len(row["answer"]) for row in rows]
    assert max(lengths) == 256 and 28 < sum(lengths) / len(lengths) < 36
    assert all(row["question"] == f"Say {len(row['answer'])} digits." for row in rows)


def test_works_measured_since_a_time_are_left_out():
    done = Result("digits", "2026-11-27T17:05:00+00:00", "a CPU", {}, {}, "", "", 0.5)

    assert left(["digits", "sums"], {"digits": done}, since="2026-11-27T17:00") == ["sums"]
    assert left(["digits", "sums"], {"digits": done}, since="") == ["digits", "sums"]


def test_results_are_read_as_they_were_written_and_have_a_row_a_side(tmp_path: Path):
    rounds = {"ours": [Round(64, 512, 1, 1.0, 100.0, 40.0)], "theirs": [Round(64, 512, 1, 2.0, 50.0)]}
    result = Result("digits", "2026-11-27", "a CPU", rounds, {"ours": 1.5}, "prompts", "lengths", 0.5)

    write(tmp_path / "peers.json", {"digits": result})

    known = read(tmp_path / "peers.json")
    assert known == {"digits": result} and os.listdir(tmp_path) == ["peers.json"]
    assert markdown(known)[2:4] == [
        "| `digits` | ours | 64.00 | 512 | 100 | 40 (1 of 1 runs) | 2.00 (2.00 to 2.00) | 1.5 | yes |",
        "| `digits` | theirs | 32.00 | 256 | 50 |  |  |  |  |",
    ]


def meet(own: Path, other: Path) -> Callable[[int], int]:
    """Builds a worker once the other process builds one too, as members of a process group do."""
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    return abs


@pytest.mark.timeout(120)
def test_workers_that_wait_for_each_other_are_built(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with apart(meet, one, two, env={}) as first, apart(meet, two, one, env={}) as second:
        assert (first.ask(-3), second.ask(-4), first.ask(5)) == (3, 4, 5)
