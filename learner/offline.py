"""Offline learner: objectives of supervised rows, preference pairs and reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.schema import OfflineConfig, RunConfig
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES
from mobula.learner.algorithms.policy_losses import Totals, token_mean
from mobula.learner.backends.sharded import ShardedWriter
from mobula.learner.examples import (
    DataRows,
    Example,
    ExampleBatch,
    ExampleTotals,
    Row,
    SharedExample,
    all_whole,
    answer_row,
    collate_examples,
    end_row,
    image_row,
    totals_of,
)
from mobula.learner.gradient_step import Term
from mobula.learner.image_teaching import errors
from mobula.learner.learner import Learner
from mobula.learner.meter import Meter
from mobula.learner.optim import NullSlow, SlowWeights, learning_rate
from mobula.learner.policies.adapters import without_adapters
from mobula.learner.policies.flow.policy import Noising, StepRescoring
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.trained import teaching_noising
from mobula.learner.shares import Portion

PAIR_LEVELS = 1  # noise levels of a pair in one step
Model = Callable[..., Any]


"""The forward of `mobula.learner.policies.token.TokenPolicy` or `mobula.learner.policies.token.ScoreModel`."""


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


class OfflineLearner(Learner):
    """A learner rank that runs the steps of `offline.job`. Backends, optimizer, checkpoints and export are those of
    `Learner`.

    `update` and `assess` are collective. A rank gets references to all groups, or outlines and its own `portion`, and
    fetches its share.
    """

    def connect(self, init_method: str) -> None:
        """Connects as a learner does; a flow model keeps its initial weights as the reference."""
        super().connect(init_method)
        self._offline_objective = build_objective(self._config, self._scoring.canary)
        compares = self._config.sampler.is_flow
        self._initial = SlowWeights(self._backend.trained, 0.0, 0.0, ShardedWriter().copied) if compares else NullSlow()

    def update(
        self, groups: Sequence[ScoredGroup], version: int, *, portion: Portion | None = None, **more: object
    ) -> UpdateReport:
        """Takes one optimizer step to `version` on these rows; skips rows without trained tokens."""
        assert not more, f"a step of an offline job has rows alone, not {sorted(more)}"
        with self._profiler.update(version):
            examples = self._compared(self._examples(groups, portion))
            totals, meter = totals_of(examples), Meter(self._config.learner.sequence_parallel)
            rate = learning_rate(self._config.learner, version - 1, self._config.num_steps)
            is_taken, metrics = False, {"loss": 0.0, "grad_norm": 0.0}
            if totals.num_tokens > 0:
                grad_norm = self._optimized([Term(examples, partial(self._part, totals, meter))], rate)
                is_taken, metrics = math.isfinite(grad_norm), {**meter.reduce(), "grad_norm": grad_norm}
            self.version = version
            counts = {"skipped": float(not is_taken), "optimizer_steps": float(is_taken)}
            return UpdateReport(version, {**metrics, "learning_rate": rate, **counts})

    def assess(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> Mapping[str, float]:
        """Returns the job's metrics on these rows without training."""
        examples = self._compared(self._examples(groups, portion))
        totals, meter = totals_of(examples), Meter(self._config.learner.sequence_parallel)
        with self._backend.inference():
            for rows in self._step.shares(examples):
                self._part(totals, meter, rows)
        return meter.reduce()

    def _examples(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> list[SharedExample]:
        row, timeout_s = self._offline_objective.row, self._config.timeouts.object_s
        return self._shares.fetch(DataRows([groups], self._config.learner, row, timeout_s, portion))

    def _compared(self, examples: list[SharedExample]) -> list[SharedExample]:
        """Adds outputs of the initial weights to this rank's examples: predicted velocities for a flow model, log-probs
        for adapters with `reference.place=learner_ranks`. Other examples have log-probs from scorers, or need none."""
        if self._config.sampler.is_flow:
            with self._initial.in_place(), self._backend.inference():
                return self._measured(examples, self._predicted)
        if self._config.reference.place == "learner_ranks":
            # Re-enable adapters after resharding: gathered parameters are not the tensors that the optimizer holds.
            with without_adapters(self._policy), self._backend.inference():
                return self._measured(examples, self._logprobs)
        return examples

    def _measured(
        self, examples: list[SharedExample], measure: Callable[[ExampleBatch, Sequence[Example]], list[Example]]
    ) -> list[SharedExample]:
        measured: dict[int, SharedExample] = {}
        for rows in self._step.shares(examples):
            batch = collate_examples(rows, self._reader, self._device)
            whole = all_whole(rows, Example)
            measured |= {id(row): new for row, new in zip(whole, measure(batch, whole), strict=True)}
        return [measured.get(id(example), example) for example in examples]

    def _predicted(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        predicted = self._policy(batch.tokens, self._scoring.canary).predicted.cpu().numpy()
        return [row.compared(part) for row, part in zip(rows, np.split(predicted, len(rows)), strict=True)]

    def _logprobs(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        logprobs = iter(self._policy(batch.tokens, PLAIN).logprobs.cpu().numpy())
        return [row.referred([next(logprobs) for _ in row.candidates]) for row in rows]

    def _part(self, totals: ExampleTotals, meter: Meter, rows: Sequence[SharedExample]) -> Tensor:
        batch = collate_examples(rows, self._reader, self._device)
        return self._offline_objective(self._policy, batch, totals, meter)
