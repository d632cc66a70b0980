"""What a rollout actor and its client tell each other of prompts: requests one way, messages the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.records.partial_response import Attempt, TokenChunk
from cluster.records.trajectory import GroupReport, Prompt
from cluster.roles import SamplingSettings


@dataclass(frozen=True)
class GroupRequest:
    """One try at a prompt: sample all its siblings, from where an earlier try left them."""

    prompt: Prompt
    settings: SamplingSettings
    attempt: Attempt

    @property
    def request_id(self) -> str:
        return self.attempt.request_id


@dataclass(frozen=True)
class Ended:
    """How a request ended: with a group and its report, or with an error."""

    request_id: str
    report: GroupReport | None
    error: Exception | None = None


@dataclass(frozen=True)
class MessageBatch:
    """What there is to say of all requests of an actor at one moment: first the chunks, then who has ended.

    The groups themselves follow the messages in the same stream, one value each, in the order of `ended`: a receiver of
    the messages need not fetch them.
    """

    chunks: Sequence[TokenChunk]
    ended: Sequence[Ended]

    @property
    def num_groups(self) -> int:
        return sum(ended.error is None for ended in self.ended)
