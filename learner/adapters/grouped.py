"""Grouped LoRA: linear layers whose input rows belong to different adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""Module -> A [rank, in] and B [out, rank], float32."""


@dataclass(frozen=True)
class AdapterSegment:
    """Adjacent tokens of a batch that one adapter computes."""

    num_tokens: int
    factors: Factors
    scale: float


class GroupedAdapters:
    """Adds the products of several adapters to the outputs of frozen linear layers.

    The frozen layers compute all tokens of a batch at once. Each adapter computes the tokens of its segment alone:
    W x + scale * B A x. Source: arXiv:2106.09685; for several adapters in a batch, arXiv:2310.18547.

    Example:
        grouped = GroupedAdapters(model, ["model.layers.0.self_attn.q_proj"])
        with grouped.segments([AdapterSegment(5, factors, 1.0), AdapterSegment(3, other_factors, 0.5)]):
            loss(model(tokens)).backward()  # blocks that are recomputed need the segments again
    """

    def __init__(self, model: nn.Module, modules: Collection[str]) -> None:
        """Installs a hook on each of `modules`, which are linear layers of `model`."""
        self._segments: Sequence[AdapterSegment] = ()
        for name in modules:
            model.get_submodule(name).register_forward_hook(partial(self._add, name))

    @contextmanager
    def segments(self, segments: Sequence[AdapterSegment]) -> Iterator[None]:
        """Sets the adapters of the tokens, in order, for the forward and backward passes of the body."""
        self._segments = segments
        try:
            yield
        finally:
            self._segments = ()

    def _add(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self._segments:
            return output
        inputs, flat = args[0].flatten(0, -2), output.flatten(0, -2)  # [num_tokens, in], [num_tokens, out]
        sizes = [segment.num_tokens for segment in self._segments]
        if sum(sizes) != len(inputs):
            raise ValueError(
                f"policy.model computes {len(inputs)} of {sum(sizes)} tokens in {name}, so the tokens of an adapter "
                "are not known there: choose a model whose layers compute every token"
            )
        parts = zip(self._segments, inputs.split(sizes), flat.split(sizes), strict=True)
        added = [_with_product(segment, name, x, out) for segment, x, out in parts]
        return (added[0] if len(added) == 1 else torch.cat(added)).view(output.shape)


def _with_product(segment: AdapterSegment, name: str, inputs: Tensor, output: Tensor) -> Tensor:
    """[n, in], [n, out] -> [n, out]"""
    factors = segment.factors.get(name)
    if factors is None:
        return output
    a, b = (factor.to(inputs.dtype) for factor in factors)
    return torch.addmm(output, linear(inputs, a), b.T, alpha=segment.scale)
