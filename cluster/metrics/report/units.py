"""The unit of response lengths: tokens, or denoising steps of a flow model."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.configs.schema.rollout import SamplerKind

TOKEN = "token"
DENOISING_STEP = "denoising step"


def unit_of(runs: Sequence[RunFolder]) -> str:
    """Returns the unit of runs, in the singular; it depends on the sampler."""
    samplers = {run.summary.sampler for run in runs if run.summary is not None}
    return DENOISING_STEP if samplers == {SamplerKind.FLOW.value} else TOKEN


def counted_in(unit: str, text: str) -> str:
    """Replaces tokens by `unit` in a text."""
    return text.replace(TOKEN, unit)
