"""The supervised warm start: trains on correct answers until the accuracy suffices for RL."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from mobula.actors.datasets.mixture import epoch_order
from mobula.actors.datasets.open_split import TRAIN
from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.datasets.rows import Row, RowError
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.episodes import Demonstrations
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.seeds import SEED_BITS, derived_seed
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import VALIDATION, Prepared
from mobula.learner.examples import Example
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.flow.patches import CleanPatches, model_config, negative_ids, teaching_levels
from mobula.learner.policies.flow.policy import CleanSequence, Denoising, Noising, condition_of
from mobula.learner.policies.trained import teaching_noising

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor, TargetImages  # which imports diffusers
    from mobula.actors.processors.image_patches import ImagePatchProcessor

_logger = logging.getLogger(__name__)
ORDER_SEED_OFFSET = 1 << 20  # keeps the warm start's data order apart from that of RL
CHECKED_LEVELS = 16  # noise levels at which an image is checked


async def warm_start(prepared: Prepared, learner: LearnerGroup) -> float:
    """Takes supervised steps until the validation accuracy reaches the target; returns the last accuracy, else 0."""
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
    # In threads: processor workers are served by the event loop.
    held_out = await asyncio.to_thread(prepared.fixed_prompts, VALIDATION, config.max_checks_rows)
    checks = [await examples.checked(prompt, n) for n, prompt in enumerate(held_out.prompts)]
    accuracy = 0.0

    def batch() -> list[Prompt]:
        return [source.next() for _ in range(config.batch_size)]

    for step in range(1, config.num_steps + 1):
        prompts = await asyncio.to_thread(batch)
        first = seed + step * config.batch_size
        metrics = await learner.supervised_step(
            [await examples.taught(prompt, first + n) for n, prompt in enumerate(prompts)]
        )
        if step % config.check_interval == 0 or step == config.num_steps:
            accuracy = await learner.answer_accuracy(checks)
            _logger.info("warm start: step %d, loss %.3f, accuracy %.3f", step, metrics["loss"], accuracy)
            if accuracy >= config.target_accuracy:
                break
    return accuracy


def _chosen(rows: Sequence[Row], num_rows: int, seed: int) -> Sequence[Row]:
    """Selects `num_rows` rows (0: all), deterministically, with distinct answers in turn: RL cannot reinforce an answer
    that the policy never gives."""
    if num_rows == 0:
        return rows
    by_answer: defaultdict[str, list[int]] = defaultdict(list)
    for index in epoch_order(len(rows), seed, 0).tolist():
        with suppress(RowError):  # an unchecked, invalid record
            by_answer[rows[index].answer].append(index)
    turns = zip_longest(*by_answer.values())
    chosen = [index for turn in turns for index in turn if index is not None]
    return [rows[index] for index in chosen[:num_rows]]


class Examples(Protocol):
    async def taught(self, prompt: Prompt, seed: int) -> Example: ...

    async def checked(self, prompt: Prompt, seed: int) -> Example:
        return await self.taught(prompt, seed)

    def close(self) -> None:
        return  # nothing is held


def _examples(prepared: Prepared) -> Examples:
    config = prepared.config
    if config.sampler.is_flow:
        return Images(cast("FlowProcessor", prepared.processor), config)
    if config.sampler.draws_patches:
        return PatchImages(cast("ImagePatchProcessor", prepared.processor), config)
    processor = cast(ChatProcessor, prepared.processor)
    if config.environment.is_on:
        read = MediaReader(timeout_s=config.timeouts.object_s, max_items=config.warm_start.batch_size).read
        model = config.policy.model
        return Episodes(Demonstrations(config.environment, config.sampler, processor, model=model, read=read))
    return Solutions(processor)


class Solutions(Examples):
    def __init__(self, processor: ChatProcessor) -> None:
        self._processor = processor

    async def taught(self, prompt: Prompt, seed: int) -> Example:
        _, solution = prompt.references
        answer = self._processor.encode_answer(solution)
        return Example.of_answer(prompt, TokenActions(answer), np.ones(len(answer), dtype=bool))


class Episodes(Examples):
    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations

    async def taught(self, prompt: Prompt, seed: int) -> Example:
        demonstration = await self._demonstrations.of(prompt)
        return Example.of_answer(prompt, demonstration.actions, demonstration.mask)

    def close(self) -> None:
        self._demonstrations.close()


class TargetExamples(Examples):
    """One image of a row, at few noise levels for training and at several for validation."""

    def __init__(self, processor: TargetImages, text_dropout: float, taught: Noising, checked: Noising) -> None:
        self._processor = processor
        self._text_dropout = text_dropout
        self._taught, self._checked = taught, checked

    async def taught(self, prompt: Prompt, seed: int) -> Example:
        drawn = derived_seed(seed, "text") / (1 << SEED_BITS)
        return self._example(self._taught, prompt, seed, without_text=drawn < self._text_dropout)

    async def checked(self, prompt: Prompt, seed: int) -> Example:
        return self._example(self._checked, prompt, seed, without_text=False)

    def _example(self, noising: Noising, prompt: Prompt, seed: int, *, without_text: bool) -> Example:
        clean = self._processor.clean(prompt, derived_seed(seed, "image"))
        return Example.of_image(self._row(clean, prompt, noising, seed, without_text=without_text))

    @abstractmethod
    def _row(
        self, clean: np.ndarray, prompt: Prompt, noising: Noising, seed: int, *, without_text: bool
    ) -> CleanSequence:
        """Returns the row of an image; `without_text` uses the negative prompt."""


class Images(TargetExamples):
    def __init__(self, processor: FlowProcessor, config: RunConfig) -> None:
        text_dropout = config.warm_start.text_dropout
        if text_dropout > 0 and not processor.takes_negatives:
            raise ValueError(
                f"warm_start.text_dropout={text_dropout:g} teaches the negative prompt, and policy.model="
                f"{config.policy.model} takes its guidance as an input and none: set warm_start.text_dropout=0"
            )
        super().__init__(processor, text_dropout, *(teaching_noising(config, num) for num in (1, CHECKED_LEVELS)))

    def _row(
        self, clean: np.ndarray, prompt: Prompt, noising: Noising, seed: int, *, without_text: bool
    ) -> CleanSequence:
        conditions = condition_of(prompt)  # the second is the negative prompt
        return CleanSequence(clean, conditions[-1:] if without_text else conditions[:1], noising, seed)


class PatchImages(TargetExamples):
    """Each token of an image has separate noise levels."""

    def __init__(self, processor: ImagePatchProcessor, config: RunConfig) -> None:
        num_tokens, draws = processor.num_tokens, model_config(config.policy.model).fm_head_batch_mul
        levels = (teaching_levels(num, num_tokens) for num in (draws, CHECKED_LEVELS))
        super().__init__(processor, config.warm_start.text_dropout, *levels)
        flow = config.sampler.flow
        self._negative = negative_ids(config.policy.model, flow.negative_prompt, Denoising.of(flow).size)

    def _row(
        self, clean: np.ndarray, prompt: Prompt, noising: Noising, seed: int, *, without_text: bool
    ) -> CleanSequence:
        ids = self._negative if without_text else prompt.expanded_ids
        return CleanPatches(clean, (), noising, seed, prompt_ids=ids)
