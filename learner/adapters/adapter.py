"""TrainedAdapter: the weights, optimizer and targets of one adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.errors import CheckpointError
from mobula.cluster.files import replacing
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec
from mobula.learner.adapters.calls import Factors
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import PADDING_ID, TokenBatch, pad_rows
from mobula.learner.state_files import load_plain


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
        limit = settings.grad_clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit).item()
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


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes a state to `folder`; a reader never finds a part of it."""
    with replacing(folder / STATE_FILE) as file:
        torch.save(dict(state), file)


def read_state(folder: Path) -> dict[str, Any]:
    """Reads a state that `write_state` has written, into host memory."""
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(f"{folder} holds no saved adapter: load a folder that `save` has written")
    return load_plain(folder / STATE_FILE)
