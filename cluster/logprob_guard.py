"""LogprobGuard: checks the log-prob gap between engine and learner in every step."""

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
    "tokens were not sampled with the settings of sampler.*",
)


class LogprobGuard:
    """Raises or warns if learner and engine compute different log-probs of a step's tokens at equal weights."""

    def __init__(self, *, dtype: str, limit: float, rounding: Rounding, stops: bool) -> None:
        """`limit` is the maximum mean gap in nat for `resources.dtype=dtype`; `rounding` may widen it."""
        self._dtype = dtype
        self._limit = limit
        self._rounding = rounding
        self._stops = stops

    def check(self, report: UpdateReport) -> None:
        """Checks the report of a step.

        Raises:
            LogprobGapError: the gap is over the limit, and `stops` is set.
        """
        gap = report.metrics.get(MetricName.LOGPROB_GAP_MEAN)
        if gap is not None and not gap <= self._rounding.widened(self._limit):  # `not <=`: a NaN is over the limit
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
