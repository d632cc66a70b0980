"""The critic: a value model with an optimizer of its own, its rows and its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.media import MediaReader
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.algorithms.policy_losses import Totals, token_mean
from mobula.learner.algorithms.token_advantages import value_loss
from mobula.learner.backends import build_backend
from mobula.learner.batch import LearnerItem, totals
from mobula.learner.gradient_step import GradientStep
from mobula.learner.meter import Meter
from mobula.learner.optim import learning_rate
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import RowOutline, on_device
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate, pad_rows
from mobula.learner.policies.checkpoint import StoredWeights, Weights, unread_policy_model
from mobula.learner.policies.loading import DTYPES, recompute_blocks
from mobula.learner.policies.token import TokenModel
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.rank import Offloader
from mobula.learner.scoring_pass import scores_of


class ScalarHead(nn.Module):
    """The inner product of a state with a learned vector, in float32 and without a bias.

    It starts from N(0, 1 / (H + 1)^2), so that values are near 0 at first. Every rank draws the same numbers from
    `seed`, and the generators of the process stay as they are.

    Source: Learning to Summarize from Human Feedback, arXiv:2009.01325, appendix B.1.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(drawn / (hidden_size + 1))  # [1, H], the layout of a linear layer

    def forward(self, states: Tensor) -> Tensor:
        """states [..., H] of any float type -> float32 [...]."""
        return (states.float() * self.weight[0].float()).sum(dim=-1)


class ValueModel(TokenModel):
    """The backbone of a model with a scalar head in the place of its output layer."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, seed: int, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """Takes the output layer out of `model`, which no other part may use from here on."""
        super().__init__(model, config, sequence_ranks)
        model.set_output_embeddings(nn.Identity())
        self.head = ScalarHead(model.config.get_text_config().hidden_size, seed)

    def forward(self, batch: TokenBatch) -> Tensor:
        """float32 [B, T]: the value of the state before each target; 0 behind a row's last target."""
        values = self.head(self.states(batch))  # [N]
        return self.padded(batch, values)


Values = Sequence[Sequence[np.ndarray]]
"""float32 [T + 1] of each trajectory of each group: before each token, and after the last one."""


def with_values(groups: list[list[LearnerItem]], values: Values) -> list[list[LearnerItem]]:
    """The items with these values of a critic; as they are where there are none."""
    if not values:
        return groups
    return [
        [replace(item, values=found) for item, found in zip(row, of, strict=True)]
        for row, of in zip(groups, values, strict=True)
    ]


@dataclass(frozen=True)
class ValueRow:
    """A response and one padding token after it, so that the state after the last token has a value too.

    Attention is causal: what follows changes no value. T tokens have T + 1 values.
    """

    index: int  # of the item among all trajectories of the step
    group: int  # the place of its group in the step
    sequence: TokenSequence | RowOutline  # T + 1 targets
    old_values: np.ndarray  # float32 [T + 1], of the critic before the step
    returns: np.ndarray  # float32 [T]
    mask: np.ndarray  # bool [T]: True where a value has a loss

    @classmethod
    def of(cls, item: LearnerItem) -> ValueRow:
        """Of an item; before it has values and returns they are empty."""
        row = item.sequence
        assert isinstance(row, TokenSequence | RowOutline), "a critic values tokens"
        nothing = np.zeros(0, dtype=np.float32)
        return cls(
            index=item.index,
            group=item.group,
            sequence=row.with_end(),
            old_values=nothing if item.values is None else item.values,
            returns=nothing if item.returns is None else item.returns,
            mask=item.kept_mask,
        )

    def untrained(self) -> ValueRow:
        return replace(self, mask=np.zeros_like(self.mask))


@dataclass(frozen=True)
class ValueBatch:
    """Padded columns of a micro-batch; W is one more than its longest response."""

    tokens: TokenBatch
    old_values: Tensor  # float32 [B, W]
    returns: Tensor  # float32 [B, W]
    mask: Tensor  # bool [B, W]


def collate_rows(rows: Sequence[ValueRow], reader: MediaReader, device: torch.device) -> ValueBatch:
    sequences = [row.sequence for row in rows if isinstance(row.sequence, TokenSequence)]
    assert len(sequences) == len(rows), "a row of another rank: no content of it was fetched"
    tokens = collate(sequences, reader, device)
    width = tokens.targets.shape[1]

    def column(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
        return on_device(pad_rows([*arrays, np.zeros(width)], 0, dtype)[:-1], device)

    return ValueBatch(
        tokens=tokens,
        old_values=column([row.old_values for row in rows], np.float32),
        returns=column([row.returns for row in rows], np.float32),
        mask=column([row.mask for row in rows], np.bool_),
    )


FOLDER = "critic"  # of a learner's state
Groups = list[list[LearnerItem]]


class Critic:
    """Predicts the return of each token and trains on the observed returns. All methods are collective.

    Example:
        critic.connect()
        critic.begin(weights)  # RL begins here, from these weights
        groups = credit.assign(critic.valued(groups)).groups
        metrics = critic.train(minibatches, version=1)
    """

    def __init__(
        self, config: RunConfig, rank: int, world_size: int, reader: MediaReader, device: torch.device
    ) -> None:
        self._config = config
        self._settings = _settings(config)
        self._rank = rank
        self._world_size = world_size
        self._reader = reader
        self._device = device
        self._clip = config.algorithm.critic.value_clip

    def connect(self) -> None:
        """Builds the critic from `policy.model`, after the process group exists."""
        num_sharing = self._settings.sequence_parallel
        self._sequence_ranks = SequenceRanks(num_sharing, self._device) if num_sharing > 1 else None
        self._wrap(*self._unread())

    def begin(self, policy: Weights) -> None:
        """Resets the critic to the policy's weights."""
        critic, _ = self._unread()
        self._wrap(critic, policy)

    def valued(self, groups: Groups) -> Groups:
        """Returns the items with the critic's current values; every rank gets the values of all items."""
        rows = [ValueRow.of(item) for group in groups for item in group]
        scores = scores_of(rows, self._backend, self._step, self._values)
        return [[replace(item, values=scores[item.index]) for item in group] for group in groups]

    def train(self, parts: Sequence[Sequence[LearnerItem]], version: int) -> dict[str, float]:
        """One optimizer step on each minibatch; returns means over them, over all ranks."""
        if not parts:
            return {}
        meter = Meter(self._settings.sequence_parallel)
        rate = learning_rate(self._settings, version - 1, self._config.num_steps)
        norms = [
            self._step([ValueRow.of(i) for i in part], partial(self._loss, totals(part), meter), rate) for part in parts
        ]
        return {
            **{name: value / len(parts) for name, value in meter.reduce().items()},
            "critic_grad_norm": sum(norms) / len(norms),
            "critic_learning_rate": rate,
            "critic_skipped": float(sum(not math.isfinite(norm) for norm in norms)),
        }

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return self._backend.save(folder / FOLDER, self._optimizer, version)

    def load(self, folder: Path) -> int:
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} holds no critic: a run without one wrote it, so resume with algorithm.critic.place=none, or "
                "start a new run"
            )
        return self._backend.load(folder / FOLDER, self._optimizer)

    def offload(self, part: str) -> None:
        """Moves to host memory: the critic's weights for `policy`, the state of the critic's optimizer for
        `optimizer`."""
        self._offloader.offload(part)

    def onload(self) -> None:
        self._offloader.onload()

    def _unread(self) -> tuple[ValueModel, StoredWeights]:
        model, weights = unread_policy_model(self._config.policy, torch.float32)
        recompute_blocks(model, self._config.learner.activation_checkpointing)
        critic = ValueModel(model, self._config.learner, self._config.seed, self._sequence_ranks)
        return critic.train(), weights

    def _wrap(self, critic: ValueModel, weights: Weights) -> None:
        PolicyWeights(critic.model, self._config)  # puts adapters in, where the policy has them
        dtype, num_replicas = DTYPES[self._config.resources.dtype], self._config.resources.learner.replicas
        self._backend = build_backend(self._settings, self._device, dtype, num_replicas)
        self._model = self._backend.wrap(critic, weights)
        self._optimizer = self._backend.optimizer()
        self._step = GradientStep(self._backend, self._optimizer, self._settings, self._rank, self._world_size)
        self._offloader = Offloader(self._model, self._optimizer, self._device)

    def _values(self, rows: Sequence[ValueRow]) -> list[np.ndarray]:
        """float32 [T + 1] of each row."""
        values = self._model(collate_rows(rows, self._reader, self._device).tokens).cpu().numpy()
        return [own[: row.sequence.num_targets].copy() for row, own in zip(rows, values, strict=True)]

    def _loss(self, part_totals: Totals, meter: Meter, rows: Sequence[ValueRow]) -> Tensor:
        batch = collate_rows(rows, self._reader, self._device)
        values = self._model(batch.tokens)  # [B, W]
        losses = value_loss(values, batch.old_values, batch.returns, clip=self._clip)
        loss = token_mean(losses.loss, batch.mask, part_totals)
        meter.add(value_loss=loss, value_clip_fraction=token_mean(losses.is_clipped.float(), batch.mask, part_totals))
        return loss


class NullCritic:
    """Null object of Critic, for advantages without values."""

    def connect(self) -> None: ...

    def begin(self, policy: Weights) -> None: ...

    def valued(self, groups: Groups) -> Groups:
        return groups

    def train(self, parts: Sequence[Sequence[LearnerItem]], version: int) -> dict[str, float]:
        return {}

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return lambda: None

    def load(self, folder: Path) -> None: ...

    def offload(self, part: str) -> None: ...

    def onload(self) -> None: ...


def _settings(config: RunConfig) -> LearnerConfig:
    critic = config.algorithm.critic
    return config.learner.model_copy(
        update={
            "optimizer": critic.optimizer,
            "optimizer_options": critic.optimizer_options,
            "learning_rate": critic.learning_rate,
        }
    )
