"""The policy's weights for a push, a late joiner or a checkpoint folder."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from mobula.cluster.weight_sync.changes import digest, weights_checksum, words_of
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.schema import RunConfig
from mobula.learner.backends import saved_weights
from mobula.learner.backends.base import Backend, Wanted, everything
from mobula.learner.backends.sharded import saved_tensors
from mobula.learner.optim import AVERAGE_FOLDER as AVERAGE
from mobula.learner.optim import refuse_without_average
from mobula.learner.policies.adapters import (
    WEIGHT,
    A,
    B,
    adapted_modules,
    adapter_manifest,
    add_adapters,
    as_merged,
    factors_of,
    is_factor,
    merged,
    split_factor,
)
from mobula.learner.policies.checkpoint import StoredWeights, plain_name, pushed_manifest
from mobula.learner.policies.loading import DTYPES, as_stored, checkpoint_names
from mobula.learner.policies.quantised import quantised_layers, rounded
from mobula.learner.policies.trained import save_trained, save_trained_adapters, unread_trained_model

Named = Iterator[tuple[str, Tensor]]
MODEL = "model."  # prefix of a policy's state-dict names, before the names of its model


class PolicyWeights:
    """Exports the learner's weights with their names; adapters are merged or, in a push, sent alone.

    Every iterator over tensors is collective: all ranks run it to the end.

    Example:
        weights = PolicyWeights(model, config)  # adds the adapters of `policy.lora`
        backend.wrap(TokenPolicy(model, config.learner), stored)
        WeightPublisher(weights.manifest, lambda: weights.pushed(backend), ...)
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        """Takes a model as loaded and adds the adapters of `policy.lora` to it, in place."""
        self._model = model
        self._scale = config.policy.lora.scale
        self._names = checkpoint_names(model)  # state-dict name -> checkpoint name, of the model without adapters
        plain = self._described(model.state_dict().items(), config.resources.dtype)
        if config.policy.lora.is_on:
            states = {name: state for state, name in self._names.items()}
            modules = [_module(states[f"{module}.{WEIGHT}"]) for module in adapted_modules(plain, config.policy)]
            add_adapters(model, modules, config.policy.lora, config.seed)
            if config.offline.job == "reward_model":
                model.get_submodule("score").requires_grad_(True)
        empty = ((name, torch.empty_like(tensor, device="meta")) for name, tensor in model.state_dict().items())
        self.described = dict(as_merged(empty, self._scale))  # as `plain_state`, on the meta device
        if config.weight_sync.payload == "adapters":
            self.manifest = adapter_manifest(plain, config.policy)
            self.pushed = self.adapters
        else:
            self.manifest = pushed_manifest(self._described(self.described.items(), config.resources.dtype), config)
            self.pushed = self._pushed_weights

    def merged(self, backend: Backend) -> Named:
        """Yields (checkpoint name, whole tensor) of every weight, adapters merged; tied weights once."""
        yield from self.named(self.plain_state(backend))

    def named(self, state: Iterable[tuple[str, Tensor]]) -> Named:
        """Yields (checkpoint name, tensor as stored) of the weights of a state dict without adapters."""
        for name, tensor in state:
            if name in self._names:
                yield self._names[name], as_stored(self._model, self._names[name], tensor)

    def _pushed_weights(self, backend: Backend) -> Named:
        """Yields (checkpoint name, whole tensor) of the manifest's weights, adapters merged. Gathers no others."""
        names = {spec.name for spec in self.manifest.tensors}

        def is_pushed(name: str) -> bool:
            return is_factor(name) or self._names.get(plain_name(name)) in names

        yield from self.named(self.plain_state(backend, is_pushed))

    def adapters(self, backend: Backend) -> Named:
        """Yields (checkpoint name, whole tensor) of every adapter factor."""
        yield from self.named_factors(backend.full_state(is_factor))

    def named_factors(self, state: Named) -> Named:
        """Yields (name in a push, tensor) of the adapter factors in a state dict."""
        for name, tensor in state:
            if is_factor(name):
                module, factor = split_factor(name)
                yield f"{_module(self._names[f'{module}.{WEIGHT}'])}.{factor}", tensor.detach()

    def plain_state(self, backend: Backend, wanted: Wanted = everything) -> Named:
        """Yields (state-dict name, whole tensor) of the model with adapters merged and removed."""
        for name, tensor in as_merged(backend.full_state(wanted), self._scale):
            yield name, tensor.detach()

    def _described(self, state: Iterable[tuple[str, Tensor]], dtype: str) -> Manifest:
        return Manifest(tuple(TensorSpec(name, tuple(tensor.shape), dtype) for name, tensor in self.named(state)))


class Merge:
    """Merges adapters into the weights of `policy.model`, or with `as_trained` into the dequantised ones of a
    quantised base; measures how far the two are apart."""

    def __init__(self, config: RunConfig, layers: Container[str], *, as_trained: bool = False) -> None:
        """`layers`: state-dict names of the weights that the learner quantised."""
        self._config, self._layers, self._as_trained = config, layers, as_trained
        self._error = self._change = self._trained = 0.0  # squared norms

    def __call__(self, name: str, weight: Tensor, factors: tuple[Tensor, Tensor] | None) -> Tensor:
        """The weight to write; `factors` are A and B of its adapter."""
        scale, is_quantised, base = self._config.policy.lora.scale, name in self._layers, weight
        if is_quantised:
            base = rounded(weight, self._config.policy.quantisation, DTYPES[self._config.resources.dtype])
        trained = base if factors is None else merged(base, *factors, scale)
        if is_quantised:
            self._error += _square(weight.float() - base.float())
            self._change += _square(trained.float() - base.float())
            self._trained += _square(trained.float())
        if self._as_trained or not is_quantised:
            return trained
        return weight if factors is None else merged(weight, *factors, scale)

    @property
    def error(self) -> tuple[float, float] | None:
        """Norms, relative to the trained weights, of the change by quantisation and of that by adapters; over the
        quantised weights. None without any."""
        return (sqrt(self._error / self._trained), sqrt(self._change / self._trained)) if self._trained else None


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())


def export_state(
    config: RunConfig,
    state: Path,
    folder: Path,
    *,
    merge: bool,
    average: bool,
    dtype: str = "",
    as_trained: bool = False,
) -> Merge:
    """Writes the policy of a learner's saved `state` to `folder`, in one process, for a state of any number of ranks.
    Memory holds one tensor at a time, and all adapters.

    The folder is a checkpoint in the Hugging Face layout with merged adapters. Without `merge` only the adapters are
    written, in the layout of PEFT or, for a flow model, of diffusers. With `average` the averaged weights replace the
    weights. Tensors have the dtypes of `policy.model`, or `dtype`; adapters are float32. With `policy.quantisation`,
    `merge` is into the original weights, and `as_trained` into the dequantised ones.
    """
    model, stored = unread_trained_model(config)
    merging = Merge(config, quantised_layers(model), as_trained=as_trained)
    weights = PolicyWeights(model, config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    saved = _saved(config, state, shapes, average=average)
    if config.policy.lora.is_on and not merge:
        save_trained_adapters(factors_of(dict(saved)), config, folder)
    else:
        save_trained(model, config, folder, weights.described, _plain(saved, stored, merging), dtype)
    return merging


def saved_checksum(config: RunConfig, state: Path) -> str:
    """Returns the checksum of the tensors that a push of a saved `state` sends, as `Push.checksum`."""
    model, stored = unread_trained_model(config)
    weights = PolicyWeights(model, config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    specs = {spec.name: spec for spec in weights.manifest.tensors}
    saved = _saved(config, state, shapes, average=False)
    if weights.manifest.payload == "adapters":
        named = weights.named_factors(saved)
    else:
        named = weights.named(_plain(saved, stored, Merge(config, ())))
    digests = ((specs[n], int(digest(words_of(t, specs[n]).view(torch.uint8)))) for n, t in named if n in specs)
    return f"{weights_checksum(digests):032x}"


def _saved(config: RunConfig, state: Path, shapes: Mapping[str, torch.Size], *, average: bool) -> Named:
    """Yields (state-dict name, whole tensor) from a learner's state; with `average`, averaged tensors if it has
    them."""
    tensors = saved_weights(config.learner, state)
    if average:
        refuse_without_average(state)
        tensors = {**tensors, **saved_tensors(state / AVERAGE)}
    for name, read in tensors.items():
        if (plain := name.removeprefix(MODEL)) in shapes:
            shape = shapes[plain]
            yield plain, read().flatten()[: shape.numel()].view(shape)  # DeepSpeed shards are flat and padded


def _plain(saved: Named, stored: StoredWeights, merge: Merge) -> Named:
    """Yields (state-dict name, whole tensor) of the model without adapters: `saved` tensors, and `stored` tensors of
    the initial checkpoint with adapters merged."""
    names, factors = set(), dict[tuple[str, str], Tensor]()
    for name, tensor in saved:
        if is_factor(name):
            factors[split_factor(name)] = tensor
        else:
            names.add(plain_name(name))
            yield plain_name(name), tensor
    for name, rows in stored:
        if name not in names:
            module = _module(name)
            own = (factors[module, A], factors[module, B]) if (module, A) in factors else None
            yield name, merge(name, rows[...], own)


def _module(weight: str) -> str:
    return weight.removesuffix(f".{WEIGHT}")
