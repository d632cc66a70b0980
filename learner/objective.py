"""The RL objective: clipped policy loss plus a KL term, and the numbers that tell how it goes."""

from __future__ import annotations

import torch

from configs.schema import AlgorithmConfig
from learner.algorithms.aggregation import AGGREGATIONS, Totals, token_mean
from learner.algorithms.kl import KL_ESTIMATORS
from learner.algorithms.over_age import by_age, truncated_importance
from learner.algorithms.policy_losses import clipped_surrogate
from learner.batch import LearnerBatch, TokensByAge
from learner.meter import Meter
from learner.policies.token import PolicyOutput


class PolicyObjective:
    """loss = policy_loss + kl.coef * kl, each brought to one number by `algorithm.loss_aggregation`.

    The old policy of the ratio is the engine's own: its log-probs of what it sampled. Tokens older than
    `algorithm.max_staleness` have a loss of their own, and none beyond `algorithm.max_trained_age`.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._aggregate = AGGREGATIONS[config.loss_aggregation]
        self._kl = KL_ESTIMATORS[config.kl.estimator]

    def __call__(self, output: PolicyOutput, batch: LearnerBatch, totals: Totals, meter: Meter) -> torch.Tensor:
        """This micro-batch's part of the minibatch's loss; its metrics go to `meter`."""
        mask = batch.loss_mask
        policy = clipped_surrogate(
            output.logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )
        policy_loss = self._aggregate(self._by_age(policy.loss, output, batch), mask, totals)
        loss = policy_loss + self._kl_term(output, batch, totals, meter)
        meter.add(
            loss=loss,
            policy_loss=policy_loss,
            entropy=token_mean(output.entropy, mask, totals),
            clip_fraction=token_mean(policy.is_clipped.float(), mask, totals),
            ratio_mean=token_mean(policy.ratio, mask, totals),
        )
        meter.keep_max(ratio_max=torch.where(mask, policy.ratio, 0.0).max())
        return loss

    def _by_age(self, loss: torch.Tensor, output: PolicyOutput, batch: LearnerBatch) -> torch.Tensor:
        config = self._config
        cap = config.over_age.weight_cap
        over_age = truncated_importance(output.logprobs, batch.behavior_logprobs, batch.advantages, weight_cap=cap)
        ages, limits = batch.ages, {"max_staleness": config.max_staleness, "max_age": config.max_trained_age}
        return by_age(loss, over_age, ages, **limits)

    def _kl_term(self, output: PolicyOutput, batch: LearnerBatch, totals: Totals, meter: Meter) -> torch.Tensor | float:
        if batch.reference_logprobs is None:
            if self._config.kl.coef > 0:
                raise ValueError(
                    f"algorithm.kl.coef={self._config.kl.coef:g} but these groups carry no reference log-probs: "
                    "set resources.reference.num_workers=1, or algorithm.kl.coef=0"
                )
            return 0.0
        kl_by_token = self._kl(output.logprobs, batch.reference_logprobs)
        is_masked = batch.ages > self._config.max_trained_age
        kl = self._aggregate(torch.where(is_masked, 0.0, kl_by_token), batch.loss_mask, totals)
        meter.add(kl=kl)
        return self._config.kl.coef * kl if self._config.kl.coef > 0 else 0.0


def measure_gap(output: PolicyOutput, batch: LearnerBatch, tokens: TokensByAge, meter: Meter) -> None:
    """|learner - behaviour| of the sampled tokens' log-probs, before any step; `tokens` are those of the minibatch.

    For tokens of the weights that are trained from, this is the gap between two implementations of one policy
    (`logprob_gap_*`). For older ones it is how far the policy has moved since (`logprob_drift_mean`).
    """
    gap = (output.logprobs - batch.behavior_logprobs).abs()
    if tokens.num_current > 0:
        current = torch.where(batch.loss_mask & (batch.ages == 0), gap, 0.0)
        meter.add(logprob_gap_mean=current.sum() / tokens.num_current)
        meter.keep_max(logprob_gap_max=current.max())
    if tokens.num_older > 0:
        older = torch.where(batch.loss_mask & (batch.ages > 0), gap, 0.0)
        meter.add(logprob_drift_mean=older.sum() / tokens.num_older)
