"""The interfaces of the roles that the loop calls.

Every method is a coroutine, implemented by an object in the same process, a Ray actor or a group of actors. Each call
has a deadline from `timeouts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup
from mobula.cluster.runtime.seeds import derived_seed


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of one group."""

    num_samples: int
    temperature: float  # 0 is greedy (evaluation only)
    max_tokens: int
    seed: int
    priority: int = 0  # requests with a smaller number run first
    min_version: int = -1  # an engine with older weights waits for the push of this version
    top_p: float = 1.0  # 1: no cut
    top_k: int = 0  # 0: no cut
    min_p: float = 0.0  # 0: no cut
    first_token_temperature: float = 0.0  # 0: `temperature`, as of all other tokens
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one of these texts
    keeps_sets: bool = False  # record the set of tokens from which each token was sampled, for the learner
    adapter: str | None = None  # name of served weights; None: the base model, or the pushed weights
    stop_token_ids: tuple[int, ...] = ()  # in addition to the stop tokens of the model

    def for_prompt(self, prompt_id: str) -> SamplingSettings:
        """Returns these settings with the prompt's own seed, derived from the run's seed."""
        return replace(self, seed=derived_seed(self.seed, prompt_id))


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of a prompt of P tokens, at temperature 1 without bans."""

    logprobs: np.ndarray  # float32 [P - 1], of the tokens after the first
    top: Sequence[Sequence[tuple[int, float]]] = ()  # P - 1 lists of (token, log-prob), best first; empty if not asked


@dataclass(frozen=True)
class UpdateReport:
    """The result of one learner update. `metrics` are equal on all ranks: means over minibatches, maxima, counts."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ReplayStats:
    """The state of the replay buffer, for metrics."""

    num_ready: int = 0
    num_taken: int = 0
    num_bytes: int = 0
    oldest_age_s: float = 0.0
    num_rejected: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    oldest_id: str | None = None  # the group with `oldest_age_s`; None if the buffer is empty
    num_waiting: int = 0  # finished groups that wait for space in the buffer
    num_oversized: int = 0  # groups larger than the whole byte budget, since the start of the buffer


class Prompts(Protocol):
    """An endless sequence of prompts, a pure function of data and seed (`actors.datasets.prompts.PromptSource`)."""

    @property
    def cursor(self) -> int:
        """Index of the next prompt in the sequence."""

    def next(self) -> Prompt:
        """Returns the next prompt. Called from one thread at a time."""

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        """Returns the prompts with the ids `pending` first, in order, then continues at `cursor`."""

    def index_of(self, prompt_id: str) -> int:
        """Returns the index of an id in the sequence. Raises: DatasetError: the data or the seed changed."""

    def id_at(self, index: int) -> str:
        """Returns the id at an index of the sequence."""

    def is_open(self, index: int) -> bool:
        """Whether the prompt at an index is handed out when it is due now."""

    def prompt_at(self, index: int) -> Prompt:
        """Returns the prompt at an index, from any thread. Raises: SkippedSample: the row is unusable."""


class Rollouts(Protocol):
    """The pool of rollout actors."""

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Samples one group of a prompt."""


class Rewards(Protocol):
    """The reward pool."""

    async def score(self, group: Any, group_id: str) -> Sequence[Reward | None]:
        """Returns one reward per trajectory, in order; None if scoring failed (counted by the pool).

        `group` is a `TrajectoryGroup`, as reference or value, or all `Answers` of a group. Responses that were scored
        before the group was complete are not scored again.

        Raises:
            LostObjectError: the group was lost with the node that held it.
            UnscoredGroupError: workers that score the group die or hang; it counts as a group without rewards.
        """


class Reference(Protocol):
    """Log-probs of the frozen policy."""

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups with `reference_logprobs` set."""


class Learner(Protocol):
    """The learner group."""

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """Trains one step on these groups. The report has the version that it made."""


class Weights(Protocol):
    """Sends weights from the learner to the rollout actors."""

    def settling(self) -> AbstractAsyncContextManager[None]:
        """Inside the body `publish` returns once the weights are sent; actors may still load them."""

    async def settled(self) -> None:
        """Waits until every rollout actor serves the last published version, or is lost."""

    async def publish(self, version: int) -> int:
        """Sends `version` to every rollout actor, verifies it, and returns the version."""
