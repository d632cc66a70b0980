"""What a side of a comparison reports, and the clock of steps of a transformers Trainer; needs no package of Mobula."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = "peers: "  # begins the one line that the harness reads


@dataclass
class Run:
    """Totals of each optimizer step of one run, in order."""

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # responses or answers: two of a pair
    tokens: list[int] = field(default_factory=list)  # of these responses or rows
    reached_s: float | None = None  # seconds of training until held-out 0.9; None: not reached or not asked

    def print(self) -> None:
        print(MARK + json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True)
class HeldOut:
    """Training ends with the first weights of at least this accuracy."""

    accuracy: float
    interval: int  # steps between two evaluations
    measure: Callable[[Any], float]  # the model -> its accuracy


class StepClock:
    """Callbacks of a transformers Trainer that fill a Run; `counted` is called by whatever sees the samples."""

    def __init__(self, held_out: HeldOut | None = None) -> None:
        self.run = Run()
        self._held_out = held_out
        self._samples = self._tokens = 0
        self._since = 0.0

    def counted(self, samples: int, tokens: int) -> None:
        self._samples += samples
        self._tokens += tokens

    def counted_labels(self, labels: Any) -> None:
        """Of packed rows [B, T], -100 outside of answers: every answer is a sample, all its labels are its tokens."""
        trained = labels != -100
        starts = trained.clone()
        starts[:, 1:] &= ~trained[:, :-1]
        self.counted(int(starts.sum()), int(trained.sum()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # every other event of a Trainer
            return lambda args, state, control, **kwargs: control
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._since = time.perf_counter()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        self.run.seconds.append(now - self._since)
        self.run.samples.append(self._samples)
        self.run.tokens.append(self._tokens)
        self._samples = self._tokens = 0
        held_out = self._held_out
        if held_out is not None and len(self.run.seconds) % held_out.interval == 0:
            accuracy = held_out.measure(kwargs["model"])
            print(f"held-out accuracy {accuracy:.3f} after {len(self.run.seconds)} steps", flush=True)
            if accuracy >= held_out.accuracy:
                self.run.reached_s = sum(self.run.seconds)
                control.should_training_stop = True
        self._since = time.perf_counter()  # an evaluation is in no step
        return control


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL split."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
