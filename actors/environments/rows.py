"""environment_split: the prompts of an environment, a row with the first observation for each seed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mobula.actors.datasets.media import EncodedFile
from mobula.actors.datasets.rows import Row, Split, Turn
from mobula.actors.environments.base import (
    SEEDS_A_SPLIT,
    EpisodeError,
    Message,
    Reset,
    observation_hash,
    row_text,
)
from mobula.actors.environments.hosts.pool import EnvironmentPool
from mobula.cluster.errors import DatasetError
from mobula.configs.schema.data import EnvironmentConfig

ENVIRONMENT = "environment"  # the key of a row's metadata
SPLITS = ("train", "validation", "test")


def environment_split(config: EnvironmentConfig, name: str, *, takes_images: bool) -> Split[Row]:
    """Builds the rows of one split. The seeds of splits are disjoint. Each seed is reset once; the first seed twice, to
    check that observations depend only on the seed. There is no cluster yet: with `environment.host=ray`, a local
    process is used."""
    counts = dict(zip(SPLITS, (config.num_train, config.num_validation, config.num_test), strict=True))
    if name not in counts:
        raise DatasetError(f"environment.name={config.name} has no split {name!r}: use {', '.join(SPLITS)}")
    if config.host == "ray":
        config = config.model_copy(update={"host": "process"})
    first = SPLITS.index(name) * SEEDS_A_SPLIT
    seeds = range(first, first + counts[name])
    try:
        with ThreadPoolExecutor(1) as thread:  # asyncio.run fails in a thread with a running loop
            rows = thread.submit(asyncio.run, _rows(config, seeds, takes_images=takes_images)).result()
    except EpisodeError as error:
        raise DatasetError(f"environment.name={config.name} cannot be reset ({error.kind}): {error}") from error
    return Split(name, rows, ())


async def _rows(config: EnvironmentConfig, seeds: range, *, takes_images: bool) -> tuple[Row, ...]:
    """Training seeds alternate between the stages of a curriculum; held-out episodes use the last stage."""
    stages = config.curriculum.stages or ({},)
    is_train = seeds.start == 0
    pool = EnvironmentPool(config, takes_images=takes_images)
    rows = []
    try:
        async with pool.session() as session:
            first = 0 if is_train else len(stages) - 1
            again = observation_hash((await session.reset(seeds[0], stages[first])).observation)
            for number, seed in enumerate(seeds):
                stage = number % len(stages) if is_train else first
                start = await session.reset(seed, stages[stage])
                episode = {"seed": seed, "hash": observation_hash(start.observation), "options": dict(stages[stage])}
                rows.append(_row(config.name, episode | {"stage": stage}, start))
    finally:
        pool.close()
    if rows[0].metadata[ENVIRONMENT]["hash"] != again:
        raise DatasetError(
            f"environment.name={config.name} gives two observations for seed {seeds[0]}, so siblings would get "
            "different tasks: make its reset a function of the seed"
        )
    return tuple(rows)


def _row(name: str, task: Mapping[str, Any], start: Reset) -> Row:
    seed = task["seed"]
    *history, question = start.observation or (Message("", ""),)
    if question.role != "user":
        raise DatasetError(f"environment.name={name} begins with no user message: let the last message of reset be one")
    answer, solution = str(start.info.get("answer", "")), str(start.info.get("solution", ""))
    images = [image for message in start.observation for image in message.images]
    return Row(
        sample_id=f"{name}-{seed}",
        question=row_text(question),
        answer=answer,
        solution=solution,
        images=tuple(EncodedFile(content, f"{name}-{seed}, image {n}") for n, content in enumerate(images, 1)),
        metadata={ENVIRONMENT: task},
        history=tuple(Turn(message.role, row_text(message)) for message in history),
    )
