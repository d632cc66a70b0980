"""SupervisedTerm: rows of a data set whose cross-entropy is a term of the loss of an RL step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.algorithms.aggregation import Totals, token_mean
from mobula.learner.examples.entries import DataRows, parts_of
from mobula.learner.examples.examples import SharedExample, answer_row, collate_examples, totals_of
from mobula.learner.gradient_step import Term
from mobula.learner.meter import Meter
from mobula.learner.policies.logprobs import PLAIN
from mobula.learner.shares import Portion, ShareFetcher
from mobula.learner.shares.portions import ROWS


class SupervisedTerm:
    """loss of an optimizer step = RL loss + coef * mean over trained tokens of the step's rows of -log p.

    Each minibatch of each epoch has `algorithm.supervised.batch_size` rows of its own. p is the policy at temperature 1
    and without bans, as in `offline.job=sft`.

    Source: Training language models to follow instructions with human feedback, arXiv:2203.02155, equation 2.
    """

    def __init__(self, config: RunConfig, shares: ShareFetcher, reader: MediaReader) -> None:
        self._config = config
        self._settings = config.algorithm.supervised
        self._device = torch.device(config.resources.device)
        self._shares = shares
        self._reader = reader

    def fetch(self, rows: Sequence[ScoredGroup], portion: Portion | None = None) -> list[list[SharedExample]]:
        """The examples of each optimizer step of an update. Collective.

        Args:
            rows: with all references, or outlines of rows to which `portion` adds the references of this rank.
        """
        if not rows:
            return []
        parts, timeout_s = parts_of(rows, self._settings.batch_size), self._config.timeouts.object_s
        entries = DataRows(parts, self._config.learner, answer_row, timeout_s, portion, ROWS)
        return entries.in_parts(self._shares.fetch(entries))

    def terms(
        self, policy: nn.Module, examples: Sequence[Sequence[SharedExample]], step: int, meter: Meter
    ) -> list[Term[SharedExample]]:
        """Terms that are added to the loss of optimizer step `step` of the update; none without rows."""
        if not examples:
            return []
        totals = totals_of(examples[step])
        counts = Totals(totals.num_tokens, totals.num_examples)
        return [Term(examples[step], partial(self._loss, policy, counts, meter))]

    def _loss(self, policy: nn.Module, counts: Totals, meter: Meter, rows: Sequence[SharedExample]) -> Tensor:
        batch = collate_examples(rows, self._reader, self._device)
        part = token_mean(-policy(batch.tokens, PLAIN).logprobs, batch.mask, counts)
        loss = self._settings.coef * part
        meter.add(loss=loss, supervised_loss=part)
        return loss
