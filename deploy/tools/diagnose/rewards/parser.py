"""Whether the reward's parser finds answers in the responses."""

from __future__ import annotations

from collections import Counter

from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured

NAME = "reward_parser"
ACTION = (
    "ask for the form that the reward reads (data.prompt_suffix, data.system_prompt), or let the reward read the form "
    "that the policy writes (rewards.components.N.options.extract)"
)
COMPARISONS = ("another value", "too far from every reference", "over budget", "the choice is taken back")
"""Beginnings of reasons of answers that were found and are wrong."""
FAULT_FROM, WARNING_FROM, NOTICE_FROM = 0.9, 0.3, 0.05
NUM_SHOWN = 3


def check_parser(material: Material) -> RunFinding:
    """Share of the responses of the last quarter for which the component of accuracy found no answer."""
    component = material.config.rewards.accuracy_component
    num = material.num_late_samples
    if num == 0:
        return not_measured(NAME, "no response was trained")
    prefix = f"{component}: "
    reasons = Counter(
        {
            reason.removeprefix(prefix): count
            for reason, count in material.late_count(CounterName.REWARD_REASONS).items()
            if reason.startswith(prefix) and not reason.removeprefix(prefix).startswith(COMPARISONS)
        }
    )
    failed = sum(material.late_count(CounterName.REWARD_FAILURES).values())
    share, failed_share = reasons.total() / num, failed / (num + failed)
    numbers = {"unparsed_fraction": share, "failed_fraction": failed_share, "num_responses": float(num)}
    shown = "".join(f"; {reason!r} {count}" for reason, count in reasons.most_common(NUM_SHOWN) if count)
    measured = (
        f"{component} found no answer in {share:.1%} of the newest {num} trained responses{shown}; "
        f"{failed_share:.1%} could not be scored"
    )
    return RunFinding(
        NAME, _verdict(max(share, failed_share)), measured, numbers, _action(share, failed_share), _shown(material)
    )


def _verdict(share: float) -> RunVerdict:
    if share >= FAULT_FROM:
        return RunVerdict.FAULT
    if share >= WARNING_FROM:
        return RunVerdict.WARNING
    return RunVerdict.NOTICE if share >= NOTICE_FROM else RunVerdict.OK


def _action(share: float, failed_share: float) -> str:
    if max(share, failed_share) < NOTICE_FROM:
        return ""
    return (
        ACTION
        if share >= failed_share
        else "read the first failure in run.log; rewards.on_failure=stop ends the run at it"
    )


def _shown(material: Material) -> tuple[Evidence, ...]:
    component = material.config.rewards.accuracy_component
    unread = [answer for answer in reversed(material.kept_answers) if component in answer.reasons]
    return tuple(Evidence(f"{answer.reasons[component]}: {answer.text!r}") for answer in unread[:NUM_SHOWN])
