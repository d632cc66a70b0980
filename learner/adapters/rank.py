"""AdapterRank: one rank of the group that trains many adapters on one frozen base."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.errors import DeadlineError, LostObjectError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall
from mobula.configs.schema import LoRAConfig, RunConfig
from mobula.learner.adapters.adapter import TrainedAdapter, read_state, write_state
from mobula.learner.adapters.call_batch import CallBatch, PartialResult
from mobula.learner.adapters.calls import CallRow, RowLimits, refuse_invalid
from mobula.learner.adapters.grouped import AdapterSegment, GroupedAdapters
from mobula.learner.adapters.targets import with_targets
from mobula.learner.backends import build_backend
from mobula.learner.backends.process_group import RankRendezvous
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.adapters import save_adapters
from mobula.learner.policies.batch import TokenBatch, collate
from mobula.learner.policies.families import family_of
from mobula.learner.policies.loading import DTYPES, recompute_blocks
from mobula.learner.policies.logprobs import PLAIN
from mobula.learner.policies.lora import A, B
from mobula.learner.policies.trained import as_policy, unread_trained_model
from mobula.learner.shares import all_ranks


class AdapterRank:
    """Trains adapters on the frozen model of `policy.model`. Implements the calls of `AdapterLearner` on one rank.

    All methods are collective, except `rendezvous_address` and `close`. Rows are split over the ranks; every rank has
    all adapters, and `step` sums their gradients. The base model is sharded by `learner.backend`.

    Example:
        rank = AdapterRank(config, 0, 1)
        rank.connect("")
        rank.create("a", AdapterSpec(rank=8, alpha=16.0, seed=0))
        [result] = rank.compute([LossCall("a", rows, "cross_entropy")])
        rank.step("a", AdamParameters(1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0))
    """

    isolates_failures = True
    """Whether a call that fails in a pass leaves no gradient."""

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        """Raises: ValueError: the configuration asks for what adapters of several users cannot have."""
        _refuse_unsupported(config)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = RankRendezvous()
        self._device = torch.device(config.resources.device)
        self._reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )
        self._adapters: dict[str, TrainedAdapter] = {}

    def rendezvous_address(self) -> str:
        """Returns the `host:port` that all ranks `connect` to. Called on rank 0."""
        return self._rendezvous.address(self._config.timeouts.start_s)

    def connect(self, init_method: str) -> None:
        """Loads the base model, joins the process group and shards the model over the ranks."""
        torch.set_num_threads(self._config.resources.learner.num_threads)
        model, weights = unread_trained_model(self._config)
        assert isinstance(model, PreTrainedModel), "the configuration refuses other models"
        model.train()  # activation checkpointing is for training mode; there is no dropout
        recompute_blocks(model, self._config.learner.activation_checkpointing)
        text = model.config.get_text_config()
        self._limits = RowLimits(text.vocab_size, text.max_position_embeddings)
        self._adapt(model)
        self._rendezvous.join_as_configured(init_method, self._config, rank=self._rank, world_size=self._world_size)
        dtype, num_replicas = DTYPES[self._config.resources.dtype], self._config.resources.learner.replicas
        self._backend = build_backend(self._config.learner, self._device, dtype, num_replicas)
        family = family_of(model.config, model.config.name_or_path)
        self._shares_prefixes = self._config.learner.shares_prompts and family.shares_prefixes
        self._policy = self._backend.wrap(as_policy(model, self._config), weights)

    def _adapt(self, model: PreTrainedModel) -> None:
        """Freezes the model and lets adapters add to its linear layers."""
        model.requires_grad_(False)
        self._layers = _linear_layers(model)
        self._has_experts = any(_is_expert(name) for name, _ in model.get_decoder().named_parameters())
        self._grouped = GroupedAdapters(model, self._layers)

    def create(self, adapter: str, spec: AdapterSpec) -> None:
        """Adds an adapter.

        Raises:
            ValueError: an adapter has this name, or the spec fits no layer of the model.
        """
        if adapter in self._adapters:
            raise ValueError(f"there is an adapter {adapter!r}: drop it, or choose another name")
        self._adapters[adapter] = TrainedAdapter(spec, self._layers_of(spec), self._device)

    def compute(self, calls: Sequence[LossCall]) -> list[PartialResult | Exception]:
        """Runs calls of one or several adapters as one batch; returns this rank's part of each result.

        A call that cannot be computed, or whose loss is not finite, has an exception in place of its result and adds
        nothing to the gradient.

        Raises:
            RuntimeError, ValueError: a pass failed on one of several ranks, which can only be started again.
        """
        batch = CallBatch(calls)
        for number, call in batch.alive():
            try:
                refuse_invalid(call, self._limits)
                batch.leaves[number] = self._adapter(call.adapter).leaves()
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
                self._adapters[call.adapter].accumulate(batch.leaves[number])
        return batch.results()

    def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns `grad_norm`, `skipped` and `optimizer_steps`.

        Raises:
            ValueError: the adapter does not exist or has no gradient.
        """
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
        """Loads what `save` has written, in place of the adapter's state; clears its gradient without the optimizer.

        Raises:
            ValueError: the saved adapter has another rank, scale or other layers.
            CheckpointError: the folder has no saved adapter.
        """
        saved, state = read_state(folder), self._adapter(adapter)
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

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

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

    def _read_media(self, batch: CallBatch) -> None:
        """Reads the media of this rank's rows; calls with media that cannot be read fail on all ranks."""
        is_read = not any(row.prompt.media for _, call in batch.alive() for row in call.rows)
        while not is_read:
            unreadable: dict[int, Exception] = {}
            for has_backward in (True, False):
                for row in (row for share in self._shares(batch.rows(has_backward=has_backward)) for row in share):
                    try:
                        self._reader.read(row.row.prompt.media)
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
        """Computes all rows of the calls that are alive, and their gradients."""
        for share in self._shares(batch.rows(has_backward=True)):
            tokens = self._tokens(share)
            with self._adapted(batch, share, tokens):
                values = self._policy(tokens, PLAIN).logprobs
                loss = batch.add(share, values)
                # A rank without a loss takes part in the collectives of the backward pass.
                (0.0 * values.sum() if loss is None else loss).backward()
        with self._backend.inference():
            for share in self._shares(batch.rows(has_backward=False)):
                tokens = self._tokens(share)
                with self._adapted(batch, share, tokens):
                    batch.add(share, self._policy(tokens, PLAIN).logprobs)

    def _tokens(self, share: Sequence[CallRow]) -> TokenBatch:
        batch = collate([row.sequence for row in share], self._reader, self._device)
        return with_targets(batch, [row.targets for row in share])

    def _adapted(self, batch: CallBatch, share: Sequence[CallRow], tokens: TokenBatch) -> AbstractContextManager[None]:
        """While the body runs, the adapter of each call computes its tokens, in the order of the decoder."""
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

    def _of_all_ranks(self, failures: Mapping[int, Exception]) -> dict[int, Exception]:
        """Returns the failed calls of all ranks. Collective."""
        reports = [failures] if self._world_size == 1 else all_ranks(failures)
        return {call: error for report in reversed(reports) for call, error in report.items()}

    def _summed(self, gradient: Tensor) -> Tensor:
        """Sums a gradient over the ranks. Collective."""
        if self._world_size > 1:
            dist.all_reduce(gradient)
        return gradient

    def _write(self, write: Callable[[], None]) -> None:
        """Writes on rank 0; no rank returns before the files are complete. Collective.

        Raises:
            OSError: on every rank, if the files could not be written.
        """
        error: OSError | None = None
        if self._rank == 0:
            try:
                write()
            except OSError as failure:
                error = failure
        if self._world_size > 1:
            error = all_ranks(error)[0]
        if error is not None:
            raise error


def _refuse_unsupported(config: RunConfig) -> None:
    """Raises: ValueError: the base model cannot be shared by adapters of several users."""
    needed = {
        "learner.backend=deepspeed": ("set learner.backend=fsdp2 or single", config.learner.backend == "deepspeed"),
        f"policy.lora.rank={config.policy.lora.rank}": ("set policy.lora.rank=0", config.policy.lora.is_on),
        "policy.dropout=true": ("set policy.dropout=false", config.policy.dropout),
        f"learner.sequence_parallel={config.learner.sequence_parallel}": (
            "set learner.sequence_parallel=1",
            config.learner.sequence_parallel > 1,
        ),
        "a policy that makes images": (
            "set policy.model to a language model",
            config.sampler.is_flow or config.sampler.draws_tokens,
        ),
        f"offline.job={config.offline.job}": ("leave offline.job out", config.offline.is_on),
    }
    for what, (action, is_set) in needed.items():
        if is_set:
            raise ValueError(f"{what} does not go with adapters of several users on one base model: {action}")


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
