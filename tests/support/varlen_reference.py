"""`torch.nn.attention.varlen.varlen_attn` in plain arithmetic, for machines without its kernel."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

calls: list[tuple[int, int]] = []  # (window to the left, window to the right) of each call


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """[num_tokens, heads, D]: token i of a row sees tokens i - left to i + right of it; -1 is no bound.

    A row with more keys than queries has the queries of its last tokens."""
    calls.append(window_size)
    num_heads, num_groups = query.shape[1], key.shape[1]
    assert enable_gqa or num_heads == num_groups
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and query.dtype == key.dtype == value.dtype
    assert all(part.stride(-1) == 1 for part in (query, key, value))
    (left, right), bounds = window_size, [cu_seq_q.tolist(), cu_seq_k.tolist()]
    for ends, longest, num in zip(bounds, (max_q, max_k), (len(query), len(key)), strict=True):
        assert ends[-1] == num and longest == max(end - start for start, end in pairwise(ends))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for own, seen in zip(*(map(slice, ends, ends[1:]) for ends in bounds), strict=True):
        q = query[own].float()
        k, v = (part[seen].float().repeat_interleave(num_heads // num_groups, dim=1) for part in (key, value))
        num = len(k)
        ahead = torch.arange(num) - torch.arange(num - len(q), num)[:, None]  # of the query, positive behind it
        is_seen = (ahead <= right if right >= 0 else ahead < num) & (ahead >= -left if left >= 0 else ahead > -num)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~is_seen, float("-inf"))
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(rows).to(query.dtype)
