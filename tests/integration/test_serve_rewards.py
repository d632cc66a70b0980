"""`mobula serve-rewards` as a process: configured by a file, asked by the function `http`, stopped by SIGTERM."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
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
CONNECTION = {
    "dialect": "mobula",
    "batch_size": 2,
    "max_concurrency": 2,
    "timeout_s": 60.0,
    "total_timeout_s": 120.0,
    "max_attempts": 3,
    "backoff_s": 0.1,
    "max_backoff_s": 1.0,
    "max_request_bytes": 1 << 20,
    "max_reply_bytes": 1 << 20,
    "max_failures": 3,
    "aside_s": 5.0,
    "token_env": "REWARD_TOKEN",
}


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
    assert process.stdout is not None
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
        tools = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
        http = build_function("http", {**CONNECTION, "urls": [f"{url}/score"]}, tools)
        texts = (r"\boxed{4}", r"\boxed{\frac{8}{2}}", r"\boxed{5}", "4")
        requests = [RewardRequest(Response(text, 3, False), ("4",), {}, "2 + 2?") for text in texts]
        outcomes = evaluate_batch(http, requests)
        assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [1.5, 1.5, 0.5, 0.0]
        assert outcomes[0].breakdown == {"accuracy": 1.0, "format": 1.0, "shape": 1.0}
        hanging = RewardRequest(Response("a" * 50 + "b", 3, False), ("4",), {}, "")  # "shape" backtracks without end
        late, early = evaluate_batch(http, [hanging, requests[1]])
        assert isinstance(late, ScoringFailure) and late.kind in (
            FailureKind.TIMED_OUT,
            FailureKind.FAILED,
        )  # time or memory
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
