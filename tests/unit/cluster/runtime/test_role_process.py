"""Processes of roles: set-up, vitals, logs and deaths."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import ray
import torch
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from mobula.cluster.errors import DeadlineError, LostObjectError, WorkerDiedError
from mobula.cluster.failures import MAX_LINE
from mobula.cluster.runtime import network, ray_actors
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.runtime.gc_tuning import collect_rarely, return_free_memory, tune_gc
from mobula.cluster.runtime.network import LOOPBACK, node_address, use_node_interface
from mobula.cluster.runtime.object_store import fetch, fetch_at_hand, fetch_or_miss
from mobula.cluster.runtime.ray_actors import (
    BOUND_THREADS,
    MEMORY_SETTINGS,
    OTHER_SETTINGS,
    POINTER,
    _log_of,
    actor_death,
    answer,
    gpu_environment,
    opening,
    part_of,
    role_log,
    write_to,
)
from mobula.cluster.runtime.usage import GpuReading, NvidiaGpus, ProcessTree, VitalsMeter, visible
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.configs.overrides import find


@pytest.mark.parametrize(
    ("positions", "claimed"), [((0,), [4]), ((0, 1), [4, 6]), ((1,), [6]), ((2, 3), [4, 6]), ((3,), [6]), ((0, 2), [4])]
)
def test_positions_are_those_of_usable_cores(
    positions: tuple[int, ...], claimed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container or a raylet with `--num-cpus` above its cores: the plan may name a position that does not exist."""
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    monkeypatch.setenv(BOUND_THREADS, ",".join(map(str, positions)))
    ray_actors._claim(positions)
    assert bound == [claimed]
    assert os.environ[BOUND_THREADS] == ",".join(map(str, claimed))
    assert ("Ray counts more CPUs" in caplog.text) == (max(positions) > 1)


def test_garbage_is_collected_rarely_until_a_process_is_set_up() -> None:
    tune_gc()  # another test of this process may have left the other threshold
    usual = gc.get_threshold()
    collect_rarely()
    assert gc.get_threshold()[0] > 10 * usual[0]
    tune_gc()
    gc.unfreeze()
    assert gc.get_threshold() == usual and gc.isenabled()


def test_without_an_engine_no_variable_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.delenv(BOUND_THREADS, raising=False)
    ray_actors._claim((0,))
    assert BOUND_THREADS not in os.environ


def test_jobs_run_in_order_on_one_thread_and_report_results_and_errors() -> None:
    thread, order = DaemonThread("jobs"), []

    def job(number: int) -> int:
        order.append((number, threading.current_thread().name))
        return 6 // number

    futures = [thread.submit(job, number) for number in (3, 0, 2)]
    thread.shutdown()
    assert futures[2].result(30) == 3 and futures[0].result() == 2
    with pytest.raises(ZeroDivisionError):
        futures[1].result()
    assert order == [(3, "jobs"), (0, "jobs"), (2, "jobs")]


def test_a_job_that_was_cancelled_before_its_turn_does_not_run() -> None:
    thread, go_on, ran = DaemonThread("jobs"), threading.Event(), []
    first, second = thread.submit(go_on.wait, 30), thread.submit(ran.append, 2)
    assert second.cancel()
    go_on.set()
    assert first.result(30) and thread.submit(len, ran).result(30) == 0


def test_a_process_ends_while_a_job_hangs() -> None:
    program = (
        "import threading; from mobula.cluster.runtime.concurrency import DaemonThread; begun = threading.Event(); "
        "DaemonThread('stuck').submit(lambda: (begun.set(), threading.Event().wait())); assert begun.wait(30)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


BLOCK, NUM_BLOCKS = 2**18, 400  # 1 MiB each of float32, of which every second is freed


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_tensors_between_others_are_given_back() -> None:
    """glibc cannot shrink its heap past a block in use; trimming gives back the pages between."""
    warm = torch.ones(2**22)  # freeing it raises the threshold up to which blocks come from the heap
    del warm
    kept = [torch.ones(BLOCK) for _ in range(NUM_BLOCKS)]
    del kept[::2]
    before = resident_bytes()
    return_free_memory()
    freed = NUM_BLOCKS // 2 * BLOCK * 4
    assert before - resident_bytes() > 0.8 * freed
    assert len(kept) == NUM_BLOCKS // 2


@pytest.mark.parametrize(("in_cluster", "address"), [(False, LOOPBACK), (True, "10.1.2.3")])
def test_a_node_has_an_address_in_a_cluster(in_cluster: bool, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: in_cluster)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    assert node_address() == address


def variables(monkeypatch: pytest.MonkeyPatch, address: str, **found: str) -> dict[str, str]:
    """What a process on a node with this address has in its environment afterwards."""
    environment = dict(found)
    monkeypatch.setattr(network.os, "environ", environment)
    monkeypatch.setattr(network, "node_address", lambda: address)
    addresses = {"lo": ["127.0.0.1"], "eth0": ["fe80::1", "192.168.0.2"], "ib0": ["10.0.0.2"]}
    interfaces = {name: [SimpleNamespace(address=each) for each in own] for name, own in addresses.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    use_node_interface()
    return environment


def test_collectives_use_the_interface_of_the_nodes_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables(monkeypatch, "10.0.0.2")
    assert found == {"VLLM_HOST_IP": "10.0.0.2", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert variables(monkeypatch, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"


def test_variables_that_the_user_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables(monkeypatch, "10.0.0.2", GLOO_SOCKET_IFNAME="eth0", VLLM_HOST_IP="1.2.3.4")
    assert found == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0", "VLLM_HOST_IP": "1.2.3.4"}


def test_no_interface_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert "GLOO_SOCKET_IFNAME" not in variables(monkeypatch, "10.9.9.9")
    assert "10.9.9.9" in caplog.text and "GLOO_SOCKET_IFNAME" in caplog.text


PROCESS = """
import logging, os, subprocess, sys
from pathlib import Path
from mobula.cluster.runtime.ray_actors import write_to

print("before", file=sys.stderr)
write_to(Path(sys.argv[1]), "rollout/0")
print("printed")
os.write(2, b"native\\n")
subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
logging.getLogger("mobula.actors.rollout").info("ours")
logging.getLogger("library").info("dropped")
logging.getLogger("library").warning("a library warns")
raise SystemExit("the end")
"""


def test_everything_goes_to_the_file_and_the_log_before_names_it(tmp_path: Path) -> None:
    path = role_log(tmp_path / "logs", "rollout/0")
    assert path == tmp_path / "logs" / "rollout-0.log"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["before", f"{POINTER}{path}"]
    first, *lines = path.read_text().splitlines()
    assert first.startswith("===== process ") and first.endswith(": rollout/0")
    assert [line for line in lines if "INFO" not in line and "WARNING" not in line] == [
        "printed", "native", "child", "the end",
    ]  # fmt: skip
    assert [line for line in lines if line.endswith("INFO mobula.actors.rollout: ours")]
    assert [line for line in lines if line.endswith("WARNING library: a library warns")]
    assert "dropped" not in path.read_text()


def test_a_process_that_follows_has_a_part_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    path.write_text(f"{opening(1)} on here: rollout/0\none\ntwo\n{opening(22)} on here: rollout/0\nthree\n")
    assert part_of(path, "1") == "one\ntwo"
    assert part_of(path, "22") == "three\n"
    assert part_of(path, "2") == path.read_text()


def test_the_cause_of_a_death_is_where_the_process_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, by_ray = tmp_path / "rollout-0.log", tmp_path / "worker-22.err"
    own.write_text(f"{opening(1)} on here: rollout/0\nold\n{opening(22)} on here: rollout/0\n*** SIGSEGV received\n")
    by_ray.write_text(f":job_id:01\nfirst words\n{POINTER}{own}\n")
    monkeypatch.setattr(ray_actors, "_path_of", lambda process_id: by_ray)
    assert _log_of("\tpid: 22") == (own, "first words\n*** SIGSEGV received")
    own.unlink()
    assert _log_of("\tpid: 22") == (by_ray, f"first words\n{POINTER}{own}")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError, match="logs"):
        write_to(role_log(tmp_path / "logs", "reward/0"), "reward/0")


def test_a_process_that_books_no_gpu_sees_none() -> None:
    hidden = gpu_environment(0)["CUDA_VISIBLE_DEVICES"]
    assert visible(hidden, ["GPU-a", "GPU-b"]) == []


@pytest.mark.parametrize("num_gpus", [0.3, 1, 2])
def test_ray_chooses_the_gpus_of_a_process_that_books_some(num_gpus: float) -> None:
    found = gpu_environment(num_gpus)
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert found["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0", "a node's setting would leave it all GPUs"


class Gpus:
    """GPUs that are not there."""

    def __init__(self, *utilizations: float | None) -> None:
        self._utilizations = utilizations

    def read(self) -> list[GpuReading]:
        return [GpuReading("gpu", 100.0, 25.0, used) for used in self._utilizations]

    def close(self) -> None: ...


def test_a_busy_thread_is_seen_and_an_idle_one_is_not() -> None:
    meter = VitalsMeter("10.0.0.1", 1, Gpus())
    until, used = time.thread_time() + 0.3, 0
    while time.thread_time() < until:
        used += 1
    busy = meter.read(None)
    time.sleep(0.3)
    idle = meter.read(None)
    assert busy.busy_share is not None and idle.busy_share is not None and idle.busy_share < 0.5 * busy.busy_share
    assert busy.node == "10.0.0.1" and busy.rss_bytes is not None and busy.rss_bytes > 10 * 2**20
    assert (busy.gpu_bytes, busy.gpu_busy_share, busy.load, busy.tokens_per_s) == (None, None, None, None)


def test_gpus_are_added_up_and_their_use_is_averaged() -> None:
    found = VitalsMeter("10.0.0.1", 1, Gpus(80.0, 40.0)).read(None)
    assert found.gpu_bytes == 50 * 2**20 and found.gpu_busy_share == pytest.approx(0.6)
    unknown = VitalsMeter("10.0.0.1", 1, Gpus(None)).read(None)  # a driver that does not report it
    assert (unknown.gpu_bytes, unknown.gpu_busy_share) == (25 * 2**20, None)


def test_the_rate_is_that_since_the_sign_before() -> None:
    meter = VitalsMeter("10.0.0.1", 1, Gpus())
    meter.read(EngineLoad(0.0, 0, 0, 0, num_tokens=1000))
    start = time.monotonic()
    time.sleep(0.2)
    found = meter.read(EngineLoad(0.5, 4, 1, 0, num_tokens=1600))
    assert found.tokens_per_s is not None and 600 / (time.monotonic() - start + 0.1) < found.tokens_per_s <= 600 / 0.2
    assert found.load is not None and found.load.kv_usage == 0.5
    assert meter.read(EngineLoad(0.5, 4, 1, 0, num_tokens=1600)).tokens_per_s == 0.0


def raising(error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        raise error

    return call


REFERENCE, LATE = (ray.ObjectRef(byte * 28) for byte in (b"\x01", b"\x02"))


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (GetTimeoutError("late"), DeadlineError, r"waited 3 s for groups \(1 objects\)"),
        *[
            (failure, LostObjectError, "groups cannot be had: the node that held it is gone")
            for failure in (ObjectLostError("01", None, ""), OutOfMemoryError("low"), RayActorError())
        ],
    ],
)
def test_what_cannot_be_had_is_named_by_its_cause(
    failure: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", raising(failure))
    with pytest.raises(error, match=message):
        fetch([REFERENCE], timeout_s=3, what="groups")
    with pytest.raises(LostObjectError, match=message):  # late is as good as lost
        fetch_or_miss([REFERENCE], timeout_s=3, what="groups")


def test_plain_values_are_returned_as_they_are() -> None:
    assert fetch([1, "two"], timeout_s=1, what="values") == [1, "two"]


def test_what_is_late_is_none_and_one_call_fetches_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[ray.ObjectRef]] = []

    def wait(references: list[ray.ObjectRef], *, num_returns: int, timeout: float) -> tuple[list, list]:
        assert (len(references), len(set(references))) == (num_returns, num_returns), "each is asked for once"
        return [r for r in references if r != LATE], [r for r in references if r == LATE]

    def get(references: list[ray.ObjectRef], timeout: float) -> list[str]:
        asked.append(set(references))
        return [f"value of {r.hex()[:2]}" for r in references]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    wanted = [[REFERENCE, "plain"], [], [REFERENCE, LATE], [None], [REFERENCE]]
    found = fetch_at_hand(wanted, wait_s=0)
    assert found == [["value of 01", "plain"], [], None, [None], ["value of 01"]]
    assert asked == [{REFERENCE}]


@pytest.mark.parametrize("failure", [GetTimeoutError("gone again"), ObjectLostError("01", None, "")])
def test_what_is_lost_is_left_to_a_fetch_of_its_own(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, **rest: (references, []))
    monkeypatch.setattr(ray, "get", raising(failure))
    assert fetch_at_hand([[REFERENCE], ["plain"], []], wait_s=0) == [None, ["plain"], []]


HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: Learner\n\tactor_id: 4f\n\tpid: 4711\n"

DEAD = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "

NO_WORD = "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the"

BY_RAY = "The actor is dead because it was killed by `ray.kill`."

IN_INIT = """The actor died because of an error raised in its creation task, \x1b[36mray::W.init()\x1b[39m (pid=4711)
  File "/app/rewards/components.py", line 12, in __init__
    raise ValueError("no such reward")
ValueError: no such reward"""

IN_LOADING = (
    HEAD
    + DEAD
    + """Worker exits unexpectedly. Traceback (most recent call last):
  File "/app/site-packages/ray/_private/function_manager.py", line 696, in _load_actor_class_from_gcs
ModuleNotFoundError: No module named 'mine'

An unexpected internal error occurred while the worker was executing a task."""
)

SEGFAULT = """:job_id:01000000
*** SIGSEGV received at time=1795538915 on cpu 1 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/app/site-packages/torch/nn/functional.py", line 519 in linear
  File "/app/site-packages/vllm/model.py", line 16 in forward
"""

FIRST, SECOND = "e00859d7d2e57ffde2c0d97b01000000", "37286bebc65c9c98fe43262401000000"

OUT_OF_MEMORY = f"""2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: 85d6) was 23.10GB used / 23.54GB limit (0.981308)
OOM kill reason: Memory usage 24803431219B exceeded threshold of 24012260860B (95.0% of 25276063744B limit)
Ray killed 2 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor({FIRST}): job ID=01, lease ID=02, task name=LearnerRank.__init__, required resources={{}}, \
pid=11633, actual memory used=5.56GB, worker ID=4a22)
Selected to kill: (Actor({SECOND}): job ID=01, lease ID=03, task name=RolloutActor.__init__, required resources={{}}, \
pid=11564, actual memory used=4.97GB, worker ID=7b5b)
]
Refer to the documentation on how to address the out of memory issue"""  # Ray 2.60


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where process 4711 wrote its stderr, on a node that it shares with this process."""
    path = tmp_path / "worker-4711.err"
    path.write_text(":job_id:01000000\n")
    monkeypatch.setattr(ray_actors, "_path_of", lambda process_id: path if process_id == "4711" else None)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + DEAD + NO_WORD, "its process 4711 ended without a word, as after SIGKILL or out of memory"),
        (HEAD + DEAD + "Exits by exit(3).", "its process 4711 ended (Ray: SYSTEM_ERROR, Exits by exit(3))"),
        (f"{HEAD}{BY_RAY}\nThe actor never ran.", BY_RAY),
        (IN_LOADING, "ModuleNotFoundError: No module named 'mine' at ray/_private/function_manager.py:696"),
        ("The actor died unexpectedly before finishing this task.", "The actor died unexpectedly"),
    ],
)
def test_one_line_names_the_cause_and_a_note_has_all_that_ray_reports(text: str, message: str, log: Path) -> None:
    error = actor_death(RayActorError(error_msg=text), "learner/0 to make version 7")
    assert "its actor died while waiting for learner/0 to make version 7: " + message in str(error)
    assert "\n" not in str(error) and str(log) not in str(error), "a log without a word is not named"
    assert error.__notes__ == [text.strip()]
    assert error.failure is not None and error.failure.fingerprint is None


def test_an_exception_of_a_constructor_is_named_with_its_frames(log: Path) -> None:
    error = actor_death(RayActorError(error_msg=IN_INIT, actor_init_failed=True), "reward/0 to start")
    assert "reward/0 to start: ValueError: no such reward at app/rewards/components.py:12 in __init__" in str(error)


def test_a_crash_is_named_with_its_signal_and_python_frames_from_the_workers_log(log: Path) -> None:
    log.write_text(SEGFAULT)
    error = actor_death(RayActorError(error_msg=HEAD + DEAD + NO_WORD), "a group")
    place = "torch/nn/functional.py:519 in linear, called from vllm/model.py:16"
    assert f"its process 4711 crashed with SIGSEGV at {place}" in str(error)
    assert str(error).endswith(f"its log is {log}")
    assert error.failure is not None and error.failure.fingerprint is not None
    assert error.__notes__[1].startswith(f"The end of {log}:\n*** SIGSEGV")


@pytest.mark.parametrize(
    ("what", "actor", "process", "settings"),
    [
        ("learner/0 to send weights", FIRST, "its process 11633, which used 5.56 GB,", MEMORY_SETTINGS["learner"]),
        ("rollout/1 to join a transfer", SECOND, "its process 11564, which used 4.97 GB,", MEMORY_SETTINGS["rollout"]),
        ("step of an environment", "of another node", "its process", OTHER_SETTINGS),
    ],
)
def test_an_end_by_the_memory_monitor_is_named(
    what: str, actor: str, process: str, settings: tuple[str, str, str]
) -> None:
    error = actor_death(OutOfMemoryError(OUT_OF_MEMORY), what, actor)
    assert str(error) == (
        f"its actor died while waiting for {what}: Ray ended {process} because its node is out of memory: 23.10 of "
        f"23.54 GB are used; change {settings[0]}, {settings[1]} or {settings[2]}, or use a node with more memory"
    )
    assert len(str(error)) < MAX_LINE, "tables show it whole"
    assert error.failure is not None and error.failure.fingerprint is None, "it was ended from outside"
    assert error.__notes__ == [OUT_OF_MEMORY]


def test_settings_that_reduce_memory_are_keys_of_the_schema() -> None:
    for setting in {*OTHER_SETTINGS, *(setting for settings in MEMORY_SETTINGS.values() for setting in settings)}:
        assert find(setting.partition("=")[0]) is not None, setting


class FailedCall:
    """A reference to the result of a call on the actor FIRST, as far as `answer` uses it."""

    def __init__(self, error: Exception) -> None:
        self._future: Future[None] = Future()
        self._future.set_exception(error)

    def future(self) -> Future[None]:
        return self._future

    def task_id(self) -> ray.TaskID:
        return ray.TaskID.for_actor_creation_task(ray.ActorID(bytes.fromhex(FIRST)))


@pytest.mark.parametrize(
    "error", [OutOfMemoryError(OUT_OF_MEMORY), RayActorError(), NodeDiedError("gone"), WorkerCrashedError()]
)
async def test_every_way_in_which_ray_reports_the_end_of_a_process_is_a_lost_worker(error: RayError) -> None:
    with pytest.raises(WorkerDiedError, match="its actor died while waiting for learner/0 to send weights") as raised:
        await answer(FailedCall(error), timeout_s=1, what="learner/0 to send weights")
    assert ("used 5.56 GB" in str(raised.value)) == isinstance(error, OutOfMemoryError)


BUSY = "import sys\nblock = bytearray(64 << 20)\nprint('on', flush=True)\nwhile True:\n    pass"

PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.mark.alone
def test_a_busy_grandchild_counts_with_its_time_and_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        tree = ProcessTree(parent.pid)
        child = None
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "on\n"
            (child,) = psutil.Process(parent.pid).children()
            before = os.times().elapsed
            while os.times().elapsed < before + 0.5:
                pass
            used = tree.read()
        finally:
            if child is not None:
                child.kill()
    assert used is not None
    cpu_percent, resident_mib = used
    assert cpu_percent > 10.0
    assert 64.0 < resident_mib < 400.0


def test_a_tree_whose_process_is_gone_gives_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tree = ProcessTree(process.pid)
        process.communicate(b"\n")
    assert tree.read() is None


@pytest.mark.parametrize(
    ("listed", "shown"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-bb33, 0", [2, 0]), ("GPU-b", [2]), ("GPU-aa", []),
     ("1,-1,2", [1]), ("0,7,1", [0])],
)  # fmt: skip
def test_visible_gpus_are_those_that_cuda_shows(listed: str | None, shown: list[int]) -> None:
    assert visible(listed, UUIDS) == shown


def test_a_driver_is_read_in_our_units_and_what_it_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_of(device: str) -> SimpleNamespace:
        if device == "slice":
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(gpu=83)

    devices = ["card", "slice"]
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": devices.__getitem__,
        "nvmlDeviceGetUUID": lambda device: f"GPU-{device}",
        "nvmlDeviceGetName": lambda device: f"a {device}",
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(total=80 << 30, used=3 << 20),
        "nvmlDeviceGetUtilizationRates": use_of,
    }
    for name, call in answers.items():
        monkeypatch.setattr(pynvml, name, call)
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert gpus.read() == [GpuReading("a slice", 81920.0, 3.0, None), GpuReading("a card", 81920.0, 3.0, 83.0)]
    gpus.close()


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.read() == []
    gpus.close()
