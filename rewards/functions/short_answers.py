"""Rewards of short answers: exact match, keywords, edit distance, numbers within a tolerance, choices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from rapidfuzz.distance import Levenshtein

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import (
    AnswerRule,
    check_number,
    check_true_or_false,
    given_metadata,
    given_references,
    last_boxed,
    request_extractor,
)
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.tools import Tools

# A digit at an alias's edge must be the number's edge as well: 7 is not in -7, 3.7, 7.5, 7/8, 1,007, 7:30 or 7%.
# Chinese and Japanese write no spaces: 7 is in 答案是7个, but 京 is not in 东京.
_IN_WORD = r"[^\W\u3040-\u30ff\u3400-\u9fff]"
_NUMBER_BEGINS = re.compile(rf"(?<!{_IN_WORD})" r"(?<![-+.\N{MINUS SIGN}\N{EN DASH}])(?<![0-9][,:/^*])")
_NUMBER_ENDS = re.compile(r"(?![-+.,:/^*\N{EN DASH}][0-9])(?!\s?%)" rf"(?!{_IN_WORD})")

# A word at the edge must be complete: Germany is not in wrong-Germany, red not in red-haired.
_WORD_BEGINS = re.compile(r"(?<!\w)(?<!\w-)")
_WORD_ENDS = re.compile(r"(?!-\w)(?!\w)")
_MAX_SCANNED = 32  # occurrences that are checked one by one before a pattern is compiled


class ExactMatch(AnswerRule):
    """Compares text with the references, which are aliases of the right answer; runs of white space are one space.

    `ignore_case` folds upper and lower case. With `whole_response` the extracted text must equal the answer. Without it
    the text may contain the answer anywhere at boundaries of words ("cat" is not in "concatenate" or "cat-like") and
    numbers ("7" is not in "-7", "3.7" or "7/8"), and other text is ignored: "not red" contains "red". `extract`
    selects the part with the answer (`mobula.rewards.functions.parsing.extraction`); None is `whole`.
    """

    def __init__(self, tools: Tools, *, ignore_case: bool, whole_response: bool, extract: str | None = None) -> None:
        check_true_or_false(ignore_case=ignore_case, whole_response=whole_response)
        super().__init__("whole" if extract is None else extract)
        self._ignore_case = ignore_case
        self._whole_response = whole_response

    def _compared(self, answer: str, references: tuple[str, ...]) -> Score:
        answer, aliases = fold(answer, self._ignore_case), _aliases(references, self._ignore_case)
        if self._whole_response:
            return Score(float(answer in aliases))
        return Score(float(any(_stands_in(answer, alias) for alias in aliases)))


def fold(text: str, ignore_case: bool) -> str:
    """Strips the text, folds white space to single spaces, rewrites full-width forms; `ignore_case` also folds case."""
    text = " ".join(plain_forms(text).split())
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=4096)  # a group's responses share their references
def _aliases(references: tuple[str, ...], ignore_case: bool) -> tuple[str, ...]:
    return tuple(fold(reference, ignore_case) for reference in references)


def _stands_in(answer: str, alias: str) -> bool:
    """Whether an answer contains an alias at boundaries of words and numbers; a pattern for every row is slower."""
    begins = _NUMBER_BEGINS if alias[0].isdigit() else _WORD_BEGINS
    ends = _NUMBER_ENDS if alias[-1].isdigit() else _WORD_ENDS
    start = answer.find(alias)
    for _ in range(_MAX_SCANNED):
        if start < 0:
            return False
        if begins.match(answer, start) and ends.match(answer, start + len(alias)):
            return True
        start = answer.find(alias, start + 1)
    pattern = f"{begins.pattern}{re.escape(alias)}{ends.pattern}"
    return start >= 0 and re.compile(pattern).search(answer, start) is not None


_WORD = re.compile(r"\w+")


class Keywords:
    """hits / number of keywords. A keyword of `metadata.keywords` counts once, as whole words, ignoring case.

    The share of a response with more than `max_words` words is multiplied by max_words / words, so that listing all
    words does not pay; 0 is no limit. `compat=vlm_gym` also finds keywords inside words, and has no limit.
    """

    def __init__(self, tools: Tools, *, max_words: int, compat: Literal["none", "vlm_gym"]) -> None:
        if isinstance(max_words, bool) or not isinstance(max_words, int) or max_words < 0:
            raise ValueError(f"max_words={max_words!r} is unfit: give a whole number, 0 for no limit")
        if compat not in ("none", "vlm_gym"):
            raise ValueError(f"compat={compat!r} is unknown: use none or vlm_gym")
        self._max_words = max_words
        self._is_compatible = compat == "vlm_gym"

    def __call__(self, request: RewardRequest) -> Score:
        keywords, text = given_metadata(request.metadata, "keywords"), request.response.text
        is_list = isinstance(keywords, list | tuple) and len(keywords) > 0
        if not is_list or not all(isinstance(keyword, str) and keyword.strip() for keyword in keywords):
            raise RewardError(f"metadata.keywords is {keywords!r}: give a list of words")
        if self._is_compatible:
            hits = sum(keyword.lower() in text.lower() for keyword in keywords)
            return Score(hits / len(keywords), "", _parts(hits, keywords, 0))
        hits = sum(_pattern(keyword).search(text) is not None for keyword in keywords)
        num_words = len(_WORD.findall(text))
        is_long = self._max_words and num_words > self._max_words
        brevity = self._max_words / num_words if is_long else 1.0
        reason = f"{num_words} words, {self._max_words} are enough" if is_long else ""
        return Score(brevity * hits / len(keywords), reason, _parts(hits, keywords, num_words))


def _parts(hits: int, keywords: Sequence[str], num_words: int) -> dict[str, float]:
    return {"hits": float(hits), "num_keywords": float(len(keywords)), "words": float(num_words)}


@lru_cache(maxsize=4096)  # a group's responses share their keywords
def _pattern(keyword: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, keyword.split()))
    return re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)


class Anls(AnswerRule):
    """Average normalised Levenshtein similarity (Biten et al. 2019, "Scene Text Visual Question Answering").

    For each reference d = edit distance / length of the longer text, both in lower case with single spaces. The value
    is 1 - min d, or 0 if below `threshold` (published: 0.5). `extract` selects the part of the response with the
    answer (`mobula.rewards.functions.parsing.extraction`).

    `lengths="raw"` uses lengths before white space is folded, like the public scorers, which rewards blanks in a wrong
    answer; `"folded"` uses lengths of the compared texts. Deliberate differences from the publication: surrounding
    white space is stripped, an empty answer scores 0, and a prompt without references is a `RewardError`.
    """

    def __init__(self, tools: Tools, *, threshold: float, lengths: Literal["raw", "folded"], extract: str) -> None:
        check_number("threshold", threshold, low=0, high=1)
        if lengths not in ("raw", "folded"):
            raise ValueError(f"lengths={lengths!r} is unknown: use raw or folded")
        self._threshold = threshold
        self._counts_raw = lengths == "raw"
        super().__init__(extract)

    def _compared(self, answer: str, references: tuple[str, ...]) -> Score:
        value = max(self._similarity(answer, reference) for reference in references)
        return Score(value) if value >= self._threshold else Score(0.0, "too far from every reference")

    def _similarity(self, answer: str, reference: str) -> float:
        answer, reference = plain_forms(answer), plain_forms(reference)
        ours, theirs = _fold(answer), _fold(reference)
        length = max(len(answer), len(reference)) if self._counts_raw else max(len(ours), len(theirs))
        most = int(length * (1 - self._threshold)) + 1  # above it the value is 0, so long texts are not compared fully
        return 1 - Levenshtein.distance(ours, theirs, score_cutoff=most) / length


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?)(\s?%|)")


class RelaxedAccuracy(AnswerRule):
    """The metric of PlotQA (Methani et al. 2020) and ChartQA (Masry et al. 2022).

    If answer a and reference r are both numbers, the value is 1 for |a - r| / |r| <= `tolerance` (published: 0.05), and
    for a = r = 0; "x%" is x / 100. Otherwise the value is 1 if the texts are equal, ignoring case. `extract` selects
    the part of the response with the answer (`mobula.rewards.functions.parsing.extraction`).

    A number is a decimal in ASCII or full-width digits, with or without exponent. Deliberate differences from the
    public scorers: "0.0" is 0 (they compare texts there), "nan", "inf", "1_000" and digits of other scripts are texts,
    surrounding white space is stripped, an empty answer scores 0, and a prompt without references is a `RewardError`.
    As published, "1,000" is a text.
    """

    def __init__(self, tools: Tools, *, tolerance: float, extract: str) -> None:
        check_number("tolerance", tolerance, low=0, high=1)
        self._tolerance = tolerance
        super().__init__(extract)

    def _compared(self, answer: str, references: tuple[str, ...]) -> Score:
        return Score(float(any(self._equals(answer, reference.strip()) for reference in references)))

    def _equals(self, answer: str, reference: str) -> bool:
        ours, theirs = _read(answer), _read(reference)
        if ours is not None and theirs is not None:
            return abs(ours - theirs) / abs(theirs) <= self._tolerance if theirs else ours == 0
        return answer.lower() == reference.lower()


def _read(text: str) -> float | None:
    if len(text) > 400:  # longer than any finite float
        return None
    match = _NUMBER.fullmatch(plain_forms(text))
    if match is None:
        return None
    number = float(match[1]) / 100 if match[2] else float(match[1])
    return number if abs(number) < float("inf") else None


# `no` is an answer only at the end of a clause: "no circle is red" answers nothing.
_ANSWERS = re.compile(r"\b(?:(true|yes)|(false|no(?=\s*(?:[)*\"']|$))))\b", re.IGNORECASE)
_CLAUSES = re.compile(r"([^,.;:!?\n]*)([,.;:!?\n]|$)")

_NEGATIONS = re.compile(
    r"^\W*nor\b|\b(?:not(?! only)|\w+n't|cannot|never|neither|hardly|scarcely|barely|no (?:means|way|circumstances)"
    r"|far from|anything but|unlikely|doubt(?:s|ed|ful)?|den(?:y|ies|ied))\b",
    re.IGNORECASE,
)

_TRUE_FALSE_RETRACTION = re.compile(
    r"\b(?:wait|actually|scratch that|on second thoughts?|correction|mistaken|never ?mind|(?:it|that) back)\b",
    re.IGNORECASE,
)

_MAX_CHARS = 100_000


class TrueFalse:
    """Reads `true`, `yes`, `false` and `no` as separate words; "hardly true" is false, and "not false" is true.

    A response with both answers, or neither, has no answer. `extract` selects the part of the response with the answer
    (`rewards.functions.parsing.extraction`). `compat=vlm_gym` reads like vlm-gym's NLVR2, inside words too: first
    `true` against `false`, then `yes` against `no`; undecided is false.
    """

    def __init__(self, tools: Tools, *, extract: str, compat: Literal["none", "vlm_gym"]) -> None:
        if compat not in ("none", "vlm_gym"):
            raise ValueError(f"compat={compat!r} is unknown: use none or vlm_gym")
        self._extract = request_extractor(extract)
        self._is_compatible = compat == "vlm_gym"

    def __call__(self, request: RewardRequest) -> Score:
        truths = {truth for truth in map(read_truth, given_references(request.references)) if truth is not None}
        if len(truths) != 1:
            raise RewardError(f"the references {request.references!r} do not say one of True and False: write one")
        [truth] = truths
        if self._is_compatible:
            return Score(float(vlm_gym_truth(request.response.text) is truth))
        text, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        answer = read_truth(text)
        return Score(float(answer is truth), "" if answer is not None else "says neither or both of true and false")


def read_truth(text: str) -> bool | None:
    """Returns whether a text says true or false; None if it says neither or both, asks, or takes its answer back.

    Example:
        >>> read_truth("It is hardly true."), read_truth("unknown"), read_truth("Yes: true."), read_truth("Is it true?")
        (False, None, True, None)
    """
    if len(text) > _MAX_CHARS:
        return None
    truths: set[bool] = set()
    for clause, end in _CLAUSES.findall(plain_forms(text)):
        if truths and _TRUE_FALSE_RETRACTION.search(clause):
            return None
        answers = [] if end == "?" else list(_ANSWERS.finditer(clause))
        truths |= {bool(answer[1]) is not is_negated(clause[: answer.start()]) for answer in answers}
        if not answers and end == "," and is_negated(clause[-10:]) and clause.split()[-1:] != ["no"]:
            return None  # "It is not, in my view, true"
    return truths.pop() if len(truths) == 1 else None


def is_negated(clause: str) -> bool:
    """Whether a clause denies what follows it: "I do not think that it is" does, two negations do not."""
    return len(_NEGATIONS.findall(clause)) % 2 == 1


def vlm_gym_truth(text: str) -> bool:
    """Reads like vlm-gym, substrings included: "it is not true" is true, "unknown" is false because of "no"."""
    text = text.lower()
    for yes, no in (("true", "false"), ("yes", "no")):
        if (yes in text) is not (no in text):
            return yes in text
    return False


# Words that retract an answer, or discuss an option instead of choosing it.
_MULTIPLE_CHOICE_RETRACTION = re.compile(
    r"\b(?:wait|not at all|by no means|hardly|wrong|incorrect|mistaken?|actually|rather|instead|sorry|false|untrue"
    r"|reject(?:ed)?|eliminated?|excluded?"
    r"|ruled out|refuted?|disproved?|disagrees?|disputed?|unsure|isn't|can(?:not|'t) be"
    r"|not (?:the |an? )?(?:right|correct|answer|option|choice|it|true|sure))\b",
    re.IGNORECASE,
)

_ABOUT_AN_OPTION = re.compile(r"[\s*]*(?:is|was|are|has|does|did|seems|looks|would|could|should|may|might|or|and)\b")

# After a cue, as in "answer: B was refuted"; "answer: B is ..." chooses B.
_NOT_A_CHOICE = re.compile(r"[\s*]*(?:was|has|does|did|seems|looks|would|could|should|may|might)\b")
_MAX_ALONE_CHARS = 60  # of a letter with brackets and quotes: matching takes quadratic time
_CLAUSE = re.compile(r"[,.;:!?]|\b(?:so|then|thus|hence|therefore|because|but)\b")
_SPACE = re.compile(r"\\[ ,;:!]|\\q?quad(?![A-Za-z])|~")
_WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}\\]*)\}")


class MultipleChoice:
    r"""Reads the option that a response chooses: `B`, `(B)`, `B) text`, `Option B`, `answer: B`, `the answer is (B)`,
    `B is correct`, `答案是B`.

    `letters` are the options, such as "ABCD". `extract` selects the part of the response with the answer
    (`rewards.functions.parsing.extraction`); if this part has a `\boxed{}`, only the box is read. A letter inside a
    word or sentence is not a choice. Two different letters are no answer, nor is a letter that is retracted, doubted or
    only discussed ("B is wrong"). A lower-case letter counts only alone or in brackets.
    """

    def __init__(self, tools: Tools, *, letters: str, extract: str) -> None:
        fits = isinstance(letters, str) and letters.isascii() and letters.isalpha() and letters.isupper()
        if not fits or len(set(letters)) != len(letters) or len(letters) < 2:
            raise ValueError(f"letters={letters!r} is unfit: name two or more different capital letters, such as ABCD")
        self._extract = request_extractor(extract)
        either = f"[{letters}{letters.lower()}]"
        alone = rf"[\s\"'`*$(\[{{]*(?:(?i:option|choice) )?[\"'`*$(\[{{]*({either})[\s\"'`*$)\]}}.:,;]*"
        self._alone = re.compile(alone)
        # "B. text", "B) text", "(B) text", "**B**: text" at the start
        self._first = re.compile(rf"\**(?:\(({either})\)|([{letters}])\**[.):])\**(?=[\s:.,]|$)")
        self._cued = re.compile(
            r"\b(?i:answer|option|choice)\**(?:(?i: is)(?: ?:)?| ?:)\** ?(?:(?i:the )?(?i:option|choice) )?[*\"]*"
            rf"(?:\(({either})\)|(?![AI] (?!because|since|as\b)[a-z])([{letters}]))(?![\w'?])"
        )
        start, end = "(?<![A-Za-z0-9_'])", "(?![A-Za-z0-9_'?])"
        self._affirmed = re.compile(
            rf"{start}(?:\(({either})\)|([{letters}]))\** (?:is|must be) (?:the )?(?:correct|right|best)\b"
        )
        self._chinese = re.compile(rf"(?<!不)(?:答案|[选選][择擇项項]?)[是为為选選: ]*\(?([{letters}])\)?{end}")
        # a separate letter in any role; "A" and "I" before a word are English words
        self._mentioned = re.compile(
            rf"{start}(?:\(({either})\)|(?![AI] [a-z])([{letters}])|([{letters}])(?= (?:is|or|and|nor|not)\b)){end}"
        )
        self._right = lru_cache(maxsize=4096)(self._letters_of)  # a group's responses share their references

    def __call__(self, request: RewardRequest) -> Score:
        right = self._right(given_references(request.references))
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        letter, flaw = self._read(answer)
        return Score(float(letter in right), flaw)

    def _read(self, text: str) -> tuple[str, str]:
        """Returns (chosen letter, ""), or ("", reason) without a choice."""
        boxed = last_boxed(text) if "\\boxed" in text else None
        text = " ".join(plain_forms(text if boxed is None else boxed).split())
        text = _WRAPPING.sub(r"\1", _SPACE.sub(" ", text)) if "\\" in text else text
        alone = self._alone.fullmatch(text) if len(text) <= _MAX_ALONE_CHARS else None
        if alone:
            return alone[1].upper(), ""
        if len(text) > _MAX_CHARS:
            return "", f"answer of {len(text)} characters"
        cued = [match for match in self._cued.finditer(text) if not _NOT_A_CHOICE.match(text, match.end())]
        cued += [*self._affirmed.finditer(text), *self._chinese.finditer(text)]
        chosen = {_letter(match) for match in cued if not is_negated(_CLAUSE.split(text[: match.start()])[-1])}
        first = self._first.match(text)
        if first and not _ABOUT_AN_OPTION.match(text, first.end()):
            chosen.add(_letter(first))
        if not chosen:
            return "", "no option is chosen"
        mentioned = chosen | {_letter(match) for match in self._mentioned.finditer(text)}
        if len(mentioned) > 1:
            return "", f"{len(mentioned)} options are named"
        if "?" in text or _MULTIPLE_CHOICE_RETRACTION.search(text):
            return "", "the choice is taken back or in doubt"
        return chosen.pop(), ""

    def _letters_of(self, references: tuple[str, ...]) -> frozenset[str]:
        letters = frozenset(letter for letter, _ in map(self._read, references) if letter)
        if not letters:
            raise RewardError(f"no reference names one option: {', '.join(map(repr, references))[:200]}")
        return letters


def _letter(match: re.Match[str]) -> str:
    return next(filter(None, match.groups())).upper()
