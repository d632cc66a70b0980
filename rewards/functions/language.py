"""Language: which share of a response is written in the language that was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lingua import IsoCode639_1, LanguageDetectorBuilder
from lingua import Language as LinguaLanguage

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.tools import Tools

# What belongs to no language: mathematics, commands, code, addresses, and tags.
_NO_LANGUAGE = re.compile(r"```[^`]*```|`[^`\n]*`|\$[^$]*\$|\\[A-Za-z]+|https?://\S+|</?\w+>")
_PIECE = re.compile(r"[^.!?。！？\n]{1,300}")
_LETTERS = re.compile(r"[^\W\d_]")
MAX_PIECES = 200  # spread over the whole response where it has more


class Language:
    """The share of the letters that stand in sentences of `language`, after DeepSeek-R1's language consistency reward.

    Each sentence (or 300 characters of one) is judged by itself by lingua, an n-gram model. `language` and `among`, the
    languages between which it decides, are ISO 639-1 codes ("en"). Mathematics, commands, code and addresses are left
    out. A sentence of fewer than `min_letters` letters is not judged. Where nothing can be judged, a number or a single
    letter, the value is 1: it is in no other language.
    """

    def __init__(self, tools: Tools, *, language: str, among: Sequence[str], min_letters: int) -> None:
        if isinstance(among, str) or language not in among or len(set(among)) < 2:
            raise ValueError(f"among={among!r} is unfit: list {language!r} and the languages it may be taken for")
        if isinstance(min_letters, bool) or not isinstance(min_letters, int) or min_letters < 1:
            raise ValueError(f"min_letters={min_letters!r} is unfit: give a whole number of 1 or more")
        languages = {code: _lingua_language(code) for code in among}
        self._wanted = languages[language]
        self._min_letters = min_letters
        self._detector = LanguageDetectorBuilder.from_languages(*languages.values()).build()

    def __call__(self, request: RewardRequest) -> Score:
        num_letters: dict[str, int] = {}
        for piece in _spread(_pieces(request.response.text)):
            count = len(_LETTERS.findall(piece))
            if count >= self._min_letters:
                name = self._detect(piece)
                num_letters[name] = num_letters.get(name, 0) + count
        if not num_letters:
            return Score(1.0, "nothing that has a language")
        wanted = num_letters.get(self._wanted.name, 0)
        others = ", ".join(sorted(name.lower() for name in num_letters.keys() - {self._wanted.name}))
        return Score(wanted / sum(num_letters.values()), f"also {others}" if others else "")

    def _detect(self, piece: str) -> str:
        language = self._detector.detect_language_of(piece.encode(errors="ignore").decode())  # lone surrogates
        return "another" if language is None else language.name


def _lingua_language(code: str) -> LinguaLanguage:
    known = getattr(IsoCode639_1, code.upper(), None) if isinstance(code, str) else None
    if known is None:
        raise ValueError(f"language {code!r} is unknown: use ISO 639-1 codes that lingua has, such as en, de or zh")
    return LinguaLanguage.from_iso_code_639_1(known)


def _pieces(text: str) -> Iterator[str]:
    return (match[0] for match in _PIECE.finditer(_NO_LANGUAGE.sub(" ", text)))


def _spread(pieces: Iterator[str]) -> Sequence[str]:
    """All of them, or as many as may be judged, evenly spread."""
    found = list(pieces)
    step = -(-len(found) // MAX_PIECES) or 1
    return found[::step]
