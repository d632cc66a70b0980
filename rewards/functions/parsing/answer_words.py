"""Words next to a value, which computer algebra drops: some of them change the meaning of an answer."""

from __future__ import annotations

import re

# Said of a number, these make another statement of it: "5 or more", "not 5", "5 million", "5 squared", "5 is wrong".
TALK = frozenset(
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


def why_other_words(answer: str, reference: str) -> str:
    """Why the words of an answer make it say something other than the reference, or ""; both are normalised."""
    words = _words(answer) - _words(reference)
    talk = sorted((words & TALK) - (_LISTING if _has_several(reference) else frozenset()))
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
    return ""


def _words(text: str) -> frozenset[str]:
    return frozenset(word.casefold() for word in _WORD.findall(_COMMAND.sub(" ", text)))


def _has_several(reference: str) -> bool:
    return "," in reference or ";" in reference or "\\pm" in reference or bool(_words(reference) & _LISTING)
