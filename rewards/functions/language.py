"""Language: the share of a response in the expected language."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lingua import IsoCode639_1, LanguageDetectorBuilder
from lingua import Language as LinguaLanguage

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.tools import Tools

# Parts without a language: mathematics, commands, code, addresses, and tags.
_NO_LANGUAGE = re.compile(r"```[^`]*```|`[^`\n]*`|\$[^$]*\$|\\[A-Za-z]+|https?://\S+|</?\w+>")
_PIECE = re.compile(r"[^.!?。！？\n]{1,300}")
_LETTERS = re.compile(r"[^\W\d_]")
MAX_PIECES = 200  # of a longer response as many, evenly spread


class Language:
    """The share of letters in sentences of `language`, like DeepSeek-R1's language consistency reward.

    lingua, an n-gram model, classifies each sentence (at most 300 characters) separately. `language` and `among`, the
    candidate languages, are ISO 639-1 codes ("en"). Mathematics, commands, code, addresses and sentences of fewer than
    `min_letters` letters are ignored. If nothing remains, such as in a number, the value is 1: no other language is
    used.
    """

    def __init__(self, tools: Tools, *, language: str, among: Sequence[str], min_letters: int) -> None:
        if isinstance(among, str) or language not in among or len(set(among)) < 2:
            raise ValueError(f"among={among!r} is unfit: list {language!r} and the languages it may be taken for")
        if isinstance(min_letters, bool) or not isinstance(min_letters, int) or min_letters < 1:
            raise ValueError(f"min_letters={min_letters!r} is unfit: give a whole number of 1 or more")
        languages: dict[str, LinguaLanguage] = {}
        for code in among:
            iso_code = getattr(IsoCode639_1, code.upper(), None) if isinstance(code, str) else None
            if iso_code is None:
                raise ValueError(
                    f"language {code!r} is unknown: use ISO 639-1 codes that lingua has, such as en, de or zh"
                )
            languages[code] = LinguaLanguage.from_iso_code_639_1(iso_code)
        self._wanted = languages[language]
        self._min_letters = min_letters
        self._detector = LanguageDetectorBuilder.from_languages(*languages.values()).build()

    def __call__(self, request: RewardRequest) -> Score:
        num_letters: dict[str, int] = {}
        pieces = _PIECE.findall(_NO_LANGUAGE.sub(" ", request.response.text))
        step = -(-len(pieces) // MAX_PIECES) or 1
        for piece in pieces[::step]:
            count = len(_LETTERS.findall(piece))
            if count >= self._min_letters:
                text = piece.encode(errors="ignore").decode()  # without lone surrogates
                language = self._detector.detect_language_of(text)
                name = "another" if language is None else language.name
                num_letters[name] = num_letters.get(name, 0) + count
        if not num_letters:
            return Score(1.0, "nothing that has a language")
        wanted = num_letters.get(self._wanted.name, 0)
        others = ", ".join(sorted(name.lower() for name in num_letters.keys() - {self._wanted.name}))
        return Score(wanted / sum(num_letters.values()), f"also {others}" if others else "")
