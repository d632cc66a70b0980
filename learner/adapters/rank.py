"""AdapterRank: one rank of the group that trains many adapters on one frozen base."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec
from mobula.configs.schema import LoRAConfig
from mobula.learner.adapters.adapter import TrainedAdapter, read_state, write_state
from mobula.learner.adapters.call_rank import CallRank
from mobula.learner.adapters.calls import AdapterSegment, CallBatch, CallRow, Factors, GroupedAdapters
from mobula.learner.policies.adapters import A, B, save_adapters
from mobula.learner.policies.batch import TokenBatch


class AdapterRank(CallRank):
    """Trains adapters on the frozen model of `policy.model`. Implements the calls of `AdapterLearner` on one rank.

    Every rank has all adapters, and `step` sums their gradients.

    Example:
        rank = AdapterRank(config, 0, 1)
        rank.connect("")
        rank.create("a", AdapterSpec(rank=8, alpha=16.0, seed=0))
        [result] = rank.compute([LossCall("a", rows, "cross_entropy")])
        rank.step("a", AdamParameters(1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0))
    """

    def create(self, adapter: str, spec: AdapterSpec) -> None:
        if adapter in self._adapters:
            raise ValueError(f"there is an adapter {adapter!r}: drop it, or choose another name")
        self._adapters[adapter] = TrainedAdapter(spec, self._layers_of(spec), self._device)

    def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns `grad_norm`, `skipped` and `optimizer_steps`."""
        state = self._adapter(adapter)
        if not state.has_gradient:
            raise ValueError(f"the adapter {adapter!r} has no gradient to apply: run a backward pass first")
        if self._world_size > 1:
            state.set_gradient(self._summed(state.gradient()))
        metrics = state.step(parameters)
        if self._device.type == "cuda":
            for name, other in self._adapters.items():
                if name != adapter:
                    other.move_state(torch.device("cpu"))
        return metrics

    def save(self, adapter: str, folder: Path) -> None:
        """Writes factors, gradient and optimizer state."""
        state = self._adapter(adapter)
        gradient = self._summed(state.gradient()) if state.has_gradient else None
        self._write(lambda: write_state(folder, {**state.state(), "gradient": gradient}))

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Loads what `save` has written, in place of the adapter's state; clears its gradient without the optimizer."""
        state, saved = self._adapter(adapter), self._together(lambda: read_state(folder))
        state.load(saved, with_optimizer=with_optimizer)
        if with_optimizer and saved["gradient"] is not None:
            # The gradients of the ranks are summed in the next step.
            is_first = self._rank == 0
            state.set_gradient(saved["gradient"] if is_first else torch.zeros_like(saved["gradient"]))

    def export(self, adapter: str, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""
        state = self._adapter(adapter)
        factors = {
            (name, kind): factor.detach()
            for name, own in state.factors.items()
            for kind, factor in zip((A, B), own, strict=True)
        }
        config = LoRAConfig(rank=state.spec.rank, alpha=state.spec.alpha)
        self._write(lambda: save_adapters(folder, factors, config, self._config.policy.model))

    def drop(self, adapter: str) -> None:
        """Removes the adapter with its optimizer state, if there is one of this name."""
        self._adapters.pop(adapter, None)

    def _prepare(self, model: PreTrainedModel) -> None:
        """Freezes the model and lets adapters add to its linear layers."""
        self._adapters: dict[str, TrainedAdapter] = {}
        model.requires_grad_(False)
        self._layers = _linear_layers(model)
        self._has_experts = any(_is_expert(name) for name, _ in model.get_decoder().named_parameters())
        self._grouped = GroupedAdapters(model, self._layers)

    def _leaves(self, name: str) -> Factors:
        return self._adapter(name).leaves()

    def _accumulate(self, name: str, leaves: Factors) -> None:
        self._adapters[name].accumulate(leaves)

    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        """Sets the segments of the calls, in the order of the decoder."""
        sizes = Counter[int]()
        for index, (row, length) in enumerate(zip(share, tokens.row_lengths, strict=True)):
            prefix = tokens.prefixes.get(index) if self._shares_prefixes else None
            own = length - (0 if prefix is None else prefix.num_tokens)
            sizes[row.call] += own if self._config.learner.packs else tokens.input_ids.shape[1]
        segments = [
            AdapterSegment(size, batch.leaves[call], self._adapters[batch.calls[call].adapter].scale)
            for call, size in sizes.items()
        ]
        return self._grouped.segments(segments)

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()  # the leaves are whole on every rank; `step` sums their gradients

    def _adapter(self, name: str) -> TrainedAdapter:
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}: create it first, there are {sorted(self._adapters)}")
        return self._adapters[name]

    def _layers_of(self, spec: AdapterSpec) -> dict[str, nn.Linear]:
        if spec.rank < 1 or not (math.isfinite(spec.alpha) and spec.alpha > 0):
            raise ValueError(
                f"an adapter has rank {spec.rank} and alpha {spec.alpha}: give a rank of 1 or more, and alpha above 0"
            )
        if spec.trains_unembedding:
            raise ValueError("the unembedding takes no adapter here: create the adapter with train_unembed=False")
        if spec.trains_mlp and self._has_experts:
            raise ValueError(
                "the experts of policy.model take no adapter here: create the adapter with train_mlp=False"
            )
        layers = {
            name: layer
            for name, layer in self._layers.items()
            if (spec.trains_attention if _is_attention(name) else spec.trains_mlp)
        }
        if not layers:
            raise ValueError(
                "the adapter fits no linear layer of policy.model: create it with train_attn=True or train_mlp=True"
            )
        return layers

    def _summed(self, gradient: Tensor) -> Tensor:
        if self._world_size > 1:
            dist.all_reduce(gradient)
        return gradient


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """State-dict name -> linear layer of the decoder, without the output layer and experts."""
    inner = {id(module) for module in model.get_decoder().modules()}
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inner and module is not head and not _is_expert(name)
    }


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")
