"""The unit in which responses are counted: tokens, or the denoising steps of a flow model."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.configs.schema.rollout import SamplerKind

TOKEN = "token"
DENOISING_STEP = "denoising step"


def unit_of(runs: Sequence[RunFolder]) -> str:
    """The unit of runs, in the singular: that of their sampler."""
    samplers = {run.summary.sampler for run in runs if run.summary is not None}
    return DENOISING_STEP if samplers == {SamplerKind.FLOW.value} else TOKEN


def counted_in(unit: str, text: str) -> str:
    """A text about tokens, as one about `unit`."""
    return text.replace(TOKEN, unit)
