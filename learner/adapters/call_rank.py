"""CallRank: a rank that computes calls of losses on the model of `policy.model`, whatever the calls train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from mobula.cluster.errors import CheckpointError, DeadlineError, LostObjectError
from mobula.cluster.training_service.interfaces import LossCall
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.adapter import with_targets
from mobula.learner.adapters.calls import CallBatch, CallRow, Factors, PartialResult, RowLimits, refuse_invalid
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.batch import TokenBatch, collate
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import PLAIN
from mobula.learner.rank import Rank
from mobula.learner.shares import all_ranks

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
        shares = self._shares(batch.rows(has_backward=True))
        for number, share in enumerate(shares):
            tokens = self._tokens(share)
            with self._adapted(batch, share, tokens):
                values = self._policy(tokens, PLAIN).logprobs
                loss = batch.add(share, values)
                # A rank without a loss takes part in the collectives of the backward pass.
                self._backward(0.0 * values.sum() if loss is None else loss, is_last=number == len(shares) - 1)
        with self._backend.inference():
            for share in self._shares(batch.rows(has_backward=False)):
                tokens = self._tokens(share)
                with self._adapted(batch, share, tokens):
                    batch.add(share, self._policy(tokens, PLAIN).logprobs)

    def _tokens(self, share: Sequence[CallRow]) -> TokenBatch:
        batch = collate([row.sequence for row in share], self._reader, self._device)
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
        (sampler.is_flow or sampler.draws_tokens, "a policy that makes images", "set policy.model to a language model"),
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
