"""CallBatch: calls that run as one batch, the parts of their results, and their failures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.training_service.interfaces import LossCall, LossResult
from mobula.learner.adapters.calls import CallRow
from mobula.learner.adapters.grouped import Factors
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES
from mobula.learner.policies.device_copies import on_device

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
