"""The supervised warm start: train on right answers until the policy is right often enough for RL to begin."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Protocol

import numpy as np

from actors.datasets.order import epoch_order
from actors.datasets.prompts import PromptSource, fixed_prompts
from actors.datasets.rows import Row, RowError
from actors.processors.chat import ChatProcessor
from actors.rollout.demonstrations import Demonstrations
from cluster.records.trajectory import Prompt
from deploy.wiring.preparation import TRAIN, VALIDATION, Prepared
from learner.learner_group import LearnerGroup
from learner.supervised import SupervisedExample

_logger = logging.getLogger(__name__)

ORDER_SEED_OFFSET = 1 << 20  # keeps the warm start's data order apart from that of RL


async def warm_start(prepared: Prepared, learner: LearnerGroup) -> float:
    """Take supervised steps until the validation accuracy reaches the target; returns the last one measured, else 0."""
    if prepared.config.warm_start.num_steps == 0:
        return 0.0
    examples = _examples(prepared)
    try:
        return await _taught(prepared, learner, examples)
    finally:
        examples.close()


async def _taught(prepared: Prepared, learner: LearnerGroup, examples: Examples) -> float:
    config = prepared.config.warm_start
    seed = prepared.config.seed + ORDER_SEED_OFFSET
    rows = _chosen(prepared.splits[TRAIN].rows, config.num_rows, seed)
    source = PromptSource(rows, prepared.preparation, seed=seed, split_name=TRAIN, on_skipped=prepared.note_skipped)

    def batch() -> list[Prompt]:
        return [source.next() for _ in range(config.batch_size)]

    # In threads: processor workers are served by the event loop.
    held_out = await asyncio.to_thread(
        fixed_prompts, prepared.usable(VALIDATION), prepared.preparation, config.max_checks_rows
    )
    checks = [await examples.of(prompt) for prompt in held_out.prompts]
    accuracy = 0.0
    for step in range(1, config.num_steps + 1):
        prompts = await asyncio.to_thread(batch)
        metrics = await learner.supervised_step([await examples.of(prompt) for prompt in prompts])
        if step % config.check_interval == 0 or step == config.num_steps:
            accuracy = await learner.answer_accuracy(checks)
            _logger.info("warm start: step %d, loss %.3f, accuracy %.3f", step, metrics["loss"], accuracy)
            if accuracy >= config.target_accuracy:
                break
    return accuracy


def _chosen(rows: Sequence[Row], num_rows: int, seed: int) -> Sequence[Row]:
    """`num_rows` of the rows, a pure function of the arguments; all of them for 0.

    Distinct answers take turns: an answer that the policy has never given gets no reward that RL could build on.
    """
    if num_rows == 0:
        return rows
    by_answer: defaultdict[str, list[int]] = defaultdict(list)
    for place in epoch_order(len(rows), seed, 0).tolist():
        with suppress(RowError):  # a record that was not checked, and is none
            by_answer[rows[place].answer].append(place)
    turns = zip_longest(*by_answer.values())
    places = [place for turn in turns for place in turn if place is not None]
    return [rows[place] for place in places[:num_rows]]


class Examples(Protocol):
    """Makes the supervised example of a prompt."""

    async def of(self, prompt: Prompt) -> SupervisedExample: ...

    def close(self) -> None: ...


def _examples(prepared: Prepared) -> Examples:
    config = prepared.config
    if not config.environment.is_on:
        return Solutions(prepared.processor)
    return Episodes(Demonstrations(config.environment, config.sampler, prepared.processor, model=config.policy.model))


class Solutions:
    """The solution of a row."""

    def __init__(self, processor: ChatProcessor) -> None:
        self._processor = processor

    async def of(self, prompt: Prompt) -> SupervisedExample:
        _, solution = prompt.references
        answer = self._processor.encode_answer(solution)
        return SupervisedExample(prompt, answer, np.ones(len(answer), dtype=bool))

    def close(self) -> None:
        """Nothing is held."""


class Episodes:
    """The episode that the environment demonstrates."""

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations

    async def of(self, prompt: Prompt) -> SupervisedExample:
        found = await self._demonstrations.of(prompt)
        actions = found.actions
        return SupervisedExample(prompt, actions.token_ids, found.mask, actions.media, actions.media_spans)

    def close(self) -> None:
        self._demonstrations.close()
