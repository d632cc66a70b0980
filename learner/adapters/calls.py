"""Calls of the training service on adapters, their batches and groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mobula.cluster.training_service.interfaces import LossCall, LossResult, LossRow
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenSequence

TARGETS = "target_tokens"


@dataclass(frozen=True)
class RowLimits:
    vocab: int
    max_tokens: int  # of a row


@dataclass(frozen=True)
class CallRow:
    row: LossRow
    call: int  # index of the call in its batch
    index: int  # of the row in the call
    is_trained: bool = True

    @cached_property
    def sequence(self) -> TokenSequence:
        """All tokens, and one more, which nothing reads: the last token predicts a target, too.

        A prefix has other states under another adapter, so rows share prefixes within a call alone.
        """
        return replace(TokenSequence.of_prompt(self.row.prompt).with_end(), variant=self.call)

    @property
    def group(self) -> int | None:
        return None

    @property
    def targets(self) -> np.ndarray:
        """int64 [N] or [N, K]"""
        return self.row.inputs[TARGETS].astype(np.int64, copy=False)

    def untrained(self) -> Self:
        return replace(self, is_trained=False)


def refuse_invalid(call: LossCall, limits: RowLimits) -> None:
    """Raises: ValueError: the loss is unknown, an option or input does not fit it, or the model takes no such row."""
    loss = SUMMED_LOSSES.get(call.loss)
    if loss is None:
        raise ValueError(f"there is no loss {call.loss!r}: use one of {', '.join(SUMMED_LOSSES)}")
    _refuse_options(call, loss)
    if not call.rows:
        raise ValueError(f"a call of {call.loss} has no rows: send at least one")
    for index, row in enumerate(call.rows):
        _refuse_row(row, f"row {index} of {call.loss}", loss, limits)


def _refuse_options(call: LossCall, loss: SummedLoss) -> None:
    known = loss.options
    if unknown := sorted(call.options.keys() - known.keys()):
        raise ValueError(f"{call.loss} has no option {unknown[0]!r}: it takes {', '.join(known) or 'none'}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in call.options]:
        raise ValueError(f"{call.loss} needs the option {missing[0]}: set it in the loss's configuration")
    for name, value in call.options.items():
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(f"{call.loss}: the option {name} is {value!r}: give a finite number")


def _refuse_row(row: LossRow, what: str, loss: SummedLoss, limits: RowLimits) -> None:
    ids, num = row.prompt.expanded_ids, row.prompt.num_tokens
    expected = {TARGETS, *loss.inputs}
    if row.inputs.keys() != expected:
        raise ValueError(f"{what} has the inputs {sorted(row.inputs)}: give {', '.join(sorted(expected))}")
    if not 0 < num < limits.max_tokens:
        raise ValueError(f"{what} has {num} tokens: give between 1 and {limits.max_tokens - 1}")
    targets = row.inputs[TARGETS]
    if targets.ndim not in (1, 2) or len(targets) != num or 0 in targets.shape:
        raise ValueError(f"{what} has {num} tokens and targets of shape {targets.shape}: give a target for each token")
    if targets.ndim == 2 and not loss.takes_several_targets:
        raise ValueError(f"{what} has targets of shape {targets.shape}, which cross_entropy alone takes: give [{num}]")
    if not np.issubdtype(targets.dtype, np.integer):
        raise ValueError(f"{what} has targets of type {targets.dtype}: give token ids as integers")
    for name, tokens in (("tokens", ids), (TARGETS, targets)):
        if tokens.min() < 0 or tokens.max() >= limits.vocab:
            raise ValueError(
                f"{what} has {name} from {tokens.min()} to {tokens.max()}, and the model has ids from 0 to "
                f"{limits.vocab - 1}: use the tokenizer of the base model"
            )
    for name in loss.inputs:
        if row.inputs[name].shape != targets.shape:
            raise ValueError(
                f"{what} has {name} of shape {row.inputs[name].shape} and targets of shape {targets.shape}: "
                "give a value for each target"
            )


Factors = Mapping[str, tuple[Tensor, Tensor]]  # module -> A [rank, in] and B [out, rank], float32


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


LOSS_SUM = "loss:sum"


@dataclass(frozen=True)
class PartialResult:
    """A rank's part of a call's result."""

    outputs: Mapping[int, Mapping[str, np.ndarray]]  # by index of the row
    loss_sum: float

    @staticmethod
    def joined(parts: Sequence[PartialResult]) -> LossResult:
        """The result of a call from the parts of all ranks."""
        outputs = {index: output for part in parts for index, output in part.outputs.items()}
        return LossResult([outputs[index] for index in sorted(outputs)], {LOSS_SUM: sum(p.loss_sum for p in parts)})


class CallBatch:
    """Calls of one or several adapters. A failed call has an entry in `failures`; the others are alive."""

    def __init__(self, calls: Sequence[LossCall]) -> None:
        self.calls = calls
        self.failures: dict[int, Exception] = {}
        self.leaves: dict[int, Factors] = {}  # of each call, so that a failed call leaves no gradient
        self._outputs: list[dict[int, dict[str, np.ndarray]]] = [{} for _ in calls]
        self._sums = [0.0] * len(calls)

    def alive(self) -> Iterator[tuple[int, LossCall]]:
        return ((number, call) for number, call in enumerate(self.calls) if number not in self.failures)

    def rows(self, *, has_backward: bool) -> list[CallRow]:
        """All rows of the calls with, or without, a backward pass."""
        return [
            CallRow(row, number, index)
            for number, call in self.alive()
            if call.has_backward is has_backward
            for index, row in enumerate(call.rows)
        ]

    def add(self, share: Sequence[CallRow], logprobs: Tensor) -> Tensor | None:
        """Adds the rows of a micro-batch to the results; returns the sum of the losses that are finite.

        Args:
            logprobs: float32 [B, T] of the targets of each row, 0 behind its last target.
        """
        trained = []
        for row, values, array in zip(share, logprobs, logprobs.detach().cpu().numpy(), strict=True):
            if row.is_trained:
                num = row.targets.size
                trained.append((row, values[:num]))
                self._outputs[row.call][row.index] = {"logprobs": array[:num].reshape(row.targets.shape)}
        numbers = sorted({row.call for row, _ in trained})
        if not numbers:
            return None
        losses = [self._loss(number, [pair for pair in trained if pair[0].call == number]) for number in numbers]
        sums = torch.stack(losses).tolist()
        for number, value in zip(numbers, sums, strict=True):
            self._sums[number] += value
        finite = [loss for loss, value in zip(losses, sums, strict=True) if math.isfinite(value)]
        return torch.stack(finite).sum() if finite else None

    def not_finite(self) -> dict[int, Exception]:
        """The calls that are alive and have a loss that is not finite."""
        return {
            number: ValueError(
                f"the loss of the call is {self._sums[number]}, so it adds nothing to the gradient: check its inputs "
                "and lower the learning rate"
            )
            for number, _ in self.alive()
            if not math.isfinite(self._sums[number])
        }

    def results(self) -> list[PartialResult | Exception]:
        parts = (PartialResult(*pair) for pair in zip(self._outputs, self._sums, strict=True))
        return [self.failures.get(number, part) for number, part in enumerate(parts)]

    def _loss(self, number: int, rows: Sequence[tuple[CallRow, Tensor]]) -> Tensor:
        call = self.calls[number]
        loss, logprobs = SUMMED_LOSSES[call.loss], torch.cat([values for _, values in rows])

        def joined(name: str) -> Tensor:
            parts = [row.row.inputs[name].reshape(-1) for row, _ in rows]
            return on_device(np.concatenate(parts, dtype=np.float32), logprobs.device)

        return loss(logprobs, {name: joined(name) for name in loss.inputs}, call.options).sum()
