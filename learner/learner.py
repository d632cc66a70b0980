"""Learner: one rank of the group that trains the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.tracing.profiler import UpdateProfiler
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema import RunConfig
from mobula.learner.backends.sharded import ShardedWriter
from mobula.learner.credit import Credit
from mobula.learner.critic import Critic, NullCritic
from mobula.learner.examples import StoredExample
from mobula.learner.offline import OfflineSteps, StepParts, WarmStart
from mobula.learner.optim import NullAverage, NullSlow, SlowWeights, WeightAverage
from mobula.learner.policies.trained import collate_rows, scoring_of
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.rank import AlgorithmState, CheckpointPart, Offloadable, Offloader, StatefulRank, TrainedWeights
from mobula.learner.rl_steps import RLSteps
from mobula.learner.shares import Portion, ShareFetcher, all_ranks
from mobula.learner.weight_publisher import WeightPublisher


class Learner(StatefulRank):
    """Trains the policy by RL, or on the rows of an offline job.

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
        super().__init__(config, rank, world_size)
        self._template_ids = template_ids
        self._scoring = scoring_of(config, banned_ids)
        self._credit = Credit(config)
        self._shares = ShareFetcher(rank, world_size, all_ranks)
        self._profiler = UpdateProfiler(config.tracing.profile_steps, config.run_folder, rank, config.resources.device)

    def _build(self, join: Callable[[], None]) -> None:
        config = self._config
        model, weights = self._read_policy()
        self.outgoing = PolicyWeights(model, config)
        join()
        self._shard_policy(weights)
        self._optimizer = self.backend.optimizer()
        self._step, teaching = (self._gradient_step(o) for o in (self._optimizer, self.backend.optimizer()))
        self._critic: Critic | NullCritic = (
            Critic(config, self._rank, self._world_size, self.reader, self.device)
            if config.algorithm.critic.place == "learner_ranks"
            else NullCritic()
        )
        self._critic.connect()
        trained, decay, slow = self.backend.trained, config.learner.ema_decay, config.algorithm.slow_copy
        self._average: WeightAverage | NullAverage = (
            WeightAverage(trained, decay, ShardedWriter().copied) if decay > 0 else NullAverage()
        )
        self._slow: SlowWeights | NullSlow = (
            NullSlow()
            if slow is None
            else SlowWeights(trained, slow.decay_rate, slow.max_decay, ShardedWriter().copied)
        )
        parts = StepParts(
            config, self._shares, self.reader, self.backend, self.policy, self._scoring, self._step, self._average
        )
        self._warm_start = WarmStart(parts, teaching)
        self.steps: RLSteps | OfflineSteps = (
            OfflineSteps(parts)
            if config.offline.is_on
            else RLSteps(parts, self._credit, self._critic, self._slow, self._template_ids)
        )
        self._offloader = Offloader(
            self.policy, self._optimizer, self.device, with_policy=(self._slow,), with_optimizer=(self._average,)
        )
        self.weights = WeightPublisher(
            self.outgoing.manifest,
            partial(self.outgoing.pushed, self.backend),
            rank=self._rank,
            device=self.device,
            transport=config.resources.transport,
            timeout_s=config.weight_sync.timeout_s,
            num_ranks=self._world_size,
            num_senders=config.weight_sync.max_senders,
            same_host=config.weight_sync.same_host,
        )

    def begin_rl(self) -> None:
        """Starts critic, weight average and slow copy from the current weights, after a warm start."""
        self._average.begin()
        self._slow.begin()
        self._critic.begin(self.outgoing.plain_state(self.backend))

    def update(self, groups: Sequence[ScoredGroup], version: int, **more: Any) -> UpdateReport:
        """Takes the step on `groups` that makes `version`; `more` is as in `RLSteps.update`."""
        with self._profiler.update(version):
            report = self.steps.update(groups, version, **more)
            self.version = version
            return report

    def assess(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> Mapping[str, float]:
        assert isinstance(self.steps, OfflineSteps), "RL assesses responses, not rows"
        return self.steps.assess(groups, portion)

    def supervised_step(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> dict[str, float]:
        """Runs one step of the warm start. A rank fetches the examples of its share; `portion` has its references, if
        `examples` has none."""
        return self._warm_start.step(examples, portion)

    def answer_accuracy(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> float:
        return self._warm_start.accuracy(examples, portion)

    def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """Returns float32 [P - 1]: log-probs of a prompt's tokens after the first, at temperature 1 and without bans,
        computed in a batch of `num_copies`. For a flow model: of arbitrary denoising steps after the prompt, [T]."""
        with self._offloader.policy_on_device(), self._slow.in_place(), self.backend.inference():
            batch = collate_rows([self._scoring.canary_row(prompt)] * num_copies, self.reader, self.device)
            return self.policy(batch, self._scoring.canary).logprobs[0].cpu().numpy()

    def manifest(self) -> Manifest:
        return self.weights.manifest

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return self.weights.open_transfer(epoch, num_receivers)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
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

    def export(self, folder: Path) -> None:
        """Writes the policy in the Hugging Face layout."""
        with self._offloader.policy_on_device():
            self._save_policy(folder)

    def close(self) -> None:
        self.weights.close()
        super().close()

    def _parts(self) -> Sequence[CheckpointPart]:
        weights = TrainedWeights(self.backend, self._optimizer)
        return weights, self._critic, self._average, self._slow, AlgorithmState(self._credit, writes=self._rank == 0)

    def _movable(self) -> Sequence[Offloadable]:
        return self._offloader, self._critic
