"""`torch.nn.attention.varlen.varlen_attn` in plain arithmetic, for machines without its kernel."""

from __future__ import annotations

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
    """[num_tokens, heads, D]: token i of a row sees tokens i - left to i + right of it; -1 is no bound."""
    calls.append(window_size)
    num_heads, num_groups = query.shape[1], key.shape[1]
    assert enable_gqa or num_heads == num_groups
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and query.dtype == key.dtype == value.dtype
    assert all(part.stride(-1) == 1 for part in (query, key, value))
    ends, (left, right) = cu_seq_q.tolist(), window_size
    assert ends == cu_seq_k.tolist() and ends[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k == max(end - start for start, end in zip(ends, ends[1:], strict=False))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for start, end in zip(ends, ends[1:], strict=False):
        q = query[start:end].float()
        k, v = (part[start:end].float().repeat_interleave(num_heads // num_groups, dim=1) for part in (key, value))
        ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]  # of the query, positive behind it
        is_seen = (ahead <= right if right >= 0 else ahead < end) & (ahead >= -left if left >= 0 else ahead > -end)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~is_seen, float("-inf"))
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(rows).to(query.dtype)
