"""Words and units beside a value, which computer algebra drops: some of them change what the answer says."""

from __future__ import annotations

import re

# Said of a number, these make another statement of it: "5 or more", "not 5", "5 million", "5 squared", "5 is wrong".
_TALK = frozenset(
    "or and not no nor none never neither either more less fewer greater smaller larger bigger at least most than under"
    " over above below before after between about around approximately approx roughly nearly almost circa is isn't was"
    " are aren't wrong false incorrect untrue mistaken right true too few many several hundred hundreds thousand"
    " thousands million millions billion billions trillion dozen dozens half third quarter double twice triple times"
    " plus minus negative positive squared cubed factorial base mod bmod pmod modulo remainder except if unless but"
    " maybe perhaps possibly cannot can't undefined unknown infinity infinite impossible wait rather instead"
    " question".split()
)
_LISTING = frozenset({"or", "and"})  # between values, where the reference has several as well
_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm)\b\s*|\\(?![bp]?mod\b)[A-Za-z]+"
)
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
_MULTIPLIER = re.compile(r"\{\s*(?:k|K|M|B|bn|mn)\s*\}")
_LETTER = re.compile(r"[^\W\d_]")
_DOTS = re.compile(r"\\[lcdv]?dots|\.\.\.")
_DATE = re.compile(r"[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\2[0-9]{4}")

_UNIT = re.compile(
    r"(?:[0-9})\]]|\\pi)\s*(?:\\,|\\ |~)?"
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*([^{}]*?)\s*\}|([A-Za-z]{1,12}\b(?:[ /][A-Za-z]{1,12}\b)*))"
    r"\s*(?:\^\s*\{?\s*([0-9])\s*\}?)?\s*\.?"
)
_SPELLINGS = {
    **{"millimeter": "mm", "centimeter": "cm", "decimeter": "dm", "meter": "m", "kilometer": "km", "mile": "mi"},
    **{"millimetre": "mm", "centimetre": "cm", "decimetre": "dm", "metre": "m", "kilometre": "km", "yard": "yd"},
    **{"inches": "in", "inch": "in", "foot": "ft", "feet": "ft", "gram": "g", "kilogram": "kg", "pound": "lb"},
    **{"second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "ounce": "oz"},
    **{"milliliter": "ml", "millilitre": "ml", "milligram": "mg", "ton": "t", "degree": "deg", "dollar": "usd"},
}
_KNOWN = {*_SPELLINGS.values(), *_SPELLINGS, "cents", "years", "days", "weeks", "months", "apples", "people", "units"}


def why_other_words(answer: str, reference: str) -> str:
    """Why the words of an answer make it say something other than the reference, or ""; both are normalised."""
    words = _words(answer) - _words(reference)
    talk = sorted((words & _TALK) - (_LISTING if _has_several(reference) else frozenset()))
    if talk:
        return f"{talk[0]!r} is no part of a value"
    if _MULTIPLIER.search(answer) and not _MULTIPLIER.search(reference):
        return "a multiplier beside the value"
    if _DOTS.search(answer) and not _DOTS.search(reference):
        return "dots are no value"
    if _DATE.fullmatch(reference):
        return "another date"  # to computer algebra, 2020-05-01 is 2014
    is_of_numbers = "=" in reference and not _LETTER.search(reference)
    if is_of_numbers and answer.replace(" ", "") != reference.replace(" ", ""):
        return "another equation"  # of numbers: to computer algebra, all true ones are equal, and all false ones
    if answer.rpartition("=")[2].lstrip().startswith("\\{") and reference.startswith("("):
        return "a set, where the order counts"
    ours, theirs = unit(answer), unit(reference)
    return f"{ours} instead of {theirs}" if ours and theirs and ours != theirs else ""


def unit(text: str) -> str:
    r"""The unit behind a value, in one spelling: "cm^2" for `5\text{ cm}^2` and "5 square centimeters", or ""."""
    found = next((m for m in _UNIT.finditer(text) if m.end() == len(text)), None)
    if found is None:
        return ""
    written = found[1] if found[1] is not None else found[2]
    words = [_one_spelling(word) for word in re.findall(r"[^\W\d_]+|/", written)]
    if not words or (found[1] is None and not all(word in _KNOWN or word in ("/", "sq", "square") for word in words)):
        return ""  # plain letters that are no unit are variables
    power = found[3] or ("2" if words[0] in ("sq", "square") else "3" if words[0] == "cubic" else "")
    words = words[1:] if words[0] in ("sq", "square", "cubic") and len(words) > 1 else words
    return " ".join(words) + (f"^{power}" if power else "")


def _one_spelling(word: str) -> str:
    folded = word.casefold()
    singular = folded.removesuffix("s") if len(folded) > 2 else folded
    return _SPELLINGS.get(folded) or _SPELLINGS.get(singular) or (word if len(word) <= 2 else singular)


def _words(text: str) -> frozenset[str]:
    return frozenset(word.casefold() for word in _WORD.findall(_COMMAND.sub(" ", text)))


def _has_several(reference: str) -> bool:
    return "," in reference or ";" in reference or "\\pm" in reference or bool(_words(reference) & _LISTING)
