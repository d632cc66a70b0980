"""Names and numbers as entities: when two spellings mean the same one, in the published reading and in ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Key = str | Fraction

NO_KEYS: frozenset[Key] = frozenset()
_CACHED_CHARS = 256  # longer texts hardly come twice
_CACHED_TEXTS = 1 << 17
_MAX_NUMBER_CHARS = 64  # longer rows of digits are names

_STOP_WORDS = frozenset("a an the within about around approximately roughly nearly just only".split())
_TOKEN = re.compile(r"(?:[+-]?\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)*%?)|(?:[a-z]+(?:['-][a-z]+)*)")
_SENTENCE_ENDS = ".,;:!?"

_EDGES = ".,;:!?\"'()[]{}"
_ARTICLE = re.compile(r"(?:the|an|a) (?=.)")
_NUMBER = re.compile(r"([+-]?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)((?:\.[0-9]+)?) ?(%?)")


class Memo:
    """Keys by text. It forgets everything when it is full, so that it never outgrows its place."""

    def __init__(self, keys_of: Callable[[str], frozenset[Key]]) -> None:
        self._keys_of = keys_of
        self._known: dict[str, frozenset[Key]] = {}

    def __call__(self, text: str) -> frozenset[Key]:
        keys = self._known.get(text)
        if keys is None:
            keys = self._keys_of(text)
            if len(text) <= _CACHED_CHARS:
                if len(self._known) >= _CACHED_TEXTS:
                    self._known.clear()
                self._known[text] = keys
        return keys


def fold(text: str) -> str:
    """One spelling for what differs in case and white space alone."""
    return " ".join(text.split()).casefold()


def aerorl_aliases(text: str) -> frozenset[Key]:
    """All spellings of an entity in aeroRL's grounding; two entities are one if they share any.

    The text in lower case without a sentence's end; its tokens; its tokens without filler words; and each number among
    them by itself, a percentage also as a share. A text of a sentence's ends alone is "", and so equal to any other.
    """
    text = " ".join(text.lower().split())
    tokens = _TOKEN.findall(text)
    if not tokens:
        return frozenset({text.rstrip(_SENTENCE_ENDS)}) if text else NO_KEYS
    aliases = {text.rstrip(_SENTENCE_ENDS), " ".join(tokens), " ".join(t for t in tokens if t not in _STOP_WORDS)}
    for token in tokens:
        number = token.removesuffix("%")
        if "-" not in number and number[-1].isdigit():
            value = float(number)
            aliases.add(f"{value:g}")
            if number != token:
                aliases |= {f"{value:g}%", f"{value / 100:g}"}
    aliases.discard("")
    return frozenset(aliases)


def entity_keys(text: str) -> frozenset[Key]:
    """Keys of an entity for equality of the whole: a number if all of it is one, else its folded words.

    1,000 is 1000, 14% is both 14 and 0.14, "the Nike" is "nike"; "page 14" is not 14. Nothing has no key.
    """
    if not text.isascii() or len(text) > _MAX_NUMBER_CHARS:
        return _word_key(fold(text))
    folded = fold(text)
    number = _NUMBER.fullmatch(folded.rstrip(_SENTENCE_ENDS))
    if number is None or not number[2] + number[3]:
        return _word_key(folded)
    value = Fraction(f"{number[1]}{number[2].replace(',', '') or '0'}{number[3]}")
    return frozenset((value, value / 100)) if number[4] else frozenset((value,))


def _word_key(folded: str) -> frozenset[Key]:
    word = folded.strip(_EDGES).strip()
    article = _ARTICLE.match(word)
    word = word[article.end() :] if article else word
    return frozenset((word or folded,)) if folded else NO_KEYS
