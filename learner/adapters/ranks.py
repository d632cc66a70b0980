"""Ranks of the training service: one trains many adapters on a frozen base, one all weights of a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.errors import CheckpointError, DeadlineError, LostObjectError
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall
from mobula.configs.schema import LoRAConfig, RunConfig
from mobula.learner.adapters.adapter import (
    STATE_FILE,
    AdapterSegment,
    CallBatch,
    CallRow,
    Factors,
    GroupedAdapters,
    PartialResult,
    RowLimits,
    TrainedAdapter,
    read_adapter_state,
    refuse_invalid,
    with_targets,
    write_adapter_state,
)
from mobula.learner.backends.sharded import ShardedWriter, saved_shapes, saved_tensors
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.optim import local
from mobula.learner.policies.adapters import A, B, save_adapters
from mobula.learner.policies.batch import TokenBatch, collate
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import PLAIN
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.rank import Rank
from mobula.learner.shares import all_ranks
from mobula.learner.state_files import read_state

T = TypeVar("T")
OPTIMIZERS = ("adamw", "adamw_8bit")  # those with the parameters that clients send


class CallRank(Rank, ABC):
    """Computes calls: validation, micro-batches, forward and backward passes. Subclasses own what is trained.

    All methods are collective, except `rendezvous_address` and `close`. Rows are split over the ranks. The model is
    sharded by `learner.backend`.
    """

    isolates_failures = True  # whether a call that fails in a pass leaves no gradient

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        refuse_unsupported(config)
        super().__init__(config, rank, world_size)

    def _build(self, join: Callable[[], None]) -> None:
        model, weights = self._read_policy()
        assert isinstance(model, PreTrainedModel), "the configuration refuses other models"
        text = model.config.get_text_config()
        self._limits = RowLimits(text.vocab_size, text.max_position_embeddings)
        family = family_of(model.config, model.config.name_or_path)
        self._shares_prefixes = self._config.learner.shares_prompts and family.shares_prefixes
        self._prepare(model)
        join()
        self._shard_policy(weights)

    def compute(self, calls: Sequence[LossCall]) -> list[PartialResult | Exception]:
        """Runs calls as one batch; returns this rank's part of each result.

        A call that cannot be computed, or whose loss is not finite, has an exception in place of its result and adds
        nothing to the gradient.
        """
        batch = CallBatch(calls)
        for number, call in batch.alive():
            try:
                refuse_invalid(call, self._limits)
                batch.leaves[number] = self._leaves(call.adapter)
            except ValueError as error:
                batch.failures[number] = error
        self._read_media(batch)
        try:
            self._run(batch)
        except (RuntimeError, ValueError) as error:
            if self._world_size > 1 or not self.isolates_failures:  # other ranks wait in the collectives of this pass
                raise
            if len(calls) == 1:
                return [error]
            return [result for call in calls for result in self.compute([call])]  # to find the call that failed
        batch.failures |= self._of_all_ranks(batch.not_finite())
        for number, call in batch.alive():
            if call.has_backward:
                self._accumulate(call.adapter, batch.leaves[number])
        return batch.results()

    @abstractmethod
    def _prepare(self, model: PreTrainedModel) -> None:
        """Marks what is trained in the model, which has no values yet."""

    @abstractmethod
    def _leaves(self, name: str) -> Factors:
        """Returns the factors of an adapter as leaves that get the gradient of a call."""

    @abstractmethod
    def _accumulate(self, name: str, leaves: Factors) -> None:
        """Adds the gradient of a call that succeeded."""

    @abstractmethod
    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        """While the body runs, each call computes its tokens with its own adapter."""

    @abstractmethod
    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of a micro-batch, the last one of all calls or not. Collective."""

    def _read_media(self, batch: CallBatch) -> None:
        """Reads the media of this rank's rows; calls with media that cannot be read fail on all ranks."""
        is_read = not any(row.prompt.media for _, call in batch.alive() for row in call.rows)
        while not is_read:
            unreadable: dict[int, Exception] = {}
            for has_backward in (True, False):
                for row in (row for share in self._shares(batch.rows(has_backward=has_backward)) for row in share):
                    try:
                        self.reader.read(row.row.prompt.media)
                    except (DeadlineError, LostObjectError) as error:
                        unreadable[row.call] = error
            failed = self._of_all_ranks(unreadable)
            batch.failures |= failed
            is_read = not failed  # else rows have moved to other ranks

    def _shares(self, rows: Sequence[CallRow]) -> list[list[CallRow]]:
        """This rank's micro-batches, each with the rows of a call behind one another."""
        if not rows:
            return []
        shares = shares_of_ranks(rows, self._config.learner, self._world_size)[self._rank]
        return [sorted(share, key=lambda row: row.call) for share in shares]

    def _run(self, batch: CallBatch) -> None:
        shares = self._shares(batch.rows(has_backward=True))
        for number, share in enumerate(shares):
            tokens = self._tokens(share)
            with self._adapted(batch, share, tokens):
                values = self.policy(tokens, PLAIN).logprobs
                loss = batch.add(share, values)
                # A rank without a loss takes part in the collectives of the backward pass.
                self._backward(0.0 * values.sum() if loss is None else loss, is_last=number == len(shares) - 1)
        with self.backend.inference():
            for share in self._shares(batch.rows(has_backward=False)):
                tokens = self._tokens(share)
                with self._adapted(batch, share, tokens):
                    batch.add(share, self.policy(tokens, PLAIN).logprobs)

    def _tokens(self, share: Sequence[CallRow]) -> TokenBatch:
        batch = collate([row.sequence for row in share], self.reader, self.device)
        return with_targets(batch, [row.targets for row in share])

    def _of_all_ranks(self, failures: Mapping[int, Exception]) -> dict[int, Exception]:
        """Returns the failed calls of all ranks. Collective."""
        reports = [failures] if self._world_size == 1 else all_ranks(failures)
        return {call: error for report in reversed(reports) for call, error in report.items()}

    def _write(self, write: Callable[[], None]) -> None:
        """Writes on rank 0; no rank returns before the files are complete. Collective; raises as `_together`."""
        self._together(write if self._rank == 0 else lambda: None)

    def _together(self, call: Callable[[], T]) -> T:
        """Runs `call` on every rank and returns its own result. Collective."""
        failure: Exception | None = None
        try:
            result = call()
        except (CheckpointError, OSError, ValueError) as error:
            failure = error
        for raised in [failure] if self._world_size == 1 else all_ranks(failure):
            if raised is not None:
                raise raised
        return result


def refuse_unsupported(config: RunConfig) -> None:
    """Raises: ValueError: a training service has no such learner."""
    learner, sampler, is_full = config.learner, config.sampler, config.training_service.weights == "full"
    optimizers = f"{' or '.join(OPTIMIZERS)}, which take the parameters that clients send"
    refused = (
        (learner.backend == "deepspeed", "learner.backend=deepspeed", "set learner.backend=fsdp2 or single"),
        (config.policy.lora.is_on, f"policy.lora.rank={config.policy.lora.rank}", "set policy.lora.rank=0"),
        (config.policy.dropout, "policy.dropout=true", "set policy.dropout=false"),
        (
            learner.sequence_parallel > 1,
            f"learner.sequence_parallel={learner.sequence_parallel}",
            "set learner.sequence_parallel=1",
        ),
        (sampler.makes_images, "a policy that makes images", "set policy.model to a language model"),
        (
            is_full and learner.optimizer not in OPTIMIZERS,
            f"learner.optimizer={learner.optimizer}",
            f"set learner.optimizer to {optimizers}",
        ),
        (config.offline.is_on, f"offline.job={config.offline.job}", "leave offline.job out"),
    )
    for is_set, what, action in refused:
        if is_set:
            raise ValueError(f"{what} does not go with a training service: {action}")


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
        self._adapters[adapter] = TrainedAdapter(spec, self._layers_of(spec), self.device)

    def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns `grad_norm`, `skipped` and `optimizer_steps`."""
        state = self._adapter(adapter)
        if not state.has_gradient:
            raise ValueError(f"the adapter {adapter!r} has no gradient to apply: run a backward pass first")
        if self._world_size > 1:
            state.set_gradient(self._summed(state.gradient()))
        metrics = state.step(parameters)
        if self.device.type == "cuda":
            for name, other in self._adapters.items():
                if name != adapter:
                    other.move_state(torch.device("cpu"))
        return metrics

    def save(self, adapter: str, folder: Path) -> None:
        """Writes factors, gradient and optimizer state."""
        state = self._adapter(adapter)
        gradient = self._summed(state.gradient()) if state.has_gradient else None
        self._write(lambda: write_adapter_state(folder, {**state.state(), "gradient": gradient}))

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Loads what `save` has written, in place of the adapter's state; clears its gradient without the optimizer."""
        state, saved = self._adapter(adapter), self._together(lambda: read_adapter_state(folder))
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
        self._trained = self.backend.trained()
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
        norm = self.backend.step(self._optimizer, max_grad_norm=parameters.grad_clip_norm or math.inf)
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
            self.backend.save(folder, self._optimizer, self._num_steps)()
        finally:
            self._set_gradient(gradient)

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Loads what `save` has written, on any number of ranks; clears the gradient without the optimizer."""
        self._refuse_other(adapter)
        self._together(lambda: self._refuse_unfit(folder))
        self._reset()
        num_steps = self.backend.load(folder, self._optimizer)
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
        self.outgoing = PolicyWeights(model, self._config)

    def _leaves(self, name: str) -> Factors:
        self._refuse_other(name)
        return {}

    def _accumulate(self, name: str, leaves: Factors) -> None:
        """Does nothing: the gradients are at the parameters."""

    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.backend.backward(loss, is_last=is_last)

    def _refuse_other(self, name: str) -> None:
        if name != self._name:
            active = "none is active" if self._name is None else f"{self._name} is active"
            raise ValueError(f"there is no model {name!r}: create it first, {active}")

    def _reset(self) -> None:
        self._clear_gradient()
        self._optimizer = self.backend.optimizer()
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
