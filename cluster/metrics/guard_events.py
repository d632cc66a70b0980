"""Signals and events of the guard as metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mobula.cluster.files import append_line, write_atomically
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import StepRecord

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import Reward, ScoredGroup

NUM_IDLE = 3  # steps in a row that train nothing, before the warning
NUM_SAMPLES = 3  # in a warning, each of a different group
MAX_CHARACTERS = 300  # last characters of a prompt or response in a warning
MOST = 0.9  # a property of at least this share of responses is a likely cause


class SignalWatch:
    """Warns once in each series of idle steps: the update changes nothing, or all rewards are equal."""

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
            parts = ", ".join(f"{name} {value:g}" for name, value in reward.components.items())
            yield f"  sample {group.prompt.sample_id}: reward {reward.value:g} ({parts}{reasons})"
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


def _tail(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"...{text[-MAX_CHARACTERS:]}"


GUARD_FILE = "guard.jsonl"  # of the run folder


@dataclass(frozen=True)
class GuardEvent:
    """What the guard did after the step that made `version`."""

    version: int
    sign: str
    action: str  # warn, raise_kl, rollback or stop
    strength: float  # of the alarm, in critical values
    agreeing: int  # newest version without a divergence
    text: str
    kl_scale: float  # factor of algorithm.kl.coef from the next step on
    restored: int | None = None  # version of the checkpoint that a rollback loaded


class GuardLog:
    """Appends events to a file, and keeps those of the run's earlier part for steps that a resume repeats."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events: list[GuardEvent] = list(read_events(path))

    def append(self, event: GuardEvent) -> None:
        """Adds an event. Returns once it is on disk. Raises: OSError: it cannot be written."""
        self.events.append(event)
        append_line(self._path, _line(event), is_synced=True)

    def at(self, version: int) -> list[GuardEvent]:
        return [event for event in self.events if event.version == version]

    def forget_from(self, version: int) -> None:
        """Removes the events of `version` and later: these steps are trained again."""
        kept = [event for event in self.events if event.version < version]
        if len(kept) < len(self.events):
            self.events = kept
            write_atomically(self._path, "".join(_line(event) + "\n" for event in kept))


def read_events(path: Path) -> Sequence[GuardEvent]:
    """Reads the events of a run, in order; none if the file does not exist. A partial last line is ignored."""
    if not path.exists():
        return []
    *whole, partial = path.read_text(encoding="utf-8").split("\n")
    del partial  # empty, or cut off by a kill
    try:
        return [GuardEvent(**json.loads(line)) for line in whole]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} holds a line that is no event of the guard ({error}): restore or remove it"
        ) from error


def _line(event: GuardEvent) -> str:
    return json.dumps({**asdict(event), "strength": min(event.strength, 1e9)})
