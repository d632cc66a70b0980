"""Classes of the tokens of the probe prompt."""

from __future__ import annotations

import numpy as np

from mobula.cluster.records.trajectory import MediaSpan, Prompt
from mobula.cluster.weight_sync.probe_tokens import classes_of


def prompt(ids: list[int], *spans: tuple[int, int]) -> Prompt:
    tokens = np.array(ids, dtype=np.int32)
    return Prompt("p", "p", "", tokens, tokens, (), tuple(MediaSpan(*span) for span in spans))


def test_media_template_and_text_are_separated_by_spans_and_by_other_prompts() -> None:
    probe = prompt([1, 2, 9, 9, 9, 5, 6, 7, 3, 4], (2, 5))
    other = prompt([1, 2, 9, 9, 5, 8, 3, 4], (2, 4))
    found = {name: np.flatnonzero(mask).tolist() for name, mask in classes_of(probe, [other]).items()}
    assert found == {"media": [1, 2, 3], "template": [0, 7, 8], "text": [4, 5, 6]}


def test_every_log_prob_has_one_class() -> None:
    probe = prompt([1, 2, 3, 4], (1, 2))
    for others in ([], [prompt([1, 2, 3, 4])], [prompt([7])]):
        assert sum(mask.sum() for mask in classes_of(probe, others).values()) == 3
