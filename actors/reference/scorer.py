"""The reference: log-probs of the frozen policy on what the trained one sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.reference.quantised import quantise
from cluster.errors import DeadlineError, ScoringError
from cluster.records.media import MediaReader
from cluster.records.trajectory import ScoredGroup, TrajectoryGroup
from cluster.runtime.object_store import fetch_or_miss
from configs.schema import RunConfig
from learner.policies.base import PolicyRow
from learner.policies.loading import DTYPES, load_policy_model
from learner.policies.logprobs import Distribution
from learner.policies.packing import split_microbatches
from learner.policies.token import TokenPolicy
from learner.policies.trained import collate_rows, row_of


class ReferenceScorer:
    """Scores trajectories with a frozen checkpoint, under the distribution that they were sampled from."""

    def __init__(self, config: RunConfig, banned_ids: tuple[int, ...]) -> None:
        torch.set_num_threads(config.resources.reference.num_threads)
        self._config = config
        self._device = torch.device(config.resources.device)
        self._distribution = Distribution(
            config.sampler.temperature, banned_ids, config.sampler.first_token_temperature
        )
        self._reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )

    def load(self, folder: Path) -> None:
        """Take the frozen policy from a checkpoint folder; before the first `score`."""
        config = self._config
        frozen = config.policy.model_copy(update={"model": str(folder), "freeze": ()})
        model = load_policy_model(frozen, DTYPES[config.resources.dtype]).to(self._device)
        quantise(model, config.reference.quantisation)
        self._policy = TokenPolicy(model, config.learner).eval()

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        """For each group one float32 [T] array a trajectory, in order.

        Raises:
            ScoringError: pictures did not arrive within `timeouts.object_s`.
            LostObjectError: groups did not, or went with their node.
        """
        try:
            return self._score([group.group for group in groups])
        except DeadlineError as error:  # the scorer itself is well: a late answer of its own would mean that it hangs
            raise ScoringError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        """`score` of a single group."""
        return self.score([group])[0]

    def ping(self) -> bool:
        """Answers once the scorer is built and free."""
        return True

    def close(self) -> None:
        """Nothing to hand back: the process ends with its memory."""

    def _score(self, references: Sequence[Any]) -> list[list[np.ndarray]]:
        fetched: list[TrajectoryGroup] = fetch_or_miss(
            references, timeout_s=self._config.timeouts.object_s, what="trajectory groups"
        )
        sequences = [row_of(group.prompt, trajectory.actions) for group in fetched for trajectory in group.trajectories]
        scores = iter(self._logprobs(sequences))
        return [[next(scores) for _ in group.trajectories] for group in fetched]

    @torch.no_grad()
    def _logprobs(self, sequences: Sequence[PolicyRow]) -> list[np.ndarray]:
        scores: dict[int, np.ndarray] = {}
        [plan] = split_microbatches(sequences, self._config.learner, 1)
        for rows in plan:
            batch = collate_rows([sequences[i] for i in rows], self._reader, self._device)
            logprobs = self._policy(batch, self._distribution).logprobs.cpu().numpy()
            scores |= {i: logprobs[n, : sequences[i].num_targets] for n, i in enumerate(rows)}
        return [scores[i] for i in range(len(sequences))]
