"""FullWeightsRank: one rank of the group that trains all weights of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec
from mobula.learner.adapters.adapter import STATE_FILE
from mobula.learner.adapters.call_rank import CallRank
from mobula.learner.adapters.calls import CallBatch, CallRow, Factors
from mobula.learner.backends.sharded import ShardedWriter, saved_shapes, saved_tensors
from mobula.learner.optim import local
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.state_files import read_state

GRADIENT = "gradient"  # folder of a saved state


class FullWeightsRank(CallRank):
    """Trains all weights of `policy.model`, for one model at a time, which takes the place of an adapter.

    Implements the calls of `AdapterLearner` on one rank. Weights, gradient and optimizer state are sharded by
    `learner.backend`, and saved as a run's checkpoints are, so another number of ranks can load them. Parameters that
    `policy.freeze` names stay frozen. A call that fails in a pass, or whose loss is not finite, leaves a part of its
    gradient: the caller restores the model.

    Example:
        rank = FullWeightsRank(config, 0, 1)
        rank.connect("")
        rank.create("a", spec)  # the weights of policy.model
    """

    isolates_failures = False
    _name: str | None = None  # of the model that is trained

    def _build(self, join: Callable[[], None]) -> None:
        """Also copies this rank's shard to host memory, for the next model that is created."""
        super()._build(join)
        self._trained = self._backend.trained()
        self._initial = [shard.detach().to("cpu", copy=True) for shard in local(self._trained.values())]
        self._gradients = ShardedWriter()
        self._reset()

    @torch.no_grad()
    def create(self, adapter: str, spec: AdapterSpec) -> None:
        """Starts from the weights of `policy.model`."""
        if self._name is not None:
            raise ValueError(
                f"all weights of one model are trained at a time, and {self._name} is active: end its session first"
            )
        for shard, initial in zip(local(self._trained.values()), self._initial, strict=True):
            shard.copy_(initial)
        self._reset()
        self._name = adapter

    def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns `grad_norm`, `skipped` and `optimizer_steps`. A gradient norm that
        is not finite skips the step."""
        self._refuse_other(adapter)
        if not self._gradient():
            raise ValueError(f"the model {adapter!r} has no gradient to apply: run a backward pass first")
        for group in self._optimizer.param_groups:
            group |= {"lr": parameters.learning_rate, "betas": (parameters.beta1, parameters.beta2)}
            group |= {"eps": parameters.eps, "weight_decay": parameters.weight_decay}
        norm = self._backend.step(self._optimizer, max_grad_norm=parameters.grad_clip_norm or math.inf)
        is_taken = math.isfinite(norm)
        self._num_steps += is_taken
        return {"grad_norm": norm, "skipped": float(not is_taken), "optimizer_steps": float(self._num_steps)}

    def save(self, adapter: str, folder: Path) -> None:
        """Writes weights, gradient and optimizer state to a new folder; each rank writes its shards."""
        self._refuse_other(adapter)
        gradient = self._gradient()
        self._clear_gradient()  # an optimizer without a state is saved with a fresh one, for which torch needs this
        try:
            if gradient:
                self._gradients.write(gradient, folder / GRADIENT)
            self._backend.save(folder, self._optimizer, self._num_steps)()
        finally:
            self._set_gradient(gradient)

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Loads what `save` has written, on any number of ranks; clears the gradient without the optimizer."""
        self._refuse_other(adapter)
        self._together(lambda: self._refuse_unfit(folder))
        self._reset()
        num_steps = self._backend.load(folder, self._optimizer)
        if with_optimizer:
            self._num_steps = num_steps
            self._set_gradient(self._read_gradient(folder / GRADIENT))
        else:
            self._reset()

    def export(self, adapter: str, folder: Path) -> None:
        self._refuse_other(adapter)
        self._together(lambda: self._save_policy(folder))

    def drop(self, adapter: str) -> None:
        """Removes the optimizer state of the model, if there is one of this name."""
        if adapter == self._name:
            self._name = None
            self._reset()

    def _prepare(self, model: PreTrainedModel) -> None:
        self._outgoing = PolicyWeights(model, self._config)

    def _leaves(self, name: str) -> Factors:
        self._refuse_other(name)
        return {}

    def _accumulate(self, name: str, leaves: Factors) -> None:
        """Does nothing: the gradients are at the parameters."""

    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._backend.backward(loss, is_last=is_last)

    def _refuse_other(self, name: str) -> None:
        if name != self._name:
            active = "none is active" if self._name is None else f"{self._name} is active"
            raise ValueError(f"there is no model {name!r}: create it first, {active}")

    def _reset(self) -> None:
        """A fresh optimizer, without steps and without a gradient."""
        self._clear_gradient()
        self._optimizer = self._backend.optimizer()
        self._num_steps = 0

    def _clear_gradient(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None

    def _gradient(self) -> dict[str, Tensor]:
        """Name -> this rank's shard of the gradient, summed over the ranks, since the last step."""
        return {name: p.grad for name, p in self._trained.items() if p.grad is not None}

    def _set_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        for name, shard in gradient.items():
            self._trained[name].grad = shard

    def _read_gradient(self, folder: Path) -> dict[str, Tensor]:
        """Reads this rank's shard of a saved gradient; empty if there was none. Collective."""
        if not folder.is_dir():
            return {}
        gradient = {name: torch.empty_like(self._trained[name]) for name in saved_tensors(folder)}
        read_state(gradient, folder)
        return gradient

    def _refuse_unfit(self, folder: Path) -> None:
        if (folder / STATE_FILE).is_file():
            raise ValueError(
                f"{folder} holds an adapter, and training_service.weights=full trains all weights: load what a service "
                "with this setting has saved"
            )
        shapes = saved_shapes(folder)
        unfit = [name for name, parameter in self._trained.items() if shapes.get(name) != parameter.shape]
        if unfit:
            raise ValueError(
                f"the saved weights lack {unfit[0]} of policy.model, or have another shape, and {len(unfit) - 1} more: "
                "load them with the model and the policy.freeze that they were trained with"
            )
