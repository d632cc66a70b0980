"""The process of a role: its cores, threads, memory, address, GPUs and log."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError

from mobula.cluster.errors import DeadlineError, LostObjectError
from mobula.cluster.runtime import network, ray_actors
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.runtime.gc_tuning import collect_rarely, return_free_memory, tune_gc
from mobula.cluster.runtime.network import LOOPBACK, node_address, use_node_interface
from mobula.cluster.runtime.object_store import fetch, fetch_at_hand, fetch_or_miss
from mobula.cluster.runtime.ray_actors import (
    BOUND_THREADS,
    POINTER,
    _log_of,
    gpu_environment,
    opening,
    part_of,
    role_log,
    write_to,
)
from mobula.cluster.runtime.usage import GpuReading, VitalsMeter, visible
from mobula.cluster.runtime.vitals import EngineLoad


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


def test_outside_a_cluster_a_node_is_met_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert node_address() == LOOPBACK


def test_inside_a_cluster_a_node_is_met_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    assert node_address() == "10.1.2.3"


def variables(monkeypatch: pytest.MonkeyPatch, address: str, **found: str) -> dict[str, str]:
    """What a process on a node with this address has in its environment afterwards."""
    environment = dict(found)
    monkeypatch.setattr(network.os, "environ", environment)
    monkeypatch.setattr(network, "node_address", lambda: address)
    monkeypatch.setattr(
        "psutil.net_if_addrs",
        lambda: {
            "lo": [SimpleNamespace(address="127.0.0.1")],
            "eth0": [SimpleNamespace(address="fe80::1"), SimpleNamespace(address="192.168.0.2")],
            "ib0": [SimpleNamespace(address="10.0.0.2")],
        },
    )
    use_node_interface()
    return environment


def test_collectives_use_the_interface_of_the_nodes_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables(monkeypatch, "10.0.0.2") == {
        "VLLM_HOST_IP": "10.0.0.2",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    assert variables(monkeypatch, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"


def test_variables_that_the_user_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables(monkeypatch, "10.0.0.2", GLOO_SOCKET_IFNAME="eth0", VLLM_HOST_IP="1.2.3.4")
    assert found == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0", "VLLM_HOST_IP": "1.2.3.4"}


def test_an_address_without_an_interface_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def run_process(path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def test_everything_goes_to_the_file_and_the_log_before_names_it(tmp_path: Path) -> None:
    path = role_log(tmp_path / "logs", "rollout/0")
    assert path == tmp_path / "logs" / "rollout-0.log"
    done = run_process(path)
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


def test_the_cause_of_a_death_is_looked_for_where_the_process_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


REFERENCE, LATE = (ray.ObjectRef(byte * 28) for byte in (b"\x01", b"\x02"))


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (GetTimeoutError("late"), DeadlineError, r"waited 3 s for groups \(1 objects\)"),
        (ObjectLostError("01", None, ""), LostObjectError, "groups cannot be had: the node that held it is gone"),
        (OutOfMemoryError("low"), LostObjectError, "groups cannot be had: the node that held it is gone"),
        (RayActorError(), LostObjectError, "groups cannot be had: the node that held it is gone"),
    ],
)
def test_what_cannot_be_had_is_named_by_its_cause(
    failure: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(references: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(ray, "get", get)
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
def test_what_turns_out_to_be_lost_is_left_to_a_fetch_of_its_own(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(references: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(ray, "wait", lambda references, **rest: (references, []))
    monkeypatch.setattr(ray, "get", get)
    assert fetch_at_hand([[REFERENCE], ["plain"], []], wait_s=0) == [None, ["plain"], []]
