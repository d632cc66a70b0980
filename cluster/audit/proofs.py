"""Statements about a run's history: staleness of tokens, groups trained once, pushes verified."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mobula.cluster.audit.chain import AUDIT_FILE
from mobula.cluster.audit.history import AuditedStep, History, named
from mobula.cluster.audit.order import AuditFinding
from mobula.cluster.audit.prompts import PromptAccount

# `newer`: the engine joined during the push, or got a later version, each through a load that checks every byte.
VERIFIED = ("checksum", "checksum+canary", "newer")


@dataclass(frozen=True)
class Staleness:
    """Lag of trained tokens: the version that their step trains from, less the version that sampled them."""

    tokens_by_lag: Mapping[int, int]
    max_allowed: int | None  # the largest algorithm.max_staleness of all parts; None if it is not known

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_lag.values())

    @property
    def mean(self) -> float:
        return sum(lag * num for lag, num in self.tokens_by_lag.items()) / max(1, self.num_tokens)

    @property
    def max(self) -> int:
        return max(self.tokens_by_lag, default=0)


def staleness_of(history: History) -> Staleness:
    lags: Counter[int] = Counter()
    for version, step in history.steps.items():
        for tokens in step.tokens.values():
            lags.update({version - 1 - sampled: num for sampled, num in tokens.items()})
    bounds = [step.bounds["max_staleness"] for step in history.steps.values()]
    allowed = None if None in bounds else max(bounds, default=0)
    return Staleness(dict(sorted((lag, num) for lag, num in lags.items() if num)), allowed)


def check_staleness(history: History) -> Iterator[AuditFinding]:
    """Yields tokens over the bound, of a version after the step's, or of a version that no engine had received."""
    newest = max(history.served, default=0)
    for version, step in history.steps.items():
        for group_id, tokens in step.tokens.items():
            for sampled in (sampled for sampled, num in tokens.items() if num):
                problem = _problem_of(version - 1 - sampled, step)
                if not problem and history.pushes and sampled < newest and sampled not in history.served:
                    problem = f"of version {sampled}, which was never pushed"
                if problem:
                    yield AuditFinding(AUDIT_FILE, f"{step.record.name}: group {group_id} has tokens {problem}")


def _problem_of(lag: int, step: AuditedStep) -> str:
    if lag < 0:
        return f"of version {step.record.body['version'] - 1 - lag}, which did not exist yet"
    limit = step.bounds["max_staleness"]
    if limit is not None and lag > limit and step.bounds["stragglers"] == "wait":
        return f"that are {lag} versions old, and algorithm.max_staleness is {limit}"
    return ""


def check_groups(history: History) -> Iterator[AuditFinding]:
    """Yields groups that stand in two steps of the run's line of versions."""
    steps_of: dict[str, list[int]] = defaultdict(list)
    for version, step in history.steps.items():
        for group_id in step.groups:
            steps_of[group_id].append(version)
        if len(step.groups) < len(step.record.body["groups"]):
            yield AuditFinding(AUDIT_FILE, f"{step.record.name} has a group twice")
    twice = {group_id: versions for group_id, versions in steps_of.items() if len(versions) > 1}
    for group_id, versions in twice.items():
        made = " and ".join(map(str, versions))
        yield AuditFinding(AUDIT_FILE, f"group {group_id} was trained {len(versions)} times, for versions {made}")
    gaps = sorted(set(range(1, history.version + 1)) - history.steps.keys())
    if gaps:
        yield AuditFinding(AUDIT_FILE, f"versions {named([str(gap) for gap in gaps])} have no record of their step")


def account_of(history: History) -> PromptAccount:
    """Returns what became of each prompt that was handed out."""
    return history.prompts.account(group_id for step in history.steps.values() for group_id in step.groups)


def check_prompts(history: History) -> Iterator[AuditFinding]:
    """Yields trained and rejected prompts that were never handed out."""
    unknown = history.prompts.unknown(group_id for step in history.steps.values() for group_id in step.groups)
    if unknown:
        yield AuditFinding(AUDIT_FILE, f"prompts {named(unknown)} were trained or rejected, and never handed out")


def check_pushes(history: History) -> Iterator[AuditFinding]:
    """Yields pushes that an engine took without a check of its bytes."""
    for record in history.pushes:
        engines = [engine for engine, how in record.body["receivers"].items() if how not in VERIFIED]
        if engines:
            where = named(engines)
            yield AuditFinding(AUDIT_FILE, f"{record.name} was verified neither by checksum nor by canary at {where}")
