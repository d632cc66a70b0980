"""Interfaces of policies, whatever their actions are: rows to train on, and a network to distribute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from mobula.cluster.records.media import MediaHandle


class PolicyRow(Protocol):
    """One trajectory, of which `num_targets` steps are scored."""

    @property
    def num_targets(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """The row's tokens in a micro-batch."""
        ...

    @property
    def num_media_tokens(self) -> int:
        """How many of them media have to be encoded for."""
        ...

    @property
    def media(self) -> tuple[MediaHandle, ...]: ...


class Velocities(NamedTuple):
    """Velocities of a flow model at K noise levels of each of B clean images: noise less image, as predicted."""

    predicted: Tensor  # float32 [B, K, ...]
    old: Tensor | None  # float32 [B, K, ...]: of the weights that a step trains from, or of the reference
    clean: Tensor  # float32 [B, K, ...]
    noise: Tensor  # float32 [B, K, ...]
    sigmas: Tensor  # float32 [B, K, 1, ...]

    @property
    def noised(self) -> Tensor:
        """float32 [B, K, ...]: where they are predicted."""
        return (1 - self.sigmas) * self.clean + self.sigmas * self.noise


class Moves(NamedTuple):
    """How far denoising steps lead, [B, T] each."""

    std: Tensor  # of the Gaussian that a step is drawn from
    length: Tensor  # -dt: what a step takes off the noise level
    drift: Tensor | None  # mean of (mean - old mean)^2 / (2 std^2), against the weights that a step trains from


NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class RowOutline:
    """A row that another rank has: its size and its media's keys, by which rows are shared out, and no content.

    No policy takes it.
    """

    num_targets: int
    num_tokens: int
    num_media_tokens: int
    media: tuple[MediaHandle, ...]  # without references
    token_ids: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # int32 [T]: the scored ones, or none
    num_context: int = 0  # of `token_ids`

    @classmethod
    def of(cls, row: PolicyRow, token_ids: np.ndarray = NO_TOKENS) -> RowOutline:
        media = tuple(replace(handle, reference=None) for handle in row.media)
        return cls(row.num_targets, row.num_tokens, row.num_media_tokens, media, token_ids)

    def with_end(self) -> RowOutline:
        """The row with one more token after its last one."""
        return replace(self, num_targets=self.num_targets + 1, num_tokens=self.num_tokens + 1)


class PolicyOutput(NamedTuple):
    """The policy's outputs for each target of a batch; 0 and False behind a row's end."""

    logprobs: Tensor  # float32 [B, T]
    entropy: Tensor  # float32 [B, T], detached unless a gradient was asked for
    is_argmax: Tensor  # bool [B, T]
    divergence: Tensor | None = None  # float32 [B, T]: KL to the reference, of a policy that computes it itself
    predicted: Tensor | None = None  # float32 [N, ...] of a flow model: means of its steps, or velocities; row by row
    moves: Moves | None = None
    velocities: Velocities | None = None


class Policy(nn.Module):
    """A network whose forward is the only way in, so that sharded parameters are gathered there.

    `model` has the weights: their names in its state dict are what `PolicyWeights` translates to a checkpoint's.
    """

    model: nn.Module

    def blocks(self) -> Iterator[nn.Module]:
        """The repeated parts of the network, each of which may be sharded by itself."""
        raise NotImplementedError
