"""The roles as the loop sees them.

Every method is a coroutine: behind it stands a plain object in the same process, one Ray actor, or a group of them;
the loop cannot tell. Each call has a deadline of its own, set from `timeouts` where the role is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup
from mobula.cluster.runtime.seeds import derived_seed


@dataclass(frozen=True)
class SamplingSettings:
    """How one group is sampled."""

    num_samples: int
    temperature: float  # 0 is greedy (evaluation only)
    max_tokens: int
    seed: int
    priority: int = 0  # where an engine has to choose, a smaller number goes first
    min_version: int = -1  # an engine that serves older weights waits for the push that brings these
    top_p: float = 1.0  # 1: no cut
    top_k: int = 0  # 0: no cut
    min_p: float = 0.0  # 0: no cut
    first_token_temperature: float = 0.0  # 0: `temperature`, as of all other tokens
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one of these texts
    keeps_sets: bool = False  # record among which tokens each one was sampled, for the learner

    def for_prompt(self, prompt_id: str) -> SamplingSettings:
        """The same with the prompt's own seed, where `seed` is the run's."""
        return replace(self, seed=derived_seed(self.seed, prompt_id))


@dataclass(frozen=True)
class UpdateReport:
    """The result of one learner update. `metrics` are means over the global batch, reduced over all ranks."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ReplayStats:
    """The buffer's state for metrics."""

    num_ready: int
    num_taken: int
    num_bytes: int
    oldest_age_s: float
    num_rejected: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    oldest_id: str | None = None  # of the group that is `oldest_age_s` old; None when the buffer is empty
    num_waiting: int = 0  # finished groups that wait for room
    num_oversized: int = 0  # groups larger than the whole byte budget, since the buffer was started


class Prompts(Protocol):
    """An endless sequence of prompts, a pure function of data and seed (`actors.datasets.prompts.PromptSource`)."""

    @property
    def cursor(self) -> int:
        """How many places of the sequence have been passed."""
        ...

    def next(self) -> Prompt:
        """The next prompt; called from one thread at a time."""
        ...

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        """Hand out the prompts with the ids `pending` first, in order, then go on at `cursor`."""
        ...

    def index_of(self, prompt_id: str) -> int:
        """The place of an id in the sequence. Raises: DatasetError: the data or the seed are others."""
        ...

    def id_at(self, index: int) -> str:
        """The id at a place of the sequence."""
        ...

    def prompt_at(self, index: int) -> Prompt:
        """The prompt at a place of the sequence, from any thread. Raises: SkippedSample: the row there is unusable."""
        ...


class Rollouts(Protocol):
    """The pool of rollout actors."""

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """One prompt to one group."""
        ...


class Rewards(Protocol):
    """The reward pool."""

    async def score(self, group: Any, group_id: str) -> Sequence[Reward | None]:
        """One reward a trajectory, in order; None where it could not be scored (counted by the pool).

        `group` is a `TrajectoryGroup`, as reference or value, or all `Answers` of one.
        Responses of the group that were scored before it was whole are not scored again.

        Raises:
            LostObjectError: the group went with the node that held it.
            UnscoredGroupError: workers that try to score it die or hang; it counts as a group without rewards.
        """
        ...


class Reference(Protocol):
    """Log-probs of the frozen policy."""

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The same groups with `reference_logprobs` filled in."""
        ...


class Learner(Protocol):
    """The learner group."""

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """One step on these groups; returns the version that it made."""
        ...


class Weights(Protocol):
    """The way of weights from the learner to the rollout actors."""

    def settling(self) -> AbstractAsyncContextManager[None]:
        """Within the body the learner is free again once `publish` returns, though actors may still load."""
        ...

    async def settled(self) -> None:
        """Wait until every rollout actor serves what was published last, or is lost."""
        ...

    async def publish(self, version: int) -> int:
        """Bring every rollout actor to `version`, prove it, and return it."""
        ...
