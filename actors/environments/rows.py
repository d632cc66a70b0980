"""Rows of episodes: first observations of an environment, one for each seed, or rows of data with tools."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mobula.actors.datasets.media import EncodedFile
from mobula.actors.datasets.rows import Row, RowError, Split, Turn
from mobula.actors.environments.base import (
    SEEDS_A_SPLIT,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Reset,
    describe_tools,
    observation_hash,
    row_text,
)
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.markup import literal, verbatim
from mobula.cluster.records.media import SHOWN_SIZES, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema.data import EnvironmentConfig

T = TypeVar("T")

DEMONSTRATION = "demonstration"  # metadata key: texts of good turns
ENVIRONMENT = "environment"  # the key of a row's metadata
SPLITS = ("train", "validation", "test")


def environment_split(config: EnvironmentConfig, name: str, *, takes_images: bool) -> Split[Row]:
    """Builds the rows of one split. The seeds of splits are disjoint. Each seed is reset once; the first seed twice, to
    check that observations depend only on the seed."""
    counts = dict(zip(SPLITS, (config.num_train, config.num_validation, config.num_test), strict=True))
    if name not in counts:
        raise DatasetError(f"environment.name={config.name} has no split {name!r}: use {', '.join(SPLITS)}")
    first = SPLITS.index(name) * SEEDS_A_SPLIT
    seeds = range(first, first + counts[name])
    return Split(name, _in_session(config, takes_images, partial(_rows, config, seeds)), ())


class RowPlayer:
    """Makes a row of data a task of an environment that plays rows: the tools are in its prompt, as the chat template
    writes them, or described in front of the question if it ignores them."""

    def __init__(self, spec: EnvironmentSpec, chat: ChatProcessor) -> None:
        self._tools = [tool.declaration for tool in spec.tools]
        turns, given = [("user", "a question")], json.dumps({"tools": self._tools})
        is_shown = chat.render(turns, is_open=True, template=given) != chat.render(turns, is_open=True)
        self._described = "" if is_shown else verbatim(literal(describe_tools(spec.tools)))

    def __call__(self, row: Row) -> Row:
        given = row.metadata.get(DEMONSTRATION, [])
        if not isinstance(given, list) or not all(isinstance(text, str) and text for text in given):
            raise RowError(
                "bad_demonstration", f"`{DEMONSTRATION}` is {given!r:.60}: write a list of texts, a turn each"
            )
        row = replace(row, metadata={**row.metadata, ENVIRONMENT: {}})
        if self._described:
            return replace(row, question=f"{self._described}\n{row.question}")
        return replace(row, template=json.dumps({**json.loads(row.template or "{}"), "tools": self._tools}))


def row_player(config: EnvironmentConfig, chat: ChatProcessor) -> RowPlayer:
    """Starts the environment once, for its tools. Raises: DatasetError: it plays no rows, or does not start."""

    async def its_spec(session: EnvironmentSession) -> EnvironmentSpec:
        return session.spec

    spec = _in_session(config, chat.takes_images, its_spec)
    if not spec.plays_rows:
        raise DatasetError(
            f"environment.name={config.name} makes its own prompts: set data=environment, or environment=image_tools, "
            "which plays rows of data"
        )
    return RowPlayer(spec, chat)


def row_options(prompt: Prompt, media: Sequence[ProcessedMedia]) -> dict[str, Any]:
    """The options of a reset that plays the row of `prompt`: its image files, their sizes as the model sees them, and
    the turns that it demonstrates, else its solution."""
    images = (file for each in media if each.modality == "image" for file in each.files)
    files = [base64.b64encode(image).decode("ascii") for image in images]
    turns = prompt.metadata.get(DEMONSTRATION) or list(prompt.references[1:2])
    return {"images": files, "shown": prompt.metadata.get(SHOWN_SIZES, ()), "turns": turns}


def _in_session(config: EnvironmentConfig, takes_images: bool, work: Callable[[EnvironmentSession], Awaitable[T]]) -> T:
    """Runs `work` with an environment, without a cluster: with `environment.host=ray`, in a local process."""
    if config.host == "ray":
        config = config.model_copy(update={"host": "process"})

    async def run() -> T:
        pool = EnvironmentPool(config, takes_images=takes_images)
        try:
            async with pool.session() as session:
                return await work(session)
        finally:
            pool.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # asyncio.run fails in a thread with a running loop
            return thread.submit(lambda: asyncio.run(run())).result()
    except EpisodeError as error:
        raise DatasetError(f"environment.name={config.name} cannot be reset ({error.kind}): {error}") from error


async def _rows(config: EnvironmentConfig, seeds: range, session: EnvironmentSession) -> tuple[Row, ...]:
    """Training seeds alternate between the stages of a curriculum; held-out episodes use the last stage."""
    stages = config.curriculum.stages or ({},)
    is_train, rows = seeds.start == 0, []
    if session.spec.plays_rows:
        raise DatasetError(
            f"environment.name={config.name} plays rows of data: set data and data.path, not data=environment"
        )
    first = 0 if is_train else len(stages) - 1
    again = observation_hash((await session.reset(seeds[0], stages[first])).observation)
    for number, seed in enumerate(seeds):
        stage = number % len(stages) if is_train else first
        start = await session.reset(seed, stages[stage])
        episode = {"seed": seed, "hash": observation_hash(start.observation), "options": dict(stages[stage])}
        rows.append(_row(config.name, episode | {"stage": stage}, start))
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
