"""`mobula evaluate --compare huggingface`: our sampler beside plain transformers, timed on the same prompts."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.pictures import EncodedFile
from mobula.actors.datasets.rows import Row
from mobula.actors.environments.rows import environment_split
from mobula.actors.samplers.plain_transformers import PlainTransformers
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.concurrency import run_all
from mobula.configs.schema import RunConfig
from mobula.deploy.tools.policy.local_policy import LocalPolicy
from mobula.deploy.wiring.preparation import ensure_data
from mobula.learner.policies.families import family_at

JSON_FILE, PLOT_FILE = "sampler_comparison.json", "sampler_comparison.svg"
DIGITS = 4

Generate = Callable[[int, int], Awaitable[list[list[int]]]]  # (most tokens, seed) -> the tokens of each prompt


@dataclass(frozen=True)
class ComparisonOptions:
    """`num_prompts` prompts, `batch_size` of them at a time, `num_runs` times after one warm-up."""

    num_prompts: int
    batch_size: int
    num_runs: int


@dataclass(frozen=True)
class Timed:
    """One run over all prompts."""

    seconds: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class SamplerMeasurements:
    """Measurements of one sampler. `steady` leaves the first run out where there are several."""

    name: str
    load_s: float
    first_token_s: float
    runs: tuple[Timed, ...]
    answers: list[list[int]]  # of the last run

    @property
    def steady(self) -> tuple[Timed, ...]:
        return self.runs[1:] or self.runs

    def report(self) -> dict[str, Any]:
        """Means and population standard deviations."""
        seconds, speed = [run.seconds for run in self.runs], [run.tokens_per_s for run in self.runs]
        steady = [run.tokens_per_s for run in self.steady]
        found = {
            "load_s": self.load_s,
            "first_token_s": self.first_token_s,
            "seconds_mean": np.mean(seconds),
            "seconds_std": np.std(seconds),
            "tokens_per_s_mean": np.mean(speed),
            "tokens_per_s_std": np.std(speed),
            "steady_tokens_per_s_mean": np.mean(steady),
            "steady_tokens_per_s_std": np.std(steady),
        }
        rounded = {name: round(float(value), DIGITS) for name, value in found.items()}
        return {"sampler": self.name, **rounded, "runs": [asdict(run) for run in self.runs]}


def compare(config: RunConfig, options: ComparisonOptions, folder: Path, console: Console) -> int:
    """Time both, print a table, and write JSON and a plot to `folder`; returns the exit code.

    Raises:
        PreflightError: the model is not there, or data or options are unfit.
    """
    if config.evaluation.temperature > 0 and config.sampler.min_p > 0:
        raise PreflightError("sampler.min_p has no counterpart in the comparison: set sampler.min_p=0")
    policy = LocalPolicy(config)
    rows = _rows(config, policy, options.num_prompts)
    ours = asyncio.run(_measure_ours(policy, rows, options))
    prompts = [policy.prompt_of(row, row.sample_id) for row in rows]
    theirs = asyncio.run(_measure_theirs(policy, rows, prompts, options))
    report = {
        "model": config.policy.model,
        "device": config.resources.device,
        "dtype": config.resources.dtype,
        "prompts": len(rows),
        "batch_size": options.batch_size,
        "max_new_tokens": config.sampler.max_tokens,
        "temperature": config.evaluation.temperature,
        "equal_answers": sum(a == b for a, b in zip(ours.answers, theirs.answers, strict=True)),
        "samplers": [ours.report(), theirs.report()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / JSON_FILE, json.dumps(strict(report), indent=1, allow_nan=False) + "\n")
    write_atomically(folder / PLOT_FILE, plot(report["samplers"]))
    console.print(_table(report["samplers"]))
    if config.evaluation.temperature == 0:
        console.print(f"equal greedy answers: {report['equal_answers']} of {len(rows)}", highlight=False)
    console.print(f"written to {folder / JSON_FILE} and {folder / PLOT_FILE}", markup=False, soft_wrap=True)
    return 0


def _rows(config: RunConfig, policy: LocalPolicy, num_prompts: int) -> list[Row]:
    """The first rows of the evaluation split."""
    split = config.evaluation.split
    if config.environment.is_on:
        rows = environment_split(config.environment, split, takes_pictures=policy.chat.takes_pictures).rows
    else:
        ensure_data(config)
        rows = open_split(config.data, split, config.rewards.label_key).rows
    return [rows[number] for number in range(min(num_prompts, len(rows)))]


async def _measure_ours(policy: LocalPolicy, rows: Sequence[Row], options: ComparisonOptions) -> SamplerMeasurements:
    started = time.perf_counter()
    await policy.start()
    load_s = time.perf_counter() - started
    prompts = [policy.prompt_of(row, row.sample_id) for row in rows]
    config = policy.config

    async def generate(max_tokens: int, seed: int) -> list[list[int]]:
        sampler = config.sampler
        settings = SamplingSettings(
            1, config.evaluation.temperature, max_tokens, seed, top_p=sampler.top_p, top_k=sampler.top_k
        )
        places = asyncio.Semaphore(options.batch_size)

        async def one(prompt: Prompt) -> list[int]:
            async with places:
                return (await policy.sample(prompt, settings)).token_ids

        return await run_all(*map(one, prompts if max_tokens > 1 else prompts[:1]))

    try:
        return await _timed(config.sampler.kind.value, generate, config, options, load_s)
    finally:
        await policy.close()
        gc.collect()


async def _measure_theirs(
    policy: LocalPolicy, rows: Sequence[Row], prompts: Sequence[Prompt], options: ComparisonOptions
) -> SamplerMeasurements:
    config, chat = policy.config, policy.chat
    started = time.perf_counter()
    plain = PlainTransformers(
        config.policy.model,
        dtype=config.resources.dtype,
        device=config.resources.device,
        takes_pictures=chat.takes_pictures,
        processor_options=(
            family_at(config.policy.model).processor_options(config.policy.model, config.data)
            if chat.takes_pictures
            else {}
        ),
    )
    load_s = time.perf_counter() - started
    pictures = [_contents(row) for row in rows]

    async def generate(max_tokens: int, seed: int) -> list[list[int]]:
        texts = [prompt.text for prompt in prompts] if max_tokens > 1 else [prompts[0].text]
        answers: list[list[int]] = []
        for start in range(0, len(texts), options.batch_size):
            chosen = slice(start, start + options.batch_size)
            call = partial(
                plain.generate,
                texts[chosen],
                pictures[: len(texts)][chosen],
                max_new_tokens=max_tokens,
                temperature=config.evaluation.temperature,
                top_p=config.sampler.top_p,
                top_k=config.sampler.top_k,
                seed=seed,
                stop_ids=chat.eos_token_ids,
                pad_id=chat.pad_token_id,
                banned_ids=chat.media_token_ids,
            )
            answers += await asyncio.to_thread(call)
        return answers

    return await _timed("transformers", generate, config, options, load_s)


async def _timed(
    name: str, generate: Generate, config: RunConfig, options: ComparisonOptions, load_s: float
) -> SamplerMeasurements:
    """One warm-up, the first token of the first prompt, then the runs."""
    most = config.sampler.max_tokens
    await generate(most, config.seed)
    started = time.perf_counter()
    await generate(1, config.seed)
    first_token_s = time.perf_counter() - started
    runs, answers = [], []
    for number in range(options.num_runs):
        started = time.perf_counter()
        answers = await generate(most, config.seed + number)
        runs.append(Timed(time.perf_counter() - started, sum(map(len, answers))))
    return SamplerMeasurements(name, load_s, first_token_s, tuple(runs), answers)


def _contents(row: Row) -> list[bytes]:
    return [image.content if isinstance(image, EncodedFile) else Path(image).read_bytes() for image in row.images]


def _table(samplers: Sequence[dict[str, Any]]) -> Table:
    table = Table("sampler", "tokens/s", "steady tokens/s", "first token ms", "s a run", "load s")
    for found in samplers:
        table.add_row(
            found["sampler"],
            f"{found['tokens_per_s_mean']:.1f} ± {found['tokens_per_s_std']:.1f}",
            f"{found['steady_tokens_per_s_mean']:.1f} ± {found['steady_tokens_per_s_std']:.1f}",
            f"{1000 * found['first_token_s']:.1f}",
            f"{found['seconds_mean']:.3f} ± {found['seconds_std']:.3f}",
            f"{found['load_s']:.1f}",
        )
    return table


def plot(samplers: Sequence[dict[str, Any]]) -> str:
    """An SVG with bars of steady tokens/s, with their standard deviation, and of milliseconds to the first token."""
    panels = (
        ("steady tokens/s", [(s["steady_tokens_per_s_mean"], s["steady_tokens_per_s_std"]) for s in samplers]),
        ("ms to the first token", [(1000 * s["first_token_s"], 0.0) for s in samplers]),
    )
    width, height, base, colours = 300, 240, 190, ("#0a6ebd", "#c2703b")
    drawn = []
    for panel, (title, bars) in enumerate(panels):
        left = panel * width
        most = max(mean + deviation for mean, deviation in bars) or 1.0
        drawn.append(f'<text x="{left + width / 2}" y="20" text-anchor="middle" font-weight="600">{title}</text>')
        for number, (mean, deviation) in enumerate(bars):
            x, tall, spread = left + 60 + 100 * number, 140 * mean / most, 140 * deviation / most
            middle, colour = x + 40, colours[number % len(colours)]
            drawn.append(f'<rect x="{x}" y="{base - tall:.1f}" width="80" height="{tall:.1f}" fill="{colour}"/>')
            if deviation:
                ends = f'y1="{base - tall - spread:.1f}" y2="{base - tall + spread:.1f}"'
                drawn.append(f'<line x1="{middle}" x2="{middle}" {ends} stroke="currentColor" stroke-width="2"/>')
            top = base - tall - spread - 6
            drawn.append(f'<text x="{middle}" y="{top:.1f}" text-anchor="middle">{mean:.4g}</text>')
            name = samplers[number]["sampler"]
            drawn.append(f'<text x="{middle}" y="{base + 18}" text-anchor="middle">{name}</text>')
        drawn.append(f'<line x1="{left + 40}" x2="{left + width - 20}" y1="{base}" y2="{base}" stroke="currentColor"/>')
    size = f'viewBox="0 0 {2 * width} {height}" width="{2 * width}" height="{height}"'
    style = 'font-family="system-ui, DejaVu Sans, sans-serif" font-size="13" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(drawn) + "\n</svg>\n"
