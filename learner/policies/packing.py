"""Divides rows into micro-batches of bounded size, the same number on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.base import PolicyRow

MAX_LOAD = 1.1  # of a rank, over the mean; up to it siblings and their images stay together
LONG_ROW = 2.0  # costs so many times the mean of the rows

Microbatch = tuple[int, ...]  # row indices; empty if a rank only takes part in the collective


def split_microbatches(
    sequences: Sequence[PolicyRow], config: LearnerConfig, num_ranks: int, groups: Sequence[int] | None = None
) -> list[list[Microbatch]]:
    """For each rank, micro-batches of at most `learner.tokens_per_microbatch` tokens (or a single longer row).

    Rows are ordered so that neighbours share images and have similar lengths, cut into one part of nearly equal cost
    for each rank, and each part into micro-batches. If a few long rows put a part above `MAX_LOAD`, long rows are
    assigned first. Siblings (rows with the same entry in `groups`) stay together, so that a rank fetches few groups.

    Every rank gets the same number of micro-batches, because each is a collective; missing ones are empty. The result
    depends only on lengths, media and groups, so that all ranks compute the same without communication.
    """
    order = _order(sequences, [0] * len(sequences) if groups is None else groups)
    costs = _costs(sequences, config)
    parts = _cut_evenly([row.number for row in order], costs, num_ranks)
    placed = {row.number: row for row in order}
    parts = [sorted(part, key=lambda i: placed[i].by_length) for part in parts]
    cut = _cut_packed if config.packing else _cut_padded
    batches = [cut(part, sequences, config.tokens_per_microbatch) for part in parts]
    # A rank with fewer micro-batches would leave the others waiting in a collective.
    most = max(len(b) for b in batches)
    return [b + [()] * (most - len(b)) for b in batches]


def _costs(sequences: Sequence[PolicyRow], config: LearnerConfig) -> list[float]:
    """Cost of each row, in tokens of the decoder: tokens, attention (quadratic), and the encoding of images, divided by
    the number of rows that share them.
    """
    media = [tuple(handle.key for handle in s.media) for s in sequences]
    sharing = Counter(media)
    return [
        s.num_tokens * (1 + config.attention_token_cost * s.num_tokens)
        + config.image_token_cost * s.num_media_tokens / sharing[keys]
        for s, keys in zip(sequences, media, strict=True)
    ]


class _Placed(NamedTuple):
    """Sort keys of a row: for the order in which it is cut into parts, and within a part."""

    number: int
    by_length: tuple[int, int, int]  # the place of its block, and its length and number, negative in every other block


def _order(sequences: Sequence[PolicyRow], groups: Sequence[int]) -> list[_Placed]:
    """Blocks of rows with the same media, by longest row; in a block groups by longest row, in a group rows by length.
    Every other block is reversed, so that rows at the border of two blocks have similar lengths.
    """
    sizes = [(s.num_tokens, i) for i, s in enumerate(sequences)]
    blocks: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for i, (row, group) in enumerate(zip(sequences, groups, strict=True)):
        blocks.setdefault(tuple(handle.key for handle in row.media), {}).setdefault(group, []).append(i)

    def longest(rows: Sequence[int]) -> tuple[int, int]:
        return max(sizes[i] for i in rows)

    ordered = sorted(blocks.values(), key=lambda block: max(map(longest, block.values())))
    order: list[_Placed] = []
    for n, block in enumerate(ordered):
        sign = 1 if n % 2 == 0 else -1
        rows = [i for group in sorted(block.values(), key=longest) for i in sorted(group, key=sizes.__getitem__)]
        order += [_Placed(i, (n, sign * sizes[i][0], sign * i)) for i in rows[::sign]]
    return order


def _cut_evenly(order: list[int], costs: list[float], num_parts: int) -> list[list[int]]:
    """Cuts rows into contiguous parts. If a part costs more than `MAX_LOAD` times the mean, long rows are assigned
    first, to the part with the least cost (longest processing time first, Graham 1969), and short rows around them.
    """
    mean = sum(costs) / num_parts
    parts = _cut_into(order, costs, [mean] * num_parts)
    if max(sum(costs[row] for row in part) for part in parts) <= MAX_LOAD * mean:
        return parts
    least_of_long = max((MAX_LOAD - 1) * mean, LONG_ROW * sum(costs) / len(order))
    long = sorted((row for row in order if costs[row] > least_of_long), key=lambda row: (-costs[row], row))
    placed: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for row in long:
        least = loads.index(min(loads))
        placed[least].append(row)
        loads[least] += costs[row]
    is_long = set(long)
    short = _cut_into([row for row in order if row not in is_long], costs, [max(0.0, mean - load) for load in loads])
    return [own + rest for own, rest in zip(placed, short, strict=True)]


def _cut_into(order: list[int], costs: list[float], sizes: list[float]) -> list[list[int]]:
    """Cuts rows into contiguous parts in proportion to `sizes`; a row belongs to the part of its midpoint."""
    scale = sum(costs[row] for row in order) / max(sum(sizes), 1e-9)
    ends = [scale * end for end in accumulate(sizes)]
    parts: list[list[int]] = [[] for _ in sizes]
    done = 0.0
    for row in order:
        parts[min(bisect_right(ends, done + costs[row] / 2), len(sizes) - 1)].append(row)
        done += costs[row]
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
