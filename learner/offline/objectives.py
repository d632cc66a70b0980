"""Objectives of offline jobs: one class for each job, which computes a loss and metrics from a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mobula.configs.schema import OfflineConfig, RunConfig
from mobula.learner.algorithms.aggregation import Totals, token_mean
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES
from mobula.learner.examples.examples import ExampleBatch, ExampleTotals, Row, answer_row, end_row, image_row
from mobula.learner.images.teaching import errors
from mobula.learner.meter import Meter
from mobula.learner.policies.flow.noising import Noising
from mobula.learner.policies.flow.policy import StepRescoring
from mobula.learner.policies.logprobs import PLAIN
from mobula.learner.policies.trained import teaching_noising

PAIR_LEVELS = 1  # noise levels of a pair in one step
Model = Callable[..., Any]
"""The forward of `mobula.learner.policies.token.TokenPolicy` or `mobula.learner.policies.score_model.ScoreModel`."""


class Objective(Protocol):
    """The loss of a job. Parts of one step's loss add up over micro-batches and ranks."""

    @property
    def row(self) -> Row: ...

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        """Returns this micro-batch's part of the step's loss; adds metrics to `meter`."""
        ...


class SupervisedObjective:
    """Mean cross-entropy of the assistant's tokens, with equal weight for each token of all rows.

    `token_accuracy` is the share of trained tokens that are the argmax given the tokens before them. `accuracy` is the
    share of rows in which all trained tokens are.
    """

    row = staticmethod(answer_row)

    def __init__(self, config: OfflineConfig) -> None:
        """This job has no options."""

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        output, counts = model(batch.tokens, PLAIN), Totals(totals.num_tokens, totals.num_examples)
        loss = token_mean(-output.logprobs, batch.mask, counts)
        is_right = (output.is_argmax | ~batch.mask).all(dim=1) & batch.is_trained
        meter.add(
            loss=loss,
            entropy=token_mean(output.entropy, batch.mask, counts),
            token_accuracy=token_mean(output.is_argmax.float(), batch.mask, counts),
            accuracy=is_right.sum() / totals.num_examples,
        )
        return loss


class PreferenceObjective:
    """Direct preference optimisation: `offline.dpo.loss` of the log-ratios of each pair to the initial policy.

    The log-ratio of an answer is the sum over its tokens. The implicit reward of an answer is beta times its log-ratio.
    `accuracy` is the share of pairs in which the chosen answer has the higher implicit reward.
    """

    row = staticmethod(answer_row)

    def __init__(self, config: OfflineConfig) -> None:
        parameters = config.dpo
        self._beta = parameters.beta
        self._loss = partial(
            PREFERENCE_LOSSES[parameters.loss], beta=parameters.beta, label_smoothing=parameters.label_smoothing
        )

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        if batch.reference_logprobs is None:
            raise ValueError(
                "offline.job=dpo but these pairs carry no log-probs of the initial policy: set "
                "resources.reference.num_workers=1"
            )
        by_token = model(batch.tokens, PLAIN).logprobs - batch.reference_logprobs
        chosen, rejected = torch.where(batch.mask, by_token, 0.0).sum(dim=1).view(-1, 2).unbind(dim=1)  # [E] each
        loss = _mean(self._loss(chosen, rejected), batch, totals)
        _measure_pairs(self._beta * chosen, self._beta * rejected, batch, totals, meter, loss)
        return loss


class ImagePreferenceObjective:
    """Diffusion-DPO: `offline.dpo.loss` on images. Both images of a pair have the same noise levels and noise. The
    log-ratio of an image to the initial policy is

        -1/2 mean over levels of (|v - (noise - image)|^2 - |v_initial - (noise - image)|^2),

    with |.|^2 as a mean over the elements of the latents. Source: arXiv:2311.12908, equation 14.
    """

    def __init__(self, config: OfflineConfig, noising: Noising, replay: StepRescoring) -> None:
        parameters = config.dpo
        self.row = partial(image_row, noising)
        self._replay = replay
        self._beta = parameters.beta
        self._loss = partial(
            PREFERENCE_LOSSES[parameters.loss], beta=parameters.beta, label_smoothing=parameters.label_smoothing
        )

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        velocities = model(batch.tokens, self._replay).velocities
        initial = (
            velocities.predicted.detach() if velocities.old is None else velocities.old
        )  # untrained rows have no old velocities
        ratio = -0.5 * (errors(velocities) - errors(velocities._replace(predicted=initial))).mean(dim=1)  # [B]
        chosen, rejected = ratio.view(-1, 2).unbind(dim=1)  # [E] each
        loss = _mean(self._loss(chosen, rejected), batch, totals)
        _measure_pairs(self._beta * chosen, self._beta * rejected, batch, totals, meter, loss)
        return loss


class PairwiseScoreObjective:
    """Reward model from pairs: the Bradley-Terry loss of their scores with margin `offline.reward_model.margin`."""

    row = staticmethod(end_row)

    def __init__(self, config: OfflineConfig) -> None:
        self._loss = partial(SCORE_LOSSES["bradley_terry"], margin=config.reward_model.margin)

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        chosen, rejected = model(batch.tokens)[:, 0].view(-1, 2).unbind(dim=1)  # [E] each
        loss = _mean(self._loss(chosen, rejected), batch, totals)
        _measure_pairs(chosen, rejected, batch, totals, meter, loss)
        return loss


class RegressionScoreObjective:
    """Reward model from labelled answers: the squared error of the score.

    `accuracy` is the share of rows whose score is on the same side of the mean label as their label.
    """

    row = staticmethod(end_row)

    def __init__(self, config: OfflineConfig) -> None:
        self._loss = SCORE_LOSSES["regression"]

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        scores = model(batch.tokens)[:, 0]  # [E]
        loss = _mean(self._loss(scores, batch.labels), batch, totals)
        is_right = (scores > totals.mean_label) == (batch.labels > totals.mean_label)
        meter.add(
            loss=loss,
            accuracy=_mean(is_right.float(), batch, totals),
            absolute_error=_mean((scores - batch.labels).abs(), batch, totals),
        )
        return loss


def build_objective(run: RunConfig, replay: object) -> Objective:
    """Builds the objective of `offline.job`; `replay` is the policy's scoring of rows without a divergence."""
    config = run.offline
    if isinstance(replay, StepRescoring):
        return ImagePreferenceObjective(config, teaching_noising(run, PAIR_LEVELS), replay)
    name = f"{config.job}.{config.reward_model.loss}" if config.job == "reward_model" else config.job
    return OBJECTIVES[name](config)


OBJECTIVES: dict[str, Callable[[OfflineConfig], Objective]] = {
    "sft": SupervisedObjective,
    "dpo": PreferenceObjective,
    "reward_model.bradley_terry": PairwiseScoreObjective,
    "reward_model.regression": RegressionScoreObjective,
}


def _mean(values: Tensor, batch: ExampleBatch, totals: ExampleTotals) -> Tensor:
    """sum_e values / num_examples over trained examples; [E] -> []."""
    return torch.where(batch.is_trained, values, 0.0).sum() / totals.num_examples


def _measure_pairs(
    chosen: Tensor, rejected: Tensor, batch: ExampleBatch, totals: ExampleTotals, meter: Meter, loss: Tensor
) -> None:
    meter.add(
        loss=loss,
        chosen_reward=_mean(chosen, batch, totals),
        rejected_reward=_mean(rejected, batch, totals),
        margin=_mean(chosen - rejected, batch, totals),
        accuracy=_mean((chosen > rejected).float(), batch, totals),
    )
