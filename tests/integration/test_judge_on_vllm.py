"""A judge behind vLLM's own server: texts and images go in, the forced output of the engine comes out as a score."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_judge import OF_ANY_JUDGE
from tiny_reward_models import encoded_image

from mobula.cluster.records.trajectory import Response
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

START_S = 280.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",  # its processes then import nothing a second time
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture
def chat_url(tmp_path: Path) -> Iterator[str]:
    """A server with a tiny model of random weights."""
    model, log = write_tiny_qwen2_5_vl(tmp_path / "model"), tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", "1024"]
    command += ["--max-num-seqs", "4"]
    with log.open("wb") as file:
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        _wait_until_well(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            _kill_group(process.pid)


def _wait_until_well(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            is_waiting = process.poll() is None and time.monotonic() < until
            assert is_waiting, f"vLLM does not start: {log.read_text()[-3000:]}"
            time.sleep(0.5)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all gone already


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_judge_on_vllm_sees_and_scores(chat_url: str) -> None:
    options: dict[str, Any] = {
        "urls": [chat_url],
        **OF_ANY_JUDGE,
        "model": "judge",
        "max_concurrency": 4,
        "timeout_s": 100.0,
        "total_timeout_s": 200.0,
        "max_attempts": 2,
        "backoff_s": 0.1,
        "max_backoff_s": 1.0,
        "max_request_bytes": 1 << 20,
        "max_reply_bytes": 1 << 20,
        "max_failures": 2,
        "aside_s": 5.0,
        "token_env": None,
    }
    tools = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
    requests = [
        RewardRequest(Response("four", 1, False), (), {}, "2 + 2?"),
        RewardRequest(Response("noise", 1, False), (), {}, "What is it?", (encoded_image(1),)),
        RewardRequest(Response("noise", 1, False), (), {}, "What are they?", (encoded_image(1), encoded_image(2))),
    ]
    made_to = evaluate_batch(build_function("judge", options, tools), requests)
    assert all(isinstance(outcome, Score) and 1 <= outcome.value <= 5 for outcome in made_to), made_to
    free_to = evaluate_batch(build_function("judge", {**options, "extra": {}}, tools), requests)
    assert all(isinstance(outcome, ScoringFailure) and "gave no score" in outcome.reason for outcome in free_to), (
        free_to
    )
