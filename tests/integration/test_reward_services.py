"""Rewards in other processes: a server, a judge behind vLLM, and the pool over real actors."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from engine_judge import OF_ANY_JUDGE
from engines import OFFLINE
from fakes import AT_ONCE, FakeHosts
from http_servers import CONNECTION
from ray_apart import free_port
from reward_data import answers, component, pool_over, rewards_of
from tiny_checkpoints import encoded_image
from waiting import until, wait_until_served

from mobula.cluster.records.trajectory import Response
from mobula.cluster.runtime.ray_actors import answer
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.pool.worker import RewardWorker
from mobula.rewards.tools import Tools

REWARDS = """
components:
  - name: accuracy
    function: math_answer
    weight: 1.0
    options: {require_boxed: true}
  - name: format
    function: format
    weight: 0.5
    options: {preset: boxed}
  - name: shape
    function: format
    weight: 0.0
    options: {pattern: "(a+)+|[^a].*"}
accuracy_component: accuracy
"""

PATIENT = {**CONNECTION, "max_attempts": 2, "timeout_s": 100.0, "total_timeout_s": 200.0}
TOOLS = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and the URL that it announced."""
    file = folder / "rewards.yaml"
    file.write_text(REWARDS)
    command = [sys.executable, "-m", "mobula.deploy.cli", "serve-rewards", str(file), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, _announced(process)
    finally:
        process.kill()
        process.wait(20)


def _announced(process: subprocess.Popen[str]) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(timeout=120), "the server does not print its address"
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert found, line + process.stdout.read()
    return found[0]


def test_a_served_file_scores_and_stops_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with served(tmp_path, "--token-env", "REWARD_TOKEN", "--timeout", "40") as (process, url):
        own = {"dialect": "mobula", "batch_size": 2, "urls": [f"{url}/score"], "token_env": "REWARD_TOKEN"}
        http = build_function("http", {**PATIENT, **own}, TOOLS)
        texts = (r"\boxed{4}", r"\boxed{\frac{8}{2}}", r"\boxed{5}", "4")
        requests = [RewardRequest(Response(text, 3, False), ("4",), {}, "2 + 2?") for text in texts]
        outcomes = evaluate_batch(http, requests)
        assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [1.5, 1.5, 0.5, 0.0]
        assert outcomes[0].breakdown == {"accuracy": 1.0, "format": 1.0, "shape": 1.0}
        hanging = RewardRequest(Response("a" * 50 + "b", 3, False), ("4",), {}, "")  # "shape" backtracks without end
        late, early = evaluate_batch(http, [hanging, requests[1]])
        of_time_or_memory = (FailureKind.TIMED_OUT, FailureKind.FAILED)
        assert isinstance(late, ScoringFailure) and late.kind in of_time_or_memory
        assert isinstance(early, Score) and early.value == 1.5, "one that hangs costs no other its score"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_file_that_is_unfit_is_one_message(tmp_path: Path) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text(REWARDS.replace("math_answer", "maths_answer"))
    command = [sys.executable, "-m", "mobula.deploy.cli", "serve-rewards", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'math_answer'?" in done.stderr and "Traceback" not in done.stderr


START_S = 280.0

FORKS = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}  # its processes then import nothing a second time
ENVIRONMENT = {**OFFLINE, **FORKS, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}


@pytest.fixture
def chat_url(tmp_path: Path) -> Iterator[str]:
    """A server with a tiny model of random weights."""
    model, log = write_tiny_qwen2_5_vl(tmp_path / "model"), tmp_path / "log"
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", "1024"]
    command += ["--max-num-seqs", "4"]
    with log.open("wb") as file:
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        wait_until_served(f"http://127.0.0.1:{port}/health", process, START_S, lambda: log.read_text()[-3000:])
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):  # all gone already
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_judge_on_vllm_sees_and_scores(chat_url: str) -> None:
    options = {**OF_ANY_JUDGE, **PATIENT, "urls": [chat_url], "model": "judge"}
    requests = [
        RewardRequest(Response("four", 1, False), (), {}, "2 + 2?"),
        RewardRequest(Response("noise", 1, False), (), {}, "What is it?", (encoded_image(1),)),
        RewardRequest(Response("noise", 1, False), (), {}, "What are they?", (encoded_image(1), encoded_image(2))),
    ]
    made_to = evaluate_batch(build_function("judge", options, TOOLS), requests)
    assert all(isinstance(outcome, Score) and 1 <= outcome.value <= 5 for outcome in made_to), made_to
    free_to = evaluate_batch(build_function("judge", {**options, "extra": {}}, TOOLS), requests)
    assert all(isinstance(it, ScoringFailure) and "gave no score" in it.reason for it in free_to), free_to


PLUGIN = """
import time

def score(request):
    if request.response.text == "hang":
        time.sleep(1000)
    if request.response.text == "raise":
        raise KeyError("a bug")
    time.sleep(0.05)
    return float(request.response.text)
"""

SLOW_REWARDS = rewards_of(component("mine", "slow_plugin:score", 2.0))


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_plugin.py").write_text(PLUGIN)
    return tmp_path


def spawn_worker(plugin_folder: Path) -> Any:
    environment = {"PYTHONPATH": str(plugin_folder), "OMP_NUM_THREADS": "1"}
    actor = ray.remote(RewardWorker).options(num_cpus=0.5, runtime_env={"env_vars": environment})
    limits = {"object_timeout_s": 10, "start_timeout_s": 60, "function_timeout_s": 2, "group_timeout_s": 60}
    return actor.remote(SLOW_REWARDS, "reward", **limits, device="cpu", dtype="float32")


async def test_a_killed_worker_and_functions_that_fail_lose_nothing(local_ray: str, plugin_folder: Path) -> None:
    workers = [spawn_worker(plugin_folder) for _ in range(2)]
    await asyncio.gather(*(answer(w.ping.remote(), timeout_s=60, what="a worker to start") for w in workers))
    hosts = FakeHosts(lambda index: spawn_worker(plugin_folder), end=ray.kill)
    deadlines = {"start_s": 60, "alive_s": 60, "timeout_s": 120}
    pool = pool_over(SLOW_REWARDS, workers, hosts=hosts, restarts=AT_ONCE, **deadlines, max_in_flight=2)
    service = pool.services["reward"]
    bad = {3: "raise", 5: "hang", 8: "nan"}
    texts = [(str(i), bad.get(i, str(i + 0.5))) for i in range(12)]
    references = [ray.put(answers(f"0/{i}", *pair)) for i, pair in enumerate(texts)]
    tasks = [asyncio.create_task(pool.score(reference, f"0/{i}")) for i, reference in enumerate(references)]
    await tasks[0]
    ray.kill(workers[1])
    rewards = await asyncio.gather(*tasks)

    expected = [[None if t in bad.values() else 2 * float(t) for t in pair] for pair in texts]
    assert [[r and r.value for r in pair] for pair in rewards] == expected
    assert +pool.failures == {"worker_died": 1, "timed_out": 1, "failed": 1, "not_finite": 1}
    await until(lambda: len(service.workers) == 2)  # the one that replaces it may still start
    assert service.workers[0] is workers[0] and service.workers[1] is not workers[1]
    await pool.close()
