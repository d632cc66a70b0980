"""Preloaded: the driver's side of the process that forks the workers of a run.

Imports are most of a start. On few cores, workers that import by themselves compete for them; one process that imports
for all of them does so while the driver imports and starts Ray.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.environment_variables import SLEEPING_THREADS
from mobula.configs.schema import RunConfig
from mobula.configs.schema.rollout import SamplerKind

ROLES = (
    "mobula.learner.learner",
    "mobula.actors.reference.scorer",
    "mobula.actors.rollout.actor",
    "mobula.rewards.pool.worker",
)
ENGINE = "mobula.actors.samplers.vllm.sampler"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **SLEEPING_THREADS}  # a worker sets its own number
MIB = 1 << 20


@dataclass(frozen=True)
class Preloaded:
    """The sockets at which workers are forked."""

    roles: Path
    engines: Path

    def python(self, role: str) -> str:
        """Returns the command that Ray runs in place of Python for a worker of `role`."""
        path = self.engines if role == "rollout" else self.roles
        return shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("worker.py")), str(path)])


@contextmanager
def preloaded(config: RunConfig) -> Iterator[Preloaded | None]:
    """Imports the modules of the roles in a separate process while the body runs; its end ends no worker.

    Yields None where workers import by themselves: on GPUs, and on a cluster of several machines. Call it before the
    imports of the run.
    """
    resources = config.resources
    if resources.device != "cpu" or resources.address or os.environ.get("RAY_ADDRESS"):
        yield None
        return
    has_engines = config.sampler.kind is SamplerKind.VLLM and not config.offline.is_on
    stages = {"roles": ",".join(ROLES), **({"engines": ENGINE} if has_engines else {})}
    eager = {"TORCH_COMPILE_DISABLE": "1"} if config.sampler.vllm.enforce_eager else {}
    try:
        sockets = tempfile.TemporaryDirectory(prefix="mobula-preloaded-", dir="/tmp")  # a socket's path is short
    except OSError:  # /tmp is full or cannot be written
        yield None
        return
    from mobula.deploy.host.run_folder import marking

    with sockets as folder, marking(config.name):
        paths = [Path(folder, name) for name in stages]
        with ExitStack() as listeners:
            numbers = [listeners.enter_context(_listening(path)).fileno() for path in paths]
            arguments = [str(part) for stage in zip(numbers, stages.values(), strict=True) for part in stage]
            # Its output is of no use: if it fails, workers import by themselves and write the error to their logs.
            server = subprocess.Popen(
                [sys.executable, "-m", "mobula.deploy.preloading.server", folder, *arguments],
                stdin=subprocess.PIPE,  # ends the server, also when this process is killed
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **{name: value for name, value in os.environ.items() if name != config.audit.key_env},
                    **THREADS,
                    **eager,
                    **library_environment(config),
                },
                pass_fds=numbers,
                process_group=0,
            )
        with server:
            try:
                yield Preloaded(paths[0], paths[-1])
            finally:
                server.kill()


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def library_environment(config: RunConfig) -> dict[str, str]:
    """Returns the variables of all workers that libraries read when they are loaded: no usage statistics."""
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(config.policy.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env | allocator_environment(config)


def allocator_environment(config: RunConfig) -> dict[str, str]:
    """Returns the glibc malloc settings of workers on CPU: freed memory is kept for the next step. By default malloc
    trims the heaps of all threads but the first, so that the kernel maps and clears an engine's buffers again in every
    step: thousands of page faults per second."""
    if config.resources.device == "cuda":
        return {}
    return {
        "MALLOC_TRIM_THRESHOLD_": str(512 * MIB),
        "MALLOC_TOP_PAD_": str(64 * MIB),
        "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),  # maximum of glibc
    }
