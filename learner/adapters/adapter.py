"""Calls of the training service with their batches, and the trained state of one adapter."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mobula.cluster.errors import CheckpointError
from mobula.cluster.files import replacing
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall, LossResult, LossRow
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import PADDING_ID, TokenBatch, TokenSequence, pad_rows
from mobula.learner.state_files import load_plain

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
    known = loss.options
    if unknown := sorted(call.options.keys() - known.keys()):
        raise ValueError(f"{call.loss} has no option {unknown[0]!r}: it takes {', '.join(known) or 'none'}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in call.options]:
        raise ValueError(f"{call.loss} needs the option {missing[0]}: set it in the loss's configuration")
    for name, value in call.options.items():
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(f"{call.loss}: the option {name} is {value!r}: give a finite number")
    if not call.rows:
        raise ValueError(f"a call of {call.loss} has no rows: send at least one")
    for index, row in enumerate(call.rows):
        _refuse_row(row, f"row {index} of {call.loss}", loss, limits)


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


def with_targets(batch: TokenBatch, targets: Sequence[np.ndarray]) -> TokenBatch:
    """Returns the batch with the given targets in place of the rows' own tokens.

    Args:
        targets: of each row, int64 [N] or [N, K]. Position i of the row predicts `targets[i]`; K targets at a position
            follow one another, so that the row has N * K of them.
    """
    flat = [row.reshape(-1) for row in targets]
    num_at_position = np.array([row.shape[1] if row.ndim == 2 else 1 for row in targets])
    padded = pad_rows(flat, PADDING_ID, np.int64)
    mask = np.arange(padded.shape[1]) < np.array([len(row) for row in flat])[:, None]
    rows, steps = np.nonzero(mask)
    columns = steps // num_at_position[rows]
    device = batch.input_ids.device
    return replace(
        batch,
        targets=on_device(padded, device),
        target_mask=on_device(mask, device),
        before_targets=(rows, columns),
        hidden_rows=on_device(rows, device),
        hidden_columns=on_device(columns, device),
        target_columns=on_device(steps, device),
        kept_ends=np.zeros(len(rows), dtype=np.int64),
    )


STATE_FILE = "adapter.pt"


class TrainedAdapter:
    """Low-rank factors A [rank, in] and B [out, rank] of linear layers, trained in float32 with AdamW.

    A is drawn from the seed, uniform within 1 / sqrt(in) as in PEFT; B is 0, so that a new adapter changes nothing.
    Every rank draws the same factors, independently of its random state.
    """

    def __init__(self, spec: AdapterSpec, layers: Mapping[str, nn.Linear], device: torch.device) -> None:
        self.spec = spec
        self.factors: dict[str, tuple[nn.Parameter, ...]] = {}
        random = torch.Generator().manual_seed(spec.seed)
        for name, layer in layers.items():
            a = nn.init.kaiming_uniform_(torch.empty(spec.rank, layer.in_features), math.sqrt(5), generator=random)
            b = torch.zeros(layer.out_features, spec.rank)
            self.factors[name] = nn.Parameter(a.to(device)), nn.Parameter(b.to(device))
        self._device = device
        self._optimizer = torch.optim.AdamW(self.parameters, fused=True)
        self.num_steps = 0

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [factor for pair in self.factors.values() for factor in pair]

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def leaves(self) -> Factors:
        """Returns the factors as leaves with a gradient of their own, in the same memory."""
        return {
            name: (a.detach().requires_grad_(), b.detach().requires_grad_()) for name, (a, b) in self.factors.items()
        }

    def accumulate(self, leaves: Factors) -> None:
        """Adds the gradients of `leaves`; a leaf without a gradient adds 0."""
        for name, pair in self.factors.items():
            for parameter, leaf in zip(pair, leaves[name], strict=True):
                gradient = torch.zeros_like(parameter) if leaf.grad is None else leaf.grad
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def gradient(self) -> Tensor:
        """float32 [size of all factors]: the accumulated gradient of this rank."""
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def set_gradient(self, flat: Tensor) -> None:
        parts = flat.to(self._device).split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def clear_gradient(self) -> None:
        self._optimizer.zero_grad()

    def step(self, settings: AdamParameters) -> dict[str, float]:
        """Takes one step of AdamW and clears the gradient. A gradient norm that is not finite skips the step.

        Source: arXiv:1711.05101.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, settings.grad_clip_norm or math.inf).item()
        is_taken = math.isfinite(norm)
        if is_taken:
            self.move_state(self._device)
            for group in self._optimizer.param_groups:
                group |= {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
                group |= {"eps": settings.eps, "weight_decay": settings.weight_decay}
            self._optimizer.step()
            self.num_steps += 1
        self.clear_gradient()
        return {"grad_norm": norm, "skipped": float(not is_taken), "optimizer_steps": float(self.num_steps)}

    def move_state(self, device: torch.device) -> None:
        """Moves the optimizer state; copies to the host wait for the device."""
        for state in self._optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    def state(self) -> dict[str, Any]:
        """Returns factors, optimizer state and number of steps, without the gradient."""
        factors = {name: [factor.detach() for factor in own] for name, own in self.factors.items()}
        optimizer = self._optimizer.state_dict()
        return {"spec": asdict(self.spec), "factors": factors, "optimizer": optimizer, "num_steps": self.num_steps}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], *, with_optimizer: bool) -> None:
        """Takes over a `state`; clears the gradient. Without the optimizer its state is as of a new adapter."""
        own, other = asdict(self.spec), dict(state["spec"])
        differing = [name for name in own if name != "seed" and own[name] != other[name]]
        if differing:
            names = ", ".join(f"{name}={other[name]} and not {own[name]}" for name in differing)
            raise ValueError(f"the saved adapter has {names}: create the adapter as the saved one was created")
        if state["factors"].keys() != self.factors.keys():
            raise ValueError("the saved adapter has other layers: load it with the base model that it was trained on")
        for name, pair in self.factors.items():
            for parameter, saved in zip(pair, state["factors"][name], strict=True):
                parameter.copy_(saved)
        self.clear_gradient()
        self._optimizer = torch.optim.AdamW(self.parameters, fused=True)
        self.num_steps = 0
        if with_optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
            self.num_steps = state["num_steps"]


def write_adapter_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes a state to `folder`; a reader never finds a part of it."""
    with replacing(folder / STATE_FILE) as file:
        torch.save(dict(state), file)


def read_adapter_state(folder: Path) -> dict[str, Any]:
    """Reads a state that `write_adapter_state` has written, into host memory."""
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(f"{folder} holds no saved adapter: load a folder that `save` has written")
    return load_plain(folder / STATE_FILE)
