"""SignalWatch: detects steps that train nothing, and reports the likely cause with a few samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import StepRecord

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import Reward, ScoredGroup

NUM_IDLE = 3  # steps in a row that train nothing, before the warning
NUM_SAMPLES = 3  # in a warning, each of a different group
MAX_CHARACTERS = 300  # last characters of a prompt or response in a warning
MOST = 0.9  # a property of at least this share of responses is a likely cause


class SignalWatch:
    """Warns once in each series of idle steps: the update changes nothing, or all rewards are equal.

    Example:
        if (warning := watch.look(record, groups)) is not None:
            logger.warning("%s", warning)
    """

    def __init__(self, *, learns_from_rewards: bool, fetch: Callable[..., list[Any]], timeout_s: float) -> None:
        """`learns_from_rewards` is False for offline jobs and distillation; `fetch` reads the object store."""
        self._learns_from_rewards = learns_from_rewards
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._num_steps = 0
        self._num_idle = 0  # in a row, up to the newest step
        self._cause = ""

    def look(self, record: StepRecord, groups: Sequence[ScoredGroup]) -> str | None:
        """Counts a step; returns the text of a warning if one is due. A resumed run passes the records of its earlier
        part without groups."""
        self._num_steps += 1
        cause = idle_cause(record, learns_from_rewards=self._learns_from_rewards)
        if cause is None:
            self._num_idle = 0
            return None
        self._num_idle += 1
        self._cause = "; ".join([cause, *_hints(record, [r for group in groups for r in group.scored_rewards])])
        if self._num_idle != NUM_IDLE or not groups:
            return None
        first = f"nothing was learned in steps {record.step - NUM_IDLE + 1} to {record.step}: {self._cause}"
        return "\n".join([first, *self._samples(groups)])

    def conclusion(self) -> str | None:
        """Returns the warning for the end of the run if its last steps were idle."""
        if self._num_idle == 0 or self._num_idle < min(NUM_IDLE, self._num_steps):
            return None
        return f"nothing was learned in the last {self._num_idle} of {self._num_steps} steps: {self._cause}"

    def _samples(self, groups: Sequence[ScoredGroup]) -> Iterator[str]:
        chosen = [group for group in groups if group.scored_rewards][:NUM_SAMPLES]
        loaded = self._fetch([group.group for group in chosen], timeout_s=self._timeout_s, what="groups of a warning")
        for scored, group in zip(chosen, loaded, strict=True):
            index = next(i for i, reward in enumerate(scored.rewards) if reward is not None)
            reward, trajectory = scored.scored_rewards[0], group.trajectories[index]
            reasons = "".join(f", {name}: {reason}" for name, reason in reward.reasons.items())
            yield f"  sample {group.prompt.sample_id}: reward {reward.value:g} ({_parts(reward)}{reasons})"
            yield f"    prompt ends: {_tail(group.prompt.text)!r}"
            yield f"    response ({trajectory.finish_reason}): {_tail(trajectory.response.text)!r}"
            yield f"    references: {group.prompt.references!r}"


def idle_cause(record: StepRecord, *, learns_from_rewards: bool) -> str | None:
    """Returns why a step trained nothing; None if it trained something."""
    values = record.values
    if values.get(MetricName.OPTIMIZER_STEPS) == 0:
        return "every optimizer step was skipped, so the gradients are not finite or no token is trained"
    if values.get(MetricName.LEARNING_RATE) == 0:
        return "the learning rate is 0: raise learner.learning_rate, or lower learner.warmup_steps"
    low, high = values[MetricName.REWARD_MIN], values[MetricName.REWARD_MAX]
    if learns_from_rewards and low == high:
        parts = ", ".join(f"{name} {mean:g}" for name, mean in record.components.items())
        return f"every response has the reward {low:g} ({parts})"
    if values.get(MetricName.GRAD_NORM) != 0:
        return None
    if learns_from_rewards and values[MetricName.UNIFORM_FRACTION] == 1:
        return f"the gradient norm is 0: the rewards within each group are equal ({low:g} to {high:g} over all groups)"
    return "the gradient norm is 0: see policy.freeze, the mask of trained tokens, and the weights of the loss"


def _hints(record: StepRecord, rewards: Sequence[Reward]) -> Iterator[str]:
    """Yields properties of most responses that may be the cause, each with the keys to change."""
    if record.values[MetricName.TRUNCATED_FRACTION] >= MOST:
        share = record.values[MetricName.TRUNCATED_FRACTION]
        yield f"{share:.0%} of the responses were cut at their longest length: raise sampler.max_tokens"
    reasons = Counter((name, reason) for reward in rewards for name, reason in reward.reasons.items())
    for (name, reason), num in reasons.most_common(1):
        if num >= MOST * len(rewards):
            yield (
                f"{name} says {reason!r} of {num} of {len(rewards)} responses: compare the prompt (data.prompt_suffix, "
                "data.system_prompt) with what the reward reads (rewards.components)"
            )
    for reason, num in record.counters.get("reward_failures", {}).items():
        if num:
            yield f"responses without a reward so far ({reason}): {num}, see run.log"


def _parts(reward: Reward) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in reward.components.items())


def _tail(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"...{text[-MAX_CHARACTERS:]}"
