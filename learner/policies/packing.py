"""Divides rows into micro-batches of bounded size, the same number on every rank."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.packed import MIN_SHARE
from mobula.learner.policies.base import PolicyRow

MAX_LOAD = 1.1  # of a rank, over the mean; up to it siblings and their images stay together
LONG_UNIT = 2.0  # costs so many times the mean of the rows or groups
MIN_FILL = 8  # a micro-batch is filled with a part of a group if that has so many times the tokens of its prompt

Microbatch = tuple[int, ...]  # row indices; empty if a rank only takes part in the collective
Unit = tuple[int, ...]  # rows that a part gets together


def split_microbatches(
    rows: Sequence[PolicyRow], config: LearnerConfig, num_ranks: int, groups: Sequence[int] | None = None
) -> list[list[Microbatch]]:
    """For each rank, micro-batches of at most `learner.tokens_per_microbatch` tokens (or a single longer row).

    Rows are ordered so that neighbours share images and have similar lengths, cut into one part of nearly equal cost
    for each rank, and each part into micro-batches. If a few long rows put a part above `MAX_LOAD`, long rows are
    assigned first. Siblings (rows with the same entry in `groups`) stay together, so that a rank fetches few groups.

    With `shares_prompts`, siblings in a micro-batch compute their prompt once, and it counts once. A group is then
    divided over ranks only if their loads require it, and over micro-batches only if it is longer than one or its
    prompt is short (`MIN_FILL`).

    Every rank gets the same number of micro-batches, because each is a collective; missing ones are empty. The result
    depends only on lengths, media and groups, so that all ranks compute the same without communication.
    """
    batches = _Plan(rows, config, range(len(rows)) if groups is None else groups).of_ranks(num_ranks)
    # A rank with fewer micro-batches would leave the others waiting in a collective.
    most = max(len(b) for b in batches)
    return [b + [()] * (most - len(b)) for b in batches]


class _Size(NamedTuple):
    """Tokens of a row in a micro-batch. Costs are in tokens of the decoder, with attention (quadratic)."""

    prompt: int  # computed once for the siblings in a micro-batch; 0 if it is not shared
    prompt_cost: float
    own: int  # the others
    own_cost: float

    @classmethod
    def of(cls, row: PolicyRow, config: LearnerConfig) -> _Size:
        lengths = [row.num_prompt_tokens + answer for answer in row.answers]
        if not config.packs:  # candidates are padded
            lengths = [max(lengths)] * len(lengths)
        is_shared = config.shares_prompts and row.num_prompt_tokens * MIN_SHARE >= max(lengths)
        prompt = row.num_prompt_tokens if is_shared else 0
        attention = config.attention_token_cost
        return cls(
            prompt,
            prompt * (1 + attention * prompt),
            sum(lengths) - len(lengths) * prompt,
            sum((length - prompt) * (1 + attention * length) for length in lengths),
        )


class _Plan:
    """Rows in the order in which they are cut into parts and micro-batches."""

    def __init__(self, rows: Sequence[PolicyRow], config: LearnerConfig, groups: Sequence[int]) -> None:
        self._config = config
        self._groups = groups
        self._sizes = [_Size.of(row, config) for row in rows]
        self._media = [tuple(handle.key for handle in row.media) for row in rows]
        sharing = Counter(self._media)
        # The encoding of images is divided by the number of rows that share them.
        self._media_costs = [
            config.image_token_cost * row.num_media_tokens / sharing[keys]
            for row, keys in zip(rows, self._media, strict=True)
        ]
        self._order, self._by_length = self._ordered()

    def of_ranks(self, num_ranks: int) -> list[list[Microbatch]]:
        """The first partition with no rank above `MAX_LOAD`, else the one with the least load of a rank."""
        mean = self._load(self._microbatches(self._order)) / num_ranks
        best: list[list[Microbatch]] = []
        least = float("inf")
        for parts in self._partitions(num_ranks):
            batches = [self._microbatches(part) for part in parts]
            load = max(map(self._load, batches))
            if load < least:
                best, least = batches, load
            if load <= MAX_LOAD * mean:
                break
        return best

    def _ordered(self) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """Blocks of rows with the same media, by longest row; in a block groups by longest row, in a group rows by
        length. Every other block is reversed, so that rows at the border of two blocks have similar lengths.

        Also returns the sort key of each row within a part: block and length, and with shared prompts the place.
        """
        sizes = [(size.prompt + size.own, i) for i, size in enumerate(self._sizes)]
        blocks: dict[tuple[str, ...], dict[int, list[int]]] = {}
        for i, (keys, group) in enumerate(zip(self._media, self._groups, strict=True)):
            blocks.setdefault(keys, {}).setdefault(group, []).append(i)

        def longest(rows: Sequence[int]) -> tuple[int, int]:
            return max(sizes[i] for i in rows)

        ordered = sorted(blocks.values(), key=lambda block: max(map(longest, block.values())))
        order: list[int] = []
        within: dict[int, tuple[int, ...]] = {}
        for n, block in enumerate(ordered):
            sign = 1 if n % 2 == 0 else -1
            rows = [i for group in sorted(block.values(), key=longest) for i in sorted(group, key=sizes.__getitem__)]
            for i in rows[::sign]:
                within[i] = (len(order),) if self._config.shares_prompts else (n, sign * sizes[i][0], sign * i)
                order.append(i)
        return order, within

    def _partitions(self, num_parts: int) -> Iterator[list[list[int]]]:
        """Parts of nearly equal cost: of whole groups if they share prompts, then of rows; each contiguous, then with
        long ones assigned first, to the part with the least cost (longest processing time first, Graham 1969)."""
        alone: list[Unit] = [(row,) for row in self._order]
        together: list[Unit] = [tuple(run) for _, run in groupby(self._order, key=self._groups.__getitem__)]
        for units in (together, alone) if self._config.shares_prompts else (alone,):
            costs = self._costs(units)
            mean = sum(costs.values()) / num_parts
            yield _cut_into(units, costs, [mean] * num_parts)
            least_of_long = max((MAX_LOAD - 1) * mean, LONG_UNIT * sum(costs.values()) / len(units))
            long = sorted((unit for unit in units if costs[unit] > least_of_long), key=lambda u: (-costs[u], u))
            placed: list[list[int]] = [[] for _ in range(num_parts)]
            loads = [0.0] * num_parts
            by_load = [(0.0, part) for part in range(num_parts)]  # a heap
            for unit in long:
                least = by_load[0][1]
                placed[least] += unit
                loads[least] += costs[unit]
                heapq.heapreplace(by_load, (loads[least], least))
            is_long = set(long)
            short = [unit for unit in units if unit not in is_long]
            rest = _cut_into(short, costs, [max(0.0, mean - load) for load in loads])
            yield [own + others for own, others in zip(placed, rest, strict=True)]

    def _costs(self, units: Sequence[Unit]) -> dict[Unit, float]:
        """Cost of each unit; the siblings of a group share what its prompt costs in all its micro-batches."""
        members: dict[int, list[int]] = {}
        for row in self._order:
            members.setdefault(self._groups[row], []).append(row)
        counts = {group: len(self._microbatches(rows)) / len(rows) for group, rows in members.items()}

        def cost(row: int) -> float:
            size = self._sizes[row]
            return size.own_cost + size.prompt_cost * counts[self._groups[row]] + self._media_costs[row]

        return {unit: sum(map(cost, unit)) for unit in units}

    def _load(self, batches: Sequence[Microbatch]) -> float:
        load = 0.0
        for batch in batches:
            load += sum(self._sizes[row].own_cost + self._media_costs[row] for row in batch)
            shared = [row for row in batch if self._sizes[row].prompt > 0]
            load += sum({self._groups[row]: self._sizes[row].prompt_cost for row in shared}.values())
        return load

    def _microbatches(self, part: Sequence[int]) -> list[Microbatch]:
        rows = sorted(part, key=self._by_length.__getitem__)
        batches = self._cut_packed(rows) if self._config.packs else self._cut_padded(rows)
        return [tuple(batch) for batch in batches]

    def _cut_packed(self, rows: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for _, run in groupby(rows, key=self._groups.__getitem__):
            rest = list(run)
            while rest:
                prompt = max(self._sizes[row].prompt for row in rest)
                ends = list(accumulate(self._sizes[row].own for row in rest))
                num = bisect_right(ends, room - prompt)
                if num == 0 or (num < len(rest) and ends[num - 1] < MIN_FILL * prompt):
                    batches.append([])
                    room = self._config.tokens_per_microbatch
                    num = max(1, bisect_right(ends, room - prompt))
                batches[-1] += rest[:num]
                room -= prompt + ends[num - 1]
                rest = rest[num:]
        return batches

    def _cut_padded(self, rows: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        width = 0
        for row in rows:
            own = self._sizes[row].own
            width = max(width, own)
            if batches and width * (len(batches[-1]) + 1) <= self._config.tokens_per_microbatch:
                batches[-1].append(row)
            else:
                batches.append([row])
                width = own
        return batches


def _cut_into(units: Sequence[Unit], costs: dict[Unit, float], sizes: list[float]) -> list[list[int]]:
    """Cuts units into contiguous parts in proportion to `sizes`; a unit belongs to the part of its midpoint."""
    scale = sum(costs[unit] for unit in units) / max(sum(sizes), 1e-9)
    ends = [scale * end for end in accumulate(sizes)]
    parts: list[list[int]] = [[] for _ in sizes]
    done = 0.0
    for unit in units:
        parts[min(bisect_right(ends, done + costs[unit] / 2), len(sizes) - 1)] += unit
        done += costs[unit]
    return parts
