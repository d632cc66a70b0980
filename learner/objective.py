"""The RL objective: policy loss, KL and distillation terms, entropy bonus, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from mobula.cluster.user_code import chosen
from mobula.configs.schema import AlgorithmConfig
from mobula.learner.algorithms.corrections import CORRECTIONS, OLD_LOGPROBS, by_age, truncated_importance
from mobula.learner.algorithms.flow_losses import FLOW_LOSSES, Reads
from mobula.learner.algorithms.kl import capped, kl_estimator, reverse_kl
from mobula.learner.algorithms.policy_losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    Totals,
    token_mean,
)
from mobula.learner.batch import LearnerBatch
from mobula.learner.credit import missing_reference
from mobula.learner.meter import Meter
from mobula.learner.policies.base import PolicyOutput

NO_CLASSES: Mapping[str, Tensor] = {}


class PolicyObjective:
    """loss = policy loss + KL coefficient * KL + distillation - entropy.bonus * entropy, each aggregated to one number.

    The policy loss of a token is `algorithm.loss` times the weight of `algorithm.correction`. Tokens older than
    `algorithm.max_staleness` have a loss of their own, and none beyond `algorithm.max_trained_age`. A token without a
    loss still counts where a mean is taken.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        given, own = ("values", "mask", "totals", "norm"), config.loss_aggregation_options
        aggregation = chosen(AGGREGATIONS, config.loss_aggregation, "algorithm.loss_aggregation", given, own)
        self._aggregate = partial(aggregation, norm=config.loss_norm)
        self._policy_loss = _policy_loss(config)
        self._old = OLD_LOGPROBS[config.old_logprobs]
        takes = ("proximal_logprobs", "behavior_logprobs", "mask")
        correction = chosen(CORRECTIONS, config.correction, "algorithm.correction", takes, config.correction_options)
        self._correction = partial(correction, **config.correction_parameters)
        self._kl = kl_estimator(config.kl)

    def __call__(
        self, output: PolicyOutput, batch: LearnerBatch, totals: Totals, meter: Meter, kl_coef: float
    ) -> Tensor:
        """Returns the micro-batch's part of the minibatch's loss; adds metrics to `meter`."""
        mask = batch.loss_mask
        old = self._old(output.logprobs, batch.behavior_logprobs, batch.old_logprobs, batch.ages)
        policy = self._policy_loss(output, old, batch)
        weights = self._correction(old, batch.behavior_logprobs, mask)
        # Correction before aggregation: the denominator counts all trained tokens, also those of weight 0.
        config, cap = self._config, self._config.over_age.weight_cap
        over_age = truncated_importance(output.logprobs, batch.behavior_logprobs, batch.advantages, weight_cap=cap)
        limits = {"max_staleness": config.max_staleness, "max_age": config.max_trained_age}
        by_token = by_age(policy.loss * weights, over_age, batch.ages, **limits)
        policy_loss = self._aggregate(torch.where(batch.policy_mask, by_token, 0.0), mask, totals)
        entropy = torch.where(batch.kept_mask, output.entropy, 0.0)
        loss = policy_loss + self._kl_term(output, batch, totals, meter, kl_coef)
        loss = loss + self._distillation_term(output, batch, totals)
        if config.entropy.bonus > 0:
            loss = loss - config.entropy.bonus * self._aggregate(entropy, mask, totals)
        meter.add(
            loss=loss,
            policy_loss=policy_loss,
            entropy=token_mean(output.entropy, mask, totals),
            clip_fraction=token_mean(policy.is_clipped.float(), mask, totals),
            ratio_mean=token_mean(policy.ratio, mask, totals),
            rejected_fraction=token_mean((weights == 0).float(), mask, totals),
            correction_weight=token_mean(weights, mask, totals),
            without_loss_fraction=token_mean((~batch.policy_mask).float(), mask, totals),
        )
        meter.keep_max(ratio_max=torch.where(mask, policy.ratio, 0.0).max())
        return loss

    def _kl_term(
        self, output: PolicyOutput, batch: LearnerBatch, totals: Totals, meter: Meter, coef: float
    ) -> Tensor | float:
        config = self._config.kl
        if output.divergence is not None:
            by_token = output.divergence
        elif batch.reference_logprobs is None:
            if config.coef > 0:
                raise ValueError(missing_reference(self._config))
            return 0.0
        else:
            by_token = self._kl(output.logprobs, batch.reference_logprobs, batch.behavior_logprobs)
        kl = torch.where(self._is_left_out(batch), 0.0, capped(by_token, config.token_cap))
        meter.add(kl=token_mean(kl, batch.loss_mask, totals))
        if config.coef == 0 or config.place == "reward":
            return 0.0
        return coef * self._aggregate(kl, batch.loss_mask, totals)

    def _distillation_term(self, output: PolicyOutput, batch: LearnerBatch, totals: Totals) -> Tensor | float:
        config = self._config.distillation
        if not config.is_on or config.place == "advantage":
            return 0.0
        if batch.reference_logprobs is None:
            raise ValueError(missing_reference(self._config))
        by_token = reverse_kl(output.logprobs, batch.reference_logprobs, batch.behavior_logprobs, config.token_cap)
        trained = torch.where(self._is_left_out(batch), 0.0, by_token)
        return config.coef * self._aggregate(trained, batch.loss_mask, totals)

    def _is_left_out(self, batch: LearnerBatch) -> Tensor:
        """bool [B, T]: tokens without a term of the loss."""
        return (batch.ages > self._config.max_trained_age) | ~batch.kept_mask


Loss = Callable[[PolicyOutput, Tensor, LearnerBatch], PolicyLoss]
"""(what the policy says, log-probs of the old policy, the batch) -> the policy loss, [B, T]"""


def _policy_loss(config: AlgorithmConfig) -> Loss:
    flow_loss = FLOW_LOSSES.get(config.loss)
    if flow_loss is not None:
        return partial(READERS[flow_loss.reads], flow_loss.given(config.loss_parameters))
    given = ("logprobs", "old_logprobs", "advantages", "mask")
    loss = chosen(POLICY_LOSSES, config.loss, "algorithm.loss", given, config.loss_options)
    return partial(_of_likelihoods, partial(loss, **config.loss_parameters))


def _of_likelihoods(loss: PolicyLossFunction, output: PolicyOutput, old: Tensor, batch: LearnerBatch) -> PolicyLoss:
    return loss(output.logprobs, old, batch.advantages, batch.loss_mask)


def _of_moves(loss: PolicyLossFunction, output: PolicyOutput, old: Tensor, batch: LearnerBatch) -> PolicyLoss:
    moves = output.moves
    assert moves is not None and moves.drift is not None, "a scoring pass comes before a loss of moves"
    std, length = (torch.where(batch.loss_mask, values, 1.0) for values in (moves.std, moves.length))
    return loss(output.logprobs, old, batch.advantages, std, length, moves.drift)


def _of_velocities(loss: PolicyLossFunction, output: PolicyOutput, old: Tensor, batch: LearnerBatch) -> PolicyLoss:
    velocities = output.velocities
    assert velocities is not None and velocities.old is not None, "a scoring pass comes before a loss of velocities"
    return loss(
        velocities.predicted, velocities.old, velocities.noised, velocities.clean, velocities.sigmas, batch.advantages
    )


READERS: dict[Reads, Callable[..., PolicyLoss]] = {"moves": _of_moves, "velocities": _of_velocities}


def measure_gap(
    output: PolicyOutput,
    batch: LearnerBatch,
    tokens: tuple[int, int],
    meter: Meter,
    classes: Mapping[str, Tensor] = NO_CLASSES,
) -> None:
    """|learner - behaviour| of the sampled tokens' log-probs, before any step; `tokens` as `tokens_by_age`.

    For tokens of the weights that are trained from, this is the gap between two implementations of one policy
    (`logprob_gap_*`; `movement.ratios` divides the sums of first and last tokens, and of `classes`: name -> bool
    [B, T]). For older ones it is how far the policy has moved since (`logprob_drift_mean`).
    """
    gap = (output.logprobs - batch.behavior_logprobs).abs()
    num_current, num_older = tokens
    if num_current > 0:
        is_current = batch.loss_mask & (batch.ages == 0)
        current = torch.where(is_current, gap, 0.0)
        meter.add(logprob_gap_mean=current.sum() / num_current)
        meter.keep_max(logprob_gap_max=current.max())
        count = batch.loss_mask.cumsum(dim=1)
        last = count.max(dim=1, keepdim=True).values
        for name, is_member in {"first": count == 1, "last": count == last, **classes}.items():
            is_chosen = is_current & is_member
            meter.add(**{f"gap_{name}": torch.where(is_chosen, gap, 0.0).sum(), f"num_{name}": is_chosen.sum().float()})
    if num_older > 0:
        older = torch.where(batch.loss_mask & (batch.ages > 0), gap, 0.0)
        meter.add(logprob_drift_mean=older.sum() / num_older)
