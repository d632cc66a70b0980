"""ReferenceScorer: computes log-probs of a frozen policy for sampled trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mobula.actors.reference.quantised import quantise
from mobula.cluster.errors import DeadlineError, ScoringError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema import RunConfig
from mobula.learner.policies.base import PolicyRow
from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.loading import DTYPES
from mobula.learner.policies.logprobs import Distribution
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policies.trained import collate_rows, row_of

NO_TEACHERS: Mapping[str, Path] = {}
OTHERS = ""  # key of labels without a teacher; no label is empty


class ReferenceScorer:
    """Scores trajectories with a frozen checkpoint, under the sampling distribution.

    Labels may have separate checkpoints (`algorithm.distillation.teachers`).
    """

    def __init__(
        self, config: RunConfig, banned_ids: tuple[int, ...], teachers: Mapping[str, Path] = NO_TEACHERS
    ) -> None:
        """`teachers`: label -> checkpoint folder; prompts of other labels use the loaded checkpoint."""
        torch.set_num_threads(config.resources.reference.num_threads)
        self._config = config
        self._teachers = teachers
        self._device = torch.device(config.resources.device)
        self._distribution = Distribution(
            config.sampler.temperature, banned_ids, config.sampler.first_token_temperature
        )
        self._reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )

    def load(self, folder: Path) -> None:
        """Loads the frozen policy from a checkpoint folder; call it before `score`."""
        self._policy = self._loaded(folder)
        self._own_policies = {label: self._loaded(own) for label, own in self._teachers.items()}

    def _loaded(self, folder: Path) -> nn.Module:
        config = self._config
        frozen = config.policy.model_copy(update={"model": str(folder), "freeze": ()})
        model = load_policy_model(frozen, DTYPES[config.resources.dtype], self._device)
        quantise(model, config.reference.scorers.quantisation)
        return TokenPolicy(model, config.learner).eval()

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        """Returns for each group one float32 [T] array per trajectory, in order.

        Raises:
            ScoringError: images did not arrive within `timeouts.object_s`.
            LostObjectError: groups did not arrive in time, or were lost with their node.
        """
        try:
            return self._score([group.group for group in groups])
        except DeadlineError as error:  # not a DeadlineError: the pool would replace a healthy scorer
            raise ScoringError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        """`score` of a single group."""
        return self.score([group])[0]

    def ping(self) -> bool:
        """Returns once the scorer is built and free."""
        return True

    def close(self) -> None:
        """Does nothing: the end of the process frees the memory."""

    def _score(self, references: Sequence[Any]) -> list[list[np.ndarray]]:
        fetched: list[TrajectoryGroup] = fetch_or_miss(
            references, timeout_s=self._config.timeouts.object_s, what="trajectory groups"
        )
        by_label: dict[str, list[int]] = {}  # indices of the groups of one policy
        for index, group in enumerate(fetched):
            label = self._config.rewards.label_of(group.prompt.metadata)
            by_label.setdefault(label if label in self._own_policies else OTHERS, []).append(index)
        scored: dict[int, list[np.ndarray]] = {}
        for label, indices in by_label.items():
            own = [fetched[index] for index in indices]
            rows = [row_of(group.prompt, trajectory.actions) for group in own for trajectory in group.trajectories]
            of = [n for n, group in enumerate(own) for _ in group.trajectories]
            scores = iter(self._logprobs(self._own_policies.get(label, self._policy), rows, of))
            for index, group in zip(indices, own, strict=True):
                scored[index] = [next(scores) for _ in group.trajectories]
        return [scored[index] for index in range(len(fetched))]

    @torch.no_grad()
    def _logprobs(self, policy: nn.Module, sequences: Sequence[PolicyRow], groups: Sequence[int]) -> list[np.ndarray]:
        scores: dict[int, np.ndarray] = {}
        [plan] = split_microbatches(sequences, self._config.learner, 1, groups)
        for rows in plan:
            batch = collate_rows([sequences[i] for i in rows], self._reader, self._device)
            logprobs = policy(batch, self._distribution).logprobs.cpu().numpy()
            scores |= {i: logprobs[n, : sequences[i].num_targets] for n, i in enumerate(rows)}
        return [scores[i] for i in range(len(sequences))]
