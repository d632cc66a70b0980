"""Attention over packed rows: torch's variable-length kernel, or scaled dot products row by row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mobula.learner.policies.attention.sequence_ranks import SequenceRanks

# Name of `packed_attention` in transformers. Vision towers of transformers pass window bounds to implementations with
# "flash" in their name; for other implementations they split queries, keys and values themselves.
PACKED = "packed_flash"
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Values of `policy.attention` -> the package that has the kernel."""

MAX_HEAD_DIM = 256  # of the kernel
HALF = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # compute capability (Ampere)
# torch 2.11 supports grouped heads without an argument.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

MIN_WINDOW_BLOCK = 128  # queries per block if the window is shorter

UNSHARED = nn.Module()  # transformers repeats no keys and values for this module


class RowBounds:
    """Bounds of packed rows, for attention within each row."""

    def __init__(
        self,
        ends: Tensor,
        longest: int,
        lengths: tuple[int, ...] | None = None,
        sequence_ranks: SequenceRanks | None = None,
    ) -> None:
        """Args:
        ends: int32 [R + 1]: 0 and the cumulative lengths, on the device of the rows.
        longest: the largest length.
        lengths: the R lengths on the host; None: read from `ends` on first use.
        sequence_ranks: ranks that share the tokens of the rows.
        """
        self.ends = ends
        self.longest = longest
        self.sequence_ranks = sequence_ranks
        self.is_used = False
        self._known = lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return self._known if self._known is not None else tuple(self.ends.diff().tolist())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_bounds: RowBounds | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention within each packed row, or within each row of the batch if there are no bounds. Ranks of
    sequence parallelism exchange heads.

    Shapes are those of transformers' attention functions: [1, heads, num_tokens, D] -> [1, num_tokens, heads, D].
    Bounds come from `RowPacking` (`row_bounds`) or from a vision tower (`cu_seq_lens_q`, `max_length_q`). The kernel
    is used where `kernel_takes` holds; otherwise transformers' `sdpa` runs row by row.

    Raises:
        ValueError: the model caps its scores or has attention sinks, which neither the kernel nor `sdpa` supports.
    """
    assert attention_mask is None, "packed rows have no mask: they are causal or see all of themselves"
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"policy.model: {type(module).__name__} caps its attention scores or has attention sinks, which are not "
            "computed for packed rows: set policy.attention=eager and learner.packing=false"
        )
    is_causal = bool(module.is_causal) if is_causal is None else is_causal
    bounds = row_bounds
    if bounds is None and cu_seq_lens_q is not None:
        assert max_length_q is not None, "a vision tower passes both"
        bounds = RowBounds(cu_seq_lens_q.int(), int(max_length_q))
    ranks = None if bounds is None else bounds.sequence_ranks
    if ranks is not None:
        query, key, value = ranks.to_heads(query, key, value)
    output = _of_rows(module, query, key, value, bounds, is_causal, sliding_window, scaling, dropout, **kwargs)
    return (output if ranks is None else ranks.to_tokens(output)), None


def _of_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: RowBounds | None,
    is_causal: bool,
    sliding_window: int | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Returns the attention [1, num_tokens, heads, D] of whole rows."""
    if bounds is not None:
        bounds.is_used = True
        parts = _autocast(query, key, value)
        # The kernel has no dropout.
        if dropout == 0 and kernel_takes(*parts):
            return _kernel(*parts, bounds, is_causal, sliding_window, scaling)
    num_sharing = query.shape[1] // key.shape[1]
    if bounds is not None and bounds.sequence_ranks is not None and num_sharing > 1:
        # On a rank, fewer queries may share a key head than the module states.
        key, value = (part.repeat_interleave(num_sharing, dim=1) for part in (key, value))
    if bounds is not None and bounds.sequence_ranks is not None:
        module = UNSHARED
    blocks = [
        sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal=is_causal, **kwargs)[0]
        for row_query, row_key, row_value in _split(bounds, query, key, value)
        for q, k, v, mask in _blocks(row_query, row_key, row_value, sliding_window)
    ]
    return torch.cat(blocks, dim=1)


def kernel_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length kernel supports these heads [1, heads, num_tokens, D].

    It needs a GPU of compute capability 8.0 or more, float16 or bfloat16, and the same head width for queries, keys and
    values: a multiple of 8, at most 256. It has no mask, dropout, cap on scores or attention sinks.
    """
    width = query.shape[-1]
    return (
        _has_kernel(query.device)
        and query.dtype in HALF
        and query.dtype == key.dtype == value.dtype
        and width % 8 == 0
        and width <= MAX_HEAD_DIM
        and width == key.shape[-1] == value.shape[-1]
    )


@lru_cache(maxsize=8)
def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts to the autocast dtype. Autocast does not cover the kernel, and position embeddings return float32."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: RowBounds,
    is_causal: bool,
    sliding_window: int | None,
    scaling: float | None,
) -> Tensor:
    """Returns [1, num_tokens, heads, D]. `sliding_window` includes the token itself; the kernel's window does not."""
    before = -1 if sliding_window is None else sliding_window - 1
    window = (before, 0) if is_causal else (-1, -1)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [num_tokens, heads, D] each
    ends, longest = bounds.ends, bounds.longest
    found = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, **GROUPED)
    assert isinstance(found, Tensor), "the logarithms of the sums come with it on request alone"
    return found.unsqueeze(0)


def _split(bounds: RowBounds | None, *parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns queries, keys and values of each row."""
    if bounds is None:
        return [parts]
    return list(zip(*(part.split(bounds.lengths, dim=2) for part in parts), strict=True))


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yields the row, or blocks of its queries with keys and values of their window and a mask bool [1, 1, n, m]. A
    token attends to itself and the earlier tokens of the window. A whole row's mask is quadratic in its length."""
    num_tokens = query.shape[2]
    if sliding_window is None or num_tokens <= sliding_window:
        yield query, key, value, None
        return
    size = max(sliding_window, MIN_WINDOW_BLOCK)
    positions = torch.arange(num_tokens, device=query.device)
    for start in range(0, num_tokens, size):
        own, seen = slice(start, start + size), slice(max(0, start - sliding_window + 1), start + size)
        distance = positions[own, None] - positions[seen]
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
        yield query[:, :, own], key[:, :, seen], value[:, :, seen], mask


def pack_windows(model: PreTrainedModel) -> None:
    """Switches vision and audio towers with `sdpa` to `packed_attention`.

    These towers compute all media of a batch as one row and have the bounds of their windows (`cu_seqlens`).
    """
    for module in model.modules():
        own = getattr(module, "config", None)
        if own is None or isinstance(module, PreTrainedModel) or own._attn_implementation != "sdpa":
            continue
        if "cu_seqlens" in inspect.signature(module.forward).parameters:
            own._attn_implementation = PACKED


def missing_package(attention: str) -> str | None:
    """Returns the package with the kernel of this `policy.attention` if it is not installed, else None."""
    package = PACKAGES.get(attention)
    return package if package is not None and find_spec(package) is None else None


def refuse_without_package(attention: str) -> None:
    """Raises: ValueError: `policy.attention` needs a package that is not installed."""
    if package := missing_package(attention):
        raise ValueError(
            f"policy.attention={attention} needs the package {package}, which is not installed: install it, or set "
            "policy.attention=sdpa, which computes packed rows with torch's own kernel"
        )


AttentionInterface.register(PACKED, packed_attention)
