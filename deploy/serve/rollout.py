"""`mobula rollout`: samples responses and writes transcripts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader

from mobula.deploy.run import runtime  # isort: skip  (first: sets what ray reads)
import numpy as np
from rich.console import Console
from rich.table import Table

from mobula.actors.datasets.prompts import InDriver, fixed_prompts
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader
from mobula.cluster.records.trajectory import Prompt, Reward, Trajectory
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.seeds import derived_seed
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import file_access
from mobula.deploy.wiring.preparation import Prepared, require_model
from mobula.deploy.wiring.roles import Inference, sampling_settings

JSON_FILE, PAGE_FILE, IMAGES = "transcripts.json", "transcripts.html", "images"
TEMPLATE = "transcripts.html.j2"
MEDIA_IN_MEMORY = 256


@dataclass(frozen=True)
class RolloutOptions:
    """How many episodes, how many at a time, and cuts of the distribution; None leaves those of `sampler`.

    Nothing is trained, so turns of an environment may be cut as well, which `sampler.top_p` refuses.
    """

    num_episodes: int
    batch_size: int
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Rolled:
    """One episode and its reward; None if scoring failed."""

    prompt: Prompt
    trajectory: Trajectory
    reward: Reward | None
    seed: int
    seconds: float


def transcript(episode: Rolled) -> dict[str, Any]:
    """One episode, or one answer of a task without an environment, as in `transcripts.json`."""
    prompt, trajectory, reward = episode.prompt, episode.trajectory, episode.reward
    response = trajectory.response
    turns: list[dict[str, Any]] = [
        {
            "action": turn.action,
            "observation": turn.observation,
            "images": [_image_name(handle) for handle in media],
            "rewards": dict(turn.rewards),
            "status": turn.status,  # of its tool calls
        }
        for turn, media in zip(response.turns, trajectory.turn_media, strict=True)
    ]
    return {
        "prompt_id": prompt.prompt_id,
        "sample_id": prompt.sample_id,
        "seed": episode.seed,
        "prompt": prompt.text,
        "images": [_image_name(handle) for handle in prompt.media],
        "references": [reference for reference in prompt.references if reference],
        "turns": turns or [{"action": response.text, "observation": "", "images": [], "rewards": {}, "status": "none"}],
        "finish_reason": trajectory.finish_reason.value,
        "failure": response.failure,
        "num_tokens": response.num_tokens,
        "reward": None if reward is None else reward.value,
        "components": {} if reward is None else dict(reward.components),
        "reasons": {} if reward is None else dict(reward.reasons),
        "seconds": round(episode.seconds, 3),
    }


def _image_name(handle: MediaHandle) -> str:
    return f"{handle.key[:32]}.png"


def write_transcripts(
    folder: Path, rolled: Sequence[Rolled], images: Mapping[str, bytes], summary: Mapping[str, Any]
) -> None:
    """Writes `transcripts.json`, `transcripts.html` and the directory `images` of PNG files by name."""
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        (folder / IMAGES / name).write_bytes(content)
    transcripts = [transcript(episode) for episode in rolled]
    document = strict({"summary": dict(summary), "episodes": transcripts})
    write_atomically(folder / JSON_FILE, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    inlined = {name: base64.b64encode(content).decode("ascii") for name, content in images.items()}
    templates = Templates(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = templates.get_template(TEMPLATE).render(summary=summary, transcripts=transcripts, images=inlined)
    write_atomically(folder / PAGE_FILE, page)


def rollout(config: RunConfig, options: RolloutOptions, folder: Path, console: Console) -> int:
    """Run the episodes, print a table, and write transcripts to `folder`; returns the exit code.

    The episodes go through the split in order, and begin again at its end, each with a seed of its own.
    """
    require_model(config)
    if config.sampler.denoises:
        raise PreflightError("mobula rollout writes down texts: use sampler=huggingface or vllm, or mobula evaluate")
    started = time.perf_counter()
    rolled, images = runtime.with_engines(config, partial(_episodes, options))
    summary = summarise(config, options, rolled, time.perf_counter() - started)
    with file_access(config):
        folder.mkdir(parents=True, exist_ok=True)
        write_transcripts(folder, rolled, images, summary)
    console.print(_table(rolled))
    for label, value in summary.items():
        console.print(f"{label}: {value}")
    console.print(f"written to {folder / JSON_FILE} and {folder / PAGE_FILE}", soft_wrap=True)
    return 0


def summarise(config: RunConfig, options: RolloutOptions, rolled: Sequence[Rolled], seconds: float) -> dict[str, Any]:
    """Common facts of the episodes, and their figures; means are over those that could be scored."""
    rewards = [episode.reward.value for episode in rolled if episode.reward is not None]
    turns = [len(episode.trajectory.response.turns) or 1 for episode in rolled]
    sampler, settings = config.sampler, settings_of(config, options, config.seed)
    return {
        "name": f"{config.policy.model} in {config.environment.name if config.environment.is_on else config.data.path}",
        "sampler": f"{sampler.kind}, temperature {sampler.temperature:g}, top-p {settings.top_p:g}, top-k "
        f"{settings.top_k}, at most {sampler.max_tokens} tokens a turn",
        "seed": config.seed,
        "episodes": len(rolled),
        "without a reward": len(rolled) - len(rewards),
        "mean reward": round(float(np.mean(rewards)), 6) if rewards else None,
        "standard deviation": round(float(np.std(rewards)), 6) if rewards else None,
        "mean turns": round(float(np.mean(turns)), 3),
        "tokens": sum(episode.trajectory.response.num_tokens for episode in rolled),
        "seconds": round(seconds, 3),
    }


async def _episodes(
    options: RolloutOptions, prepared: Prepared, inference: Inference
) -> tuple[list[Rolled], dict[str, bytes]]:
    config = prepared.config
    split = config.evaluation.split
    prompts = fixed_prompts(prepared.usable(split), InDriver(prepared.processor), options.num_episodes)
    semaphore = asyncio.Semaphore(options.batch_size)
    reader = MediaReader(timeout_s=config.timeouts.object_s, max_items=MEDIA_IN_MEMORY)
    images: dict[str, bytes] = {}

    def fetched(group: Any, prompt: Prompt) -> Trajectory:
        [whole] = fetch([group], timeout_s=config.timeouts.object_s, what="an episode")
        [trajectory] = whole.trajectories
        handles = [*prompt.media, *(trajectory.actions.media if isinstance(trajectory.actions, TokenActions) else ())]
        media = reader.read(handles)
        images.update({_image_name(handle): medium.thumbnail for handle, medium in zip(handles, media, strict=True)})
        return trajectory

    async def one(number: int) -> Rolled:
        prompt = prompts.prompts[number % len(prompts.prompts)]
        seed = derived_seed(config.seed, f"{prompt.prompt_id}/{number}")
        async with semaphore:
            started = time.perf_counter()
            generated = await inference.rollouts.generate(prompt, settings_of(config, options, seed))
            seconds = time.perf_counter() - started
        [reward] = await inference.rewards.score(generated.to_score, prompt.prompt_id)
        return Rolled(prompt, await asyncio.to_thread(fetched, generated.group, prompt), reward, seed, seconds)

    return await run_all(*map(one, range(options.num_episodes))), images


def settings_of(config: RunConfig, options: RolloutOptions, seed: int) -> SamplingSettings:
    sampler = config.sampler
    return replace(
        sampling_settings(config),
        num_samples=1,
        seed=seed,
        top_p=sampler.top_p if options.top_p is None else options.top_p,
        top_k=sampler.top_k if options.top_k is None else options.top_k,
        keeps_sets=False,
    )


def _table(rolled: Sequence[Rolled]) -> Table:
    table = Table("episode", "reward", "turns", "tokens", "ended by", "s")
    for episode in rolled:
        response = episode.trajectory.response
        table.add_row(
            episode.prompt.sample_id,
            "-" if episode.reward is None else f"{episode.reward.value:.4g}",
            str(len(response.turns) or 1),
            str(response.num_tokens),
            response.failure or episode.trajectory.finish_reason.value,
            f"{episode.seconds:.2f}",
        )
    return table
