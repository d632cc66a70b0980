"""Which rows go through a policy together: micro-batches of bounded size, the same number on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from configs.schema import LearnerConfig
from learner.policies.base import PolicyRow

Microbatch = tuple[int, ...]  # indices of the rows; empty where a rank only keeps step with the others


def split_microbatches(sequences: Sequence[PolicyRow], config: LearnerConfig, num_ranks: int) -> list[list[Microbatch]]:
    """For each rank its micro-batches, of at most `learner.tokens_per_microbatch` tokens each (or a single longer row).

    Rows are ordered so that neighbours share their pictures and have similar lengths, cut into one part of nearly
    equal cost a rank, and each part into micro-batches. Every rank gets equally many, because each one is a
    collective; what a rank lacks are empty ones. Depends on lengths and media alone, so all ranks agree unasked.
    """
    order = _order(sequences)
    costs = _costs(sequences, config.picture_token_cost)
    parts = _cut_evenly(order, [costs[i] for i in order], num_ranks)
    cut = _cut_packed if config.packing else _cut_padded
    batches = [cut(part, sequences, config.tokens_per_microbatch) for part in parts]
    most = max(len(b) for b in batches)
    return [b + [()] * (most - len(b)) for b in batches]


def _costs(sequences: Sequence[PolicyRow], picture_token_cost: float) -> list[float]:
    """Tokens of each row, and its share of its pictures' encoding: rows with the same ones encode them together."""
    media = [tuple(handle.key for handle in s.media) for s in sequences]
    sharing = Counter(media)
    return [
        s.num_tokens + picture_token_cost * s.num_media_tokens / sharing[keys]
        for s, keys in zip(sequences, media, strict=True)
    ]


def _order(sequences: Sequence[PolicyRow]) -> list[int]:
    """Blocks of rows with the same media, by longest row; every other block runs from long to short, so that
    neighbours across a border are alike too."""
    media = [tuple(handle.key for handle in s.media) for s in sequences]
    lengths = [s.num_tokens for s in sequences]
    by_media = sorted(range(len(sequences)), key=lambda i: (media[i], lengths[i], i))
    blocks = [list(rows) for _, rows in groupby(by_media, key=lambda i: media[i])]
    blocks.sort(key=lambda rows: (lengths[rows[-1]], rows[-1]))
    return [i for n, rows in enumerate(blocks) for i in (rows if n % 2 == 0 else reversed(rows))]


def _cut_evenly(order: list[int], costs: list[float], num_parts: int) -> list[list[int]]:
    """Contiguous parts; a row belongs to the part that its middle falls into."""
    total = max(sum(costs), 1)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    done = 0.0
    for row, cost in zip(order, costs, strict=True):
        parts[min(int((done + cost / 2) * num_parts / total), num_parts - 1)].append(row)
        done += cost
    return parts


def _cut_packed(rows: list[int], sequences: Sequence[PolicyRow], budget: int) -> list[Microbatch]:
    batches: list[list[int]] = []
    num_tokens = 0
    for row in rows:
        num_tokens += sequences[row].num_tokens
        if batches and num_tokens <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            num_tokens = sequences[row].num_tokens
    return [tuple(batch) for batch in batches]


def _cut_padded(rows: list[int], sequences: Sequence[PolicyRow], budget: int) -> list[Microbatch]:
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
