"""Digit list: the share of the images, and of their sum, that an answer to a `digit_list` question states rightly."""

from __future__ import annotations

import re
from functools import lru_cache

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import given_references

_SENTENCE_ENDS = re.compile(r"(?<=\.)\s+|\s*\n\s*")
_NAMED = re.compile(r"Picture ([A-Z]) is the digit ([0-9])\.")
_SUM = re.compile(r"The sum is ([0-9]+)\.")


def digit_list(request: RewardRequest) -> Score:
    """Partial credit for "Picture A is the digit 7. Picture B is the digit 3. The sum is 10."

    With N images an answer makes N + 1 statements, each worth 1 / (N + 1). The statement on image k counts if it is
    the k-th sentence and equals the reference's. The sum counts if it is right, the last sentence, and the only one
    that states a sum. Each further sentence (an image beyond the N-th, a second sum, any other text) takes one
    statement's worth away, down to 0, so that listing several guesses never beats one guess. The value is 1 only for
    the reference itself, white space aside. The breakdown has the share of right digits, the sum and the number of
    further sentences.

    Raises:
        RewardError: no reference has this form.
    """
    truth = _truth(given_references(request.references))
    num_images = len(truth) - 1
    sentences = _sentences(request.response.text)
    named = [sentence for sentence in sentences if _NAMED.fullmatch(sentence)]
    sums = [sentence for sentence in sentences if _SUM.fullmatch(sentence)]
    num_right = sum(ours == theirs for ours, theirs in zip(sentences, truth[:-1], strict=False))
    is_sum_right = len(sums) == 1 and sentences[-1] == truth[-1]
    num_other = len(sentences) - len(named) - len(sums)
    num_extra = max(0, len(named) - num_images) + max(0, len(sums) - 1) + num_other
    value = max(0, num_right + is_sum_right - num_extra) / len(truth)
    parts = {"digits": num_right / num_images, "sum": float(is_sum_right), "extra": float(num_extra)}
    return Score(value, _flaw(num_images - num_right, num_images, is_sum_right, num_extra), parts)


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_ENDS.split(text.strip()) if sentence]


@lru_cache(maxsize=4096)  # a group's responses share their references
def _truth(references: tuple[str, ...]) -> tuple[str, ...]:
    """The sentences of the reference that names at least one image and ends with the sum."""
    for reference in references:
        *images, last = _sentences(reference)
        if images and all(map(_NAMED.fullmatch, images)) and _SUM.fullmatch(last):
            return (*images, last)
    raise RewardError(f"no reference names digits and their sum: {', '.join(map(repr, references))[:200]}")


def _flaw(num_wrong: int, num_images: int, is_sum_right: bool, num_extra: int) -> str:
    """The reason of an answer that is not wholly right."""
    flaws = []
    if num_wrong:
        flaws.append(f"{num_wrong} of {num_images} digits wrong or out of place")
    if not is_sum_right:
        flaws.append("sum wrong or not last")
    if num_extra:
        flaws.append(f"{num_extra} further sentences")
    return ", ".join(flaws)
