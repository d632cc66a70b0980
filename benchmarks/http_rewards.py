"""Rewards over HTTP: samples/s of `mobula serve-rewards` and the function `http`, over bare aiohttp on both ends.

Both servers are processes of their own with the same three cheap rules, asked with the same batches, as many at a time;
ours checks schema, size and token, scores beside its event loop and counts, and our client encodes each sample.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, interleave, rates
from benchmarks.raw.raw_rewards import local_scoring, post_all
from benchmarks.reward_pool import numbered_group
from mobula.cluster.records.trajectory import Reward
from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.functions import build_function
from mobula.rewards.http.wire import encode_sample, join_samples
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.pool.worker import reward_request
from mobula.rewards.tools import Tools

T = TypeVar("T")
NUM_GROUPS, QUICK_GROUPS = 1024, 128  # of eight samples
BATCH_SAMPLES = 64
CONCURRENCY = 4
START_S = 120.0
TOKEN = "BENCHMARK_TOKEN"
UNIT = "samples/s"
REST = "service: reward, needs_images: false, retries: 0, cache_entries: 0"
ANYWHERE = "{ignore_case: true, whole_response: false}"
REWARDS = f"""
components:
  - {{name: accuracy, function: exact_match, weight: 1.0, options: {ANYWHERE}, {REST}}}
  - {{name: boxed, function: format, weight: 0.1, options: {{preset: boxed}}, {REST}}}
  - {{name: tags, function: format, weight: 0.1, options: {{preset: think_answer}}, {REST}}}
accuracy_component: accuracy
"""
CONNECTION = {
    "dialect": "mobula",
    "batch_size": BATCH_SAMPLES,
    "max_concurrency": CONCURRENCY,
    "timeout_s": 60.0,
    "total_timeout_s": 120.0,
    "max_attempts": 3,
    "backoff_s": 0.1,
    "max_backoff_s": 1.0,
    "max_request_bytes": 1 << 20,
    "max_reply_bytes": 1 << 20,
    "max_failures": 3,
    "aside_s": 5.0,
    "token_env": TOKEN,
}


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All three ways to the same scores; the overrides say nothing here."""
    num_groups = QUICK_GROUPS if effort == QUICK else NUM_GROUPS
    groups = [numbered_group(index) for index in range(num_groups)]
    requests = [reward_request(group.prompt, row.response, ()) for group in groups for row in group.trajectories]
    os.environ[TOKEN] = "s3cret"
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder, ExitStack() as servers:
        path = Path(folder) / "rewards.yaml"
        path.write_text(REWARDS)
        ours = servers.enter_context(_served("mobula.deploy.cli", "serve-rewards", str(path), "--token-env", TOKEN))
        raw = servers.enter_context(_served("benchmarks.raw.raw_rewards", str(path)))
        bench = _Bench(requests, path, ours, raw)
        gc.collect()
        gc.freeze()  # else every other round pays for a look through all that was imported
        found = asyncio.run(_in_turn(bench, effort))
    return _findings(found, len(requests))


class _Bench:
    """The same requests in three ways; each round sees that they agree."""

    def __init__(self, requests: Sequence[RewardRequest], path: Path, ours: str, raw: str) -> None:
        tools = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
        self._http = build_function("http", {**CONNECTION, "urls": [f"{ours}/score"]}, tools)
        self._scoring = local_scoring(path)
        self._requests = requests
        self._raw = f"{raw}/score"
        self._expected = [r.value for r in self._scoring.rewards(requests) if isinstance(r, Reward)]

    async def ours(self, _: int) -> float:
        return self._rate(*await asyncio.to_thread(_timed, lambda: self._http.score_batch(self._requests)))

    async def raw(self, _: int) -> float:
        started = time.perf_counter()
        samples = [encode_sample(request) for request in self._requests]
        batches = [samples[i : i + BATCH_SAMPLES] for i in range(0, len(samples), BATCH_SAMPLES)]
        rewards = await post_all(self._raw, [join_samples(batch) for batch in batches], CONCURRENCY)
        return self._rate(time.perf_counter() - started, rewards)

    async def in_process(self, _: int) -> float:
        return self._rate(*_timed(lambda: self._scoring.rewards(self._requests)))

    def _rate(self, seconds: float, results: Sequence[float | Outcome | Reward]) -> float:
        values = [r.value if isinstance(r, Score | Reward) else r for r in results]
        assert values == self._expected, "what came back is not what the functions say here"
        return len(self._requests) / seconds


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


async def _in_turn(bench: _Bench, effort: Effort) -> dict[str, tuple[float, ...]]:
    return await interleave({"ours": bench.ours, "raw": bench.raw, "in process": bench.in_process}, effort)


@contextmanager
def _served(module: str, *arguments: str) -> Iterator[str]:
    """The URL of a server that runs as a process while the body does."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout=START_S), f"{module} does not say where it is within {START_S:g} s"
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, f"{module} said {line!r} and not where it is"
        yield found[0]
    finally:
        process.kill()
        process.wait()


def _findings(found: dict[str, tuple[float, ...]], num_samples: int) -> Findings:
    how = f"{num_samples:,} samples, {BATCH_SAMPLES} a request, {CONCURRENCY} requests at a time"
    series = {
        "ours": Measurements(f"function `http` and `mobula serve-rewards`: {how}", UNIT, found["ours"]),
        "raw": Measurements(f"aiohttp on both ends: {how}", UNIT, found["raw"]),
        "in process": Measurements("the same rules in this process", UNIT, found["in process"]),
    }
    claims = (
        Claim("served / bare aiohttp", rates(series["ours"], series["raw"]), 0.25),
        Claim("served / in process", rates(series["ours"], series["in process"])),
    )
    return Findings({"samples": num_samples, "batch": BATCH_SAMPLES, "concurrency": CONCURRENCY}, series, claims)
