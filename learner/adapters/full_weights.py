"""FullWeightsRank: the rank of a training service that trains all weights of one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from mobula.cluster.training_service.interfaces import AdapterSpec
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.adapter import TrainedWeights
from mobula.learner.adapters.call_batch import CallBatch
from mobula.learner.adapters.calls import CallRow
from mobula.learner.adapters.rank import AdapterRank
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.trained import save_trained
from mobula.learner.policy_weights import PolicyWeights


class FullWeightsRank(AdapterRank):
    """Trains all weights of `policy.model`, for one model at a time, which takes the place of an adapter.

    Implements the calls of `AdapterLearner` on one rank. Parameters that `policy.freeze` names stay frozen. A pass that
    fails leaves a part of its gradient, so it raises: the caller restores the model.

    Example:
        rank = FullWeightsRank(config, 0, 1)
        rank.connect("")
        rank.create("a", spec)  # the weights of policy.model
    """

    isolates_failures = False

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        """Raises: ValueError: there are several ranks, or as `AdapterRank`."""
        super().__init__(config, rank, world_size)
        if world_size > 1:
            raise ValueError(
                f"training_service.weights=full trains on one rank, and there are {world_size}: set "
                "resources.learner.num_workers=1"
            )

    def connect(self, init_method: str) -> None:
        """Loads the model, and keeps a copy of its weights in host memory for the next model that is created."""
        super().connect(init_method)
        trained = self._backend.trained()
        self._trained = {name: tensor for name, tensor in trained.items() if isinstance(tensor, nn.Parameter)}
        self._initial = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._trained.items()}

    @torch.no_grad()
    def create(self, adapter: str, spec: AdapterSpec) -> None:
        """Starts from the weights of `policy.model`.

        Raises:
            ValueError: a model is being trained.
        """
        if self._adapters:
            raise ValueError(
                f"all weights of one model are trained at a time, and {next(iter(self._adapters))} is active: end its "
                "session first"
            )
        for name, parameter in self._trained.items():
            parameter.copy_(self._initial[name])
            parameter.grad = None
        self._adapters[adapter] = TrainedWeights(spec, self._trained, self._device)

    def export(self, adapter: str, folder: Path) -> None:
        """Writes a checkpoint in the Hugging Face layout."""
        self._adapter(adapter)
        described = self._outgoing.described
        self._write(
            lambda: save_trained(
                self._model, self._config, folder, described, self._outgoing.plain_state(self._backend)
            )
        )

    def _adapt(self, model: PreTrainedModel) -> None:
        self._model = model
        self._outgoing = PolicyWeights(model, self._config)

    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        return nullcontext()
