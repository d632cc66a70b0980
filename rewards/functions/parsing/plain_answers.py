"""Decides plain answers (numbers, fractions, words) without computer algebra, and refuses what is no value at all."""

from __future__ import annotations

import re
from fractions import Fraction

_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_TEXT_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}\\]*)\}")
_PLAIN_FRACTION = re.compile(r"\\frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9]{3})")

_LITERAL = re.compile(r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")
_RATIO = re.compile(r"([+-]?)\s*(?:([0-9]+)\s+)?([0-9]+)\s*/\s*([0-9]+)")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")

# A computer algebra parser adds up digits that merely stand side by side: "3 4", "3{4}", "3(4)" and "3\quad 4" are 7.
_SPACING = re.compile(r"\\(?:[,;:! ]|q?quad|space)|~")
_ARGUMENTS = re.compile(r"(?:\\[a-zA-Z]+(?:\[[^\[\]{}]*\])?|[\^_])((?:\s*\{[^{}]*\})+)")  # innermost: no braces within
_SIDE_BY_SIDE = re.compile(r"[0-9][\s{}()]+[0-9]")
# "3 + 4" names the question, not the answer; scientific notation (2 \times 10^3) is a value.
_COMPUTATION = re.compile(r"[0-9)}\]]\s*(?:[-+*×÷_]|\\(?:times|cdot|div|pm)(?![a-z]))(?!\s*10\s*(?:\^|\\v))")


_MAX_CHARS = 4000  # Python reads no integer of more than 4,300 digits


def decide(answer: str, reference: str) -> bool | None:
    """Whether the answer equals the reference; None where only computer algebra can tell.

    Numbers that are both written out are equal digit for digit; a fraction beside a decimal may still be its rounding.
    Where only one of them has a percent sign, 10% is both 10 and 0.1. A reference made of words is compared as words,
    and so is what is too long for arithmetic.
    """
    answer, reference = normalise(answer), normalise(reference)
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    if max(len(answer), len(reference)) > _MAX_CHARS:
        return False
    ours, theirs = read_number(answer.rstrip("%")), read_number(reference.rstrip("%"))
    if ours is not None and theirs is not None:
        percents = {answer.endswith("%"): ours, reference.endswith("%"): theirs}
        if ours == theirs or (len(percents) == 2 and percents[True] == 100 * percents[False]):
            return True
        may_be_rounded = "/" in answer + reference and "." in answer + reference
        return None if may_be_rounded else False
    if is_words(reference):
        return answer.casefold() == reference.casefold()
    return None


def normalise(text: str) -> str:
    r"""One spelling for what only looks different: delimiters, spacing, `\dfrac`, `\text{}`, thousands, minus signs."""
    text = text.strip().replace("\N{MINUS SIGN}", "-").replace("\\%", "%")
    for opening, closing in _MATH_DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
            text = text[len(opening) : len(text) - len(closing)]
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\left", "").replace("\\right", "") if "\\left" in text else text
    text = _PLAIN_FRACTION.sub(r" \1/\2", text)
    wrapped = _TEXT_WRAPPER.fullmatch(text.strip())
    text = _THOUSANDS.sub(",", wrapped[1] if wrapped else text)
    return " ".join(text.split()).removesuffix(".").rstrip()


def read_number(text: str) -> Fraction | None:
    """The exact value of a normalised integer, decimal, fraction or mixed number in ASCII digits; None for the rest."""
    if _LITERAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    ratio = _RATIO.fullmatch(text)
    if ratio is None or not int(ratio[4]):
        return None
    value = int(ratio[2] or 0) + Fraction(int(ratio[3]), int(ratio[4]))
    return -value if ratio[1] == "-" else value


def is_words(text: str) -> bool:
    """Whether a normalised text is language: to computer algebra, "cat" is c*a*t and equals "act"."""
    return _WORDS.fullmatch(text) is not None and max(map(len, re.split(r"[\s'-]+", text))) >= 3


def why_no_value(answer: str, reference: str) -> str:
    """Why an answer may not go to computer algebra, or "" if it may.

    Digits side by side are never one value; a sum or product is none where the reference is a written-out number.
    """
    last = answer.rsplit("=", 1)[-1].replace("\N{MINUS SIGN}", "-")
    flat = _SPACING.sub(" ", last)
    while command := _ARGUMENTS.search(flat):  # each argument is looked at by itself, then stands for one thing
        if any(_SIDE_BY_SIDE.search(argument) for argument in re.split("[{}]", command[1])):
            return "numbers side by side"
        kept = "_\\v " if command[0].startswith("_") else "\\v "
        flat = flat[: command.start()] + kept + flat[command.end() :]
    if _SIDE_BY_SIDE.search(flat):
        return "numbers side by side"
    if _LITERAL.fullmatch(normalise(reference)) and _COMPUTATION.search(flat):
        return "a computation, not its result"
    return ""
