"""The Ray cluster of one run, joined or private on the loopback address, and the environment of its workers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services

import mobula.deploy.host.ray_defaults  # noqa: F401  (no address but loopback: Ray reads it when it starts)
from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.network import LOOPBACK
from mobula.cluster.runtime.placement import NodeResources, PlacedWorker
from mobula.cluster.runtime.placement_groups import cluster_nodes
from mobula.cluster.runtime.ray_actors import BOUND_THREADS
from mobula.configs.schema import RunConfig
from mobula.deploy.host.authentication import check_admission, check_auth
from mobula.deploy.host.machine import as_node, ray_folder, this_machine
from mobula.deploy.host.run_folder import SESSION_FILE, RunMark, RunRecord, marking
from mobula.deploy.host.terminal import sigterm_stays_ours

ADDRESS_VARIABLE = "RAY_ADDRESS"
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a process that `ray job submit` starts
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SESSION_MARK, NUM_SESSIONS = "mobula-session", 3  # a file in session folders of runs; how many of ended runs stay
TOO_SLOW = "timed out during startup"  # Ray's words, after 30 s; its error has no class of its own


@dataclass(frozen=True)
class ClusterSession:
    nodes: tuple[NodeResources, ...]
    is_local: bool  # started by us, on the loopback address only
    mark: RunMark  # of everything that the run starts


@contextmanager
def ray_session(config: RunConfig) -> Iterator[ClusterSession]:
    """Join the cluster that `resources.address` or RAY_ADDRESS names (`ray job submit` sets it), or start one here;
    leave it at the end.

    A cluster that this process is already connected to is used as it is and left running.
    """
    with marking(config.name) as mark:
        if ray.is_initialized():
            yield ClusterSession(cluster_nodes(), _is_loopback(), mark)
            return
        check_access(config)
        with sigterm_stays_ours():
            if config.resources.address:
                ray.init(config.resources.address, namespace=config.name, **_worker_start(), **QUIET)
            elif os.environ.get(ADDRESS_VARIABLE):
                ray.init(namespace=config.name, **_worker_start(), **QUIET)
            else:
                start_private(config, include_dashboard=config.resources.dashboard)
        try:
            yield ClusterSession(cluster_nodes(), _is_loopback(), mark)
        finally:
            with sigterm_stays_ours():
                ray.shutdown()


def check_access(config: RunConfig) -> None:
    """Checks that the cluster to join admits this process, or that a private cluster has a token."""
    if ray.is_initialized():
        return
    if config.resources.address:
        check_admission(config.resources.address, "resources.address")
    elif address := os.environ.get(ADDRESS_VARIABLE):
        check_admission(address, ADDRESS_VARIABLE)
    else:
        check_auth()


def run_record(config: RunConfig, session: ClusterSession) -> RunRecord:
    ray_here = ray.get_runtime_context()
    folder = Path(ray_here.get_temp_dir()) / ray_here.get_session_name()
    is_ours = folder.name.endswith(f"_{os.getpid()}")  # Ray names a session after the process that started it
    return RunRecord(
        run=config.name,
        run_folder=config.run_folder.absolute(),
        mark=session.mark,
        address=ray_here.gcs_address,
        namespace=ray_here.namespace,
        session_folder=folder if is_ours else None,
    )


def expected_nodes(config: RunConfig) -> tuple[NodeResources, ...] | None:
    """Returns the nodes of a private cluster; None if the run joins a cluster."""
    if ray.is_initialized() or config.resources.address or os.environ.get(ADDRESS_VARIABLE):
        return None
    return (as_node(this_machine(), config.resources),)


def start_private(config: RunConfig, *, include_dashboard: bool, temp_dir: Path | None = None) -> None:
    """Start a cluster with the resources of `config` on the loopback address and join it; `ray.shutdown()` ends it.

    With RAY_AUTH_MODE=token it admits only who has the same token. Its session folder is made in `temp_dir`, by default
    where Ray makes them.
    """
    check_auth()  # Ray would make a token, in a file that all users of the machine may read
    node = as_node(this_machine(), config.resources)
    folder = temp_dir or ray_folder(os.environ)
    forget_sessions(folder or Path(get_default_ray_temp_dir()))
    with _beyond_our_signals(), _named_if_too_slow():
        ray.init(
            address="local",
            namespace=config.name,
            num_cpus=int(node.num_cpus),
            num_gpus=int(node.num_gpus),
            object_store_memory=config.resources.object_store_bytes,
            include_dashboard=include_dashboard,
            dashboard_host=LOOPBACK,
            **QUIET,
            _node_ip_address=LOOPBACK,
            _temp_dir=None if folder is None else str(folder),
        )
    here = ray.get_runtime_context()
    with suppress(OSError):  # without the mark, the folder stays
        Path(here.get_temp_dir(), here.get_session_name(), SESSION_MARK).touch()


def forget_sessions(folder: Path) -> None:
    """Removes the session folders of ended runs below Ray's temporary folder, but the newest `NUM_SESSIONS`."""
    marks = sorted(folder.glob(f"session_*/{SESSION_MARK}"), key=lambda mark: mark.stat().st_mtime, reverse=True)
    ended = [mark.parent for mark in marks if not Path("/proc", mark.parent.name.rpartition("_")[2]).exists()]
    for session in ended[NUM_SESSIONS:]:
        if not (session / SESSION_FILE).exists():  # of a killed run: `mobula doctor --leftovers` shows it
            shutil.rmtree(session, ignore_errors=True)


def engine_environment(config: RunConfig, worker: PlacedWorker) -> dict[str, str]:
    """Environment variables that vLLM reads in one rollout actor.

    On CPU the engine binds its own threads, and shares one process with its worker: on few cores every process that
    passes messages costs throughput. vLLM's eager mode still compiles a helper of its sampler, seconds of every start.
    """
    if config.resources.device == "cuda":
        return {}
    cores = ",".join(str(core) for core in worker.cores)
    binding = {BOUND_THREADS: cores} if cores else {}
    eager = {"TORCH_COMPILE_DISABLE": "1"} if config.sampler.vllm.enforce_eager else {}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", **eager, **binding}


def learner_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that torch reads in a rank that trains.

    Micro-batches have other shapes each time. Segments that grow leave fewer gaps between blocks, and give the memory
    of their free pages back when a rank moves to host memory. Pinned blocks of 1 MiB or more are as large as asked for:
    by default they are rounded up to powers of two, and a rank that moves to host memory would pin up to twice as much.
    Settings in the driver's environment stay as they are.
    """
    if config.resources.device != "cuda" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}


def _worker_start() -> dict[str, Any]:
    """Returns the worker setup of jobs with a checkout as working directory: workers import the checkout's code."""
    if JOB_VARIABLE in os.environ and Path("deploy/package/mobula").is_dir():
        return {"runtime_env": {"worker_process_setup_hook": "deploy.find_checkout"}}
    return {}


@contextmanager
def _named_if_too_slow() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if TOO_SLOW not in str(error):
            raise
        raise PreflightError(
            "Ray did not start on this machine within 30 s: its processes are slow on busy cores, and at their first "
            "import from a slow file system. Start again once fewer processes compute here; Ray's logs are in "
            "/tmp/ray/session_latest/logs"
        ) from error


@contextmanager
def _beyond_our_signals() -> Iterator[None]:
    """Starts Ray's processes in new process groups while the body runs.

    `timeout`, schedulers and terminals signal the whole group of the run. Without this the cluster would end before the
    driver, which then could not write a checkpoint.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[misc, assignment]  # a patch of Ray
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def _is_loopback() -> bool:
    return all(node["NodeManagerAddress"] == LOOPBACK for node in ray.nodes())
