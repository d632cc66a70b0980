"""Supervised steps before RL: masked cross-entropy on answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaSpan
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import WarmStartConfig
from mobula.learner.algorithms.policy_losses import Totals, token_mean
from mobula.learner.backends.base import Backend
from mobula.learner.examples import ExampleOutline, all_whole
from mobula.learner.gradient_step import GradientStep
from mobula.learner.meter import Meter
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate, pad_rows
from mobula.learner.policies.head import PLAIN, Distribution


@dataclass(frozen=True)
class SupervisedExample:
    """A prompt and the tokens of its correct answer with EOS, or of a whole episode with a mask.

    Prompt and vision tokens are never trained on.
    """

    prompt: Prompt
    answer_ids: np.ndarray  # int32 [A]
    answer_mask: np.ndarray  # bool [A]: True where a token is trained
    media: tuple[MediaHandle, ...] = ()  # of later turns: `media[i]` fills `media_spans[i]` of `answer_ids`
    media_spans: tuple[MediaSpan, ...] = ()
    labels: ClassVar[tuple[float, ...]] = ()

    @cached_property
    def sequence(self) -> TokenSequence:
        actions = TokenActions(self.answer_ids, media=self.media, media_spans=self.media_spans)
        return TokenSequence.of_actions(self.prompt, actions)

    @property
    def group(self) -> int:
        """A key of the prompt: examples with the same prompt compute it once."""
        return self.sequence.prefix_key(self.prompt.num_tokens)

    @property
    def num_trained(self) -> int:
        return int(self.answer_mask.sum())

    def untrained(self) -> SupervisedExample:
        return replace(self, answer_mask=np.zeros_like(self.answer_mask))


SharedSupervised = SupervisedExample | ExampleOutline
"""An example as a rank has it: whole if it takes it through the model."""
WARMUP_STEPS = 30  # of the cosine schedule


def taught_rate(config: WarmStartConfig, step: int) -> float:
    """Learning rate of warm-start step `step` (from 0); a cosine ends at a tenth of the peak."""
    if config.schedule == "constant":
        return config.learning_rate
    rise = min(1.0, (step + 1) / WARMUP_STEPS)
    return config.learning_rate * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / config.num_steps)))


class SupervisedTrainer:
    """Trains the policy on answers and measures its accuracy. All methods are collective."""

    def __init__(
        self,
        policy: nn.Module,
        backend: Backend,
        step: GradientStep,
        reader: MediaReader,
        device: torch.device,
        sampled: Distribution,
        sequence_parallel: int,
    ) -> None:
        """`policy` has the `forward` of a TokenPolicy; `sampled` is the sampling distribution of responses."""
        self._policy = policy
        self._backend = backend
        self._step = step
        self._reader = reader
        self._device = device
        self._sampled = sampled
        self._sequence_parallel = sequence_parallel

    def step(self, examples: Sequence[SharedSupervised], learning_rate: float) -> dict[str, float]:
        """One step on the mean cross-entropy of trained answer tokens; if there are none, loss 0, `skipped` 1."""
        trained = [example.num_trained for example in examples]
        totals = Totals(num_tokens=sum(trained), num_sequences=sum(n > 0 for n in trained))
        counts = {"num_tokens": float(totals.num_tokens), "learning_rate": learning_rate}
        if totals.num_tokens == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0, **counts}
        meter = Meter(self._sequence_parallel)

        def loss(rows: Sequence[SharedSupervised]) -> Tensor:
            output = self._policy(self._collate(rows), PLAIN)
            part = token_mean(-output.logprobs, self._mask(rows), totals)
            meter.add(loss=part)
            return part

        grad_norm = self._step(examples, loss, learning_rate)
        skipped = float(not np.isfinite(grad_norm))
        return {**meter.reduce(), "grad_norm": grad_norm, "skipped": skipped, **counts}

    def answer_accuracy(self, examples: Sequence[SharedSupervised]) -> float:
        """Returns the share of examples in which each trained token is the argmax given the tokens before it.

        This equals the exact-match accuracy of greedy decoding, without decoding.
        """
        meter = Meter(self._sequence_parallel)
        with self._backend.inference():
            for rows in self._step.shares(examples):
                mask = self._mask(rows)
                output = self._policy(self._collate(rows), self._sampled)
                is_right = (output.is_argmax | ~mask).all(dim=1) & mask.any(dim=1)
                meter.add(right=is_right.sum())
        return meter.reduce()["right"] / len(examples)

    def _collate(self, rows: Sequence[SharedSupervised]) -> TokenBatch:
        return collate([row.sequence for row in all_whole(rows, SupervisedExample)], self._reader, self._device)

    def _mask(self, rows: Sequence[SharedSupervised]) -> Tensor:
        masks = [row.answer_mask for row in all_whole(rows, SupervisedExample)]
        return on_device(pad_rows(masks, 0, np.bool_), self._device)
