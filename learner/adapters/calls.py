"""Calls of a loss: their validation, their rows in micro-batches, and their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from mobula.cluster.training_service.interfaces import LossCall, LossRow
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss
from mobula.learner.policies.batch import TokenSequence

TARGETS = "target_tokens"


@dataclass(frozen=True)
class RowLimits:
    """What the model can compute."""

    vocab: int
    max_tokens: int  # of a row


@dataclass(frozen=True)
class CallRow:
    """A row of a call."""

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
