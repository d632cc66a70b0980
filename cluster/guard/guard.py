"""RewardGuard and LogprobGuard: follow a run step by step, and act when a sign fires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mobula.cluster.errors import LogprobGapError, MobulaError, RewardHackingError
from mobula.cluster.guard.signs import Level, Moments, Observer, Series, Sign, Window, metrics_of, reward_and_judge
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.guard_events import GuardEvent, GuardLog
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.tolerance import Rounding

_logger = logging.getLogger(__name__)


class KLScale:
    """Steps of a factor that is 1 at the start. Which factor makes a version does not depend on when it is asked, so
    repeated steps train as before."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []  # (first version, factor), ascending

    @property
    def newest(self) -> float:
        return self._steps[-1][1] if self._steps else 1.0

    def at(self, version: int) -> float:
        return next((factor for first, factor in reversed(self._steps) if first <= version), 1.0)

    def set_from(self, version: int, factor: float) -> None:
        self._steps = [*(step for step in self._steps if step[0] < version), (version, factor)]

    def state(self) -> list[list[float]]:
        return [[first, factor] for first, factor in self._steps]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        self._steps = [(int(first), float(factor)) for first, factor in state]


@dataclass(frozen=True)
class Alarm:
    """A sign that fired at `step`. `is_new`: it did not fire at the look before. Other fields as in `SignVerdict`."""

    sign: str
    step: int
    strength: float
    agreeing: int
    text: str
    is_new: bool


@dataclass
class Watch:
    """The windows of a run and the outcome of the newest look. Each complete window is one look of every sign."""

    signs: Sequence[Sign]
    series: Series
    false_alarm_rate: float
    num_looks: int = 0
    agreeing: int = 0  # last step of the newest window that every sign agrees with
    strength: float = 0.0  # largest of the signs, at the newest look
    firing: set[str] = field(default_factory=set)  # signs that fired at the newest look

    def observe(self, values: Window) -> list[Alarm]:
        """Adds a step; returns the alarms if it completes a window, the strongest first."""
        if not self.series.add(values):
            return []
        self.num_looks += 1
        alarms, agreeing, strengths = [], [values.last], [0.0]
        for sign in self.signs:
            windows = [w for w in self.series.windows if all(q in w.moments for q in sign.quantities)]
            if len(windows) < 2 or self.num_looks < 2 or windows[-1].last != values.last:
                continue
            verdict = sign.judge(windows, Level(self.false_alarm_rate, self.num_looks))
            strengths.append(verdict.strength)
            agreeing.append(verdict.agreeing)
            if verdict.is_alarm:
                is_new = sign.name not in self.firing
                alarms.append(Alarm(sign.name, values.last, verdict.strength, verdict.agreeing, verdict.text, is_new))
        self.firing = {alarm.sign for alarm in alarms}
        self.agreeing, self.strength = min(agreeing), max(strengths)
        return sorted(alarms, key=lambda alarm: -alarm.strength)

    def cut(self, after: int) -> None:
        """Removes the steps after `after`. The number of looks stays, so the bound on false alarms holds."""
        self.series.cut(after)
        self.agreeing = min(self.agreeing, after)
        self.firing.clear()

    def state(self) -> dict[str, Any]:
        known = {"num_looks": self.num_looks, "agreeing": self.agreeing, "strength": min(self.strength, 1e9)}
        return {**known, "firing": sorted(self.firing), "series": self.series.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_looks, self.agreeing, self.strength = state["num_looks"], state["agreeing"], state["strength"]
        self.firing = set(state["firing"])
        self.series.restore(state["series"])


class Restorable(Protocol):
    """The learner, whose state a rollback replaces."""

    async def restore(self, folder: Path, version: int) -> None:
        """Loads the learner state in `folder`, which becomes `version`."""


@dataclass(frozen=True)
class Situation:
    """An alarm, the version made by its step, the newest agreeing version, and the earlier events of the run."""

    alarm: Alarm
    version: int
    agreeing: int
    kl_scale: float
    events: tuple[GuardEvent, ...]

    def event(self, action: str, kl_scale: float, restored: int | None = None) -> GuardEvent:
        alarm = self.alarm
        return GuardEvent(
            self.version, alarm.sign, action, alarm.strength, self.agreeing, alarm.text, kl_scale, restored
        )

    def num_of(self, action: str) -> int:
        return sum(event.action == action for event in self.events)


class GuardAction(Protocol):
    """What happens at an alarm. `severity` orders the actions of several signs: only the highest acts."""

    name: str
    severity: int

    async def act(self, situation: Situation) -> GuardEvent | None:
        """Acts; returns the event to record, None if nothing happens.

        Raises:
            RewardHackingError: the run has to stop.
        """


class Warn:
    """Records and logs an alarm once, until the sign has agreed again."""

    name, severity = "warn", 1

    async def act(self, situation: Situation) -> GuardEvent | None:
        return situation.event(self.name, situation.kl_scale) if situation.alarm.is_new else None


@dataclass(eq=False)
class RaiseKL:
    """Multiplies the factor of the KL coefficient at each alarm; an alarm after `max_actions` raises stops the run."""

    kl_scale: KLScale
    _: KW_ONLY
    factor: float
    max_actions: int
    name, severity = "raise_kl", 2

    async def act(self, situation: Situation) -> GuardEvent | None:
        if situation.num_of(self.name) >= self.max_actions:
            raise RewardHackingError(_stopped(situation, f"after {self.max_actions} raises of the KL coefficient"))
        factor = self.kl_scale.newest * self.factor
        self.kl_scale.set_from(situation.version + 1, factor)
        return situation.event(self.name, factor)


@dataclass(eq=False)
class Rollback:
    """Loads the newest checkpoint whose version agrees; an alarm after `max_actions` rollbacks stops the run."""

    learner: Restorable
    newest: Callable[[int], tuple[int, Path] | None]  # (version): that and folder of the newest checkpoint up to it
    _: KW_ONLY
    max_actions: int
    name, severity = "rollback", 3

    async def act(self, situation: Situation) -> GuardEvent | None:
        if situation.num_of(self.name) >= self.max_actions:
            raise RewardHackingError(_stopped(situation, f"after {self.max_actions} rollbacks"))
        found = await asyncio.to_thread(self.newest, situation.agreeing)
        if found is None:
            raise RewardHackingError(_stopped(situation, "no checkpoint of an agreeing version is left"))
        await self.learner.restore(found[1], situation.version)
        return situation.event(self.name, situation.kl_scale, found[0])

    async def repeat(self, event: GuardEvent) -> None:
        """Loads the checkpoint of a recorded rollback again, for a step that a resume repeats."""
        assert event.restored is not None, "a rollback names its checkpoint"
        found = await asyncio.to_thread(self.newest, event.restored)
        if found is None or found[0] != event.restored:
            raise RewardHackingError(
                f"the rollback of step {event.version} cannot be repeated: its checkpoint of step {event.restored} is "
                "missing or damaged; restore it, or remove the journal folder to resume from the newest checkpoint"
            )
        await self.learner.restore(found[1], event.version)


class Stop:
    """Ends the run with an error."""

    name, severity = "stop", 4

    async def act(self, situation: Situation) -> GuardEvent | None:
        raise RewardHackingError(_stopped(situation, "guard.action is stop"))


def _stopped(situation: Situation, reason: str) -> str:
    return (
        f"step {situation.version}: {situation.alarm.text} (sign {situation.alarm.sign}, {reason}). The newest version "
        f"without this divergence is {situation.agreeing}, see its checkpoints. Change the trained reward "
        "(rewards.components), or go on with guard.action=warn and resume=auto"
    )


class Guard(Protocol):
    """Looks at each step of the loop."""

    async def inspect(self, groups: Sequence[ScoredGroup], update: UpdateReport) -> UpdateReport:
        """Called after the update and before its version is pushed. Returns the report with the guard's metrics."""


class NoGuard:
    """Looks at nothing."""

    async def inspect(self, groups: Sequence[ScoredGroup], update: UpdateReport) -> UpdateReport:
        return update


@dataclass(eq=False, kw_only=True)
class RunGuard:
    """Implements `Guard`, and `Resumable` for its state in checkpoints.

    With `judges_held_out` the sign `judge` reads held-out evaluations, which `evaluated` collects, one window each;
    else the step's groups. A rollback keeps the number of the version: the restored weights are pushed as the version
    of the step, and the run continues with new prompts.
    """

    watch: Watch
    held_out: Watch | None  # of evaluations; None: groups are judged
    observer: Observer
    actions: Mapping[str, GuardAction]  # by sign
    rollback: Rollback  # repeats recorded rollbacks
    log: GuardLog
    kl_scale: KLScale
    identity: str  # of rewards and settings of the guard: the state of a run with another one is not used
    on_event: Callable[[GuardEvent], None] = lambda event: None
    # Gets the version that has older weights: groups of earlier versions are to be rejected
    on_rollback: Callable[[int], None] = lambda version: None

    def __post_init__(self) -> None:
        self._evaluated: list[Window] = []
        self._since = 0  # version of the newest rollback: groups of earlier weights are not counted

    @property
    def agreeing(self) -> int:
        """Newest version of weights without a divergence."""
        versions = [max(self.watch.agreeing - 1, 0)] if self.watch.signs else []  # version s - 1 samples step s
        return min([*versions, *([] if self.held_out is None else [self.held_out.agreeing])])

    def is_discarded(self, version: int) -> bool:
        """Whether a rollback has replaced the weights that made `version`."""
        return any(e.restored is not None and e.restored < version < e.version for e in self.log.events)

    def kept(self, versions: Sequence[int]) -> list[int]:
        """Returns which of the `versions` with a complete checkpoint a rollback would load; it is not removed."""
        usable = [version for version in versions if version <= self.agreeing and not self.is_discarded(version)]
        return [max(usable)] if usable else []

    def evaluated(self, version: int, rewards: Sequence[Sequence[Reward]]) -> None:
        """Takes the rewards of each prompt of a held-out evaluation; the next step's inspection looks at them."""
        if self.held_out is not None:
            values = reward_and_judge(rewards, self.observer.judge_weights)
            self._evaluated.append(Window(version, version, {q: Moments.of(v) for q, v in values.items() if v}))

    async def inspect(self, groups: Sequence[ScoredGroup], update: UpdateReport) -> UpdateReport:
        self.log.forget_from(update.version)  # of an earlier part of the run that lost this step
        measured, alarms = await self._look(groups, update.version)
        chosen = max(alarms, key=lambda alarm: (self.actions[alarm.sign].severity, alarm.strength), default=None)
        for alarm in alarms:
            if alarm is chosen:
                await self._act(alarm, update.version)
            elif alarm.is_new:
                _logger.warning("step %d: %s (sign %s)", update.version, alarm.text, alarm.sign)
        return self._with_metrics(update, measured)

    async def repeat(self, groups: Sequence[ScoredGroup], update: UpdateReport) -> UpdateReport:
        """Looks at a step that a resume repeats; actions recorded for it are applied again, none is decided."""
        measured, _ = await self._look(groups, update.version)
        for event in self.log.at(update.version):
            if event.action == "raise_kl":
                self.kl_scale.set_from(event.version + 1, event.kl_scale)
            if event.restored is not None:
                await self.rollback.repeat(event)
                self._cut(event)
        return self._with_metrics(update, measured)

    def state(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "watch": self.watch.state(),
            "held_out": None if self.held_out is None else self.held_out.state(),
            "kl_scale": self.kl_scale.state(),
            "since": self._since,
        }

    def restore(self, version: int, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint. The KL factor stays if rewards or guard were changed since."""
        self.kl_scale.restore(state["kl_scale"])
        if state["identity"] != self.identity:
            _logger.warning("rewards or guard have changed: the guard compares steps after %d only", version)
            return
        self._begin(state["since"])
        self.watch.restore(state["watch"])
        if self.held_out is not None:
            self.held_out.restore(state["held_out"])

    async def _look(self, groups: Sequence[ScoredGroup], version: int) -> tuple[dict[str, float], list[Alarm]]:
        """Returns the metrics of a step, and of an evaluation that ended in it, and the alarms of both."""
        try:
            values = await asyncio.to_thread(self.observer.observe, version, groups, since=self._since)
        except MobulaError as error:  # the texts of a drift sign must not end the run
            _logger.warning("step %d is not looked at: its groups cannot be read: %s", version, error)
            values = Window(version, version, {})
        measured, alarms = metrics_of(values), self.watch.observe(values)
        evaluated, self._evaluated = self._evaluated, []
        for evaluation in evaluated:
            if self.held_out is not None and evaluation.last >= self._since:
                measured |= metrics_of(evaluation)
                alarms += self.held_out.observe(evaluation)
        return measured, alarms

    async def _act(self, alarm: Alarm, version: int) -> None:
        action = self.actions[alarm.sign]
        situation = Situation(alarm, version, self.agreeing, self.kl_scale.newest, tuple(self.log.events))
        try:
            event = await action.act(situation)
        except RewardHackingError:
            self._record(situation.event("stop", situation.kl_scale))
            raise
        if event is not None:
            self._record(event)
            self._cut(event)

    def _cut(self, event: GuardEvent) -> None:
        if event.restored is None:
            return
        self._begin(event.version)
        self.watch.cut(event.agreeing + 1)
        if self.held_out is not None:
            self.held_out.cut(event.agreeing)

    def _begin(self, version: int) -> None:
        self._since = version
        self.on_rollback(version)

    def _record(self, event: GuardEvent) -> None:
        self.log.append(event)
        done = {"raise_kl": f"the KL coefficient is now algorithm.kl.coef * {event.kl_scale:g}"}
        done["rollback"] = f"the weights of version {event.restored} replace those of version {event.version}"
        done |= {"warn": "the run continues (guard.action=warn)", "stop": "the run stops"}
        _logger.warning("step %d: %s (sign %s); %s", event.version, event.text, event.sign, done[event.action])
        self.on_event(event)

    def _with_metrics(self, update: UpdateReport, measured: Mapping[str, float]) -> UpdateReport:
        watches = [self.watch, *([self.held_out] if self.held_out is not None else [])]
        own: dict[str, float] = {
            MetricName.GUARD_STRENGTH: max(watch.strength for watch in watches),
            MetricName.GUARD_KL_SCALE: self.kl_scale.newest,
        }
        return replace(update, metrics={**update.metrics, **measured, **own})


CAUSES = (
    "engine and learner differ in the chat template, processor or position ids of this model",
    "the checkpoint's configuration changes one of them (penalties of generation_config.json, dropout with "
    "policy.dropout=true, sliding windows, quantisation)",
    "a push left a tensor of the engine at an old value (weight_sync.canary_interval=1 tests every push)",
    "tokens were not sampled with the settings of sampler.*",
)


@dataclass(eq=False, kw_only=True)
class LogprobGuard:
    """Raises or warns if learner and engine compute different log-probs of a step's tokens at equal weights."""

    dtype: str  # `resources.dtype`
    limit: float  # maximum mean gap, in nat
    rounding: Rounding  # may widen the limit
    stops: bool

    def check(self, report: UpdateReport) -> None:
        gap = report.metrics.get(MetricName.LOGPROB_GAP_MEAN)
        if gap is not None and not gap <= self.rounding.widened(self.limit):  # `not <=`: a NaN is over the limit
            largest = report.metrics.get(MetricName.LOGPROB_GAP_MAX, gap)
            limit = self.rounding.widened(self.limit)
            widened = "" if limit == self.limit else f", widened to {limit:.3g} by the rounding of the model"
            causes = "; ".join(f"({n}) {cause}" for n, cause in enumerate(CAUSES, 1))
            message = (
                f"step {report.version}: log-probs of the learner differ from those that its engines recorded at equal "
                f"weights by {gap:.3g} nat in the mean, {largest:.3g} at most "
                f"(supervision.max_logprob_gap.{self.dtype}={self.limit:g}{widened}). Likely causes: {causes}. "
                "Find the cause, raise the limit if it is rounding, or go on with supervision.on_logprob_gap=warn"
            )
            if self.stops:
                raise LogprobGapError(message)
            _logger.warning("%s", message)
