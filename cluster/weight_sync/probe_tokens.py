"""Classes of the tokens of the probe prompt: media, template and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mobula.cluster.records.trajectory import Prompt

MEDIA, TEMPLATE, TEXT = "media", "template", "text"


def classes_of(probe: Prompt, others: Sequence[Prompt]) -> Mapping[str, np.ndarray]:
    """Returns for each class that occurs which log-probs it has, bool [P - 1].

    Media are the placeholders of images, videos and sounds. The template are the tokens with which the probe and all
    of `others` begin and end, including a question that all of them have.
    """
    ids = np.asarray(probe.expanded_ids)
    is_media, is_shared = np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.bool_)
    for span in probe.media_spans:
        is_media[span.start : span.end] = True
    if others:
        start = min(_num_equal(ids, np.asarray(other.expanded_ids)) for other in others)
        end = min(_num_equal(ids[::-1], np.asarray(other.expanded_ids)[::-1]) for other in others)
        is_shared[:start] = True
        is_shared[len(ids) - end :] = True
    found = {MEDIA: is_media, TEMPLATE: is_shared & ~is_media, TEXT: ~is_shared & ~is_media}
    return {name: mask[1:] for name, mask in found.items() if mask[1:].any()}  # the first token has no log-prob


def _num_equal(ids: np.ndarray, others: np.ndarray) -> int:
    """Returns the number of equal tokens at the start."""
    num = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:num] != others[:num])
    return int(differs[0]) if len(differs) else num
