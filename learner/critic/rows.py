"""Training rows of a critic: responses with the values before a step and the returns that followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.media import MediaReader
from mobula.learner.batch import LearnerItem
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate, pad_rows
from mobula.learner.policies.device_copies import on_device

Values = Sequence[Sequence[np.ndarray]]
"""float32 [T + 1] of each trajectory of each group: before each token, and after the last one."""


def with_values(groups: list[list[LearnerItem]], values: Values) -> list[list[LearnerItem]]:
    """The items with these values of a critic; as they are where there are none."""
    if not values:
        return groups
    return [
        [replace(item, values=found) for item, found in zip(row, of, strict=True)]
        for row, of in zip(groups, values, strict=True)
    ]


@dataclass(frozen=True)
class ValueRow:
    """A response and one padding token after it, so that the state after the last token has a value too.

    Attention is causal: what follows changes no value. T tokens have T + 1 values.
    """

    index: int  # of the item among all trajectories of the step
    group: int  # the place of its group in the step
    sequence: TokenSequence | RowOutline  # T + 1 targets
    old_values: np.ndarray  # float32 [T + 1], of the critic before the step
    returns: np.ndarray  # float32 [T]
    mask: np.ndarray  # bool [T]: True where a value has a loss

    @classmethod
    def of(cls, item: LearnerItem) -> ValueRow:
        """Of an item; before it has values and returns they are empty."""
        row = item.sequence
        assert isinstance(row, TokenSequence | RowOutline), "a critic values tokens"
        nothing = np.zeros(0, dtype=np.float32)
        return cls(
            index=item.index,
            group=item.group,
            sequence=row.with_end(),
            old_values=nothing if item.values is None else item.values,
            returns=nothing if item.returns is None else item.returns,
            mask=item.kept_mask,
        )

    def untrained(self) -> ValueRow:
        return replace(self, mask=np.zeros_like(self.mask))


@dataclass(frozen=True)
class ValueBatch:
    """Padded columns of a micro-batch; W is one more than its longest response."""

    tokens: TokenBatch
    old_values: Tensor  # float32 [B, W]
    returns: Tensor  # float32 [B, W]
    mask: Tensor  # bool [B, W]


def collate_rows(rows: Sequence[ValueRow], reader: MediaReader, device: torch.device) -> ValueBatch:
    """Pad rows into one micro-batch."""
    sequences = [row.sequence for row in rows if isinstance(row.sequence, TokenSequence)]
    assert len(sequences) == len(rows), "a row of another rank: no content of it was fetched"
    tokens = collate(sequences, reader, device)
    width = tokens.targets.shape[1]

    def column(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
        return on_device(pad_rows([*arrays, np.zeros(width)], 0, dtype)[:-1], device)

    return ValueBatch(
        tokens=tokens,
        old_values=column([row.old_values for row in rows], np.float32),
        returns=column([row.returns for row in rows], np.float32),
        mask=column([row.mask for row in rows], np.bool_),
    )
