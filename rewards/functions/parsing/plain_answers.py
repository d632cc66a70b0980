"""Compares plain answers (numbers, fractions, words) without computer algebra, and refuses texts without a value."""

from __future__ import annotations

import re
from fractions import Fraction

from mobula.rewards.functions.parsing.named_forms import same_form
from mobula.rewards.functions.parsing.typesetting import plain_typesetting
from mobula.rewards.functions.parsing.unicode_latex import to_latex

_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_TEXT_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{((?:[^{}\\]|\\[,;: ])*)\}")
_PERCENT = re.compile(
    r"(?:\s|\\[,;:! ]|~)*(?:\\?%|\\(?:text|mathrm)\s*\{\s*(?:\\?%|percent|per cent|percentage|pct)\s*\}|"
    r"\b(?:percent|per cent|pct))(?=\s*\.?\s*$)"
)
_PERCENT_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}\\]*)\\?%\s*\}")
_IDLE_SPACE = re.compile(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+")
_ROMAN_GROUP = re.compile(r"\{\s*\\rm(?![A-Za-z])([^{}]*)\}")
_TEXT_IN_BRACES = re.compile(r"(?<=[0-9\s])\{(\\(?:text|mathrm)\s*\{[^{}]*\})\}")
_DELIMITERS = {"\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")", "\\varnothing": "\\emptyset"}
_DELIMITER = re.compile("|".join(map(re.escape, _DELIMITERS)))
_ONE_CHARACTER_INDEX = re.compile(r"_\s*([0-9A-Za-z])")
# A number alone: after a power or before a letter, 1/2 has another meaning.
_PLAIN_FRACTION = re.compile(
    r"\s*([+-]?\s*(?:[0-9]+)?)\s*\\frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}\s*(%?)\s*\.?\s*"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9]{3})")

_LITERAL = re.compile(r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")
_SCIENTIFIC = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*"
    r"(?:[eE]([+-]?[0-9]{1,3})|(?:\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\*)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([0-9])))"
)
_REPEATING = re.compile(
    r"([+-]?)([0-9]*)\.([0-9]*)"
    r"(?:\\(?:overline|bar)\s*\{([0-9]+)\}|\\(?:overline|bar|dot)\s*([0-9])|\(([0-9]+)\)"
    r"|\\dot\s*\{([0-9])\}(?:([0-9]*)\\dot\s*\{([0-9])\})?)"
)
_RATIO = re.compile(r"([+-]?)\s*(?:([0-9]+)\s+)?([0-9]+)\s*/\s*([0-9]+)")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")

# A computer algebra parser adds adjacent numbers: "3 4", "3{4}", "3(4)" and "3\quad 4" are 7.
_SPACING = re.compile(r"\\(?:[,;:! ]|q?quad|space)|~")
_ARGUMENTS = re.compile(r"(?:\\[a-zA-Z]+(?:\[[^\[\]{}]*\])?|[\^_])((?:\s*\{[^{}]*\})+)")  # innermost: no braces within
_SIDE_BY_SIDE = re.compile(r"[0-9][\s{}()]+[0-9]")
# "3 + 4" repeats the question; scientific notation (2 \times 10^3) is a value.
_COMPUTATION = re.compile(r"(?:[0-9)}\]]|\\v)\s*(?:[-+*×÷_]|\\(?:times|cdot|div|pm)(?![a-z]))(?!\s*10\s*(?:\^|\\v))")


_NAME_LAST = re.compile(r"([^=]+?)\s*=\s*([A-Za-z](?:_\{\w\})?)")  # 5 = x

_MAX_CHARS = 4000  # Python reads no integer of more than 4,300 digits


def decide(answer: str, reference: str) -> bool | None:
    """Returns whether two normalised texts are equal; None if only computer algebra can decide.

    Numbers are compared exactly, except that a decimal may be a rounded fraction. If only one text has a percent sign,
    10% is both 10 and 0.1. A reference of words is compared as words, and so are texts too long for arithmetic.
    """
    if not answer or not reference:
        return False
    if answer == reference or _squeezed(answer) == _squeezed(reference):
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
    if is_words(reference) and (len(reference) > 2 or is_words(answer)):
        return answer.casefold() == reference.casefold()
    return same_form(answer, reference)


def _squeezed(text: str) -> str:
    """Removes spaces that separate nothing: `A \\cup B` becomes `A\\cup B`, "3 4" is unchanged."""
    return _IDLE_SPACE.sub("", text)


def normalise(text: str) -> str:
    r"""Unifies spellings: Unicode, delimiters, spacing, `\dfrac`, `\text{}`, percent signs."""
    text = to_latex(text.strip())
    for opening, closing in _MATH_DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
            text = text[len(opening) : len(text) - len(closing)]
    text = plain_typesetting(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = text.replace("\\left", "").replace("\\right", "") if "\\left" in text else text
    text = _DELIMITER.sub(lambda name: _DELIMITERS[name[0]], text)
    text = _TEXT_IN_BRACES.sub(r"\1", _ROMAN_GROUP.sub(r"\\mathrm{\1}", text))
    text = _PERCENT.sub("%", _PERCENT_IN_TEXT.sub(r"\1%", text)).replace("\\%", "%")
    if fraction := _PLAIN_FRACTION.fullmatch(text):
        text = f"{fraction[1]} {fraction[2]}/{fraction[3]}{fraction[4]}"
    text = _ONE_CHARACTER_INDEX.sub(r"_{\1}", text)
    wrapped = _TEXT_WRAPPER.fullmatch(text.strip())
    text = _THOUSANDS.sub(",", wrapped[1] if wrapped else text)
    text = " ".join(text.split()).removesuffix(".").rstrip()
    named = _NAME_LAST.fullmatch(text)
    return f"{named[2]} = {named[1]}" if named and read_number(named[1]) is not None else text


def read_number(text: str) -> Fraction | None:
    """Returns the exact value of a normalised number in ASCII digits; None for other texts.

    Reads integers, decimals, repeating decimals, fractions, mixed numbers and scientific notation.
    """
    if _LITERAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if scientific := _SCIENTIFIC.fullmatch(text):
        exponent = int(scientific[2] or scientific[3] or scientific[4])
        return Fraction(scientific[1]) * Fraction(10) ** exponent
    if repeating := _REPEATING.fullmatch(text):
        sign, whole, fixed, *periods = repeating.groups()
        period = "".join(filter(None, periods))
        # 0.1(6) is 1/10 + 6/90: the period repeats after the fixed digits.
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        value = Fraction(f"{whole or 0}.{fixed or 0}") + repeated
        return -value if sign == "-" else value
    ratio = _RATIO.fullmatch(text)
    if ratio is None or not int(ratio[4]):
        return None
    value = int(ratio[2] or 0) + Fraction(int(ratio[3]), int(ratio[4]))
    return -value if ratio[1] == "-" else value


def is_words(text: str) -> bool:
    """Whether a normalised text is prose: computer algebra reads "cat" as c*a*t, which equals "act"."""
    return _WORDS.fullmatch(text) is not None and max(map(len, re.split(r"[\s'-]+", text))) >= 2


def why_no_value(answer: str, reference: str) -> str:
    """Returns why computer algebra must not read an answer, or "". Both texts are normalised.

    Adjacent numbers are never one value; a sum or product is not a value if the reference is a plain number.
    """
    last = answer.rsplit("=", 1)[-1]
    flat = _SPACING.sub(" ", last)
    while command := _ARGUMENTS.search(flat):  # check each argument alone, then replace it by one symbol
        if any(_SIDE_BY_SIDE.search(argument) for argument in re.split("[{}]", command[1])):
            return "numbers side by side"
        kept = "_\\v " if command[0].startswith("_") else "\\v "
        flat = flat[: command.start()] + kept + flat[command.end() :]
    if _SIDE_BY_SIDE.search(flat):
        return "numbers side by side"
    if _LITERAL.fullmatch(reference) and _COMPUTATION.search(flat):
        return "a computation, not its result"
    return ""
