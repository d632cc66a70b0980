"""Row packing: a decoder computes all rows of a batch as one row without padding; attention stays within each row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from mobula.learner.policies.attention.packed import PACKAGES, PACKED, RowBounds, RowPlaces
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks

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
            _refuse_unsplit(decoder, self._attention, sequence_ranks.size)
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
        index = self._index_of(places)
        packed = {name: _taken(kwargs[name], index, axis=0) for name in PER_TOKEN if kwargs.get(name) is not None}
        positions = kwargs.get(POSITIONS)
        if positions is None:
            positions = torch.arange(width, device=embeds.device).expand(num_rows, width)
        packed[POSITIONS] = _taken(positions, index, axis=positions.ndim - 2)
        if kwargs.get(VISUAL_MASK) is not None and (self._ranks is not None or places.keys is not None):
            packed |= self._visual(kwargs[VISUAL_MASK], kwargs[PER_VISUAL_TOKEN], places)
        return args, {**kwargs, **packed, **self._bounds_of(places)}

    def _index_of(self, places: RowPlaces) -> Tensor:
        """Returns int64 [n]: indices of the tokens to compute among the B * S tokens of the padded rows."""
        if self._ranks is None:
            return places.index
        # Copies of the first token fill the last rank's part, as a separate row at the end.
        filled = pad(places.index, (0, self._ranks.num_padded(places.num_tokens) - places.num_tokens))
        return filled[self._ranks.chunk(places.num_tokens)]

    def _visual(self, mask: Tensor, features: list[Tensor], places: RowPlaces) -> dict[str, Any]:
        """Returns the mask of the computed visual tokens [1, n] and their features of each layer."""
        index, flat = self._index_of(places), mask.flatten()
        is_visual = flat.index_select(0, index)
        if self._ranks is not None:
            is_visual[max(0, places.num_tokens - self._ranks.chunk(places.num_tokens).start) :] = False
        shown = (flat.cumsum(0) - 1)[index[is_visual]]
        return {VISUAL_MASK: is_visual.unsqueeze(0), PER_VISUAL_TOKEN: [layer[shown] for layer in features]}

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


def _refuse_unsplit(decoder: PreTrainedModel, attention: str, num_ranks: int) -> None:
    """Raises: ValueError: `learner.sequence_parallel` cannot split this decoder's attention."""
    if attention != "sdpa":
        raise ValueError(
            f"learner.sequence_parallel={num_ranks} exchanges heads in sdpa alone, and policy.attention={attention}: "
            "set policy.attention=sdpa"
        )
    if decoder.config.num_attention_heads % num_ranks > 0:
        raise ValueError(
            f"learner.sequence_parallel={num_ranks} does not divide the {decoder.config.num_attention_heads} attention "
            "heads of policy.model: choose a divisor of them"
        )
