"""Batches whose targets are given position by position, one or several at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mobula.learner.policies.batch import PADDING_ID, TokenBatch, pad_rows
from mobula.learner.policies.device_copies import on_device


def with_targets(batch: TokenBatch, targets: Sequence[np.ndarray]) -> TokenBatch:
    """Returns the batch with the given targets in place of the rows' own tokens.

    Args:
        targets: of each row, int64 [N] or [N, K]. Position i of the row predicts `targets[i]`; K targets at a position
            follow one another, so that the row has N * K of them.
    """
    flat = [row.reshape(-1) for row in targets]
    num_at_position = np.array([row.shape[1] if row.ndim == 2 else 1 for row in targets])
    padded = pad_rows(flat, PADDING_ID, np.int64)
    mask = np.arange(padded.shape[1]) < np.array([len(row) for row in flat])[:, None]
    rows, steps = np.nonzero(mask)
    columns = steps // num_at_position[rows]
    device = batch.input_ids.device
    return replace(
        batch,
        targets=on_device(padded, device),
        target_mask=on_device(mask, device),
        before_targets=(rows, columns),
        hidden_rows=on_device(rows, device),
        hidden_columns=on_device(columns, device),
        target_columns=on_device(steps, device),
        kept_ends=np.zeros(len(rows), dtype=np.int64),
    )
