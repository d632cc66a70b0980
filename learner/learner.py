"""Learner: one rank of the group that trains the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.tracing.profiler import UpdateProfiler
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema import RunConfig
from mobula.learner.backends import build_backend
from mobula.learner.backends.base import Optimizer
from mobula.learner.backends.sharded import RankRendezvous, ShardedWriter
from mobula.learner.batch import (
    LearnerBatch,
    LearnerItem,
    collate_items,
    minibatches_of,
    select_by_entropy,
    tokens_by_age,
    totals,
    without_overlong,
)
from mobula.learner.credit import Credit
from mobula.learner.critic import build_critic
from mobula.learner.critic.critic import Values, with_values
from mobula.learner.examples import StoredExample, SupervisedTerm, TaughtExamples
from mobula.learner.gradient_step import GradientStep, Term
from mobula.learner.image_teaching import ImageTrainer
from mobula.learner.measures import FreshGap, Movement, ratios
from mobula.learner.meter import Meter
from mobula.learner.objective import PolicyObjective, measure_gap
from mobula.learner.optim import NullAverage, NullSlow, SlowWeights, WeightAverage, learning_rate
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import PolicyOutput, on_device
from mobula.learner.policies.batch import TokenBatch, pad_rows
from mobula.learner.policies.flow.policy import StepRescoring
from mobula.learner.policies.loading import DTYPES, recompute_blocks
from mobula.learner.policies.trained import as_policy, collate_rows, save_trained, scoring_of, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.scoring_pass import ReferencePass, ScoringPass, unscored
from mobula.learner.shares import Portion, ShareFetcher, StepGroups, all_ranks
from mobula.learner.state import Offloader, StateWriter, load_state
from mobula.learner.supervised import SupervisedTrainer, taught_rate
from mobula.learner.weight_publisher import WeightPublisher


class Learner:
    """Trains the policy. All methods are collective, except `rendezvous_address`, `finish_save` and `close`.

    Example:
        address = ranks[0].rendezvous_address()
        for rank in ranks: rank.connect(address)      # at the same time
        for rank in ranks: rank.update(groups, version=1)
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        world_size: int,
        banned_ids: tuple[int, ...],
        template_ids: tuple[int, ...] = (),
    ) -> None:
        """`template_ids`: tokens such as the end of text, whose log-prob gap in responses is measured separately."""
        self._config = config
        self._template_ids = template_ids
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = RankRendezvous()
        self._device = torch.device(config.resources.device)
        self._scoring = scoring_of(config, banned_ids)
        self._objective = PolicyObjective(config.algorithm)
        self._credit = Credit(config)
        self._shares = ShareFetcher(rank, world_size, all_ranks)
        self._reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )
        self._fresh_gap = FreshGap(self._fresh_logprobs, config.timeouts.object_s)
        self._supervised_term = SupervisedTerm(config, self._shares, self._reader)
        self._profiler = UpdateProfiler(config.tracing.profile_steps, config.run_folder, rank, config.resources.device)
        self.version = 0

    def rendezvous_address(self) -> str:
        """Returns the `host:port` that all ranks `connect` to. Called on rank 0."""
        return self._rendezvous.address(self._config.timeouts.start_s)

    def connect(self, init_method: str) -> None:
        """Loads the policy, joins the process group and shards the policy over the ranks."""
        torch.set_num_threads(self._config.resources.learner.num_threads)
        torch.manual_seed(self._config.seed + self._rank)
        model, weights = unread_trained_model(self._config)
        model.train()
        recompute_blocks(model, self._config.learner.activation_checkpointing)
        self._model = model
        self._outgoing = PolicyWeights(model, self._config)
        self._rendezvous.join_as_configured(init_method, self._config, rank=self._rank, world_size=self._world_size)
        dtype, num_replicas = DTYPES[self._config.resources.dtype], self._config.resources.learner.replicas
        self._backend = build_backend(self._config.learner, self._device, dtype, num_replicas)
        num_sharing = self._config.learner.sequence_parallel
        ranks = SequenceRanks(num_sharing, self._device) if num_sharing > 1 else None
        self._policy = self._backend.wrap(as_policy(model, self._config, ranks), weights)
        self._optimizer = self._backend.optimizer()
        self._step = self._gradient_step(self._optimizer)
        scoring = ScoringPass(
            self._backend,
            self._step,
            lambda rows: self._forward(rows)[0],
            keeps_predictions=self._config.algorithm.needs_old_predictions,
        )
        self._scored = scoring if self._config.algorithm.needs_scoring_pass else unscored
        referring = ReferencePass(self._backend, self._step, lambda rows: self._forward(rows)[0], model)
        self._referred = referring if self._config.reference.place == "learner_ranks" else unscored
        self._supervised, self._num_taught = self._trainer(), 0
        self._critic = build_critic(self._config, self._rank, self._world_size, self._reader, self._device)
        self._critic.connect()
        self._movement = Movement(self._backend, self._step.shares, self._forward, self._config.num_steps)
        self._average = self._weight_average()
        self._slow = self._slow_weights()
        self._offloader = Offloader(
            self._policy, self._optimizer, self._device, with_policy=(self._slow,), with_optimizer=(self._average,)
        )
        self._states = StateWriter(self._rank)
        self.weights = self._publisher()

    def begin_rl(self) -> None:
        """Starts critic, weight average and slow copy from the current weights, after a warm start."""
        self._average.begin()
        self._slow.begin()
        self._critic.begin(self._outgoing.plain_state(self._backend))

    def update(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        *,
        supervised: Sequence[ScoredGroup] = (),
        supervised_portion: Portion | None = None,
        values: Values = (),
        fresh: Sequence[Any] = (),
        kl_scale: float = 1.0,
        portion: Portion | None = None,
    ) -> UpdateReport:
        """Runs one RL step on `groups`, which makes `version`.

        Args:
            groups: all groups of the step. A rank fetches the groups that it trains, and receives outlines of the
                others.
            supervised: rows for the supervised term of the loss.
            values: of a critic with separate ranks.
            fresh: empty, or a reference to a group sampled with the weights before the step, on which the log-prob gap
                is measured.
            kl_scale: factor of the KL coefficient.
            portion: the references of this rank, if `groups` has none; `supervised_portion` those to `supervised`.
        """
        with self._profiler.update(version):
            self._credit.kl_scale = kl_scale
            algorithm = self._config.algorithm
            fetched = self._shares.fetch(StepGroups(groups, version, self._config, self._scoring.row, portion=portion))
            examples = self._supervised_term.fetch(supervised, supervised_portion)
            # In this order: KL in the reward needs reference log-probs, and advantages need the critic's values.
            fetched = self._referred(with_values(fetched, values))
            credited = self._credit.assign(self._critic.valued(fetched))
            with self._slow.in_place():
                items = self._scored(without_overlong(credited.groups, algorithm))
            is_alone = algorithm.critic.is_alone(version)
            rate = 0.0 if is_alone else learning_rate(self._config.learner, version - 1, self._config.num_steps)
            parts = [
                select_by_entropy(part, algorithm.entropy.top_share)
                for part in minibatches_of(items, algorithm, (self._config.seed, version))
            ]
            critic, num_parts = self._critic.train(parts, version), len(parts)
            parts = [] if is_alone else parts
            meter = Meter(self._config.learner.sequence_parallel)
            self._movement.begin(parts[0] if parts else (), version)
            losses = [Term(part, self._loss(part, meter, is_first=n == 0)) for n, part in enumerate(parts)]
            grad_norms = []
            for n, loss in enumerate(losses):
                measures = [partial(self._fresh_gap.measure, group, version - 1, meter) for group in fresh if n == 0]
                terms: list[Term[Any]] = [loss, *self._supervised_term.terms(self._policy, examples, n, meter)]
                grad_norms.append(self._optimized(terms, rate, *measures))
            self._movement.end(meter)
            self._slow.follow(version)
            self.version = version
            metrics = self._metrics(meter, items, grad_norms) if parts else {"loss": 0.0, "policy_loss": 0.0}
            # The mean KL is reduced over ranks, so all ranks change the coefficient by the same amount.
            if "kl" in metrics:
                self._credit.kl.observe(metrics["kl"], sum(len(group) for group in items))
            planned = 0 if is_alone else algorithm.num_epochs * algorithm.num_minibatches
            taken = sum(map(math.isfinite, grad_norms))
            num_critic = num_parts - critic["critic_skipped"] if critic else 0.0
            counts = {"skipped": float(planned - taken), "optimizer_steps": taken + num_critic}
            report = {**credited.metrics, **metrics, **critic, "learning_rate": rate, **counts}
            return UpdateReport(version, report)

    def supervised_step(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> dict[str, float]:
        """Runs one step of the warm start, with a separate optimizer: RL starts with a fresh one. A rank fetches the
        examples of its share; `portion` has its references, if `examples` has none."""
        rate = taught_rate(self._config.warm_start, self._num_taught)
        self._num_taught += 1
        return self._supervised.step(self._taught(examples, portion), rate)

    def answer_accuracy(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> float:
        """Exact-match accuracy of greedy decoding on the examples; for images, the explained share of velocities."""
        return self._supervised.answer_accuracy(self._taught(examples, portion))

    def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """Returns float32 [P - 1]: log-probs of a prompt's tokens after the first, at temperature 1 and without bans,
        computed in a batch of `num_copies`. For a flow model: of arbitrary denoising steps after the prompt, [T].
        """
        with self._offloader.policy_on_device(), self._slow.in_place(), self._backend.inference():
            rows = [self._scoring.canary_row(prompt)] * num_copies
            batch = collate_rows(rows, self._reader, self._device)
            return self._policy(batch, self._scoring.canary).logprobs[0].cpu().numpy()

    def manifest(self) -> Manifest:
        return self.weights.manifest

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Opens the rendezvous of a transfer group. Called on rank 0."""
        return self.weights.open_transfer(epoch, num_receivers)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Joins a transfer group; does nothing on ranks that do not send."""
        self.weights.join_transfer(rendezvous)

    def leave_transfer(self, epoch: int) -> None:
        self.weights.leave_transfer(epoch)

    def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> PushedChanges:
        """Sends the weights to a transfer group; with `step` their changes. Returns this rank's part of them."""
        with self._slow.in_place():
            if step is not None:
                return self.weights.send_changes(bucket_bytes, epoch, step)
            return self.weights.send(bucket_bytes, epoch)

    def export_weights(self, bucket_bytes: int) -> tuple[int, list[np.ndarray]]:
        """Returns the version and the packed buckets, for engines without a transfer group. Buckets of other ranks are
        empty."""
        with self._offloader.policy_on_device(), self._slow.in_place():
            return self.version, self.weights.export(bucket_bytes)

    def export_buckets(self, bucket_bytes: int) -> tuple[int | np.ndarray, ...]:
        """As `export_weights`, with each bucket as a separate Ray object."""
        version, buckets = self.export_weights(bucket_bytes)
        return version, *buckets

    def offload(self, part: str) -> None:
        """Moves `policy` or `optimizer` to host memory, to free the device for an engine."""
        self._offloader.offload(part)
        self._critic.offload(part)

    def onload(self) -> None:
        """Moves policy and optimizer to the device."""
        self._offloader.onload()
        self._critic.onload()

    def save(self, folder: Path) -> None:
        """Copies the state for an exact resume, and writes the copy in the background."""
        parts = (self._critic, self._average, self._slow)
        self._states.save(folder, self._backend, self._optimizer, parts, self.version, self._credit.state())

    def finish_save(self) -> None:
        """Waits until the copy is on disk. Not collective; may run concurrently with any other method."""
        self._states.finish()

    def load(self, folder: Path) -> int:
        """Restores a saved state and returns its version."""
        self._states.finish()
        parts = (self._critic, self._average, self._slow)
        self.version, algorithm = load_state(folder, self._backend, self._optimizer, parts, self._rank)
        self._credit.load(algorithm)
        return self.version

    def restore(self, folder: Path, version: int) -> None:
        """Restores a saved state, which becomes `version`."""
        self.load(folder)
        self.version = version

    def export(self, folder: Path) -> None:
        """Writes the policy in the Hugging Face layout; rank 0 writes each tensor as soon as it is gathered."""
        with self._offloader.policy_on_device():
            tensors = self._outgoing.plain_state(self._backend)
            try:
                if self._rank == 0:
                    save_trained(self._model, self._config, folder, self._outgoing.described, tensors)
            finally:
                # Gather the rest also after a failed write: the other ranks wait in each gather.
                for _ in tensors:
                    pass

    def close(self) -> None:
        self.weights.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _taught(self, examples: Sequence[StoredExample], portion: Portion | None) -> list[Any]:
        timeout_s = self._config.timeouts.object_s
        return self._shares.fetch(TaughtExamples(examples, self._config.learner, timeout_s, portion))

    def _loss(
        self, part: list[LearnerItem], meter: Meter, *, is_first: bool
    ) -> Callable[[Sequence[LearnerItem]], Tensor]:
        """Returns the loss of a micro-batch of `part`."""
        part_totals, ages, kl_coef = totals(part), tokens_by_age(part), self._credit.kl_coef

        def loss(rows: Sequence[LearnerItem]) -> Tensor:
            output, batch = self._forward(rows)
            if self._config.learner.shares_prompts and isinstance(batch.inputs, TokenBatch):
                counts = [sum(batch.inputs.row_lengths), batch.inputs.num_shared]
                row_tokens, shared_tokens = on_device(np.array(counts, dtype=np.float32), self._device)
                meter.add(row_tokens=row_tokens, shared_tokens=shared_tokens)
            if is_first:
                measure_gap(output, batch, ages, meter, self._token_classes(rows))
            return self._objective(output, batch, part_totals, meter, kl_coef)

        return loss

    def _token_classes(self, rows: Sequence[LearnerItem]) -> dict[str, Tensor]:
        """Returns name -> bool [B, T]: tokens whose log-prob gap is measured separately."""
        if not self._template_ids:
            return {}
        masks = [np.isin(row.response_ids, self._template_ids) for row in rows]
        return {"template": on_device(pad_rows(masks, 0, np.bool_), self._device)}

    def _optimized(
        self, terms: Sequence[Term[Any]], rate: float, before_step: Callable[[], None] | None = None
    ) -> float:
        """Takes one optimizer step and returns the gradient norm. Skips the step if the norm is not finite."""
        grad_norm = self._step.on_sum(terms, rate, before_step)
        if math.isfinite(grad_norm):
            self._average.update()
        return grad_norm

    def _fresh_logprobs(self, group: TrajectoryGroup) -> Tensor:
        """Returns float32 [B, T]: log-probs of the sampled actions under the sampling distribution."""
        rows = [self._scoring.row(group.prompt, trajectory.actions) for trajectory in group.trajectories]
        with self._backend.inference():
            return self._policy(collate_rows(rows, self._reader, self._device), self._scoring.training).logprobs

    def _forward(self, rows: Sequence[LearnerItem]) -> tuple[PolicyOutput, LearnerBatch]:
        batch = collate_items(rows, self._reader, self._device)
        has_bonus = self._config.algorithm.entropy.bonus > 0
        return self._policy(batch.inputs, self._scoring.training, entropy_has_gradient=has_bonus), batch

    def _trainer(self) -> SupervisedTrainer | ImageTrainer:
        step = self._gradient_step(self._backend.optimizer())
        parts = (self._policy, self._backend, step, self._reader, self._device)
        scoring = self._scoring.training
        if isinstance(scoring, StepRescoring):
            return ImageTrainer(*parts, scoring)
        return SupervisedTrainer(*parts, scoring, self._config.learner.sequence_parallel)

    def _weight_average(self) -> WeightAverage | NullAverage:
        decay = self._config.learner.ema_decay
        return WeightAverage(self._backend.trained, decay, ShardedWriter().copied) if decay > 0 else NullAverage()

    def _slow_weights(self) -> SlowWeights | NullSlow:
        slow = self._config.algorithm.slow_copy
        if slow is None:
            return NullSlow()
        return SlowWeights(self._backend.trained, slow.decay_rate, slow.max_decay, ShardedWriter().copied)

    def _publisher(self) -> WeightPublisher:
        return WeightPublisher(
            self._outgoing.manifest,
            partial(self._outgoing.pushed, self._backend),
            rank=self._rank,
            device=self._device,
            transport=self._config.resources.transport,
            timeout_s=self._config.weight_sync.timeout_s,
            num_ranks=self._world_size,
            num_senders=self._config.weight_sync.max_senders,
            same_host=self._config.weight_sync.same_host,
        )

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint name, whole tensor), tied weights once. Collective: every rank must exhaust it."""
        return self._outgoing.merged(self._backend)

    def _gradient_step(self, optimizer: Optimizer) -> GradientStep:
        return GradientStep(self._backend, optimizer, self._config.learner, self._rank, self._world_size)

    def _metrics(self, meter: Meter, items: list[list[LearnerItem]], grad_norms: list[float]) -> dict[str, float]:
        """Reduces metrics over ranks: means over minibatches; maxima and counts over the whole step."""
        reduced = meter.reduce()
        measured = ratios(reduced)
        num_tokens, num_shared = reduced.pop("row_tokens", 0.0), reduced.pop("shared_tokens", 0.0)
        shared = {"shared_prompt_share": num_shared / num_tokens} if num_tokens > 0 else {}
        per_step = ("logprob_gap_mean", "logprob_gap_max", "logprob_drift_mean", "ratio_max")
        means = {name: value if name in per_step else value / len(grad_norms) for name, value in reduced.items()}
        rows = [item for group in items for item in group]
        return {
            **means,
            **measured,
            **shared,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "response_length": sum(item.sequence.num_targets for item in rows) / len(rows),
            "num_tokens": float(sum(item.num_trained for item in rows)),
            "filtered_responses": float(sum(bool(item.loss_mask.any() and not item.kept_mask.any()) for item in rows)),
            "over_age_tokens": float(sum(item.num_older(self._config.algorithm.max_staleness) for item in rows)),
        }
