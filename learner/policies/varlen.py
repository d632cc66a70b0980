"""Rows without padding: a decoder computes all rows of a batch as one, and each row attends to itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import ModelOutput

SDPA = "sdpa_varlen"  # the name under which transformers finds `sdpa_varlen`
PER_TOKEN = ("inputs_embeds", "visual_pos_masks")  # arguments of decoders with axes [B, S, ...]
POSITIONS = "position_ids"  # [B, S], or [3, B, S] with M-RoPE


class RowPacking:
    """Takes the padding out of what enters a decoder and puts it back into what leaves it.

    Rows lie behind one another in one row of all their tokens, with the positions that they have alone. Attention is
    computed row by row (`sdpa`), or by the kernel that takes their bounds (`flash_attention_2`); everything else of the
    decoder is computed for tokens and not for padding.

    Example:
        packing = RowPacking(model)
        with packing.rows((17, 4)):  # lengths of the two rows of the batch
            hidden = decoder(inputs_embeds=embeds, position_ids=positions).last_hidden_state  # [2, 17, H]
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """From here on the model's decoder takes packed rows within `rows`, and padded ones outside of it.

        Raises:
            ValueError: its attention cannot keep rows apart.
        """
        decoder = model.get_decoder()
        self._attention = decoder.config._attn_implementation
        if self._attention not in ("sdpa", "flash_attention_2"):
            raise ValueError(
                f"learner.packing=true keeps rows apart in sdpa and flash_attention_2, and policy.attention="
                f"{self._attention}: set policy.attention=sdpa or learner.packing=false"
            )
        if self._attention == "sdpa":
            decoder.config._attn_implementation = SDPA
        self._lengths: tuple[int, ...] | None = None
        self._bounds: _Bounds | None = None
        self._kept: Tensor | None = None
        decoder.register_forward_pre_hook(self._pack, with_kwargs=True)
        decoder.register_forward_hook(self._unpack)

    @contextmanager
    def rows(self, lengths: Sequence[int]) -> Iterator[None]:
        """Within the body the decoder is called with rows of these lengths, padded on the right."""
        self._lengths = tuple(lengths)
        try:
            yield
        finally:
            self._lengths = None

    def _pack(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._lengths is None:
            return args, kwargs
        embeds = kwargs["inputs_embeds"]  # [B, S, H]
        (num_rows, width), device = embeds.shape[:2], embeds.device
        assert len(self._lengths) == num_rows and max(self._lengths) <= width, "a length for each row of the batch"
        columns = torch.arange(width, device=device)
        lengths = torch.tensor(self._lengths, device=device)
        self._shape = (num_rows, width)
        self._kept = (columns < lengths[:, None]).flatten().nonzero()[:, 0]  # int64 [num_tokens]
        packed = {name: self._taken(kwargs[name], axis=0) for name in PER_TOKEN if kwargs.get(name) is not None}
        positions = kwargs.get(POSITIONS)
        if positions is None:
            positions = columns.expand(num_rows, width)
        packed[POSITIONS] = self._taken(positions, axis=positions.ndim - 2)
        return args, {**kwargs, **packed, **self._bounds_of(lengths)}

    def _taken(self, tensor: Tensor, axis: int) -> Tensor:
        """The tokens of all rows as one row: axes [B, S] at `axis` become [1, num_tokens]."""
        return tensor.flatten(axis, axis + 1).index_select(axis, self._kept).unsqueeze(axis)

    def _bounds_of(self, lengths: Tensor) -> dict[str, Any]:
        """Row bounds for the attention; they are passed with each call, so that a block that is recomputed in the
        backward pass has them too."""
        if self._attention == "sdpa":
            self._bounds = _Bounds(self._lengths)
            return {"row_bounds": self._bounds}
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        longest = max(self._lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def _unpack(self, decoder: nn.Module, args: tuple[Any, ...], output: ModelOutput) -> ModelOutput:
        if self._lengths is None:
            return output
        if self._bounds is not None and not self._bounds.is_used:
            raise ValueError(
                f"policy.model: {type(decoder).__name__} does not tell its attention where rows end, so they cannot be "
                "packed: set learner.packing=false"
            )
        packed = output.last_hidden_state[0]  # [num_tokens, H]
        num_rows, width = self._shape
        padded = packed.new_zeros(num_rows * width, packed.shape[-1]).index_copy(0, self._kept, packed)
        output.last_hidden_state = padded.view(num_rows, width, -1)
        return output


class _Bounds:
    """The lengths of packed rows, and whether an attention has asked for them."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths
        self.is_used = False

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """[1, heads, num_tokens, D] -> one [1, heads, length, D] a row."""
        self.is_used = True
        return tensor.split(self._lengths, dim=2)


def sdpa_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_bounds: _Bounds | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of transformers' `sdpa` within each packed row; of rows that are not packed, within each row.

    Shapes are those of transformers' attention functions: [1, heads, num_tokens, D] -> [1, num_tokens, heads, D].
    """
    assert attention_mask is None, "rows are causal and padded on the right"
    parts = [(query, key, value)]
    if row_bounds is not None:
        parts = list(zip(*(row_bounds.split(tensor) for tensor in (query, key, value)), strict=True))
    rows = [
        sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), is_causal=True, **kwargs)[0]
        for q, k, v in parts
    ]
    return torch.cat(rows, dim=1), None


def _window(query: Tensor, sliding_window: int | None) -> Tensor | None:
    """bool [1, 1, S, S]: a token sees itself and those before it in the window; None where that is every one."""
    num_tokens = query.shape[2]
    if sliding_window is None or num_tokens <= sliding_window:
        return None
    places = torch.arange(num_tokens, device=query.device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < sliding_window))[None, None]


AttentionInterface.register(SDPA, sdpa_varlen)
