"""Checks between nodes: network and shared paths."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.network import INTERFACE_VARIABLES, interface_of, node_address
from mobula.cluster.runtime.placement import PlacementPlan
from mobula.cluster.runtime.placement_groups import node_name
from mobula.configs.schema import RunConfig

SHARED_PATHS_ANSWER_S = 60.0


def relative_paths(config: RunConfig) -> dict[str, str]:
    """Key -> value of the run's relative paths. A `policy.model` that is no folder here may be a hub name."""
    paths = {"folder": str(config.folder), "data.path": str(config.data.path)}
    model = Path(config.policy.model)
    if config.policy.tiny != "none" or model.exists():
        paths["policy.model"] = config.policy.model
    return {key: value for key, value in paths.items() if not Path(value).is_absolute()}


def refuse_relative(config: RunConfig) -> None:
    """Refuses paths that depend on a process's working folder; the message has the words to add."""
    paths = relative_paths(config)
    if paths:
        overrides = " ".join(f"{key}=/SHARED/{value}" for key, value in paths.items())
        raise PreflightError(
            f"{', '.join(f'{key}={value}' for key, value in paths.items())}: relative to a working folder, which is "
            f"another one on each node. Give absolute paths on a file system that all nodes see, e.g. {overrides}"
        )


def check_on_all_nodes(config: RunConfig) -> None:
    """Checks that every node of a connected cluster sees the run's data, model and folder under the same paths."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    refuse_relative(config)
    folder = config.folder
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    probe = existing / f".mobula-{uuid4().hex}"
    paths = {"data.path": str(config.data.path), "folder": str(probe)}
    if Path(config.policy.model).is_absolute():
        paths["policy.model"] = config.policy.model
    try:
        probe.touch()
        missing = missing_on(nodes, paths)
    except OSError as error:
        raise PreflightError(
            f"folder={folder} cannot be written ({error}): name a folder that can be written"
        ) from error
    finally:
        probe.unlink(missing_ok=True)
    if missing:
        shown = "; ".join(
            f"{name} does not see {key}={existing if key == 'folder' else paths[key]}"
            for name, keys in missing.items()
            for key in keys
        )
        raise PreflightError(
            f"{shown}: mount the file system that holds it under the same path on every node, or name a path that "
            "all nodes see"
        )


def missing_on(nodes: Sequence[Mapping[str, object]], paths: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns node name -> keys of the paths missing there, for nodes with missing paths."""
    look = ray.remote(num_cpus=0, max_retries=0)(_unseen)
    calls = {
        node_name(node): look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        ).remote(dict(paths))
        for node in nodes
    }
    try:
        answers = dict(zip(calls, ray.get(list(calls.values()), timeout=SHARED_PATHS_ANSWER_S), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise PreflightError(
            f"waited {SHARED_PATHS_ANSWER_S:g} s for {', '.join(calls)} to look for the run's paths: see `ray status`"
        ) from error
    return {name: keys for name, keys in answers.items() if keys}


def _unseen(paths: dict[str, str]) -> list[str]:
    return [key for key, path in paths.items() if not os.path.exists(path)]


CONNECT_S = 10.0
NODE_NETWORK_ANSWER_S = 120.0  # of one node: its process has to start first
LISTENING = 64
GLOO = INTERFACE_VARIABLES[0]


@dataclass(frozen=True)
class ListenAddress:
    node: str  # its name in the plan
    host: str
    port: int
    interface: str | None

    def __str__(self) -> str:
        return f"{self.node} at {self.host} on {self.interface or 'no interface of its own'}"


class ProbeEndpoint:
    """Listens on one node at the address of its collectives, and connects to the other nodes."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._listener: socket.socket | None = None

    def open(self) -> ListenAddress:
        """Listen on the interface that GLOO_SOCKET_IFNAME names, else at the node's Ray address."""
        host, interface = _own_place()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=LISTENING)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return ListenAddress(self._node, host, self._listener.getsockname()[1], interface)

    def unreached(self, addresses: Sequence[ListenAddress]) -> list[tuple[ListenAddress, str]]:
        """Returns the addresses that this node cannot reach, with the reason."""
        failures = []
        for address in addresses:
            try:
                with socket.create_connection((address.host, address.port), timeout=CONNECT_S) as connection:
                    connection.settimeout(CONNECT_S)
                    greeted = connection.recv(256).decode()
            except OSError as error:
                failures.append((address, error.strerror or str(error)))
                continue
            if greeted != address.node:
                failures.append((address, f"{greeted or 'another process'} answers at that address"))
        return failures

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # it was closed
                return
            with connection:
                connection.sendall(self._node.encode())


def check_network(plan: PlacementPlan) -> None:
    """Connect every pair of nodes that have workers of this plan, in both directions."""
    names = {worker.node_id: worker.node_name for worker in plan.workers}
    if len(names) < 2:
        return
    role = ray.remote(num_cpus=0, max_restarts=0)(ProbeEndpoint)
    there: dict[str, Any] = {  # handles; Ray's stubs know no remote methods
        name: role.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(name)
        for node_id, name in names.items()
    }
    try:
        addresses = _asked([handle.open.remote() for handle in there.values()], plan)
        calls = [
            handle.unreached.remote([address for address in addresses if address.node != name])
            for name, handle in there.items()
        ]
        refuse_unreached(dict(zip(addresses, _asked(calls, plan), strict=True)))
    finally:
        for handle in there.values():
            ray.kill(handle)


def refuse_unreached(failures: dict[ListenAddress, list[tuple[ListenAddress, str]]]) -> None:
    pairs = [(address, *failure) for address, missed in failures.items() for failure in missed]
    if not pairs:
        return
    shown = "; ".join(f"{address} does not reach {other}: {why}" for address, other, why in pairs[:4])
    raise PreflightError(
        f"{shown}. Collectives of learner and engines would wait in vain: open TCP between these nodes for all ports "
        f"above 1024, start them with `ray start --node-ip-address=ADDRESS` on a network that they share, or name its "
        f"interface with {' and '.join(INTERFACE_VARIABLES)} (`mobula submit --env`)"
    )


def _asked(calls: list[Any], plan: PlacementPlan) -> list[Any]:
    try:
        return ray.get(calls, timeout=NODE_NETWORK_ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        nodes = ", ".join(sorted({worker.node_name for worker in plan.workers}))
        raise PreflightError(
            f"waited {NODE_NETWORK_ANSWER_S:g} s for {nodes} to look for each other: "
            "see `ray status`, and start what is missing"
        ) from error


def _own_place() -> tuple[str, str | None]:
    name = os.environ.get(GLOO)
    if name is None:
        address = node_address()
        return address, interface_of(address)
    addresses = psutil.net_if_addrs().get(name.removeprefix("="), [])
    host = next((entry.address for entry in addresses if entry.family is socket.AF_INET), None)
    return (host, name) if host is not None else (node_address(), None)
