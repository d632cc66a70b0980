"""Offline scoring: records/s of the whole command, start-up included, over a plain-Python program of the same rules.

The rows are corrupted ones (`benchmarks/harness/corruption.py`) over questions with answers of the kinds that charts
have: numbers, percentages, names. Both sides read the same file, score it by aeroRL's rules and write a report, each in
a process of its own; at the smaller size the two reports have to say the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.corruption import corrupt
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, Side, interleave, rates

SMALL, LARGE, QUICK_LARGE = 29_299, 1_000_000, 100_000
LARGE_REPEATS = 3
TARGETS = {SMALL: 10_000.0, LARGE: 60_000.0}  # records/s
MAX_PEAK_GB = 1.0
NUM_PROCESSES = 2
SAMPLE_S = 0.1
TIMEOUT_S = 300.0
UNIT = "records/s"
SETTINGS: dict[str, Any] = {
    "weights": {"verifier": 0.45, "grounding": 0.3, "format": 0.2, "cost": 0.05},
    "require_json": True,
    "regex_pattern": r"^\{.*\}$",
    "target_tokens": 32,
    "latency_budget_ms": 400.0,
    "pass_threshold": 0.5,
    "top_k": 5,
    "max_ids": 100,
}
NAMES = ("red", "blue", "North America", "Germany", "total revenue", "yes", "no", "share of women", "increase", "Nike")


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """The command on both sizes, plain Python on the smaller one; the overrides say nothing here."""
    large = QUICK_LARGE if effort == QUICK else LARGE
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder:
        bench = _Bench(Path(folder))
        found = asyncio.run(_in_turn(bench, effort, large))
        bench.compare()
    return _findings(found, bench, large)


async def _in_turn(bench: _Bench, effort: Effort, large: int) -> dict[str, tuple[float, ...]]:
    small = await interleave({"small": bench.command(SMALL), "plain": bench.plain(SMALL)}, effort)
    few = Effort(repeats=min(effort.repeats, LARGE_REPEATS), warmups=0, num_steps=0)
    return small | await interleave({"large": bench.command(large)}, few)


class _Bench:
    """Runs both programs on files of its own and keeps the largest memory of the command's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak_bytes: dict[int, int] = {}

    def command(self, num_rows: int) -> Side:
        path = self._rows(num_rows)
        words = [sys.executable, "-m", "mobula.deploy.cli", "score", str(path), *_overrides(), "--quiet"]
        for key in ("pass_threshold", "top_k", "max_ids"):
            words += [f"--{key.replace('_', '-')}", str(SETTINGS[key])]
        words += ["--processes", str(NUM_PROCESSES), "--output", str(self._folder / "ours.json")]

        async def side(round_number: int) -> float:
            seconds, peak = await asyncio.to_thread(_run, words, "")
            self.peak_bytes[num_rows] = max(peak, self.peak_bytes.get(num_rows, 0))
            return num_rows / seconds

        return side

    def plain(self, num_rows: int) -> Side:
        words = [sys.executable, "-m", "benchmarks.raw.score_reference", str(self._rows(num_rows))]

        async def side(round_number: int) -> float:
            target = str(self._folder / "plain.json")
            seconds, _ = await asyncio.to_thread(_run, [*words, target], json.dumps(SETTINGS))
            return num_rows / seconds

        return side

    def compare(self) -> None:
        """Score the smaller file once more, and see that both programs say the same.

        Raises:
            AssertionError: they do not.
        """
        asyncio.run(self.command(SMALL)(0))
        ours, plain = (json.loads((self._folder / f"{name}.json").read_text()) for name in ("ours", "plain"))
        found = ours | {"caught": ours["accuracy"]["right_below_threshold"]}
        found |= {key: [example["id"] for example in ours[key]] for key in ("best", "worst")}
        found["component_averages"] = {name: found["component_averages"][name] for name in plain["component_averages"]}
        for key in ("average_reward", "pass_rate", "component_averages", "best", "worst", "caught"):
            assert found[key] == plain[key], f"{key}: {found[key]}, plain Python {plain[key]}"

    def _rows(self, num: int) -> Path:
        path = self._folder / f"{num}.jsonl"
        if not path.exists():
            chance = random.Random(num)
            with path.open("w", encoding="utf-8") as file:
                for i in range(num):
                    prompt = f"What is the value of bar {i % 40} in the year {1980 + i % 45}?"
                    file.write(json.dumps(corrupt(f"chart::{i % 3}:{i}", prompt, _answer(chance))) + "\n")
        return path


def _overrides() -> list[str]:
    """The same settings as words of the command."""
    options = {
        "0.weight": SETTINGS["weights"]["verifier"],
        "1.weight": SETTINGS["weights"]["grounding"],
        "2.weight": SETTINGS["weights"]["format"],
        "3.weight": SETTINGS["weights"]["cost"],
        "2.options.require_json": str(SETTINGS["require_json"]).lower(),
        "2.options.regex_pattern": f"'{SETTINGS['regex_pattern']}'",
        "3.options.target_tokens": SETTINGS["target_tokens"],
        "3.options.latency_budget_ms": SETTINGS["latency_budget_ms"],
    }
    return ["rewards=aerorl", *(f"rewards.components.{key}={value}" for key, value in options.items())]


def _answer(chance: random.Random) -> str:
    """Half of the answers are numbers, hardly one of them twice; a tenth are percentages; the rest are names."""
    kind = chance.random()
    if kind < 0.3:
        return f"{chance.uniform(0, 5000):.2f}"
    if kind < 0.5:
        return str(chance.randrange(3000))
    if kind < 0.6:
        return f"{chance.randrange(101)}%"
    return " ".join(chance.choices(NAMES, k=1 + (kind > 0.9)))


def _run(words: Sequence[str], stdin: str) -> tuple[float, int]:
    """Wall seconds of a program, and the most memory that it and its processes had together, shared pages twice."""
    started = time.perf_counter()
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    peak, is_over = [0], threading.Event()
    watch = threading.Thread(target=_watch, args=(psutil.Process(process.pid), peak, is_over))
    watch.start()
    try:
        process.communicate(stdin, timeout=TIMEOUT_S)
    finally:
        seconds = time.perf_counter() - started
        is_over.set()
        watch.join()
        process.kill()
    assert process.returncode == 0, f"{' '.join(words)} ended with {process.returncode}"
    return seconds, peak[0]


def _watch(process: psutil.Process, peak: list[int], is_over: threading.Event) -> None:
    while not is_over.wait(SAMPLE_S):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(member.memory_info().rss for member in family))
        except psutil.Error:  # one of them has just ended: the next look shows the others
            continue


def _findings(found: dict[str, tuple[float, ...]], bench: _Bench, large: int) -> Findings:
    whole = "parse, score by rewards=aerorl, write the report"
    series = {
        "small": Measurements(
            f"mobula score, {SMALL:,} rows, {NUM_PROCESSES} processes: {whole}", UNIT, found["small"]
        ),
        "plain": Measurements(f"plain Python, {SMALL:,} rows, 1 process: {whole}", UNIT, found["plain"]),
        "large": Measurements(
            f"mobula score, {large:,} rows, {NUM_PROCESSES} processes: {whole}", UNIT, found["large"]
        ),
    }
    peaks = {num: num_bytes / 1e9 for num, num_bytes in bench.peak_bytes.items()}
    claims = (
        Claim(f"{SMALL:,} rows: {UNIT} / {TARGETS[SMALL]:,.0f}", series["small"].median / TARGETS[SMALL], 1.0),
        Claim(f"{large:,} rows: {UNIT} / {TARGETS[LARGE]:,.0f}", series["large"].median / TARGETS[LARGE], 1.0),
        Claim(f"{large:,} rows: peak GB of all processes", peaks[large], MAX_PEAK_GB, at_least=False),
        Claim("the command / plain Python", rates(series["small"], series["plain"])),
    )
    return Findings({**SETTINGS, "peak_gb": {f"{num} rows": round(gb, 3) for num, gb in peaks.items()}}, series, claims)
