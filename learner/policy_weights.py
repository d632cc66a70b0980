"""The policy's weights on their way out of the learner: for a push, for a late joiner, for a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.schema import RunConfig
from mobula.learner.backends import load_weights
from mobula.learner.backends.base import Backend, trained_parameters
from mobula.learner.backends.single import SingleBackend
from mobula.learner.optim.average import read_average
from mobula.learner.policies.adapters import add_adapters, as_merged, is_factor, split_factor
from mobula.learner.policies.loading import as_stored, checkpoint_names
from mobula.learner.policies.lora import WEIGHT, adapted_modules, adapter_manifest
from mobula.learner.policies.trained import as_policy, save_trained, save_trained_adapters, unread_trained_model

Named = Iterator[tuple[str, Tensor]]


class PolicyWeights:
    """The weights that leave the learner, with their names; adapters are merged or, in a push, sent alone.

    Every iterator over tensors is collective: all ranks run it to the end.

    Example:
        weights = PolicyWeights(model, config)  # puts adapters in, if there are to be any
        backend.wrap(TokenPolicy(model, config.learner), stored)
        WeightPublisher(weights.manifest, lambda: weights.pushed(backend), ...)
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        """Of a model as it was loaded. From here on it has adapters where `policy.lora` asks for them."""
        self._model = model
        self._scale = config.policy.lora.scale
        self._names = checkpoint_names(model)  # state-dict name -> checkpoint name, of the model without adapters
        plain = self._described(model.state_dict().items(), config.resources.dtype)
        if config.policy.lora.is_on:
            states = {name: state for state, name in self._names.items()}
            modules = [_module(states[f"{module}.{WEIGHT}"]) for module in adapted_modules(plain, config.policy)]
            add_adapters(model, modules, config.policy.lora, config.seed)
        if config.weight_sync.payload == "adapters":
            self.manifest = adapter_manifest(plain, config.policy)
            self.pushed = self.adapters
        else:
            empty = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in model.state_dict().items())
            self.manifest = self._described(as_merged(empty, self._scale), config.resources.dtype)
            self.pushed = self.merged

    def merged(self, backend: Backend) -> Named:
        """(checkpoint name, whole tensor) of every weight, adapters merged; tied weights once."""
        for name, tensor in self.plain_state(backend):
            if name in self._names:
                yield self._names[name], as_stored(self._model, self._names[name], tensor)

    def adapters(self, backend: Backend) -> Named:
        """(checkpoint name, whole tensor) of every factor."""
        for name, tensor in backend.full_state(is_factor):
            module, factor = split_factor(name)
            yield f"{_module(self._names[f'{module}.{WEIGHT}'])}.{factor}", tensor.detach()

    def plain_state(self, backend: Backend) -> Named:
        """(state-dict name, whole tensor) of the model without adapters, as if it had been trained itself."""
        for name, tensor in as_merged(backend.full_state(), self._scale):
            yield name, tensor.detach()

    def _described(self, state: Iterable[tuple[str, Tensor]], dtype: str) -> Manifest:
        named = ((self._names[n], tensor) for n, tensor in state if n in self._names)
        stored = ((name, as_stored(self._model, name, tensor)) for name, tensor in named)
        return Manifest(tuple(TensorSpec(name, tuple(tensor.shape), dtype) for name, tensor in stored))


def export_state(config: RunConfig, state: Path, folder: Path, *, merge: bool, average: bool, dtype: str = "") -> None:
    """Write the policy of a learner's saved `state` to `folder`, in one process, however many ranks saved it.

    It is a checkpoint in the Hugging Face layout, adapters merged. Without `merge` a policy with adapters is written as
    these alone, in the layout of PEFT or, of a flow model, of diffusers. With `average` the average of the weights is
    in the place of the weights. Tensors have the dtypes of `policy.model`, or `dtype`; adapters are float32.

    Raises:
        CheckpointError: there is no complete state in `state`, or no average in it.
    """
    model, stored = unread_trained_model(config)
    weights = PolicyWeights(model, config)
    backend = SingleBackend(torch.device("cpu"), torch.float32, config.learner)
    policy = backend.wrap(as_policy(model, config), stored)
    load_weights(config.learner, state, policy)
    if average:
        trained = {name: p.detach() for name, p in trained_parameters(policy).items()}
        read_average(state, trained, no_dist=True)
    if config.policy.lora.is_on and not merge:
        save_trained_adapters(model, config, folder)
    else:
        save_trained(model, config, folder, dict(weights.plain_state(backend)), dtype)


def _module(weight: str) -> str:
    return weight.removesuffix(f".{WEIGHT}")
