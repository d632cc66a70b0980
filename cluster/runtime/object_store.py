"""Resolves references to values in Ray's object store.

Roles never import ray. They call `fetch`, which accepts object refs and plain values, so a role also runs outside a
cluster and without ray: ray is imported when there is a reference to resolve. Every fetch has a deadline and a name
for error messages.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mobula.cluster.errors import DeadlineError, LostObjectError
from mobula.cluster.runtime.vitals import ObjectStoreUse

if TYPE_CHECKING:
    import ray

STORE = "object_store_memory"  # Ray's name of the resource


def fetch(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """Resolves references to values, in order. Other values are returned unchanged."""
    pending = [r for r in references if _is_reference(r)]
    if not pending:
        return list(references)
    import ray
    from ray.exceptions import GetTimeoutError, ObjectLostError

    from mobula.cluster.runtime.ray_actors import PROCESS_GONE

    try:
        values = iter(ray.get(pending, timeout=timeout_s))
    except GetTimeoutError as error:
        raise DeadlineError(f"waited {timeout_s:g} s for {what} ({len(pending)} objects)") from error
    except (ObjectLostError, *PROCESS_GONE) as error:  # PROCESS_GONE: the actor that held the value died, too
        raise LostObjectError(
            f"{what} cannot be had: the node that held it is gone ({type(error).__name__})"
        ) from error
    return [next(values) if _is_reference(r) else r for r in references]


def fetch_or_miss(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """Like `fetch`, for values that can be regenerated: a late value counts as lost. Until Ray has noticed the death of
    a node, requests for its objects wait."""
    try:
        return fetch(references, timeout_s=timeout_s, what=what)
    except DeadlineError as error:
        raise LostObjectError(
            f"{error}: see whether the node is alive that holds them, or raise timeouts.object_s"
        ) from error


def fetch_at_hand(wanted: Sequence[Sequence[Any]], *, wait_s: float) -> list[list[Any] | None]:
    """Fetches several lists of references at once. Returns None for a list with a value that is missing after `wait_s`.
    If a value is lost, all lists with references are None; fetch each list alone to get the error."""
    pending = list({r for references in wanted for r in references if _is_reference(r)})
    values: dict[ray.ObjectRef[Any], Any] = {}
    if pending:
        import ray
        from ray.exceptions import RayError

        there, _ = ray.wait(pending, num_returns=len(pending), timeout=wait_s)
        with suppress(RayError):
            values = dict(zip(there, ray.get(there, timeout=wait_s), strict=True))
    return [_resolved(references, values) for references in wanted]


def object_store_use() -> ObjectStoreUse:
    """Returns the use of all object stores, as last reported by the nodes. Blocks: it asks Ray's control store."""
    import ray

    total, free = (resources.get(STORE, 0.0) for resources in (ray.cluster_resources(), ray.available_resources()))
    return ObjectStoreUse(max(0, int(total - free)), int(total))


def _resolved(references: Sequence[Any], values: Mapping[ray.ObjectRef[Any], Any]) -> list[Any] | None:
    if any(_is_reference(r) and r not in values for r in references):
        return None
    return [values[r] if _is_reference(r) else r for r in references]


def _is_reference(value: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


async def bring_here(references: Sequence[Any], *, timeout_s: float, what: str) -> None:
    """Copies every value to this node's object store, so that it survives the loss of the node that made it."""
    pending = [r for r in references if _is_reference(r)]
    if not pending:
        return
    import ray

    # No thread if nothing is missing: the usual case on one node.
    if len(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) == len(pending):
        return
    _, missing = await asyncio.to_thread(ray.wait, pending, num_returns=len(pending), timeout=timeout_s)
    if missing:
        raise DeadlineError(
            f"waited {timeout_s:g} s for {what} ({len(missing)} objects) to arrive on the driver's node"
        )
