"""LogprobGuard: bounds the log-prob gap of engine and learner in every step."""

from __future__ import annotations

import logging

from mobula.cluster.errors import LogprobGapError
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.tolerance import Rounding

_logger = logging.getLogger(__name__)

CAUSES = (
    "engine and learner differ in the chat template, processor or position ids of this model",
    "the checkpoint's configuration changes one of them (penalties of generation_config.json, dropout with "
    "policy.dropout=true, sliding windows, quantisation)",
    "a push left a tensor of the engine at an old value (weight_sync.canary_interval=1 tests every push)",
    "tokens were sampled otherwise than sampler.* says",
)


class LogprobGuard:
    """Fails, or warns, where tokens of the version that a step trains from have other log-probs than their engine
    recorded."""

    def __init__(self, *, dtype: str, limit: float, rounding: Rounding, stops: bool) -> None:
        """`limit` is the largest mean gap in nat, that of `resources.dtype=dtype`; `rounding` may widen it."""
        self._dtype = dtype
        self._limit = limit
        self._rounding = rounding
        self._stops = stops

    def check(self, report: UpdateReport) -> None:
        """Check the report of a step.

        Raises:
            LogprobGapError: the gap is over the limit, and the run is to stop there.
        """
        gap = report.metrics.get(MetricName.LOGPROB_GAP_MEAN)
        if gap is not None and not gap <= self._rounding.widened(self._limit):  # a NaN is over it too
            message = self._message(gap, report)
            if self._stops:
                raise LogprobGapError(message)
            _logger.warning("%s", message)

    def _message(self, gap: float, report: UpdateReport) -> str:
        largest = report.metrics.get(MetricName.LOGPROB_GAP_MAX, gap)
        limit = self._rounding.widened(self._limit)
        widened = "" if limit == self._limit else f", widened to {limit:.3g} by the rounding of the model"
        causes = "; ".join(f"({n}) {cause}" for n, cause in enumerate(CAUSES, 1))
        return (
            f"step {report.version}: log-probs of the learner differ from those that its engines recorded at equal "
            f"weights by {gap:.3g} nat in the mean, {largest:.3g} at most "
            f"(supervision.max_logprob_gap.{self._dtype}={self._limit:g}{widened}). Likely causes: {causes}. "
            "Find the cause, raise the limit if it is rounding, or go on with supervision.on_logprob_gap=warn"
        )
