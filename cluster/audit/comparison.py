"""Compares the histories of two runs: up to which version they trained equal groups, and whether they end equal."""

from __future__ import annotations

from dataclasses import dataclass

from mobula.cluster.audit.history import AuditedStep, History

POLICY = "policy/"  # the trained policy in the run folder


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; equal digests mean equal bits."""

    equal_to: int  # the newest version up to which all steps have equal groups
    num_shared: int  # steps that both runs have
    first_difference: str  # the first group that differs in content, order or presence; empty if there is none
    has_equal_policy: bool | None  # None: a run has not ended, or wrote no policy


def compare(ours: History, theirs: History) -> Comparison:
    shared = sorted(ours.steps.keys() & theirs.steps.keys())
    equal_to = 0
    for version in shared:
        difference = _difference(ours.steps[version], theirs.steps[version])
        if difference:
            return Comparison(equal_to, len(shared), difference, _has_equal_policy(ours, theirs))
        equal_to = version
    return Comparison(equal_to, len(shared), "", _has_equal_policy(ours, theirs))


def _difference(ours: AuditedStep, theirs: AuditedStep) -> str:
    for (group, digest), (other, other_digest) in zip(ours.groups.items(), theirs.groups.items(), strict=False):
        if group != other:
            return f"{group} in place of {other}"
        if digest != other_digest:
            return f"{group}, with other content"
    return "" if len(ours.groups) == len(theirs.groups) else "the number of groups"


def _has_equal_policy(ours: History, theirs: History) -> bool | None:
    if ours.ended is None or theirs.ended is None:
        return None
    files = [
        {name: value for name, value in history.ended.body["files"].items() if name.startswith(POLICY)}
        for history in (ours, theirs)
        if history.ended is not None
    ]
    return files[0] == files[1] if files[0] and files[1] else None
