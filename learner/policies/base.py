"""What a learner needs of a policy, whatever its actions are: rows to train on, and a network to distribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from cluster.records.actions import Actions, LatentActions, TokenActions
from cluster.records.media import MediaHandle, MediaReader
from cluster.records.trajectory import Prompt
from learner.policies.batch import TokenBatch, TokenSequence, collate
from learner.policies.flow.rows import LatentBatch, LatentSequence, collate_latents

PolicyBatch = TokenBatch | LatentBatch
"""Rows as the forward of their policy takes them."""


class PolicyRow(Protocol):
    """One trajectory, of which `num_targets` steps are scored."""

    @property
    def num_targets(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """What the row takes of a micro-batch."""
        ...

    @property
    def num_media_tokens(self) -> int:
        """How many of them media have to be encoded for."""
        ...

    @property
    def media(self) -> tuple[MediaHandle, ...]: ...


class PolicyOutput(NamedTuple):
    """What the policy says about each target of a batch; 0 and False behind a row's end."""

    logprobs: Tensor  # float32 [B, T]
    entropy: Tensor  # float32 [B, T], detached unless a gradient was asked for
    is_argmax: Tensor  # bool [B, T]


class Policy(nn.Module):
    """A network whose forward is the only way in, so that sharded parameters are gathered there.

    `model` has the weights: their names in its state dict are what `PolicyWeights` translates to a checkpoint's.
    """

    model: nn.Module

    def blocks(self) -> Iterator[nn.Module]:
        """The repeated parts of the network, each of which may be sharded by itself."""
        raise NotImplementedError


def row_of(prompt: Prompt, actions: Actions) -> PolicyRow:
    """A prompt and what the policy did after it, as a row to score."""
    if isinstance(actions, TokenActions):
        return TokenSequence.of_actions(prompt, actions)
    assert isinstance(actions, LatentActions)
    return LatentSequence.of_response(prompt, actions)


def collate_rows(rows: Sequence[PolicyRow], reader: MediaReader, device: torch.device) -> PolicyBatch:
    """Rows of one kind as a batch, with their media."""
    if isinstance(rows[0], LatentSequence):
        return collate_latents(cast(Sequence[LatentSequence], rows), reader, device)
    return collate(cast(Sequence[TokenSequence], rows), reader, device)
