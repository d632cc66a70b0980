"""Attention over packed rows with shared prompts, and decoders that compute rows without padding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import ModelOutput

from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import on_device

MIN_SHARE = 16  # a prefix of less than a 16th of its row saves less than it costs


@dataclass(frozen=True)
class RowKeys:
    """Keys and values of packed rows whose first tokens may lie in other rows."""

    index: Tensor  # int64 [K]: packed token of each key, row by row
    ends: Tensor  # int32 [R + 1]: 0 and the cumulative lengths of the R whole rows
    longest: int
    lengths: tuple[int, ...]  # R

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], device: torch.device) -> RowKeys:
        """`rows`: packed tokens of each row, int64."""
        lengths = tuple(map(len, rows))
        return cls(on_device(np.concatenate(rows), device), ends_of(lengths, device), max(lengths), lengths)

    def with_row(self, start: int, num_tokens: int) -> RowKeys:
        """The same and one more row of packed tokens that follow on `start`."""
        own = torch.arange(start, start + num_tokens, device=self.index.device)
        ends = pad(self.ends, (0, 1), value=sum(self.lengths) + num_tokens)
        return RowKeys(torch.cat([self.index, own]), ends, max(self.longest, num_tokens), (*self.lengths, num_tokens))


@dataclass(frozen=True)
class SharedPrefix:
    """The first tokens of a row that another row of the batch has too."""

    source: int  # the other row
    num_tokens: int


@dataclass(frozen=True)
class RowPlaces:
    """The positions of B padded rows after packing without padding.

    A row's own tokens are those behind its shared prefix. Rows are packed in order; R of them have own tokens.
    """

    lengths: tuple[int, ...]  # R: own tokens
    ends: Tensor  # int32 [R + 1]: 0 and the cumulative lengths
    index: Tensor  # int64 [num_tokens]: index of each packed token among the B * S padded tokens
    keys: RowKeys | None  # of the R rows, if some share a prefix
    targets: Tensor  # int64 [N]: packed token before each target
    host_targets: np.ndarray  # the same, on the host

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        width: int,
        targets: tuple[np.ndarray, np.ndarray],
        prefixes: Mapping[int, SharedPrefix],
        device: torch.device,
    ) -> RowPlaces:
        """Args:
        lengths: tokens of each row.
        width: of a padded row (S).
        targets: row and column of the token before each target.
        prefixes: row -> its prefix, each row behind its source.
        """
        num_shared = np.array([prefixes[row].num_tokens if row in prefixes else 0 for row in range(len(lengths))])
        num_own = np.array(lengths) - num_shared
        ends = num_own.cumsum()
        rows = [np.arange(end - num, end) for num, end in zip(num_own, ends, strict=True)]  # packed tokens of each
        for row, prefix in prefixes.items():
            rows[row] = np.append(rows[prefix.source][: prefix.num_tokens], rows[row])
        columns = np.arange(width)
        is_packed = (columns >= num_shared[:, None]) & (columns < np.array(lengths)[:, None])
        placed = np.concatenate(rows)[(np.cumsum(lengths) - lengths)[targets[0]] + targets[1]]
        own_lengths = tuple(num_own[num_own > 0].tolist())
        with_own = [row for row, num in zip(rows, num_own, strict=True) if num > 0]
        return cls(
            lengths=own_lengths,
            ends=ends_of(own_lengths, device),
            index=on_device(np.flatnonzero(is_packed), device),
            keys=RowKeys.of(with_own, device) if prefixes else None,
            targets=on_device(placed, device),
            host_targets=placed,
        )


def ends_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32: 0 and the cumulative lengths."""
    return on_device(np.cumsum([0, *lengths]).astype(np.int32), device)


def shared_prefixes(rows: Sequence[np.ndarray], spans: Sequence[Sequence[tuple[int, int]]]) -> dict[int, SharedPrefix]:
    """Returns row -> the longest prefix that a row before it in the order of their ids has too, in this order.

    Args:
        rows: int64 ids of each row; tokens of different media have different ids.
        spans: start and end of each medium of a row. No prefix ends within a medium.
    """
    # In lexicographic order no earlier row shares more with a row than its neighbour, whatever the order of bytes is.
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    prefixes = {}
    for source, row in pairwise(order):
        longest = min(len(rows[source]), len(rows[row]))
        differs = rows[source][:longest] != rows[row][:longest]
        num_equal = int(differs.argmax()) if differs.any() else longest
        num_shared = min([num_equal, *(start for start, end in spans[row] if start < num_equal < end)])
        if num_shared * MIN_SHARE >= len(rows[row]):
            prefixes[row] = SharedPrefix(source, num_shared)
    return prefixes


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
QUERY_BLOCK = 512  # queries under one mask
MIN_WINDOW_BLOCK = 128  # the same, if the window is shorter


@dataclass(eq=False)
class RowBounds:
    """Bounds of packed rows, for attention within each row."""

    ends: Tensor  # int32 [R + 1]: 0 and the cumulative lengths, on the device of the rows
    longest: int  # the largest length
    known: tuple[int, ...] | None = None  # the R lengths on the host; None: read from `ends` on first use
    sequence_ranks: SequenceRanks | None = None  # ranks that share the tokens of the rows
    keys: RowKeys | None = None
    """If rows share prefixes. The lengths are then those of the rows' own tokens, which are their last."""
    is_used: bool = field(default=False, init=False)
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return self.known if self.known is not None else tuple(self.ends.diff().tolist())

    @cached_property
    def has_short_prefixes(self) -> bool:
        """Whether a row shares at least one and at most half of its tokens."""
        rows = zip(self.lengths, self.keys.lengths, strict=True) if self.keys is not None else ()
        return any(own < whole and _is_short(whole - own, whole) for own, whole in rows)

    def of_keys(self, part: Tensor) -> Tensor:
        """[1, heads, num_tokens, D] -> [1, heads, K, D]: the keys or values of whole rows, row by row."""
        if self.keys is None:
            return part
        # In float32, in which the backward pass adds up the gradients of a shared token.
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        return wide.index_select(2, self.keys.index).to(part.dtype)

    def mask(self, num_queries: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
        """Returns [num_queries, num_keys], 0 or -inf: of the last tokens of a row each attends to itself and the
        earlier tokens of the window. All layers of a batch share the memory of one mask for a window."""
        before = window or (self.keys or self).longest
        wide = self._masks.get((window, like.dtype))
        if wide is None:
            positions = torch.arange(before + _block_size(window), device=like.device)
            distance = positions[before:, None] - positions
            is_seen = (distance >= 0) & (distance < before) if window else distance >= 0
            wide = torch.zeros_like(distance, dtype=like.dtype).masked_fill(~is_seen, -torch.inf)
            self._masks[window, like.dtype] = wide
        last = before + num_queries
        return wide[:num_queries, last - num_keys : last]


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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention within each packed row, or within each row of the batch if there are no bounds. Ranks of
    sequence parallelism exchange heads.

    Shapes are those of transformers' attention functions: [1, heads, num_tokens, D] -> [1, num_tokens, heads, D].
    Bounds come from `RowPacking` (`row_bounds`) or from a vision tower (`cu_seq_lens_q`, `max_length_q`). The kernel
    is used where `kernel_takes` holds; otherwise torch's scaled dot products run row by row.
    """
    assert attention_mask is None, "packed rows have no mask: they are causal or see all of themselves"
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise ValueError(
            f"policy.model: {type(module).__name__} caps its attention scores, adds to them or has attention sinks, "
            "which is not computed for packed rows: set policy.attention=eager and learner.packing=false"
        )
    is_causal = bool(module.is_causal) if is_causal is None else is_causal
    bounds = row_bounds
    if bounds is None and cu_seq_lens_q is not None:
        assert max_length_q is not None, "a vision tower passes both"
        bounds = RowBounds(cu_seq_lens_q.int(), int(max_length_q))
    ranks = None if bounds is None else bounds.sequence_ranks
    if ranks is not None:
        query, key, value = ranks.to_heads(query, key, value)
    if torch.is_autocast_enabled(query.device.type):  # does not cover the kernel; position embeddings return float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows = bounds if bounds is not None else RowBounds(torch.tensor([0, query.shape[2]]), query.shape[2])
    rows.is_used = True
    key, value = rows.of_keys(key), rows.of_keys(value)
    # The kernel has no dropout.
    if bounds is not None and dropout == 0 and kernel_takes(query, key, value):
        output = _kernel(query, key, value, bounds, is_causal, sliding_window, scaling)
    else:
        outputs = []
        for q, k, v, m, num_used in _blocks(rows, query, key, value, is_causal, sliding_window):
            is_triangle = is_causal and m is None
            block = scaled_dot_product_attention(q, k, v, m, dropout, is_triangle, scale=scaling, enable_gqa=True)
            outputs.append(block[:, :, -num_used:].transpose(1, 2).flatten(0, 1))
        output = torch.cat(outputs).unsqueeze(0)
    return (output if ranks is None else ranks.to_tokens(output)), None


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
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [num_tokens or K, heads, D] each
    # A row's queries are the last of its keys: with unequal lengths the kernel counts from the ends of both.
    seen = bounds.keys or bounds
    output = varlen_attn(
        q, k, v, bounds.ends, seen.ends, bounds.longest, seen.longest, scale=scaling, window_size=window, **GROUPED
    )
    assert isinstance(output, Tensor), "the logarithms of the sums come with it on request alone"
    return output.unsqueeze(0)


def _blocks(
    bounds: RowBounds, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, sliding_window: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, int]]:
    """Yields queries, keys and values of whole rows, [rows, heads, num_tokens, D]: of one row, or of equal rows that
    follow one another; where a triangle is not what queries see, blocks of a row's queries, the keys and values that
    they see, and a mask. The last value is the number of queries, from the end, whose output is used.

    A triangle costs half as much as a square under a mask. Behind a short prefix the queries of the prefix are
    therefore computed again, and their output is not used.
    """
    again = [bounds.of_keys(query)] if bounds.has_short_prefixes else []
    for q, k, v, *whole in _equal_rows(bounds, query, key, value, *again):
        num_keys = k.shape[2]
        window = sliding_window if sliding_window is not None and sliding_window < num_keys else None
        last = num_keys - q.shape[2]
        if not is_causal or (last == 0 and window is None):
            yield q, k, v, None, q.shape[2]
            continue
        if window is None and _is_short(last, num_keys):
            yield whole[0], k, v, None, q.shape[2]
            continue
        for block in q.split(_block_size(window), dim=2):
            first, last = last, last + block.shape[2]
            start = 0 if window is None else max(0, first - window + 1)
            mask = bounds.mask(last - first, last - start, window, q)
            yield block, k[:, :, start:last], v[:, :, start:last], mask, block.shape[2]


def _equal_rows(bounds: RowBounds, *parts: Tensor) -> Iterator[list[Tensor]]:
    """Splits queries, keys and values [1, heads, num_tokens, D]; short rows of equal lengths that follow one another
    stay together, because calls of the kernel take most of their time."""
    lengths = zip(bounds.lengths, (bounds.keys or bounds).lengths, strict=True)
    runs: list[tuple[int, tuple[int, int]]] = []  # rows, their queries and keys
    for sizes in lengths:
        if runs and runs[-1][1] == sizes and sizes[0] <= MIN_WINDOW_BLOCK:
            runs[-1] = (runs[-1][0] + 1, sizes)
        else:
            runs.append((1, sizes))
    ends = (part.split([num * sizes[kind > 0] for num, sizes in runs], dim=2) for kind, part in enumerate(parts))
    for (num, _), *own in zip(runs, *ends, strict=True):
        yield [part[0].unflatten(1, (num, -1)).transpose(0, 1) for part in own]


def _is_short(num_shared: int, num_tokens: int) -> bool:
    return 2 * num_shared <= num_tokens


def _block_size(window: int | None) -> int:
    return QUERY_BLOCK if window is None else min(max(window, MIN_WINDOW_BLOCK), QUERY_BLOCK)


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


PER_TOKEN = ("inputs_embeds", "visual_pos_masks")  # arguments of decoders with axes [B, S, ...]
VISUAL_MASK, PER_VISUAL_TOKEN = "visual_pos_masks", "deepstack_visual_embeds"  # the latter: tokens of the mask only
POSITIONS = "position_ids"  # [B, S], or [3, B, S] with M-RoPE
Args = tuple[Any, ...]


class RowPacking:
    """Removes padding, and all but one copy of shared prefixes, from the inputs of a decoder.

    The rows are concatenated into one row and keep their positions. Attention runs in a kernel that takes row bounds:
    torch's own (`sdpa`, by `packed_attention`) or the kernel of a package (`flash_attention_2`), which shares no
    prefixes. The rest of the decoder computes no padding. Its outputs stay packed; with `sequence_ranks` they are those
    of this rank's tokens of the row.

    Example:
        packing = RowPacking(model)
        with packing.rows(batch.places):  # of two rows, 17 and 4 tokens long
            hidden = decoder(inputs_embeds=embeds, position_ids=positions).last_hidden_state  # [1, 21, H]
    """

    def __init__(self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> None:
        """Installs hooks on the model's decoder: rows are packed within `rows` and stay padded outside of it."""
        decoder = model.get_decoder()
        self._attention = decoder.config._attn_implementation
        self._ranks = sequence_ranks
        if self._attention not in ("sdpa", *PACKAGES):
            raise ValueError(
                f"learner.packing=true keeps rows apart in sdpa and {', '.join(PACKAGES)}, and policy.attention="
                f"{self._attention}: set policy.attention=sdpa or learner.packing=false"
            )
        if sequence_ranks is not None:
            num_ranks, num_heads = sequence_ranks.size, decoder.config.num_attention_heads
            if self._attention != "sdpa":
                raise ValueError(
                    f"learner.sequence_parallel={num_ranks} exchanges heads in sdpa alone, and "
                    f"policy.attention={self._attention}: set policy.attention=sdpa"
                )
            if num_heads % num_ranks > 0:
                raise ValueError(
                    f"learner.sequence_parallel={num_ranks} does not divide the {num_heads} attention heads of "
                    "policy.model: choose a divisor of them"
                )
        if self._attention == "sdpa":
            decoder.config._attn_implementation = PACKED
        self._places: RowPlaces | None = None
        self._bounds: RowBounds | None = None
        decoder.register_forward_pre_hook(self._pack, with_kwargs=True)
        decoder.register_forward_hook(self._unpack)

    @contextmanager
    def rows(self, places: RowPlaces) -> Iterator[None]:
        """Packs the decoder's inputs within the body."""
        self._places = places
        try:
            yield
        finally:
            self._places = None

    def _pack(self, decoder: nn.Module, args: Args, kwargs: dict[str, Any]) -> tuple[Args, dict[str, Any]]:
        places = self._places
        if places is None:
            return args, kwargs
        embeds = kwargs["inputs_embeds"]  # [B, S, H]
        num_rows, width = embeds.shape[:2]
        index = places.index  # int64 [n]: of the tokens to compute among the B * S tokens of the padded rows
        if self._ranks is not None:
            # Copies of the first token fill the last rank's part, as a separate row at the end.
            filled = pad(index, (0, self._ranks.num_padded(places.num_tokens) - places.num_tokens))
            index = filled[self._ranks.chunk(places.num_tokens)]
        packed: dict[str, Any] = {n: _taken(kwargs[n], index, axis=0) for n in PER_TOKEN if kwargs.get(n) is not None}
        positions = kwargs.get(POSITIONS)
        if positions is None:
            positions = torch.arange(width, device=embeds.device).expand(num_rows, width)
        packed[POSITIONS] = _taken(positions, index, axis=positions.ndim - 2)
        if kwargs.get(VISUAL_MASK) is not None and (self._ranks is not None or places.keys is not None):
            flat = kwargs[VISUAL_MASK].flatten()
            is_visual = flat.index_select(0, index)  # of the computed tokens
            if self._ranks is not None:
                is_visual[max(0, places.num_tokens - self._ranks.chunk(places.num_tokens).start) :] = False
            shown = (flat.cumsum(0) - 1)[index[is_visual]]
            packed[VISUAL_MASK] = is_visual.unsqueeze(0)
            packed[PER_VISUAL_TOKEN] = [layer[shown] for layer in kwargs[PER_VISUAL_TOKEN]]
        return args, {**kwargs, **packed, **self._bounds_of(places)}

    def _bounds_of(self, places: RowPlaces) -> dict[str, Any]:
        """Returns row bounds as arguments of the attention. They are passed in each call, so that blocks recomputed in
        the backward pass get them."""
        ends, lengths, keys, num_tokens = places.ends, places.lengths, places.keys, places.num_tokens
        if self._ranks is not None and (num_fill := self._ranks.num_padded(num_tokens) - num_tokens) > 0:
            lengths = (*lengths, num_fill)
            ends = pad(ends, (0, 1), value=num_tokens + num_fill)
            keys = None if keys is None else keys.with_row(num_tokens, num_fill)
        if self._attention == "sdpa":
            self._bounds = RowBounds(ends, max(lengths), lengths, self._ranks, keys)
            return {"row_bounds": self._bounds}
        if keys is not None:
            raise ValueError(
                f"learner.share_prompts=true needs policy.attention=sdpa, and it is {self._attention}: set "
                "learner.share_prompts=false"
            )
        longest = max(lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def _unpack(self, decoder: nn.Module, args: Args, output: ModelOutput) -> ModelOutput:
        if self._places is None:
            return output
        if self._bounds is not None and not self._bounds.is_used:
            raise ValueError(
                f"policy.model: {type(decoder).__name__} does not tell its attention where rows end, so they cannot be "
                "packed: set learner.packing=false"
            )
        return output


def _taken(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """Joins the tokens of all rows: axes [B, S] at `axis` become [1, num_tokens]."""
    return tensor.flatten(axis, axis + 1).index_select(axis, index).unsqueeze(axis)
