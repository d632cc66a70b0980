"""Portions: the references of a step that each rank receives, so that their number grows with the groups alone.

The owner of an object notes each process that holds a reference to it. References to all groups on all ranks cost the
driver time in proportion to ranks times groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

from mobula.cluster.records.trajectory import ScoredGroup


class Elsewhere(Enum):
    """Stands for a reference that this rank has not received."""

    REFERENCE = "reference"


ELSEWHERE = Elsewhere.REFERENCE
GROUPS, ROWS = "groups", "supervised rows"  # kinds of entries
T = TypeVar("T")


@dataclass(frozen=True)
class Portion:
    """The references that one rank receives in a call."""

    references: Mapping[int, tuple[Any, Any]]  # index of the group -> the group and its reference log-probs
    is_final: bool  # the references follow from exact sizes, not from summaries


class UnplannedShareError(Exception):
    """Raised by every rank before any state changes: exact sizes assign groups or rows to ranks that have no references
    to them. The call is repeated with these references.
    """

    def __init__(self, kind: str, missing: Sequence[Sequence[int]]) -> None:
        """`missing` has for each rank the indices of the entries of `kind` that it has no references to."""
        super().__init__(kind, missing)
        self.kind = kind
        self.missing = missing


class Planner(Protocol):
    """Plans which groups each rank fetches first."""

    def __call__(self, groups: Sequence[ScoredGroup], version: int, num_ranks: int) -> list[set[int]]: ...


async def in_portions(
    call: Callable[[Any, Sequence[Portion | None]], Awaitable[T]],
    groups: Sequence[ScoredGroup],
    version: int,
    *,
    num_ranks: int,
    planned: Planner | None,
    put: Callable[[Any], Any],
    kind: str = GROUPS,
) -> T:
    """Calls all ranks with the groups of the step that makes `version`, and returns the result.

    Args:
        call: takes a reference to the groups, and the portion of each rank: None if the groups have their references.
        planned: None sends every reference to every rank.
        put: stores a value once for all ranks and returns a reference to it.
        kind: `Entries.kind` of the groups. An UnplannedShareError of another kind is raised.
    """
    if planned is None or num_ranks == 1:
        return await call(put(groups), [None] * num_ranks)
    held, outlines = planned(groups, version, num_ranks), put(outlines_of(groups))
    try:
        return await call(outlines, portions_of(groups, held, is_final=False))
    except UnplannedShareError as error:
        if error.kind != kind:
            raise
        held = [own.union(missing) for own, missing in zip(held, error.missing, strict=True)]
    return await call(outlines, portions_of(groups, held, is_final=True))


def as_argument(portion: Portion | None, name: str = "portion") -> dict[str, Portion]:
    """Returns the keyword argument of a rank's call."""
    return {} if portion is None else {name: portion}


def outlines_of(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Returns the groups without references: the same value for every rank."""
    return [replace(g, group=ELSEWHERE, reference_logprobs=_without(g.reference_logprobs)) for g in groups]


def portions_of(groups: Sequence[ScoredGroup], held: Sequence[set[int]], *, is_final: bool) -> list[Portion]:
    """Returns the portion of each rank; `held` has for each rank the indices of its groups."""
    return [
        Portion({n: (groups[n].group, groups[n].reference_logprobs) for n in sorted(own)}, is_final) for own in held
    ]


def with_portion(outlines: Sequence[ScoredGroup], portion: Portion | None) -> list[ScoredGroup]:
    """Returns the groups with the references of the portion; without a portion they are complete already."""
    groups = list(outlines)
    references = {} if portion is None else portion.references
    for n, (group, logprobs) in references.items():
        groups[n] = replace(groups[n], group=group, reference_logprobs=logprobs)
    return groups


def _without(reference: Any) -> Any:
    return None if reference is None else ELSEWHERE
