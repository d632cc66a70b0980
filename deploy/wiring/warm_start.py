"""The supervised warm start: train on right answers until the policy is right often enough for RL to begin."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actors.datasets.order import epoch_order
from actors.datasets.prompts import PromptSource, fixed_prompts
from actors.datasets.rows import Row, RowError
from actors.processors.chat import ChatProcessor
from cluster.records.trajectory import Prompt
from cluster.runtime.seeds import derived_seed
from deploy.wiring.preparation import TRAIN, VALIDATION, Prepared
from learner.learner_group import LearnerGroup
from learner.pictures.teaching import PictureExample
from learner.policies.flow.noising import CleanSequence, Noising
from learner.policies.flow.rows import condition_of
from learner.policies.trained import teaching_noising
from learner.supervised import SupervisedExample

if TYPE_CHECKING:
    from actors.processors.flow import FlowProcessor  # which imports diffusers

_logger = logging.getLogger(__name__)

ORDER_SEED_OFFSET = 1 << 20  # keeps the warm start's data order apart from that of RL
CHECKED_LEVELS = 16  # noise levels at which a picture is checked

Example = Callable[[Prompt, int], Any]
"""(prompt, seed of what is drawn) -> an example that the learner takes."""


async def warm_start(prepared: Prepared, learner: LearnerGroup) -> float:
    """Take supervised steps until the validation accuracy reaches the target; returns the last one measured, else 0."""
    config, processor = prepared.config.warm_start, prepared.processor
    if config.num_steps == 0:
        return 0.0
    seed = prepared.config.seed + ORDER_SEED_OFFSET
    rows = _chosen(prepared.splits[TRAIN].rows, config.num_rows, seed)
    source = PromptSource(rows, processor, seed=seed, split_name=TRAIN, on_skipped=prepared.note_skipped)
    held_out = fixed_prompts(prepared.usable(VALIDATION), processor, config.max_checks_rows).prompts
    teach, check = _examples(prepared)
    checks = [check(prompt, n) for n, prompt in enumerate(held_out)]
    accuracy = 0.0
    for step in range(1, config.num_steps + 1):
        places = range(step * config.batch_size, (step + 1) * config.batch_size)
        metrics = await learner.supervised_step([teach(source.next(), seed + place) for place in places])
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


def _examples(prepared: Prepared) -> tuple[Example, Example]:
    """How rows are taught, and how they are checked."""
    if prepared.config.sampler.is_flow:
        processor = cast("FlowProcessor", prepared.processor)
        taught, checked = (teaching_noising(prepared.config, num) for num in (1, CHECKED_LEVELS))
        return partial(_picture, processor, taught), partial(_picture, processor, checked)
    answer = partial(_answer, cast(ChatProcessor, prepared.processor))
    return answer, answer


def _answer(processor: ChatProcessor, prompt: Prompt, seed: int) -> SupervisedExample:
    _, solution = prompt.references
    answer = processor.encode_answer(solution)
    return SupervisedExample(prompt, answer, np.ones(len(answer), dtype=bool))


def _picture(processor: FlowProcessor, noising: Noising, prompt: Prompt, seed: int) -> PictureExample:
    clean = processor.clean(prompt, derived_seed(seed, "picture"))
    return PictureExample(CleanSequence(clean, condition_of(prompt)[:1], noising, seed))
