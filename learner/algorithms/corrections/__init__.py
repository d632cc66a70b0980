"""Weights that correct for tokens of another policy than the proximal one. One formula a file; `algorithm.correction`
chooses, `algorithm.old_logprobs` says what the proximal policy is."""

from __future__ import annotations

from mobula.learner.algorithms.corrections.base import CorrectionFunction
from mobula.learner.algorithms.corrections.decoupled import decoupled
from mobula.learner.algorithms.corrections.icepop import icepop
from mobula.learner.algorithms.corrections.mis import mis
from mobula.learner.algorithms.corrections.none import none
from mobula.learner.algorithms.corrections.proximal import OLD_LOGPROBS
from mobula.learner.algorithms.corrections.tis_sequence import tis_sequence
from mobula.learner.algorithms.corrections.tis_token import tis_token

CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": none,
    "decoupled": decoupled,
    "tis_token": tis_token,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "mis": mis,
}

__all__ = ["CORRECTIONS", "OLD_LOGPROBS", "CorrectionFunction"]
