"""Chat rows of skewed lengths: the longest answer is eight times as long as the mean."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

MEAN_NUMBERS, MOST_NUMBERS = 32, 256  # of an answer
SIZES = {"train": 2048, "validation": 16}


def write_skewed(folder: Path) -> Path:
    """Write both splits unless they are there; the same rows every time."""
    random = Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        counts = [min(MOST_NUMBERS, 1 + int(random.expovariate(1 / MEAN_NUMBERS))) for _ in range(size)]
        counts[0] = MOST_NUMBERS
        lines = [json.dumps({"messages": _messages(count, random)}) for count in counts]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _messages(count: int, random: Random) -> list[dict[str, str]]:
    answer = " ".join(str(random.randrange(10)) for _ in range(count))
    return [{"role": "user", "content": f"Say {count} digits."}, {"role": "assistant", "content": answer}]
