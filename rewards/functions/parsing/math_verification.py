"""Mathematical equality by computer algebra (math-verify); imported only inside an isolated process."""

from __future__ import annotations

import logging
import math
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase, Number

# The process's deadline replaces math-verify's timeouts, which work in a main thread only and warn when disabled.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Units are already separated: the patterns of math-verify read the variables of 2ab as a unit.
_NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
_LATEX = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION)]


_DECIMALS = 6  # digits in which a decimal and a fraction must agree: 0.333333 is 1/3, 0.33 is not
_DIGITS = 15
_MAX_ZEROS = 330  # below the smallest float


def equivalent(pairs: tuple[tuple[str, str], ...]) -> tuple[bool, str]:
    """Returns whether the answer of any (answer, reference) pair equals its reference, and a reason if none does."""
    reason = "cannot be read as mathematics"
    for answer, reference in pairs:
        parsed = _parse(answer)
        if not parsed:
            continue
        gold = _parse(reference)
        extra = _leading_zeros([*gold, *parsed])
        if verify(
            gold,
            parsed,
            float_rounding=_DECIMALS + extra,
            numeric_precision=_DIGITS + extra,
            timeout_seconds=None,
        ):
            return True, ""
        reason = "another value"
    return False, reason


def _leading_zeros(expressions: list[Any]) -> int:
    """Returns the zeros after the decimal point of the smallest number: math-verify compares absolute differences."""
    smallest = 1.0
    for expression in expressions:
        if isinstance(expression, Basic | MatrixBase):
            numbers = _evaluated(expression).atoms(Number)
            smallest = min([smallest, *(abs(float(n)) for n in numbers if n.is_finite and n != 0)])
    return max(0, -math.floor(math.log10(smallest)) - 1) if smallest else _MAX_ZEROS


def _evaluated(expression: Any) -> Any:
    try:
        return expression.doit().evalf()
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError, NotImplementedError):
        return expression  # a set or relation of parts without a value


def _parse(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
