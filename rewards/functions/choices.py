"""Rewards of choices: true or false, and one of several letters."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor, last_boxed
from mobula.rewards.functions.parsing.references import given_references
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.isolation.process import Tools

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
        self._extract = RequestExtractor(extract)
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
        self._extract = RequestExtractor(extract)
        self._choices = _Choices(letters)

    def __call__(self, request: RewardRequest) -> Score:
        right = self._choices.of_references(given_references(request.references))
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        letter, flaw = self._choices.read(answer)
        return Score(float(letter in right), flaw)


class _Choices:
    def __init__(self, letters: str) -> None:
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
        self.of_references = lru_cache(maxsize=4096)(self._of_references)  # a group's responses share their references

    def read(self, text: str) -> tuple[str, str]:
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

    def _of_references(self, references: tuple[str, ...]) -> frozenset[str]:
        letters = frozenset(letter for letter, _ in map(self.read, references) if letter)
        if not letters:
            raise RewardError(f"no reference names one option: {', '.join(map(repr, references))[:200]}")
        return letters


def _letter(match: re.Match[str]) -> str:
    return next(filter(None, match.groups())).upper()
