"""Supervised training of flow models on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.records.media import MediaReader
from mobula.learner.backends.base import Backend
from mobula.learner.examples import ExampleOutline, all_whole
from mobula.learner.gradient_step import GradientStep
from mobula.learner.meter import Meter
from mobula.learner.policies.base import Velocities
from mobula.learner.policies.flow.policy import CleanSequence, StepRescoring, collate_noised


@dataclass(frozen=True)
class ImageExample:
    """A prompt, its target image, and the noise levels to train on."""

    sequence: CleanSequence
    is_trained: bool = True
    group: ClassVar[None] = None  # no siblings
    labels: ClassVar[tuple[float, ...]] = ()

    @property
    def num_trained(self) -> int:
        return int(self.is_trained)

    def untrained(self) -> ImageExample:
        return replace(self, is_trained=False)


SharedImage = ImageExample | ExampleOutline


"""An image as a rank has it: whole if it takes it through the model."""


class ImageTrainer:
    """Trains a flow model on images and measures its velocity error. All methods are collective."""

    def __init__(
        self,
        policy: nn.Module,
        backend: Backend,
        step: GradientStep,
        reader: MediaReader,
        device: torch.device,
        replay: StepRescoring,
    ) -> None:
        self._policy = policy
        self._backend = backend
        self._step = step
        self._reader = reader
        self._device = device
        self._replay = replace(replay, divergence="none")

    def step(self, examples: Sequence[SharedImage], learning_rate: float) -> dict[str, float]:
        """Takes one step on the mean of (v - (noise - image))^2 over images, levels and elements.

        Source: Flow Matching for Generative Modeling, arXiv:2210.02747.
        """
        meter = Meter()

        def loss(rows: Sequence[SharedImage]) -> Tensor:
            squares = errors(self._velocities(rows)).mean(1)
            part = torch.where(self._is_trained(rows), squares, 0.0).sum() / len(examples)
            meter.add(loss=part)
            return part

        grad_norm = self._step(examples, loss, learning_rate)
        skipped = float(not np.isfinite(grad_norm))
        counts = {"num_tokens": float(len(examples)), "learning_rate": learning_rate}
        return {**meter.reduce(), "grad_norm": grad_norm, "skipped": skipped, **counts}

    def answer_accuracy(self, examples: Sequence[SharedImage]) -> float:
        """Returns the explained share of the squared velocities, at least 0:
        1 - sum (v - (noise - image))^2 / sum (noise - image)^2.

        A model that predicts 0 has 0. It stays below 1: noise can be predicted only at high noise levels.
        """
        meter = Meter()
        with self._backend.inference():
            for rows in self._step.shares(examples):
                velocities = self._velocities(rows)
                mask = self._is_trained(rows)
                squares = (velocities.noise - velocities.clean).square().flatten(2).mean(2)
                meter.add(
                    missed=torch.where(mask, errors(velocities).mean(1), 0.0).sum(),
                    asked=torch.where(mask, squares.mean(1), 0.0).sum(),
                )
        sums = meter.reduce()
        return max(0.0, 1 - sums["missed"] / sums["asked"])

    def _velocities(self, rows: Sequence[SharedImage]) -> Velocities:
        batch = collate_noised([row.sequence for row in all_whole(rows, ImageExample)], self._reader, self._device)
        velocities = self._policy(batch, self._replay).velocities
        assert velocities is not None, "a flow model was given clean images"
        return velocities

    def _is_trained(self, rows: Sequence[SharedImage]) -> Tensor:
        return torch.tensor([row.is_trained for row in all_whole(rows, ImageExample)], device=self._device)


def errors(velocities: Velocities) -> Tensor:
    """[B, K]: mean of (v - (noise - image))^2 over the elements of the latents."""
    return (velocities.predicted - (velocities.noise - velocities.clean)).square().flatten(2).mean(2)
