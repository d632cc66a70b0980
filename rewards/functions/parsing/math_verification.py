"""Mathematical equality by computer algebra (math-verify); imported only inside an isolated process."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# The process's own deadline stands in for math-verify's, which works in a main thread only; it warns at every import.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]


def equivalent(answer: str, references: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the answer equals one of the references, and a reason if it does not."""
    parsed = _parse(answer)
    if not parsed:
        return False, "cannot be read as mathematics"
    equals = any(verify(_parse(reference), parsed, timeout_seconds=None) for reference in references)
    return equals, "" if equals else "another value"


def _parse(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
