"""Work: the sides of a comparison, the target ratios, and the equal and unequal settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.rounds import Side

ENVIRONMENTS = Path(".venv-peers")
NUM_WARMUP = 5  # steps of every run that are not counted
LEARNING_RATE = "1e-6"  # so small that lengths stay as they are
STEADY = (
    f"learner.learning_rate={LEARNING_RATE}",
    "learner.warmup_steps=0",
    "learner.schedule=constant",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
)
OURS, OVERLAPPED, SYNCHRONOUS = "mobula", "mobula, overlapped", "mobula, synchronous"
IN_PAIRS = "two engines of one thread and one learner of two, in turns"
IN_TURNS = "one engine and one learner of two threads each, in turns"
PAIRS = (
    "resources=laptop",
    "learner=single",
    "resources.learner.num_workers=1",
    "resources.learner.num_threads=2",
    "resources.learner.bind_cores=false",
)
TURNS = ("resources=laptop_in_turns", "learner=single")


@dataclass(frozen=True)
class Work:
    """`sides` makes the model and the data if they are missing; `targets` has the ratio of each of our sides."""

    name: str
    peer: str  # the environment
    num_steps: int  # counted
    sides: Callable[[int], Sequence[Side]]  # of so many steps; the peer is the last
    targets: Mapping[str, float]
    equal: str
    unequal: str
    unit: str = "samples"  # whose number a second is compared; `tokens` where the sides draw other rows


def mobula_side(
    name: str, command: str, words: Sequence[str], num_steps: int, *, num_ahead: int = 0, accuracy: float = 0.0
) -> Side:
    """A Mobula command; `accuracy` is the held-out accuracy whose time is reported, 0 for none."""
    steps = num_steps + NUM_WARMUP + 2 * num_ahead + 1
    start = (sys.executable, "-m", "benchmarks.peers.mobula_job", command, str(accuracy))
    return Side(name, lambda folder: (*start, str(folder), *words, f"num_steps={steps}"), 0, num_ahead)


def peer_side(name: str, peer: str, script: str, asked: Mapping[str, object]) -> Side:
    """A script of `scripts` in the peer's environment; it writes below the folder that it is given."""
    words = (str(ENVIRONMENTS / peer / "bin" / "python"), "-m", f"benchmarks.peers.scripts.{script}")
    options = tuple(f"--{key}={value}" for key, value in asked.items())
    return Side(name, lambda folder: (*words, *options, f"--output={folder / 'out'}"))
