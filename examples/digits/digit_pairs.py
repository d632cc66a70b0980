"""Questions with a right and a wrong answer, or with one of them and its label, as offline jobs read them."""

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


class LabelledRow(TypedDict):
    """One line of a split for KTO: a question with an answer, right or wrong."""

    id: str
    messages: list[dict[str, str]]  # the user's, then the assistant's
    images: list[str]
    label: bool


def labelled_row(row: Mapping[str, Any], answers: Sequence[int], random: Random) -> LabelledRow:
    """As `pair_row`, with one of the two answers: half of the rows have the right one."""
    pair, label = pair_row(row, answers, random), random.random() < 0.5
    answer = {"role": "assistant", "content": pair["chosen" if label else "rejected"]}
    return LabelledRow(id=pair["id"], messages=[*pair["messages"], answer], images=pair["images"], label=label)
