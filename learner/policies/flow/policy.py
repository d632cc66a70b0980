"""FlowPolicy: a flow model as a policy over denoising steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mobula.learner.policies.adapters import has_adapters, without_adapters
from mobula.learner.policies.base import Moves, Policy, PolicyOutput, Velocities
from mobula.learner.policies.flow.denoising import Denoising, velocities
from mobula.learner.policies.flow.families import FlowFamily
from mobula.learner.policies.flow.rows import LatentBatch, NoisedBatch
from mobula.learner.policies.sde import FlowStep, Transition, gaussian_kl


@dataclass(frozen=True)
class StepRescoring:
    """Settings for rescoring stored steps.

    `divergence` is the KL divergence to the model without its adapters: `exact`, or `per_time`, which does not depend
    on the size of the steps (`mobula.learner.policies.sde.gaussian_kl`).
    """

    denoising: Denoising
    divergence: Literal["none", "exact", "per_time"]


class FlowPolicy(Policy):
    """Scores denoising steps, given the latents before each step and the encoded prompt."""

    def __init__(self, model: nn.Module, family: FlowFamily) -> None:
        super().__init__()
        self.model = model
        self._family = family

    def blocks(self) -> Iterator[nn.Module]:
        kinds = getattr(self.model, "_no_split_modules", None) or ()
        return (module for module in self.model.modules() if type(module).__name__ in kinds)

    def forward(
        self, batch: LatentBatch | NoisedBatch, replay: StepRescoring, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's steps, all N of them side by side, and their divergence where it is asked for. Of
        clean images: velocities at their noise levels, without guidance, and log-probs of 0.

        The entropy is that of one number of the latents. It depends on the schedule alone, so it has no gradient.
        """
        if isinstance(batch, NoisedBatch):
            return self._at_levels(batch, replay)
        moved = self._transition(batch, replay.denoising)
        entropy = (torch.log(moved.std) + 0.5 * math.log(2 * math.pi * math.e)).flatten()
        output = PolicyOutput(
            batch.padded(moved.logprobs(batch.next_latents)),
            batch.padded(entropy.detach()),
            batch.padded(torch.zeros_like(entropy, dtype=torch.bool)),
            predicted=moved.mean.detach(),
            moves=_moves(moved, batch),
        )
        if replay.divergence == "none":
            return output
        with self._as_reference():
            reference = self._transition(batch, replay.denoising)
        scale = moved.std if replay.divergence == "exact" else moved.rate
        kl = gaussian_kl(moved.mean, reference.mean, scale)
        return output._replace(divergence=batch.padded(kl))

    def _at_levels(self, batch: NoisedBatch, replay: StepRescoring) -> PolicyOutput:
        """`divergence` is the mean over levels and numbers of (v - reference v)^2."""
        velocity = self._velocity(batch)
        nothing = velocity.new_zeros(len(velocity) // batch.num_draws, 1)
        output = PolicyOutput(
            nothing,
            nothing,
            nothing.bool(),
            predicted=velocity.detach(),
            velocities=Velocities(
                _by_image(velocity, batch),
                None if batch.old is None else _by_image(batch.old, batch),
                _by_image(batch.clean, batch),
                _by_image(batch.noise, batch),
                _by_image(batch.sigmas.view(-1, *(1,) * (velocity.ndim - 1)), batch),
            ),
        )
        if replay.divergence == "none":
            return output
        with self._as_reference():
            reference = self._velocity(batch)
        squares = _by_image((velocity - reference) ** 2, batch)
        return output._replace(divergence=squares.flatten(1).mean(1, keepdim=True))

    def _velocity(self, batch: NoisedBatch) -> Tensor:
        conditions = {name: tensor[batch.condition_rows] for name, tensor in batch.conditions.items()}
        return velocities(self.model, self._family, batch.noised, batch.timesteps, conditions, None, guidance=1)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Without gradients and adapters."""
        if not has_adapters(self.model):
            raise ValueError(
                "algorithm.kl.coef is above 0, and a flow model is compared with itself without adapters: set "
                "policy.lora.rank above 0, or algorithm.kl.coef=0"
            )
        with torch.no_grad(), without_adapters(self.model):
            yield

    def _transition(self, batch: LatentBatch, denoising: Denoising) -> Transition:
        def of(rows: Tensor) -> dict[str, Tensor]:
            return {name: tensor[rows] for name, tensor in batch.conditions.items()}

        negatives = None if batch.negative_rows is None else of(batch.negative_rows)
        inputs = (batch.latents, batch.timesteps, of(batch.condition_rows), negatives)
        velocity = velocities(self.model, self._family, *inputs, denoising.guidance)
        step = FlowStep(batch.latents, velocity, batch.sigmas, batch.next_sigmas, batch.max_sigmas)
        return denoising.transition(step)


def _moves(moved: Transition, batch: LatentBatch) -> Moves:
    drift = None if batch.old_means is None else gaussian_kl(moved.mean, batch.old_means, moved.std)
    return Moves(
        batch.padded(moved.std.flatten().detach()),
        batch.padded(batch.sigmas - batch.next_sigmas),
        None if drift is None else batch.padded(drift),
    )


def _by_image(values: Tensor, batch: NoisedBatch) -> Tensor:
    """[N, ...] -> [B, K, ...]"""
    return values.unflatten(0, (-1, batch.num_draws))
