"""CriticRank: one rank of a critic with separate ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.backends.process_group import RankRendezvous
from mobula.learner.batch import LearnerItem, minibatches_of, without_overlong
from mobula.learner.credit import Credit
from mobula.learner.critic.critic import FOLDER, Critic
from mobula.learner.critic.rows import Values
from mobula.learner.policies.checkpoint.reading import unread_policy_model
from mobula.learner.shares import Portion, ShareFetcher, StepGroups, all_ranks
from mobula.learner.state import StateWriter, load_algorithm, load_random_state


class CriticRank:
    """Predicts the values of a step's groups before the policy trains on them, then trains on the returns.

    Returns follow from rewards, log-probs and values alone, so these ranks compute them as the learner's ranks do, and
    both train at the same time. Every method but `rendezvous_address`, `finish_save` and `close` needs all ranks to
    call it.

    Example:
        version, values = rank.value(groups, version=1, kl=None)
        metrics, num_taken = rank.train(version=1)
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        self._config = config.of_critic_ranks
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = RankRendezvous()
        self._device = torch.device(config.resources.device)
        self._credit = Credit(config)
        self._shares = ShareFetcher(rank, world_size, all_ranks, role="critic")
        reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )
        self._critic = Critic(self._config, rank, world_size, reader, self._device)
        self._states = StateWriter(rank)
        self._valued: list[list[LearnerItem]] = []  # the step under way
        self._num_items = 0  # of the step before it
        self.version = 0

    def rendezvous_address(self) -> str:
        """`host:port` that all ranks `connect` to; asked of rank 0."""
        return self._rendezvous.address(self._config.timeouts.start_s)

    def connect(self, init_method: str) -> None:
        """Loads the critic, joins the process group and shards the critic over the ranks."""
        torch.set_num_threads(self._config.resources.learner.num_threads)
        torch.manual_seed(self._config.seed + self._rank)
        self._rendezvous.join_as_configured(init_method, self._config, rank=self._rank, world_size=self._world_size)
        self._critic.connect()

    def begin(self, folder: Path) -> None:
        """RL begins with the policy of the checkpoint `folder`, and so does the critic."""
        policy = self._config.policy.model_copy(update={"model": str(folder)})
        _, weights = unread_policy_model(policy, torch.float32)
        self._critic.begin(weights)

    def value(
        self, groups: Sequence[ScoredGroup], version: int, kl: float | None, portion: Portion | None = None
    ) -> tuple[int, Values]:
        """The values of the groups that make `version`; from rank 0 those of all, from the others none. `kl` is what
        the policy's ranks measured in the step before; `portion` is as in `Learner.update`.

        Raises:
            LostObjectError: on every rank, if one of them could not fetch a group; nothing has changed.
            UnplannedShareError: on every rank, if any rank needs a group outside its portion; nothing has changed.
        """
        fetched = self._shares.fetch(StepGroups(groups, version, self._config, role="critic", portion=portion))
        if kl is not None:
            self._credit.kl.observe(kl, self._num_items)
        self._valued = self._critic.valued(fetched)
        values = [[item.values for item in group if item.values is not None] for group in self._valued]
        return version, values if self._rank == 0 else []

    def train(self, version: int, kl_scale: float) -> tuple[Mapping[str, float], float]:
        """Trains on the groups of the last `value` call; returns metrics and the number of optimizer steps."""
        algorithm = self._config.algorithm
        self._credit.kl_scale = kl_scale
        credited = self._credit.assign(self._valued)
        items = without_overlong(credited.groups, algorithm)
        parts = minibatches_of(items, algorithm, (self._config.seed, version))
        metrics = self._critic.train(parts, version)
        self._num_items, self._valued = sum(map(len, items)), []
        self.version = version
        return metrics, len(parts) - metrics["critic_skipped"] if parts else 0.0

    def offload(self, part: str) -> None:
        """Move `policy` (its weights) or `optimizer` to host memory."""
        self._critic.offload(part)

    def onload(self) -> None:
        """Move everything to the device."""
        self._critic.onload()

    def save(self, folder: Path) -> None:
        """Copy the critic's state for an exact resume; the learner's ranks save the rest of `folder`."""
        self._states.finish()
        self._states.begin([self._critic.save(folder, self.version)], folder / FOLDER)

    def finish_save(self) -> None:
        """Waits until the copy is on disk. Not collective; may run concurrently with any other method."""
        self._states.finish()

    def load(self, folder: Path) -> int:
        """Loads a saved state; returns its version."""
        self._states.finish()
        self.version = self._critic.load(folder)
        load_random_state(folder / FOLDER, self._rank)
        self._credit.load(load_algorithm(folder))
        self._valued, self._num_items = [], 0
        return self.version

    def restore(self, folder: Path, version: int) -> None:
        """Loads a saved state, which becomes `version`."""
        self.load(folder)
        self.version = version

    def close(self) -> None:
        """Leave the process group."""
        self._states.finish()
        if dist.is_initialized():
            dist.destroy_process_group()
