"""Words that computer algebra drops although they change the meaning of an answer."""

from __future__ import annotations

import re

# Next to a number these change its meaning: "5 or more", "not 5", "5 million", "5 squared", "5 is wrong".
TALK = frozenset(
    "or and not no nor none never neither either more less fewer greater smaller larger bigger at least most than under"
    " over above below before after between about around approximately approx roughly nearly almost circa is isn't was"
    " are aren't wrong false incorrect untrue mistaken right true too few many several hundred hundreds thousand"
    " thousands million millions billion billions trillion dozen dozens half third quarter double twice triple times"
    " plus minus negative positive squared cubed factorial base mod bmod pmod modulo remainder except if unless but"
    " maybe perhaps possibly cannot can't undefined unknown infinity infinite impossible wait rather instead"
    " question".split()
)
_LISTING = frozenset({"or", "and"})  # allowed between values if the reference has several values
_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm)\b\s*|\\(?![bp]?mod\b)[A-Za-z]+"
)
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
_MULTIPLIER = re.compile(r"\{\s*(?:k|K|M|B|bn|mn)\s*\}")
_LETTER = re.compile(r"[^\W\d_]")
_DOTS = re.compile(r"\\[lcdv]?dots|\.\.\.")
_DATE = re.compile(r"[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\2[0-9]{4}")


def why_other_words(answer: str, reference: str) -> str:
    """Returns why the words of an answer change its meaning from the reference, or "". Both texts are normalised."""
    reference_words = _words(reference)
    words = _words(answer) - reference_words
    has_several = any(separator in reference for separator in (",", ";", "\\pm")) or bool(reference_words & _LISTING)
    talk = sorted((words & TALK) - (_LISTING if has_several else frozenset()))
    if talk:
        return f"{talk[0]!r} is no part of a value"
    if _MULTIPLIER.search(answer) and not _MULTIPLIER.search(reference):
        return "a multiplier next to the value"
    if _DOTS.search(answer) and not _DOTS.search(reference):
        return "dots are no value"
    if _DATE.fullmatch(reference):
        return "another date"  # computer algebra reads 2020-05-01 as 2014
    is_of_numbers = "=" in reference and not _LETTER.search(reference)
    if is_of_numbers and answer.replace(" ", "") != reference.replace(" ", ""):
        return "another equation"  # computer algebra reduces equations of numbers to true or false
    if answer.rpartition("=")[2].lstrip().startswith("\\{") and reference.startswith("("):
        return "a set, where the order counts"
    return ""


def _words(text: str) -> frozenset[str]:
    return frozenset(word.casefold() for word in _WORD.findall(_COMMAND.sub(" ", text)))
