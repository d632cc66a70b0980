"""Policy: the Protocol of a trained network, and copies of arrays on its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import GroupSummary


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on `device`; on the CPU it shares the array's memory.

    Copies to a GPU are asynchronous, from pinned memory, so that the host does not wait for queued work of the GPU.
    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PolicyRow(Protocol):
    """One trajectory with `num_targets` scored steps."""

    @property
    def num_targets(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """The row's tokens if it is computed alone."""

    @property
    def num_prompt_tokens(self) -> int:
        """The first of them, which all rows of the group have in common."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The tokens after the prompt: of each candidate, if a row has several."""

    @property
    def num_media_tokens(self) -> int:
        """The row's tokens of media, which have to be encoded."""

    @property
    def media(self) -> tuple[MediaHandle, ...]: ...


class Velocities(NamedTuple):
    """Velocities (noise minus image) of a flow model at K noise levels of each of B clean images."""

    predicted: Tensor  # float32 [B, K, ...]
    old: Tensor | None  # float32 [B, K, ...]: of the weights before the step, or of the reference
    clean: Tensor  # float32 [B, K, ...]
    noise: Tensor  # float32 [B, K, ...]
    sigmas: Tensor  # float32 [B, K, 1, ...]

    @property
    def noised(self) -> Tensor:
        """float32 [B, K, ...]: the noised images, at which velocities are predicted."""
        return (1 - self.sigmas) * self.clean + self.sigmas * self.noise


class Moves(NamedTuple):
    """Sizes of denoising steps, [B, T] each."""

    std: Tensor  # of the step's Gaussian
    length: Tensor  # -dt: decrease of the noise level
    drift: Tensor | None  # mean of (mean - old mean)^2 / (2 std^2), relative to the weights before the step


NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class RowOutline:
    """A row of another rank: size and keys of media, to assign rows to ranks, without content. No input of a policy."""

    num_targets: int
    num_prompt_tokens: int
    answers: tuple[int, ...]
    num_media_tokens: int
    media: tuple[MediaHandle, ...]  # without references
    token_ids: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # int32 [T]: scored tokens, or none
    num_context: int = 0  # context tokens in `token_ids`

    @classmethod
    def of(cls, row: PolicyRow, token_ids: np.ndarray = NO_TOKENS) -> RowOutline:
        media = tuple(replace(handle, reference=None) for handle in row.media)
        return cls(row.num_targets, row.num_prompt_tokens, row.answers, row.num_media_tokens, media, token_ids)

    @classmethod
    def of_summary(cls, summary: GroupSummary, num_targets: int, answers: tuple[int, ...]) -> RowOutline:
        """As `summary` predicts it, without media of later turns."""
        media = tuple(MediaHandle(key, "", 0, None) for key in summary.media_keys)
        return cls(num_targets, summary.num_prompt_tokens, answers, summary.num_media_tokens, media)

    @property
    def num_tokens(self) -> int:
        return len(self.answers) * self.num_prompt_tokens + sum(self.answers)

    def with_end(self) -> RowOutline:
        """The row with one more token."""
        return replace(self, num_targets=self.num_targets + 1, answers=tuple(num + 1 for num in self.answers))


class PolicyOutput(NamedTuple):
    """The policy's outputs for each target of a batch; 0 and False after a row's end."""

    logprobs: Tensor  # float32 [B, T]
    entropy: Tensor  # float32 [B, T], detached unless a gradient is requested
    is_argmax: Tensor  # bool [B, T]
    divergence: Tensor | None = None  # float32 [B, T]: KL to the reference, if the policy computes the reference
    predicted: Tensor | None = None  # float32 [N, ...], for flow models: means of steps, or velocities; row by row
    moves: Moves | None = None
    velocities: Velocities | None = None


class Policy(nn.Module):
    """A network that is called only through `forward`, where sharded parameters are gathered.

    `model` has the weights; `PolicyWeights` translates the names in its state dict to names of a checkpoint.
    """

    model: nn.Module

    def blocks(self) -> Iterator[nn.Module]:
        """The repeated blocks of the network, the units of sharding."""
        return (module for module in self.modules() if isinstance(module, GradientCheckpointingLayer))
