r"""Separates an answer into its value and its unit: `5\text{ m/s}` is `5` with the unit m/s."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from mobula.rewards.functions.parsing.unit_names import singular, unit_symbol

_NESTED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_WRAPPING = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*"
_WRAPPED = _WRAPPING + _NESTED
_NAME = (
    rf"(?>{_WRAPPED}|\\frac\s*{_NESTED}\s*{_NESTED}|\^\s*(?:\{{\s*\\circ\s*\}}|\\circ(?![A-Za-z]))|"
    r"\\(?:Omega|mu|degree|pounds|euro|text(?:euro|sterling|yen))(?![A-Za-z])|\\\$|"
    r"[A-Za-z]++\.?|[\u4e00-\u9fff]++|[$€£¥₹¢])"
)
_POWER = r"(?>\s*\^\s*(?:\{\s*-?[1-9]\s*\}|[1-9])|[23](?![0-9])|)"
_JOIN = r"(?>(?:\s|/|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*|\\[,;:! ]|~|[()])*)"
_TAIL = re.compile(rf"{_JOIN}{_NAME}{_POWER}(?:{_JOIN}{_NAME}{_POWER})*+\s*\)?\s*\.?\s*")
_VALUE_END = re.compile(r"(?<=[0-9})\]])|(?<=\\pi)|(?<=\\infty)|(?<=[A-Za-z])(?=\s|\\[,;: ]|~|\\text|\\mathrm)")
_CURRENCY_FIRST = re.compile(
    r"\s*([-+]?)\s*(\\text\s*\{\s*(?:[€£¥₹]|Rs\.?)\s*\}|\\\$|\\(?:pounds|euro)(?![A-Za-z])|[$€£¥₹]|"
    r"(?:Rs|USD|EUR|GBP|INR)\b\.?)(?:\s|\\[,;: ]|~)*([-+]?)(?=[0-9.\\])"
)
_MAX_UNIT_CHARS = 80
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])|\b(?:sin|cos|tan)\b")

# Directly after a number and without \text{}, these may be variables: 5m, 2mg. A reference of this form stays algebra.
_AMBIGUOUS = re.compile(r"(?:[A-Za-z]|mg|ms)\.?")
_SYMBOL_COMMANDS = {
    **{"\\Omega": "Ω", "\\mu": "μ", "\\degree": "°", "\\cdot": "·", "\\times": "·", "*": "·", "\\$": "$"},
    **{"\\pounds": "£", "\\textsterling": "£", "\\euro": "€", "\\texteuro": "€", "\\textyen": "¥"},
}
_WRAPPER = re.compile(rf"{_WRAPPING}({_NESTED})")
_SYMBOL_COMMAND = re.compile(r"\\(?:Omega|mu|degree|pounds|euro|text(?:euro|sterling|yen)|cdot|times)\s*|\\\$|\*")
_DIMENSIONS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_FRACTION = re.compile(rf"\\frac\s*({_NESTED})\s*({_NESTED})")
_TOKEN = re.compile(r"[A-Za-zμΩ°]+|[\u4e00-\u9fff]+|[$€£¥₹¢]|\^\s*\{?\s*(-?[0-9])\s*\}?|[0-9]|[/·()]|\S")
_PLAIN_WORD = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")

Unit = frozenset[tuple[str, int]]  # base unit -> power: m/s is {("m", 1), ("s", -1)}
_YEN_SIGN: Unit = frozenset({("¥", 1)})
_YEN_AND_YUAN: tuple[Unit, ...] = (frozenset({("円", 1)}), frozenset({("元", 1)}))  # both are written ¥


@dataclass(frozen=True)
class Measured:
    """A value with an optional unit; `ambiguous` if the unit may also be variables (`5m`)."""

    value: str
    unit: Unit | None = None
    ambiguous: bool = False


def split_unit(text: str, excluded: frozenset[str] = frozenset()) -> Measured:
    """Separates a normalised text into value and unit.

    Args:
        text: an answer in LaTeX or plain text, such as `5 cm^2`, `\\$12` or `12\\text{ apples}`.
        excluded: words that change a value ("more", "not") and are never part of a unit.
    """
    currency = _CURRENCY_FIRST.match(text)
    if currency and not (currency[1] and currency[3]):
        sign, unit = currency[1] or currency[3], _known_unit(_flat(currency[2]).rstrip("."))
        if unit is not None:
            return Measured(sign + text[currency.end() :], unit)
    if _ANGLE_FUNCTION.search(text):
        return Measured(text)  # the degree sign belongs to the argument of the function
    for end in _VALUE_END.finditer(text, max(1, len(text) - _MAX_UNIT_CHARS)):
        tail = text[end.start() :]
        if text[: end.start()].strip() and _TAIL.fullmatch(tail):
            unit = _unit_of(tail, excluded)
            if unit is not None and (tail[:1] not in "^" or tail.startswith(("^\\circ", "^{\\circ"))):
                return Measured(text[: end.start()].rstrip(), unit, _AMBIGUOUS.fullmatch(tail) is not None)
    return Measured(text)


def same_unit(one: Unit, other: Unit) -> bool:
    """Whether two units are equal; of two counted nouns one may have more words: "apples" and "red apples"."""
    if one == other or (_YEN_SIGN in (one, other) and (one in _YEN_AND_YUAN or other in _YEN_AND_YUAN)):
        return True
    nouns = [next(iter(unit))[0] for unit in (one, other) if len(unit) == 1]
    if len(nouns) < 2 or not any(" " in noun for noun in nouns):
        return False
    words = sorted((set(noun.split()) for noun in nouns), key=len)
    return words[0] <= words[1]


def spelled(unit: Unit) -> str:
    """Formats a unit: "m·s^-1"."""
    return "·".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(unit))


def _unit_of(tail: str, excluded: frozenset[str]) -> Unit | None:
    flat = _flat(tail)
    if excluded & {word.casefold() for word in re.findall(r"[A-Za-z']+", flat)}:
        return None
    unit = _known_unit(flat)
    if unit is not None:
        return unit
    wrapped = re.fullmatch(rf"(?:\s|\\[,;: ]|~)*{_WRAPPED}\s*\.?", tail)
    noun = flat.strip().rstrip(".").strip()
    if wrapped and _PLAIN_WORD.fullmatch(noun) and noun.isascii() and noun not in ("k", "K", "M", "B", "bn", "mn"):
        return frozenset({(" ".join(singular(word) for word in noun.casefold().split()), 1)})
    return None


def _flat(tail: str) -> str:
    """Removes wrappers and spacing commands from a unit."""
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?\s*", "°", tail)
    text = _FRACTION.sub(lambda f: f"{f[1][1:-1]}/({f[2][1:-1]})", text)
    text = _SYMBOL_COMMAND.sub(lambda c: _SYMBOL_COMMANDS[c[0].strip()], text)
    text = _WRAPPER.sub(lambda wrapper: wrapper[1][1:-1], text)
    text = re.sub(r"\\[,;:! ]|~|(?<=[A-Za-z])\.(?=\s)", " ", text)
    return re.sub(r"°\s*([CF])(?![A-Za-z])", r"°\1", re.sub(r"(?<=[kmMG])\s+(?=Ω)", "", text))


def _known_unit(flat: str) -> Unit | None:
    """Parses a text of known unit names, or returns None. "/" inverts the next name or group; a power applies to the
    last name.
    """
    powers: Counter[str] = Counter()
    group, inverted, dimension = 1, False, 1
    last: list[tuple[str, int]] = []
    for match in _TOKEN.finditer(flat.strip().rstrip(".")):
        token = match[1] or match[0]
        if token in ("/", "per"):
            inverted = True
        elif token == "(":
            group, inverted = -1 if inverted else 1, False
        elif token == ")":
            group = 1
        elif token in _DIMENSIONS:
            dimension = _DIMENSIONS[token]
        elif token.lstrip("-").isdigit() and last:
            for name, power in last:
                powers[name] += power * (int(token) - 1)
            last = []
        elif base := _base(token):
            sign = (-1 if inverted else 1) * group * dimension
            last = [(name, power * sign) for name, power in base]
            powers.update(dict(last))
            inverted, dimension = False, 1
        elif token != "·":
            return None
    return frozenset((name, power) for name, power in powers.items() if power) or None


def _base(token: str) -> Unit | None:
    """Returns the base units of a name, symbol or abbreviation."""
    symbol = unit_symbol(token)
    if symbol is None:
        return None
    if "/" in symbol:
        above, below = symbol.split("/")
        return frozenset({(above, 1), (below, -1)})
    name, _, power = symbol.partition("^")
    return frozenset({(name, int(power or 1))})
