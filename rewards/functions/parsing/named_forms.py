r"""Compares forms that computer algebra reads as products: `101_2`, `\angle ABC`, `y''` and lettered options."""

from __future__ import annotations

import re

# Digits with a base; a number that starts with a letter needs base 16, because it may be a variable.
_BASED = re.compile(
    r"([0-9][0-9A-Fa-f]*)_\{(?:\\text\s*\{)?([0-9]{1,2}|[a-z]+)\}?\}|([A-Fa-f][0-9A-Fa-f]*)_\{(16|sixteen)\}"
)
_BASES = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), range(2, 13), strict=True)) | {
    "sixteen": 16
}
_FIGURE = re.compile(
    r"\\(angle|triangle|square|overline|overrightarrow|overleftrightarrow|vec|widehat|odot)(?![A-Za-z])\s*"
    r"(?:\{\s*([A-Z]{2,})\s*\}|([A-Z]{2,}))"
)
_UNORDERED = ("triangle",)  # ABC and BCA are one triangle
_READ_BOTH_WAYS = ("angle", "overline", "overleftrightarrow", "widehat")  # ABC and CBA are one angle, BCA is another
_OPTION = re.compile(
    r"(?:\\(?:text|textbf|mathbf|mathrm)\s*\{\s*\(([A-J])\)\s*\}|\(([A-J])\))(?:\s|\\[,;: ]|~|\\q?quad)*"
    r"(-?[0-9.].*|-?\\(?:frac|sqrt|pi|\$).*)"
)
_OPTION_IN_TEXT = re.compile(r"\\(text|textbf|mathbf|mathrm)\s*\{\s*\(([A-J])\)\s*([^{}]*)\}")
_LETTER = re.compile(r"(?:[Oo]ption\s+|[Cc]hoice\s+)?(?:\(([A-J])\)|([A-J]))")


def same_form(answer: str, reference: str) -> bool | None:
    """Returns whether two normalised texts are equal, if one is a number with a base or the reference names a figure;
    otherwise None.
    """
    ours, theirs = _based(answer), _based(reference)
    if ours or theirs:
        return ours == theirs
    wanted = _FIGURE.fullmatch(reference)
    if wanted is None:
        return None
    given = _FIGURE.fullmatch(answer)
    if given is None or given[1] != wanted[1]:
        return False
    ours_name, theirs_name = given[2] or given[3], wanted[2] or wanted[3]
    if wanted[1] in _UNORDERED:
        return sorted(ours_name) == sorted(theirs_name)
    return ours_name == theirs_name or (wanted[1] in _READ_BOTH_WAYS and ours_name[::-1] == theirs_name)


def other_primes(answer: str, reference: str) -> bool:
    """Whether the numbers of primes differ, which computer algebra ignores: y' is not y''."""
    if ("=" in answer) != ("=" in reference):  # only one text names its value
        answer, reference = answer.rpartition("=")[2], reference.rpartition("=")[2]
    return answer.count("'") != reference.count("'")


def without_option(answer: str, reference: str) -> tuple[str, str]:
    """Reduces two texts to letters, or to values, if one is an option with its letter: `(B) 12`."""
    ours, theirs = _option(answer), _option(reference)
    if ours is None and theirs is None:
        return answer, reference
    letters = ours[0] if ours else _letter(answer), theirs[0] if theirs else _letter(reference)
    if all(letters):
        return str(letters[0]), str(letters[1])
    return ours[1] if ours else answer, theirs[1] if theirs else reference


def _based(text: str) -> tuple[str, int] | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    base = match[2] or match[4]
    value = int(base) if base.isdigit() else _BASES.get(base)
    return ((match[1] or match[3]).upper(), value) if value else None


def _option(text: str) -> tuple[str, str] | None:
    """Returns letter and value of an option; an option without a value, `Option B`, has the letter as value."""
    text = _OPTION_IN_TEXT.sub(r"(\2) \3", text)
    if match := _OPTION.fullmatch(text):
        return match[1] or match[2], match[3]
    letter = _LETTER.fullmatch(text)
    return (letter[1] or letter[2], letter[1] or letter[2]) if letter and len(text) > 3 else None


def _letter(text: str) -> str | None:
    letter = _LETTER.fullmatch(text)
    return (letter[1] or letter[2]) if letter else None
