"""Reference scorer: log-probs under the frozen policy, quantised where configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from mobula.cluster.errors import DeadlineError, ScoringError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema import RunConfig
from mobula.learner.policies.base import PolicyRow
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import DTYPES
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policies.trained import collate_rows, row_of

Quantisation = Literal["none", "int8", "int4"]
GROUP = {"int8": 1, "int4": 128}  # values of a row per scale; 1: the whole row


def quantise(model: PreTrainedModel, kind: Quantisation) -> None:
    """Quantises all linear layers except the output layer, in place; embeddings, norms and convolutions are unchanged.
    `int4` skips layers whose row length is no multiple of 128, and needs bfloat16 on an NVIDIA GPU."""
    if kind == "none":
        return
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reference.scorers.quantisation={kind} needs {error.name!r}, which is not installed: "
            "pip install 'mobula[quantised]', or set reference.scorers.quantisation=none"
        ) from error
    group, output = GROUP[kind], model.get_output_embeddings()

    def is_chosen(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and module is not output and module.in_features % group == 0

    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_chosen)
    else:
        packing = "tile_packed_to_4d"  # the layout of torch's own kernels
        quantize_(model, Int4WeightOnlyConfig(group_size=group, int4_packing_format=packing), filter_fn=is_chosen)


NO_TEACHERS: Mapping[str, Path] = {}
OTHERS = ""  # key of labels without a teacher; no label is empty


class ReferenceScorer:
    """Scores trajectories with a frozen checkpoint, under the sampling distribution. Labels may have separate
    checkpoints (`algorithm.distillation.teachers`)."""

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
        """Returns for each group one float32 [T] array per trajectory, in order."""
        try:
            return self._score([group.group for group in groups])
        except DeadlineError as error:  # not a DeadlineError: the pool would replace a healthy scorer
            raise ScoringError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
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
