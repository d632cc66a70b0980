"""Rows of skewed lengths: the longest answer is eight times as long as the mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

MEAN_NUMBERS, MOST_NUMBERS = 32, 256  # of an answer
NUM_ROWS, NUM_HELD_OUT = 2048, 16
SYSTEM = "You say digits."  # without it some templates add their own, and prompts of the sides differ in length


def write_chats(folder: Path, num_rows: int) -> Path:
    """Write chats for supervised fine-tuning; a space between two digits."""

    def chat(count: int, text: str) -> Mapping[str, object]:
        turns = {"system": SYSTEM, "user": _asked(count), "assistant": " ".join(text)}
        return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}

    return _write(folder, chat, num_rows)


def write_questions(folder: Path) -> Path:
    """Write questions for RL. The digits of an answer are a token each in the tiny models."""
    return _write(folder, lambda n, text: {"question": _asked(n), "answer": text, "solution": text}, NUM_ROWS)


def _write(folder: Path, row: Callable[[int, str], Mapping[str, object]], num_rows: int) -> Path:
    """The same rows every time; `row` takes the number of digits and the digits."""
    random = Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", num_rows), ("validation", NUM_HELD_OUT), ("test", NUM_HELD_OUT)):
        counts = [min(MOST_NUMBERS, 1 + int(random.expovariate(1 / MEAN_NUMBERS))) for _ in range(size)]
        counts[0] = MOST_NUMBERS
        lines = [json.dumps({"id": f"{split}-{n}", **row(c, _digits(c, random))}) for n, c in enumerate(counts)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _digits(count: int, random: Random) -> str:
    return "".join(str(random.randrange(10)) for _ in range(count))


def _asked(count: int) -> str:
    return f"Say {count} digits."
