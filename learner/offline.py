"""Steps on examples: the warm start, the supervised term of RL, and the objectives of offline jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.schema import RunConfig
from mobula.configs.schema.learner import KTOConfig
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES, kto
from mobula.learner.algorithms.policy_losses import token_mean
from mobula.learner.backends.base import Backend
from mobula.learner.backends.sharded import ShardedWriter
from mobula.learner.examples import (
    DataRows,
    Example,
    ExampleBatch,
    ExampleTotals,
    Row,
    SharedExample,
    StoredExample,
    TaughtExamples,
    all_whole,
    answer_row,
    collate_examples,
    end_row,
    image_row,
    parts_of,
    totals_of,
)
from mobula.learner.gradient_step import GradientStep, Term
from mobula.learner.meter import Meter
from mobula.learner.optim import NullAverage, NullSlow, SlowWeights, WeightAverage, learning_rate, taught_rate
from mobula.learner.policies.adapters import without_adapters
from mobula.learner.policies.base import Velocities
from mobula.learner.policies.flow.policy import StepRescoring
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.trained import Scoring, teaching_noising
from mobula.learner.shares import ROWS, Portion, ShareFetcher

PAIR_LEVELS = 1  # noise levels of a pair in one step
Model = Callable[..., Any]
"""The forward of `mobula.learner.policies.token.TokenPolicy` or `mobula.learner.policies.token.ScoreModel`."""


class Objective(Protocol):
    """The loss of a job. Parts of one step's loss add up over micro-batches and ranks."""

    @property
    def row(self) -> Row: ...

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        """Returns this micro-batch's part of the step's loss; adds metrics to `meter`."""


@dataclass(frozen=True)
class StepParts:
    """What steps on this rank's policy are made of."""

    config: RunConfig
    shares: ShareFetcher
    reader: MediaReader
    backend: Backend
    policy: nn.Module
    scoring: Scoring
    step: GradientStep
    average: WeightAverage | NullAverage

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.resources.device)

    def collated(self, rows: Sequence[SharedExample]) -> ExampleBatch:
        return collate_examples(rows, self.reader, self.device)

    def meter(self) -> Meter:
        return Meter(self.config.learner.sequence_parallel)

    def optimized(
        self, terms: Sequence[Term[Any]], rate: float, before_step: Callable[[], None] | None = None
    ) -> float:
        """Takes one optimizer step and returns the gradient norm. Skips the step if the norm is not finite."""
        grad_norm = self.step.on_sum(terms, rate, before_step)
        if math.isfinite(grad_norm):
            self.average.update()
        return grad_norm


class SupervisedTerm:
    """loss of an optimizer step = RL loss + coef * mean over trained tokens of the step's rows of -log p.

    Each minibatch of each epoch has `algorithm.supervised.batch_size` rows of its own. p is the policy at temperature 1
    and without bans, as in `offline.job=sft`.

    Source: Training language models to follow instructions with human feedback, arXiv:2203.02155, equation 2.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._settings = parts.config.algorithm.supervised

    def fetch(self, rows: Sequence[ScoredGroup], portion: Portion | None = None) -> list[list[SharedExample]]:
        """The examples of each optimizer step of an update. Collective.

        Args:
            rows: with all references, or outlines of rows to which `portion` adds the references of this rank.
        """
        if not rows:
            return []
        entries = DataRows(parts_of(rows, self._settings.batch_size), self._parts.config, answer_row, portion, ROWS)
        return entries.in_parts(self._parts.shares.fetch(entries))

    def terms(self, examples: Sequence[Sequence[SharedExample]], step: int, meter: Meter) -> list[Term[SharedExample]]:
        """Terms that are added to the loss of optimizer step `step` of the update; none without rows."""
        if not examples:
            return []
        return [Term(examples[step], partial(self._loss, totals_of(examples[step]), meter))]

    def _loss(self, totals: ExampleTotals, meter: Meter, rows: Sequence[SharedExample]) -> Tensor:
        batch = self._parts.collated(rows)
        part = token_mean(-self._parts.policy(batch.tokens, PLAIN).logprobs, batch.mask, totals)
        loss = self._settings.coef * part
        meter.add(loss=loss, supervised_loss=part)
        return loss


class SupervisedObjective:
    """Mean cross-entropy of the assistant's tokens, with equal weight for each token of all rows.

    `token_accuracy` is the share of trained tokens that are the argmax given the tokens before them. `accuracy` is the
    share of rows in which all trained tokens are.
    """

    row = staticmethod(answer_row)

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        output = model(batch.tokens, PLAIN)
        loss = token_mean(-output.logprobs, batch.mask, totals)
        is_right = (output.is_argmax | ~batch.mask).all(dim=1) & batch.is_trained
        meter.add(
            loss=loss,
            entropy=token_mean(output.entropy, batch.mask, totals),
            token_accuracy=token_mean(output.is_argmax.float(), batch.mask, totals),
            accuracy=is_right.sum() / totals.num_sequences,
        )
        return loss


@dataclass(frozen=True)
class PairObjective:
    """The loss of pairs, whose chosen answer has the implicit reward `scale` times its number.

    `accuracy` is the share of pairs in which the chosen answer has the higher implicit reward.
    """

    row: Row
    numbers: Callable[[Model, ExampleBatch], Tensor]  # -> [2 E]: of the chosen and the rejected answer of each pair
    loss: Callable[[Tensor, Tensor], Tensor]  # numbers of chosen and rejected answers, [E] each -> [E]
    scale: float = 1.0

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        chosen, rejected = self.numbers(model, batch).view(-1, 2).unbind(dim=1)  # [E] each
        loss = _mean(self.loss(chosen, rejected), batch, totals)
        chosen, rejected = self.scale * chosen, self.scale * rejected
        meter.add(
            loss=loss,
            chosen_reward=_mean(chosen, batch, totals),
            rejected_reward=_mean(rejected, batch, totals),
            margin=_mean(chosen - rejected, batch, totals),
            accuracy=_mean((chosen > rejected).float(), batch, totals),
        )
        return loss


def log_ratios(model: Model, batch: ExampleBatch) -> Tensor:
    """Direct preference optimisation: the log-ratio of an answer to the initial policy, summed over its tokens."""
    if batch.reference_logprobs is None:
        raise ValueError(
            "offline.job=dpo but these pairs carry no log-probs of the initial policy: set "
            "resources.reference.num_workers=1"
        )
    by_token = model(batch.tokens, PLAIN).logprobs - batch.reference_logprobs
    return torch.where(batch.mask, by_token, 0.0).sum(dim=1)


@dataclass(frozen=True)
class LabelObjective:
    """KTO. An example has its own answer and that of another row; the mean log-ratio of the latter over a step, not
    below 0, is the divergence that answers are compared with, without a gradient.

    `accuracy` is the share of rows whose log-ratio is above the divergence if their label is true, else below it.
    """

    row = staticmethod(answer_row)
    config: KTOConfig
    divergence: float = 0.0

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        ratios, is_desirable = log_ratios(model, batch).view(-1, 2)[:, 0], batch.labels.view(-1, 2)[:, 0] > 0
        weights = self.config.desirable_weight, self.config.undesirable_weight
        by_row = kto(ratios, is_desirable, divergence=self.divergence, beta=self.config.beta, weights=weights)
        loss, rewards = _mean(by_row, batch, totals), self.config.beta * ratios
        meter.add(
            loss=loss,
            chosen_reward=_mean(torch.where(is_desirable, rewards, 0.0), batch, totals),
            rejected_reward=_mean(torch.where(is_desirable, 0.0, rewards), batch, totals),
            kl=_mean(torch.full_like(ratios, self.divergence), batch, totals),
            accuracy=_mean(((ratios > self.divergence) == is_desirable).float(), batch, totals),
        )
        return loss

    def measured(self, parts: StepParts, examples: Sequence[SharedExample], totals: ExampleTotals) -> LabelObjective:
        """The objective with the divergence of a step. Collective."""
        meter = parts.meter()
        with parts.backend.inference():
            for rows in parts.step.shares(examples):
                batch = parts.collated(rows)
                meter.add(divergence=_mean(log_ratios(parts.policy, batch).view(-1, 2)[:, 1], batch, totals))
        return replace(self, divergence=max(0.0, meter.reduce()["divergence"]))


def image_log_ratios(replay: StepRescoring, model: Model, batch: ExampleBatch) -> Tensor:
    """Diffusion-DPO: the log-ratio of an image to the initial policy is

        -1/2 mean over levels of (|v - (noise - image)|^2 - |v_initial - (noise - image)|^2),

    with |.|^2 as a mean over the elements of the latents. Both images of a pair have the same noise levels and noise.
    Source: arXiv:2311.12908, equation 14.
    """
    velocities = model(batch.tokens, replay).velocities
    # Untrained rows have no old velocities.
    initial = velocities.predicted.detach() if velocities.old is None else velocities.old
    return -0.5 * (errors(velocities) - errors(velocities._replace(predicted=initial))).mean(dim=1)


def scores(model: Model, batch: ExampleBatch) -> Tensor:
    return model(batch.tokens)[:, 0]


class RegressionScoreObjective:
    """Reward model from labelled answers: the squared error of the score.

    `accuracy` is the share of rows whose score is on the same side of the mean label as their label.
    """

    row = staticmethod(end_row)

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        predicted = scores(model, batch)  # [E]
        loss = _mean(SCORE_LOSSES["regression"](predicted, batch.labels), batch, totals)
        is_right = (predicted > totals.mean_label) == (batch.labels > totals.mean_label)
        meter.add(
            loss=loss,
            accuracy=_mean(is_right.float(), batch, totals),
            absolute_error=_mean((predicted - batch.labels).abs(), batch, totals),
        )
        return loss


def build_objective(run: RunConfig, replay: object) -> Objective:
    """Builds the objective of `offline.job`; `replay` is the policy's scoring of rows without a divergence."""
    config, dpo = run.offline, run.offline.dpo
    preference = partial(PREFERENCE_LOSSES[dpo.loss], beta=dpo.beta, label_smoothing=dpo.label_smoothing)
    if isinstance(replay, StepRescoring):
        row = partial(image_row, teaching_noising(run, PAIR_LEVELS))
        return PairObjective(row, partial(image_log_ratios, replay), preference, dpo.beta)
    if config.job == "dpo":
        return PairObjective(answer_row, log_ratios, preference, dpo.beta)
    if config.job == "kto":
        return LabelObjective(config.kto)
    if config.job != "reward_model":
        return SupervisedObjective()
    if config.reward_model.loss == "regression":
        return RegressionScoreObjective()
    return PairObjective(end_row, scores, partial(SCORE_LOSSES["bradley_terry"], margin=config.reward_model.margin))


def _mean(values: Tensor, batch: ExampleBatch, totals: ExampleTotals) -> Tensor:
    """sum_e values / num_sequences over trained examples; [E] -> []."""
    return torch.where(batch.is_trained, values, 0.0).sum() / totals.num_sequences


class ImageObjective:
    """Mean of (v - (noise - image))^2 over images, noise levels and elements.

    Source: Flow Matching for Generative Modeling, arXiv:2210.02747.
    """

    def __init__(self, replay: StepRescoring) -> None:
        self._replay = replace(replay, divergence="none")

    def __call__(self, model: Model, batch: ExampleBatch, totals: ExampleTotals, meter: Meter) -> Tensor:
        loss = _mean(errors(self.velocities(model, batch)).mean(1), batch, totals)
        meter.add(loss=loss)
        return loss

    def velocities(self, model: Model, batch: ExampleBatch) -> Velocities:
        velocities: Velocities | None = model(batch.tokens, self._replay).velocities
        assert velocities is not None, "a flow model was given clean images"
        return velocities


def errors(velocities: Velocities) -> Tensor:
    """[B, K]: mean of (v - (noise - image))^2 over the elements of the latents."""
    return (velocities.predicted - (velocities.noise - velocities.clean)).square().flatten(2).mean(2)


class WarmStart:
    """Trains the policy on answers or images before RL, with an optimizer of its own, and measures it."""

    def __init__(self, parts: StepParts, step: GradientStep) -> None:
        """`step` takes the steps instead of that of `parts`: RL starts with a fresh optimizer."""
        self._parts = replace(parts, step=step, average=NullAverage())
        scoring = parts.scoring.training
        self._objective: ImageObjective | SupervisedObjective = (
            ImageObjective(scoring) if isinstance(scoring, StepRescoring) else SupervisedObjective()
        )
        self._num_steps = 0

    def step(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> dict[str, float]:
        """One step; without trained tokens there is none, loss 0 and `skipped` 1."""
        rate = taught_rate(self._parts.config.warm_start, self._num_steps)
        self._num_steps += 1
        fetched = self._fetched(examples, portion)
        totals, meter = totals_of(fetched), self._parts.meter()
        counts = {"num_tokens": float(totals.num_tokens), "learning_rate": rate}
        if totals.num_tokens == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0, **counts}

        def loss(rows: Sequence[SharedExample]) -> Tensor:
            return self._objective(self._parts.policy, self._parts.collated(rows), totals, meter)

        grad_norm = self._parts.optimized([Term(fetched, loss)], rate)
        return {**meter.reduce(), "grad_norm": grad_norm, "skipped": float(not math.isfinite(grad_norm)), **counts}

    def accuracy(self, examples: Sequence[StoredExample], portion: Portion | None = None) -> float:
        """Returns the share of examples in which each trained token is the argmax given the tokens before it, which is
        the exact-match accuracy of greedy decoding.

        For images, the explained share of the squared velocities, at least 0:
        1 - sum (v - (noise - image))^2 / sum (noise - image)^2. A model that predicts 0 has 0. It stays below 1: noise
        can be predicted only at high noise levels.
        """
        fetched, meter = self._fetched(examples, portion), self._parts.meter()
        with self._parts.backend.inference():
            for rows in self._parts.step.shares(fetched):
                batch = self._parts.collated(rows)
                if isinstance(self._objective, ImageObjective):
                    velocities = self._objective.velocities(self._parts.policy, batch)
                    squares = (velocities.noise - velocities.clean).square().flatten(2).mean(2)
                    sums = {"missed": errors(velocities).mean(1), "asked": squares.mean(1)}
                    meter.add(**{name: torch.where(batch.is_trained, of, 0.0).sum() for name, of in sums.items()})
                else:
                    output = self._parts.policy(batch.tokens, self._parts.scoring.training)
                    is_right = (output.is_argmax | ~batch.mask).all(dim=1) & batch.mask.any(dim=1)
                    meter.add(right=is_right.sum())
        found = meter.reduce()
        return found["right"] / len(fetched) if "right" in found else max(0.0, 1 - found["missed"] / found["asked"])

    def _fetched(self, examples: Sequence[StoredExample], portion: Portion | None) -> list[SharedExample]:
        return self._parts.shares.fetch(TaughtExamples(examples, self._parts.config, portion))


class OfflineSteps:
    """The steps of `offline.job`. Collective.

    A rank gets references to all groups, or outlines and its own `portion`, and fetches its share. A flow model keeps
    its initial weights as the reference.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._objective = build_objective(parts.config, parts.scoring.canary)
        trained, compares = parts.backend.trained, parts.config.sampler.is_flow
        self._initial = SlowWeights(trained, 0.0, 0.0, ShardedWriter().copied) if compares else NullSlow()

    def update(
        self, groups: Sequence[ScoredGroup], version: int, *, portion: Portion | None = None, **more: object
    ) -> UpdateReport:
        """Takes one optimizer step to `version` on these rows; skips rows without trained tokens."""
        assert not more, f"a step of an offline job has rows alone, not {sorted(more)}"
        examples = self._compared(self.examples(groups, portion))
        totals, meter = totals_of(examples), self._parts.meter()
        rate = learning_rate(self._config.learner, version - 1, self._config.num_steps)
        is_taken, metrics = False, {"loss": 0.0, "grad_norm": 0.0}
        if totals.num_tokens > 0:
            objective = self._measured_objective(examples, totals)
            grad_norm = self._parts.optimized([Term(examples, partial(self._part, objective, totals, meter))], rate)
            is_taken, metrics = math.isfinite(grad_norm), {**meter.reduce(), "grad_norm": grad_norm}
        counts = {"skipped": float(not is_taken), "optimizer_steps": float(is_taken)}
        return UpdateReport(version, {**metrics, "learning_rate": rate, **counts})

    def assess(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> Mapping[str, float]:
        """Returns the job's metrics on these rows without training."""
        examples = self._compared(self.examples(groups, portion))
        totals, meter = totals_of(examples), self._parts.meter()
        objective = self._measured_objective(examples, totals)
        with self._parts.backend.inference():
            for rows in self._parts.step.shares(examples):
                self._part(objective, totals, meter, rows)
        return meter.reduce()

    def _measured_objective(self, examples: Sequence[SharedExample], totals: ExampleTotals) -> Objective:
        objective = self._objective
        if isinstance(objective, LabelObjective):
            return objective.measured(self._parts, examples, totals)
        return objective

    def examples(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> list[SharedExample]:
        """Returns the examples of all ranks, those of this rank's share whole."""
        return self._parts.shares.fetch(DataRows([groups], self._config, self._objective.row, portion))

    def _compared(self, examples: list[SharedExample]) -> list[SharedExample]:
        """Adds outputs of the initial weights to this rank's examples: predicted velocities for a flow model, log-probs
        for adapters with `reference.place=learner_ranks`. Other examples have log-probs from scorers, or need none."""
        if self._config.sampler.is_flow:
            with self._initial.in_place(), self._parts.backend.inference():
                return self._measured(examples, self._predicted)
        if self._config.reference.place == "learner_ranks":
            # Re-enable adapters after resharding: gathered parameters are not the tensors that the optimizer holds.
            with without_adapters(self._parts.policy), self._parts.backend.inference():
                return self._measured(examples, self._logprobs)
        return examples

    def _measured(
        self, examples: list[SharedExample], measure: Callable[[ExampleBatch, Sequence[Example]], list[Example]]
    ) -> list[SharedExample]:
        measured: dict[int, SharedExample] = {}
        for rows in self._parts.step.shares(examples):
            batch = self._parts.collated(rows)
            whole = all_whole(rows, Example)
            measured |= {id(row): new for row, new in zip(whole, measure(batch, whole), strict=True)}
        return [measured.get(id(example), example) for example in examples]

    def _predicted(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        predicted = self._parts.policy(batch.tokens, self._parts.scoring.canary).predicted.cpu().numpy()
        return [row.compared(part) for row, part in zip(rows, np.split(predicted, len(rows)), strict=True)]

    def _logprobs(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        logprobs = iter(self._parts.policy(batch.tokens, PLAIN).logprobs.cpu().numpy())
        return [row.referred([next(logprobs) for _ in row.candidates]) for row in rows]

    def _part(self, objective: Objective, totals: ExampleTotals, meter: Meter, rows: Sequence[SharedExample]) -> Tensor:
        return objective(self._parts.policy, self._parts.collated(rows), totals, meter)
