"""The Ray cluster of one run: the one we were submitted to, or a private one on this machine's loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Both are read while ray is imported. A private cluster needs no token, and nothing is reported to anybody.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray  # noqa: E402

from cluster.network import LOOPBACK  # noqa: E402
from cluster.placement import NodeResources  # noqa: E402
from cluster.placement_groups import cluster_nodes  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from deploy.machine import as_node, this_machine  # noqa: E402

ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True)
class Session:
    """The cluster as a run finds it."""

    nodes: tuple[NodeResources, ...]
    is_local: bool  # started by us, on the loopback address only


@contextmanager
def ray_session(config: RunConfig) -> Iterator[Session]:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it) or start one here; leave it at the end.

    A cluster that this process is already connected to is used as it is and left running.
    """
    if ray.is_initialized():
        yield Session(cluster_nodes(), is_local=_is_loopback())
        return
    if os.environ.get(ADDRESS_VARIABLE):
        ray.init(namespace=config.name, logging_level="WARNING")
    else:
        _start_local(config)
    try:
        yield Session(cluster_nodes(), is_local=_is_loopback())
    finally:
        ray.shutdown()


def expected_nodes(config: RunConfig) -> tuple[NodeResources, ...] | None:
    """The nodes of the cluster that would be started here; None where one is joined and has to be asked."""
    if ray.is_initialized() or os.environ.get(ADDRESS_VARIABLE):
        return None
    return (as_node(this_machine(), config.resources),)


def _start_local(config: RunConfig) -> None:
    node = as_node(this_machine(), config.resources)
    ray.init(
        address="local",
        namespace=config.name,
        num_cpus=int(node.num_cpus),
        num_gpus=int(node.num_gpus),
        object_store_memory=config.resources.object_store_bytes,
        include_dashboard=config.resources.dashboard,
        dashboard_host=LOOPBACK,
        log_to_driver=False,
        logging_level="WARNING",
        _node_ip_address=LOOPBACK,
    )


def _is_loopback() -> bool:
    return all(node["NodeManagerAddress"] == LOOPBACK for node in ray.nodes())
