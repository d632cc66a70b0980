"""Which rows go through a policy together: micro-batches of bounded size, the same number on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from learner.policies.batch import TokenSequence

Microbatch = tuple[int, ...]  # indices of the rows; empty where a rank only keeps step with the others


def split_microbatches(
    sequences: Sequence[TokenSequence], tokens_per_microbatch: int, num_ranks: int
) -> list[list[Microbatch]]:
    """For each rank its micro-batches, of at most `tokens_per_microbatch` padded tokens each (or a single longer row).

    Rows are ordered so that neighbours share their pictures and have similar lengths, cut into one part of nearly
    equal token count a rank, and each part into micro-batches. Every rank gets equally many, because each one is a
    collective; what a rank lacks are empty ones. Depends on lengths and media alone, so all ranks agree unasked.
    """
    order = _order(sequences)
    parts = _cut_evenly(order, [sequences[i].num_tokens for i in order], num_ranks)
    batches = [_cut_by_budget(part, sequences, tokens_per_microbatch) for part in parts]
    most = max(len(b) for b in batches)
    return [b + [()] * (most - len(b)) for b in batches]


def _order(sequences: Sequence[TokenSequence]) -> list[int]:
    """Blocks of rows with the same media, by longest row; every other block runs from long to short, so that
    neighbours across a border are alike too."""
    media = [tuple(handle.key for handle in s.media) for s in sequences]
    lengths = [s.num_tokens for s in sequences]
    by_media = sorted(range(len(sequences)), key=lambda i: (media[i], lengths[i], i))
    blocks = [list(rows) for _, rows in groupby(by_media, key=lambda i: media[i])]
    blocks.sort(key=lambda rows: (lengths[rows[-1]], rows[-1]))
    return [i for n, rows in enumerate(blocks) for i in (rows if n % 2 == 0 else reversed(rows))]


def _cut_evenly(order: list[int], lengths: list[int], num_parts: int) -> list[list[int]]:
    """Contiguous parts; a row belongs to the part that its middle token falls into."""
    total = max(sum(lengths), 1)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    done = 0
    for row, length in zip(order, lengths, strict=True):
        parts[min(int((done + length / 2) * num_parts / total), num_parts - 1)].append(row)
        done += length
    return parts


def _cut_by_budget(rows: list[int], sequences: Sequence[TokenSequence], budget: int) -> list[Microbatch]:
    batches: list[list[int]] = []
    width = 0
    for row in rows:
        width = max(width, sequences[row].num_tokens)
        if batches and width * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            width = sequences[row].num_tokens
    return [tuple(batch) for batch in batches]
