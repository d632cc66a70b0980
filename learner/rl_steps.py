"""RLSteps: the steps of RL on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from mobula.cluster.records.trajectory import ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import UpdateReport
from mobula.learner.batch import (
    LearnerBatch,
    LearnerItem,
    collate_items,
    minibatches_of,
    select_by_entropy,
    tokens_by_age,
    totals,
    without_overlong,
)
from mobula.learner.credit import Credit
from mobula.learner.critic import Critic, NullCritic, Values, with_values
from mobula.learner.gradient_step import Term
from mobula.learner.measures import Movement, measure_fresh_gap, ratios
from mobula.learner.meter import Meter
from mobula.learner.objective import PolicyObjective, measure_gap
from mobula.learner.offline import StepParts, SupervisedTerm
from mobula.learner.optim import NullSlow, SlowWeights, learning_rate
from mobula.learner.policies.base import PolicyOutput, on_device
from mobula.learner.policies.batch import TokenBatch, column
from mobula.learner.policies.trained import collate_rows
from mobula.learner.scoring_pass import Groups, referred, scored, unscored
from mobula.learner.shares import Portion, StepGroups


class RLSteps:
    """Computes advantages and takes the optimizer steps of an RL step. Collective."""

    def __init__(
        self,
        parts: StepParts,
        credit: Credit,
        critic: Critic | NullCritic,
        slow: SlowWeights | NullSlow,
        template_ids: Sequence[int],
    ) -> None:
        """`template_ids`: tokens such as the end of text, whose log-prob gap in responses is measured separately."""
        self._parts = parts
        self._config = parts.config
        self.credit = credit
        self.critic = critic
        self._slow = slow
        self._template_ids = template_ids
        self._objective = PolicyObjective(parts.config.algorithm)
        self._supervised_term = SupervisedTerm(parts)
        algorithm = parts.config.algorithm
        scoring = partial(
            scored,
            backend=parts.backend,
            step=parts.step,
            forward=self._output,
            keeps_predictions=algorithm.needs_old_predictions,
        )
        self.scored: Callable[[Groups], Groups] = scoring if algorithm.needs_scoring_pass else unscored
        referring = partial(referred, backend=parts.backend, step=parts.step, forward=self._output, model=parts.policy)
        self._referred: Callable[[Groups], Groups] = (
            referring if parts.config.reference.place == "learner_ranks" else unscored
        )
        self._movement = Movement(parts.backend, parts.step.shares, self.forward, parts.config.num_steps)

    def update(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        *,
        supervised: Sequence[ScoredGroup] = (),
        supervised_portion: Portion | None = None,
        values: Values = (),
        fresh: Sequence[Any] = (),
        kl_scale: float = 1.0,
        portion: Portion | None = None,
    ) -> UpdateReport:
        """Runs one RL step on `groups`, which makes `version`.

        Args:
            groups: all groups of the step. A rank fetches the groups that it trains, and receives outlines of the
                others.
            supervised: rows for the supervised term of the loss.
            values: of a critic with separate ranks.
            fresh: empty, or a reference to a group sampled with the weights before the step, on which the log-prob gap
                is measured.
            kl_scale: factor of the KL coefficient.
            portion: the references of this rank, if `groups` has none; `supervised_portion` those to `supervised`.
        """
        self.credit.kl_scale = kl_scale
        algorithm = self._config.algorithm
        fetched = self._parts.shares.fetch(
            StepGroups(groups, version, self._config, self._parts.scoring.row, portion=portion)
        )
        examples = self._supervised_term.fetch(supervised, supervised_portion)
        # In this order: KL in the reward needs reference log-probs, and advantages need the critic's values.
        fetched = self._referred(with_values(fetched, values))
        credited = self.credit.assign(self.critic.valued(fetched))
        with self._slow.in_place():
            items = self.scored(without_overlong(credited.groups, algorithm))
        is_alone = algorithm.critic.is_alone(version)
        rate = 0.0 if is_alone else learning_rate(self._config.learner, version - 1, self._config.num_steps)
        parts = [
            select_by_entropy(part, algorithm.entropy.top_share)
            for part in minibatches_of(items, algorithm, (self._config.seed, version))
        ]
        critic, num_parts = self.critic.train(parts, version), len(parts)
        parts = [] if is_alone else parts
        meter = self._parts.meter()
        self._movement.begin(parts[0] if parts else (), version)
        losses = [Term(part, self._loss(part, meter, is_first=n == 0)) for n, part in enumerate(parts)]
        grad_norms = []
        for n, loss in enumerate(losses):
            scoring = (self._fresh_logprobs, self._config.timeouts.object_s)
            measures = [partial(measure_fresh_gap, g, version - 1, meter, *scoring) for g in fresh if n == 0]
            terms: list[Term[Any]] = [loss, *self._supervised_term.terms(examples, n, meter)]
            grad_norms.append(self._parts.optimized(terms, rate, *measures))
        self._movement.end(meter)
        self._slow.follow(version)
        metrics = self._metrics(meter, items, grad_norms) if parts else {"loss": 0.0, "policy_loss": 0.0}
        # The mean KL is reduced over ranks, so all ranks change the coefficient by the same amount.
        if "kl" in metrics:
            self.credit.kl.observe(metrics["kl"], sum(len(group) for group in items))
        planned = 0 if is_alone else algorithm.num_epochs * algorithm.num_minibatches
        taken = sum(map(math.isfinite, grad_norms))
        num_critic = num_parts - critic["critic_skipped"] if critic else 0.0
        counts = {"skipped": float(planned - taken), "optimizer_steps": taken + num_critic}
        return UpdateReport(version, {**credited.metrics, **metrics, **critic, "learning_rate": rate, **counts})

    def _loss(
        self, part: list[LearnerItem], meter: Meter, *, is_first: bool
    ) -> Callable[[Sequence[LearnerItem]], Tensor]:
        part_totals, ages, kl_coef = totals(part), tokens_by_age(part), self.credit.kl_coef

        def loss(rows: Sequence[LearnerItem]) -> Tensor:
            output, batch = self.forward(rows)
            if self._config.learner.shares_prompts and isinstance(batch.inputs, TokenBatch):
                counts = [sum(batch.inputs.row_lengths), batch.inputs.num_shared]
                row_tokens, shared_tokens = on_device(np.array(counts, dtype=np.float32), self._parts.device)
                meter.add(row_tokens=row_tokens, shared_tokens=shared_tokens)
            if is_first:
                measure_gap(output, batch, ages, meter, self._token_classes(rows))
            return self._objective(output, batch, part_totals, meter, kl_coef)

        return loss

    def _token_classes(self, rows: Sequence[LearnerItem]) -> dict[str, Tensor]:
        """Returns name -> bool [B, T]: tokens whose log-prob gap is measured separately."""
        if not self._template_ids:
            return {}
        masks = [np.isin(row.response_ids, self._template_ids) for row in rows]
        return {"template": column(masks, np.bool_, self._parts.device)}

    def _fresh_logprobs(self, group: TrajectoryGroup) -> Tensor:
        """Returns float32 [B, T]: log-probs of the sampled actions under the sampling distribution."""
        rows = [self._parts.scoring.row(group.prompt, trajectory.actions) for trajectory in group.trajectories]
        with self._parts.backend.inference():
            return self._parts.policy(
                collate_rows(rows, self._parts.reader, self._parts.device), self._parts.scoring.training
            ).logprobs

    def _output(self, rows: Sequence[LearnerItem]) -> PolicyOutput:
        return self.forward(rows)[0]

    def forward(self, rows: Sequence[LearnerItem]) -> tuple[PolicyOutput, LearnerBatch]:
        batch = collate_items(rows, self._parts.reader, self._parts.device)
        has_bonus = self._config.algorithm.entropy.bonus > 0
        return self._parts.policy(batch.inputs, self._parts.scoring.training, entropy_has_gradient=has_bonus), batch

    def _metrics(self, meter: Meter, items: list[list[LearnerItem]], grad_norms: list[float]) -> dict[str, float]:
        """Reduces metrics over ranks: means over minibatches; maxima and counts over the whole step."""
        reduced = meter.reduce()
        measured = ratios(reduced)
        num_tokens, num_shared = reduced.pop("row_tokens", 0.0), reduced.pop("shared_tokens", 0.0)
        shared = {"shared_prompt_share": num_shared / num_tokens} if num_tokens > 0 else {}
        per_step = ("logprob_gap_mean", "logprob_gap_max", "logprob_drift_mean", "ratio_max")
        means = {name: value if name in per_step else value / len(grad_norms) for name, value in reduced.items()}
        rows = [item for group in items for item in group]
        return {
            **means,
            **measured,
            **shared,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "response_length": sum(item.sequence.num_targets for item in rows) / len(rows),
            "num_tokens": float(sum(item.num_trained for item in rows)),
            "filtered_responses": float(sum(bool(item.loss_mask.any() and not item.kept_mask.any()) for item in rows)),
            "over_age_tokens": float(sum(item.num_older(self._config.algorithm.max_staleness) for item in rows)),
        }
