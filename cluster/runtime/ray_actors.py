"""Runs roles and owned classes in Ray actors, and explains their deaths."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mobula.cluster.environment_variables import SLEEPING_THREADS, UMASK
from mobula.cluster.errors import DeadlineError, PreflightError, WorkerDiedError, as_raised_by_role
from mobula.cluster.failures import COLOUR, Failure, frames_in
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.runtime.network import node_address, use_node_interface
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.runtime.placement_groups import Booking
from mobula.cluster.runtime.usage import VitalsMeter
from mobula.cluster.runtime.vitals import Vitals

_logger = logging.getLogger(__name__)

LOGS_FOLDER = "logs"  # of the run folder

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

POINTER = "mobula: the log goes on in "  # the last line in Ray's own log of the process


def role_log(folder: Path, name: str) -> Path:
    """Returns the log file of the worker `name` (`<role>/<index>`)."""
    return folder / f"{name.replace('/', '-')}.log"


def write_to(path: Path, name: str) -> None:
    """Appends stdout, stderr and log records of this process and its children to `path`, after a line with the process
    id. A restarted worker appends to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.write(f"{POINTER}{path}\n")
    sys.stderr.flush()
    os.write(descriptor, f"{opening(os.getpid())} on {socket.gethostname()}: {name}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger("mobula").setLevel(logging.INFO)


def opening(process_id: int | str) -> str:
    """Returns the first line of the part of one process."""
    return f"===== process {process_id}"


def part_of(path: Path, process_id: str) -> str:
    """Returns the part of one process in a worker's log; the whole log if the process has no part."""
    text = path.read_text(encoding="utf-8", errors="replace")
    _, marker, part = text.rpartition(f"{opening(process_id)} on ")
    return part.partition("\n")[2].partition("\n=====")[0] if marker else text


# Errors after the end of an actor's process. Ray's memory monitor kills a process without a RayActorError.
PROCESS_GONE = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)

NUM_LOG_LINES = 40  # last lines of a worker's log that are copied to the run's log

TRACEBACK = "Traceback (most recent call last)"

EXCEPTION = re.compile(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)\w*(?:: .*)?)$", re.MULTILINE)

CRASH = re.compile(r"^\*\*\* (SIG\w+) received", re.MULTILINE)  # written by Ray's signal handler to the worker's log

CRASH_STACK = "Stack (most recent call first):"

EXIT = re.compile(r"Worker exit type: (\w+)\s+Worker exit detail: (.*?)(?:\s*Some common causes include|$)", re.DOTALL)

PROCESS_ID = re.compile(r"^\s*pid: (\d+)$|\(pid=(\d+)", re.MULTILINE)

LOST_CONNECTION = "connection error"  # Ray's reason for a process that ended without a message

NODE_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")

KILLED = re.compile(r"\(Actor\((\w+)\).*?pid=(\d+), actual memory used=([\d.]+)GB")

NOISE = (":", "(raylet)")  # prefixes of Ray's own lines in a worker's log

MEMORY_SETTINGS = {  # role -> settings that reduce memory on the node of its process
    "rollout": ("sampler.vllm.kv_cache_bytes", "sampler.vllm.max_num_seqs", "resources.rollout.num_workers"),
    "learner": ("learner.tokens_per_microbatch", "learner.activation_checkpointing=blocks", "policy.lora.rank=16"),
    "critic": (
        "learner.tokens_per_microbatch",
        "learner.activation_checkpointing=blocks",
        "sampler.vllm.kv_cache_bytes",
    ),
    "reference": (
        "reference.scorers.quantisation=int8",
        "resources.reference.num_workers",
        "sampler.vllm.kv_cache_bytes",
    ),
    "reward": ("rewards.processes", "resources.reward.num_workers", "sampler.vllm.kv_cache_bytes"),
}

OTHER_SETTINGS = ("sampler.vllm.kv_cache_bytes", "learner.tokens_per_microbatch", "resources.rollout.num_workers")


def actor_death(error: RayError, what: str, actor_id: str | None = None) -> WorkerDiedError:
    """Returns an error with the cause in one line. Ray's full text and the end of the worker's log are its notes.

    Args:
        error: one of `PROCESS_GONE`.
        what: the call that failed; it begins with the worker's name if there is one.
        actor_id: the dead actor, in hexadecimal digits.
    """
    text = COLOUR.sub("", str(error)).strip()
    path, log = _log_of(text)
    is_out_of_memory = isinstance(error, OutOfMemoryError)
    failure = _out_of_memory(text, what, actor_id) if is_out_of_memory else _failure(error, text, log)
    where = f"; its log is {path}" if log else ""
    died = WorkerDiedError(f"its actor died while waiting for {what}: {failure}{where}")
    died.failure = failure
    died.add_note(text)
    if log:
        died.add_note("\n".join([f"The end of {path}:", *log.splitlines()[-NUM_LOG_LINES:]]))
    return died


def _out_of_memory(text: str, what: str, actor_id: str | None) -> Failure:
    """Returns the failure of a process that Ray's memory monitor killed, with its memory, the node's, and settings."""
    killed = {actor: (pid, used) for actor, pid, used in KILLED.findall(text)}
    pid, used = killed.get(actor_id or "", next(iter(killed.values())) if len(killed) == 1 else ("", ""))
    process = f"its process {pid}, which used {used} GB," if pid else "its process"
    node = f": {found[1]} of {found[2]} GB are used" if (found := NODE_MEMORY.search(text)) is not None else ""
    first, second, third = MEMORY_SETTINGS.get(what.partition("/")[0], OTHER_SETTINGS)  # by role
    return Failure(
        f"Ray ended {process} because its node is out of memory{node}; change {first}, {second} or {third}, "
        "or use a node with more memory"
    )


def _failure(error: RayError, text: str, log: str) -> Failure:
    process_id = _process_id(text)
    process = "its process" if process_id is None else f"its process {process_id}"
    if (crash := CRASH.search(log)) is not None:
        frames = frames_in(log.partition(CRASH_STACK)[2], is_innermost_first=True)
        return Failure(f"{process} crashed with {crash[1]}", frames, fingerprint="|".join([crash[1], *frames]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if TRACEBACK in text or (isinstance(error, RayActorError) and error.actor_init_failed):
        exceptions = EXCEPTION.findall(text) or lines[-1:]
        return Failure(exceptions[-1], frames_in(text))
    if (found := EXIT.search(text)) is None:
        reason = next((line for line in lines if line.startswith("The actor is dead because")), "".join(lines[-1:]))
        return Failure(reason or type(error).__name__)
    kind, detail = found[1], " ".join(found[2].split())
    if LOST_CONNECTION in detail:
        return Failure(f"{process} ended without a word, as after SIGKILL or out of memory (Ray: {kind})")
    return Failure(f"{process} ended (Ray: {kind}, {detail.rstrip('.')})")


def _process_id(text: str) -> str | None:
    match = PROCESS_ID.search(text)
    return None if match is None else match[1] or match[2]


def _log_of(text: str) -> tuple[Path | None, str]:
    """Returns path and text of the process's stderr; (None, "") for a process on another node."""
    process_id = _process_id(text)
    path = None if process_id is None else _path_of(process_id)
    if path is None:
        return None, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    before, marker, named = text.partition(POINTER)
    if marker and (own := Path(named.partition("\n")[0])).is_file():
        path, text = own, before + part_of(own, str(process_id))
    lines = COLOUR.sub("", text).splitlines()
    return path, "\n".join(line for line in lines if line.strip() and not line.startswith(NOISE))


def _path_of(process_id: str) -> Path | None:
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    folder = Path(here.get_temp_dir()) / here.get_session_name() / "logs"
    return max(folder.glob(f"worker-*-{process_id}.err"), key=lambda path: path.stat().st_mtime, default=None)


HEALTH = "health"  # concurrency group of health checks: a busy role still answers them

BACKGROUND = "background"  # concurrency group for calls that wait for a thread of the role while the role works

BOUND_THREADS = "VLLM_CPU_OMP_THREADS_BIND"  # core numbers to which an engine on CPU binds its threads

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def spawn(
    role: type,
    *args: Any,
    worker: PlacedWorker,
    booking: Booking,
    env: Mapping[str, str],
    log: Path | None = None,
    python: str | None = None,
    max_concurrency: int = 1,
    **kwargs: Any,
) -> ray.actor.ActorHandle[Any]:
    """Starts `role(*args, **kwargs)` in an actor and returns the handle at once.

    The actor has the worker's name in the dashboard and in logs. Its process writes to the file `log`, or to Ray's log
    files. `python` is a command in place of this interpreter. Ray never restarts the actor: a dead role has lost its
    state, so its supervisor creates a new one.
    """
    threads = str(worker.num_threads)
    env_vars = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    env_vars |= {**SLEEPING_THREADS, **env}
    env_vars |= gpu_environment(worker.num_gpus)
    # `is_alive` has a separate concurrency group: a role that computes still answers its supervisor.
    groups = {HEALTH: 1, BACKGROUND: 1}
    as_actor = ray.remote(concurrency_groups=groups)  # type: ignore[call-overload]  # Ray's stub does not declare it
    actor = as_actor(_hosted(role, worker.name)).options(
        num_cpus=worker.num_cpus,
        num_gpus=worker.num_gpus,
        max_restarts=0,
        max_concurrency=max_concurrency,
        runtime_env={"env_vars": env_vars, **({} if python is None else {"py_executable": python})},
        scheduling_strategy=PlacementGroupSchedulingStrategy(booking.group, booking.bundle_index),
    )
    return actor.remote(Seat(worker.cores, worker.num_threads, log), *args, **kwargs)


def spawn_named(role: type, *, name: str, env: Mapping[str, str]) -> ray.actor.ActorHandle[Any]:
    """Starts `role()` in an actor that is registered under `name` in the driver's namespace. It ends with the
    driver."""
    as_actor = ray.remote(concurrency_groups={HEALTH: 1})  # type: ignore[call-overload]  # Ray does not declare it
    actor = as_actor(_hosted(role, name)).options(
        name=name, num_cpus=0, max_restarts=0, runtime_env={"env_vars": {**env, **gpu_environment(0)}}
    )
    return actor.remote(Seat((), 1, None))


def gpu_environment(num_gpus: float) -> dict[str, str]:
    """Returns the environment variables that limit a process to its reserved GPUs.

    Ray sets CUDA_VISIBLE_DEVICES if an actor reserves a GPU, unless the node was started with
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES. Since 2.60 an actor that reserves none sees all GPUs of its node.
    """
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"} if num_gpus else {VISIBLE_GPUS: ""}


async def answer(reference: ray.ObjectRef[Any], *, timeout_s: float, what: str) -> Any:
    """Waits for the result of an actor call and returns it."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(reference.future())
    except RayError as error:  # first: a RayError may also be an instance of the cause's class, such as TimeoutError
        raise _as_seen_here(error, what, reference) from None
    except TimeoutError as error:
        raise DeadlineError(f"waited {timeout_s:g} s for {what}") from error


def on_failure(reference: ray.ObjectRef[Any], tell: Callable[[Exception], None], *, what: str) -> None:
    """Calls `tell` in this event loop with the error of `answer` if the call fails. There is no deadline, because no
    caller waits."""
    loop = asyncio.get_running_loop()

    def look(call: Future[Any]) -> None:  # runs on a thread of Ray
        if isinstance(error := call.exception(), Exception) and not loop.is_closed():
            loop.call_soon_threadsafe(tell, _as_seen_here(error, what, reference))

    reference.future().add_done_callback(look)


def _as_seen_here(error: Exception, what: str, reference: ray.ObjectRef[Any]) -> Exception:
    """Converts an error of Ray to one of `mobula.cluster.errors`; `reference` is a result of the call or stream."""
    match error:
        case RayTaskError() if isinstance(error.cause, Exception):
            seen = as_raised_by_role(error.cause)
            seen.add_note(COLOUR.sub("", str(error)))  # where the role raised it
            return seen
        case _ if isinstance(error, PROCESS_GONE):
            return actor_death(error, what, reference.task_id().actor_id().hex())
        case ObjectLostError():
            return WorkerDiedError(
                f"its actor's node is gone, and with it the answer while waiting for {what}: {error}"
            )
        case _:
            return error


def in_background(method: Any) -> Any:
    """Returns a method of a spawned role. Calls of it do not wait for other calls of the role."""
    return method.options(concurrency_group=BACKGROUND)


async def with_attachments(
    stream: ray.ObjectRefGenerator, num_attached: Callable[[Any], int], *, what: str
) -> AsyncIterator[tuple[Any, list[ray.ObjectRef[Any]]]]:
    """Yields the values of a streaming call, each with references to the `num_attached(value)` values that follow it.

    Attached values are not fetched. The caller owns all values, so they outlive the actor. The caller sets a deadline.
    """
    try:
        async for reference in stream:
            value = await asyncio.wrap_future(reference.future())
            attached: list[ray.ObjectRef[Any]] = []
            # References only: the group stays on its node until a rank fetches it.
            while len(attached) < num_attached(value):
                attached.append(await _unfetched(stream, before=attached[-1] if attached else reference))
            yield value, attached
    except RayError as error:
        raise _as_seen_here(error, what, stream.completed()) from None


async def _unfetched(stream: ray.ObjectRefGenerator, *, before: ray.ObjectRef[Any]) -> ray.ObjectRef[Any]:
    """Returns the stream's next reference, after `before`. `async for` would fetch the value to this process."""
    # On a thread only if it may block: the switch costs more than the wait for most values.
    reference = next(stream) if stream.next_ready() else await asyncio.to_thread(next, stream, None)
    if reference is None or reference == stream.completed():
        # An error of the role is the last value; the death of the role is in `completed()`.
        for reason in (before, stream.completed()):
            await asyncio.wrap_future(reason.future())
        raise RuntimeError("a stream ended before the attached values of its last value")
    return reference


async def stop(handle: ray.actor.ActorHandle[Any], *, timeout_s: float, what: str) -> None:
    """Calls `close()` of the role, then kills the process in any case."""
    try:
        await answer(handle.close.remote(), timeout_s=timeout_s, what=f"{what} to close")
    except (DeadlineError, WorkerDiedError):
        pass  # the process is killed below in any case
    finally:
        kill(handle)


def kill(handle: ray.actor.ActorHandle[Any]) -> None:
    ray.kill(handle, no_restart=True)


@dataclass(frozen=True)
class Seat:
    """The part of the placement plan that a process needs."""

    cores: tuple[int, ...]
    num_threads: int
    log: Path | None


def _claim(cores: Sequence[int]) -> None:
    """Binds this process to the usable cores with these indices, modulo their number: Ray may count more CPUs than
    there are cores."""
    usable = sorted(os.sched_getaffinity(0))
    claimed = sorted({usable[core % len(usable)] for core in cores})
    if max(cores) >= len(usable):
        _logger.warning("bound to cores %s: Ray counts more CPUs here than the %d usable ones", claimed, len(usable))
    os.sched_setaffinity(0, claimed)
    if BOUND_THREADS in os.environ:
        os.environ[BOUND_THREADS] = ",".join(map(str, claimed))


def _hosted(role: type, name: str) -> type:
    """Returns a subclass of `role` to run in an actor, which prepares its process before the role is built."""

    class Hosted(role):  # type: ignore[misc]  # the base class is an argument
        def __init__(self, seat: Seat, *args: Any, **kwargs: Any) -> None:
            if UMASK in os.environ:
                os.umask(int(os.environ[UMASK], 8))
            if seat.log is not None:
                write_to(seat.log, name)
            if seat.cores:
                _claim(seat.cores)
            # Before the role is built: libraries read their network interface once, at start-up.
            use_node_interface()
            try:
                super().__init__(*args, **kwargs)
            except Exception:
                _logger.exception("%s cannot be built", name)
                raise
            self._vitals = VitalsMeter(node_address(), seat.num_threads)
            tune_gc()

        @ray.method(concurrency_group=HEALTH)
        def is_alive(self) -> Vitals:
            engine_load = getattr(self, "engine_load", None)  # of a role with an engine: an `EngineLoad`, at once
            return self._vitals.read(engine_load() if engine_load else None)

        def __repr__(self) -> str:  # shown in the dashboard and in log prefixes
            return name

    Hosted.__name__ = Hosted.__qualname__ = role.__name__
    return Hosted


class OwnedActor:
    """A Ray actor with blocking calls: make them from a thread. It ends with its creator, or by `kill`. Ray reserves
    `num_cpus` for the actor outside the run's placement groups, on any node with enough CPUs."""

    def __init__(self, role: type, *args: Any, name: str, num_cpus: float) -> None:
        """Raises: PreflightError: this process is not connected to a Ray cluster."""
        if not ray.is_initialized():  # otherwise Ray starts a cluster with default settings, open to the network
            raise PreflightError(
                f"{name} runs in a Ray actor, but this command has no Ray cluster: set environment.host=process"
            )
        self._name = name
        paths = os.pathsep.join(path for path in sys.path if path)  # for imports of the user's modules in the actor
        env_vars = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        options = {"num_cpus": num_cpus, "max_restarts": 0, "runtime_env": {"env_vars": env_vars}}
        remote: Any = ray.remote(role)  # typed for classes that are written out
        self._handle: ray.actor.ActorHandle[Any] = remote.options(**options).remote(*args)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)
        except GetTimeoutError as error:
            raise DeadlineError(f"waited {timeout_s:g} s for {method} of {self._name}") from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise as_raised_by_role(error.cause) from None
            raise
        except PROCESS_GONE as error:
            raise actor_death(error, f"{method} of {self._name}") from None

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)
