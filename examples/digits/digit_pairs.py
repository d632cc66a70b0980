"""pair_row: a question with a right and a wrong answer, as offline jobs read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypedDict


class PairRow(TypedDict):
    """One line of a split: the row of supervised fine-tuning, reward models and DPO in one."""

    id: str
    messages: list[dict[str, str]]  # the user's
    images: list[str]  # paths relative to the file
    solution: str
    chosen: str  # the solution
    rejected: str


def pair_row(row: Mapping[str, Any], answers: Sequence[int], random: Random) -> PairRow:
    """`row` of a question whose answer is one of `answers`, with another one of them to reject."""
    wrong = random.choice([answer for answer in answers if str(answer) != row["answer"]])
    images = row["image"]
    return PairRow(
        id=row["id"],
        messages=[{"role": "user", "content": row["question"]}],
        images=[images] if isinstance(images, str) else list(images),
        solution=row["solution"],
        chosen=row["solution"],
        rejected=rf"\boxed{{{wrong}}}",
    )
