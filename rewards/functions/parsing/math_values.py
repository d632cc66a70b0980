"""Reads an answer as a typed value: list, set, bracket, relation, operation, quantity, matrix, expression, text, ...

Nothing is guessed: an unknown command or word makes its part of the answer a text, which equals only itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mobula.rewards.functions.parsing.math_expressions import FUNCTIONS, NUM_POINTS, Expression, rows
from mobula.rewards.functions.parsing.math_tokens import (
    Token,
    UnreadableError,
    closing,
    plain,
    refuse,
    spelled,
    split,
    token_lists,
)
from mobula.rewards.functions.parsing.units import CURRENCIES, Unit, noun, read_unit

# Next to a number these change its meaning and are no counted things: "5 or more", "5 squared", "5 is wrong".
_TALK = frozenset(
    "or and not no nor none never neither either more less fewer greater smaller larger bigger least most than under"
    " over above below before after between about around approximately approx roughly nearly almost circa is was are"
    " wrong false incorrect untrue mistaken right true too few many several hundred hundreds thousand thousands million"
    " millions billion billions trillion dozen dozens half third quarter double twice triple times plus minus negative"
    " positive squared cubed factorial base mod modulo remainder except unless but maybe perhaps possibly cannot can"
    " undefined unknown infinity infinite impossible wait rather instead question the per off".split()
)
_RELATIONS = frozenset(
    r"= < > \le \ge \ne \approx \equiv \in \notin \notless \notgreater \subset \subseteq \supset \to \Rightarrow"
    r" \Leftrightarrow \perp \parallel \sim \cong \simeq \propto \ll \gg".split()
)
_TURNED = {">": "<", "\\ge": "\\le", "\\supset": "\\subset", "\\gg": "\\ll"}
_OPERATIONS = ("\\lor", "\\land", "\\setminus", "\\cup", "\\cap", "\\times")
_LOOSE = frozenset("m g s h L l N J W V A K mg ms".split())  # bare letters that may be a unit: 5m
_OPTION = re.compile(
    r"(?:\\(?:text|textbf|mathbf|mathrm)\s*\{\s*)?(?:(?:[Oo]ption|[Cc]hoice)\s+(?=\(?[A-J]\)?\}?$))?"
    r"(?:\(([A-J])\)|([A-J])[.):](?=[\s}]|$)|([A-J])(?=\}?$))\s*\}?(?:\s|\\[,;: ]|~|\\q?quad)*(.*)",
    re.DOTALL,
)
_MATRIX = re.compile(r"\\begin\{(?:[pbB]|small|)matrix\}|\\begin\{array\}")
_JOINTS = frozenset(r"/ * \cdot \times ^ \sqrt \frac - + _".split())  # no unit begins after these
_MAX_UNIT_TOKENS = 40
# A decimal that may be rounded has six digits after the point, leading zeros not counted: 0.333333 is 1/3, 0.33 is not.
_ROUNDED = re.compile(r"(?:- )?(?:0*[1-9][0-9]*\.|0*\.0*(?=[1-9]))[0-9]{6,}")


@dataclass(frozen=True)
class Value:
    """A typed value.

    Attributes:
        kind: list, set, bracket, relation, operation, congruence, quantity, option, matrix, expression or text.
        parts: items, sides, or the value of a quantity or option.
        name: how a list is joined ("," "and" "or"); brackets; relation; operation; letter; the text of others.
        points: values of an expression at the sample points.
        symbols: names in an expression.
        decimals: of a decimal with enough digits to be a rounded value, else 0.
        is_computed: a sum or product of rational numbers, such as 3 + 4.
        is_loose: a unit that may be variables, such as 5m.
    """

    kind: str
    parts: tuple[Value, ...] = ()
    name: str = ""
    points: tuple[Any, ...] = ()
    symbols: frozenset[str] = frozenset()
    unit: Unit = frozenset()
    decimals: int = 0
    is_computed: bool = False
    is_loose: bool = False

    @property
    def is_number(self) -> bool:
        return self.kind == "expression" and not self.symbols


EMPTY = Value("set", name="\\emptyset")


def readings(text: str) -> list[Value]:
    """Returns the values that a text may have, the usual one first: 100,200 is one number or two."""
    text = plain(text)
    option = _OPTION.fullmatch(text)
    if option and len(text) > 1:
        letter, rest = option[1] or option[2] or option[3], option[4]
        rest = rest.removesuffix("}") if rest.count("}") > rest.count("{") else rest
        return [Value("option", parts, letter) for parts in (zip(readings(rest), strict=True) if rest else [()])]
    try:
        return [_value(found) for found in token_lists(text)]
    except UnreadableError:
        return [Value("text", name=text)]


def _value(found: Sequence[Token]) -> Value:
    for mode, separators in (("or", ("or",)), (";", (";",)), ("and", ("and", "\\\\")), (",", (",",))):
        pieces = split(found, separators)
        if len(pieces) > 1:
            items = [_value(piece) for piece in pieces if piece]
            return _listed("," if mode == ";" else mode, items) if pieces[0] else refuse("nothing before a separator")
    return _item(found)


def _listed(mode: str, values: Sequence[Value]) -> Value:
    """Returns a list. Values after `x = 1,` are values of x as well; equations of one name are one equation."""
    items: list[Value] = []
    for value in values:
        is_system = len({part.parts[0] for part in value.parts if part.kind == "relation"}) > 1
        items += value.parts if value.kind == "list" and value.name in (",", mode) and not is_system else [value]
    for index, (before, item) in enumerate(zip(items, items[1:], strict=False), 1):
        if before.kind == "relation" and before.name in ("=", "\\ne") and item.kind not in ("relation", "congruence"):
            items[index] = Value("relation", (before.parts[0], item), before.name)
    first = items[0]
    heads = {(item.kind, item.name, item.parts[:1], len(item.parts)) for item in items}
    if len(heads) == 1 and len(first.parts) == 2 and first.kind == "relation" and first.name in ("=", "\\ne", "\\in"):
        sides = list(dict.fromkeys(item.parts[1] for item in items))
        return Value("relation", (first.parts[0], _listed(mode, sides)), first.name)
    return Value("list", tuple(items), mode) if len(items) > 1 else first


def _item(found: Sequence[Token]) -> Value:
    if not found:
        raise UnreadableError("nothing")
    if closing(found, 0) == len(found) - 1 and found[0].text in ("{", "\\begin{cases}"):
        return _value([token for token in found[1:-1] if token.text != "&"])
    texts = [token.text for token in found]
    if "\\pmod" in texts[1:]:
        index = texts.index("\\pmod")
        return Value("congruence", (_item(found[:index]), _quantity(found[index + 1 :])))
    signs = _RELATIONS | ({"|"} if texts.count("|") == 1 else set())
    terms = split(found, signs)
    if len(terms) == 1:
        return _union(found)
    names = [texts[sum(map(len, terms[:index])) + index - 1] for index in range(1, len(terms))]
    if not terms[0]:
        return _item(found[1:]) if names[0] in ("=", "\\approx") else refuse("nothing before a relation")
    while len(names) > 1 and names[-1] == "\\approx":  # a rounded value after the exact one
        names, terms = names[:-1], terms[:-1]
    sides = [_side(term) for term in terms]
    if set(names) == {"="} and len(sides) > 2:
        return Value("relation", tuple(sides), "=")
    return _listed("and", [_relation(*each) for each in zip(names, sides, sides[1:], strict=False)])


def _side(found: Sequence[Token]) -> Value:
    """Reads a side of a relation, in which a short word is a product of letters."""
    is_product = len(found) == 1 and re.fullmatch("[A-Za-z]{2,3}", found[0].text) and not found[0].is_text
    return _expression(found) if is_product else _union(found)


def _relation(name: str, one: Value, other: Value) -> Value:
    name = "=" if name == "\\approx" and other.is_number else name
    if name in _TURNED or (name == "=" and one.is_number and not other.is_number):
        name, one, other = _TURNED.get(name, name), other, one
    if name == "\\in" and other.kind == "set":
        name, other = "=", _listed(",", other.parts) if other.parts else other
    return Value("relation", (one, other), name)


def _union(found: Sequence[Token]) -> Value:
    for operation in _OPERATIONS:
        pieces = split(found, (operation,))
        if len(pieces) > 1 and all(pieces) and (operation != "\\times" or all(map(_has_order, pieces))):
            return Value("operation", tuple(map(_union, pieces)), operation)
    return _quantity(found)


def _has_order(found: Sequence[Token]) -> bool:
    """Whether tokens are a capital letter, a vector, a set or an interval, so that a product depends on the order."""
    first = found[0].text
    if first in ("(", "[", "\\{") and closing(found, 0) == len(found) - 1:
        return len(split(found[1:-1], (",",))) > 1
    return (len(found) == 1 and first.isupper()) or first in ("\\vec", "\\mathbb", "\\overrightarrow")


def _quantity(found: Sequence[Token]) -> Value:
    texts = [token.text for token in found] or refuse("nothing")
    name = spelled(found)
    if re.fullmatch(r"\\emptyset|no solutions?|(the )?empty set", name):
        return EMPTY
    if texts[0] == "\\{" and (value := _bracket(found)):
        return value
    if "\\pm" in texts or "\\mp" in texts:
        signs = ({"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"})
        both = [_quantity([token._replace(text=sign.get(token.text, token.text)) for token in found]) for sign in signs]
        return _listed(",", [replace(value, is_computed=False) for value in both])
    if all(text.isalpha() for text in texts) and len("".join(texts)) > 1:
        return Value("text", name=name)
    sign = int(texts[0] in ("+", "-"))
    if len(texts) > sign + 1 and texts[sign] in CURRENCIES:
        amount = [*found[:sign], *found[sign + 1 + (texts[sign + 1] == ".") :]]
        return Value("quantity", (_quantity(amount),), unit=read_unit([texts[sign]]) or frozenset())
    if value := _bracket(found) or _matrix(found):
        return value
    index = 0
    while (index := closing(found, index) + 1) < len(found):
        if len(found) - index < _MAX_UNIT_TOKENS and (value := _measured(found, index)):
            return value
    try:
        return _expression(found)
    except (ArithmeticError, TypeError, ValueError, RecursionError):
        return Value("text", name=re.sub(r"\{ (\S+) \}", r"\1", name))


def _measured(found: Sequence[Token], index: int) -> Value | None:
    before, first, rest = found[index - 1].text, found[index], found[index:]
    texts = [token.text for token in rest]
    if first.text in ("(", "[", "|") or before in _JOINTS:
        return None
    is_angle = "\\degree" in texts and any(token.text.removeprefix("\\") in FUNCTIONS for token in found)
    unit = None if is_angle else read_unit(texts[texts[0] in ("\\cdot", "*") :])
    is_letter = first.text.isascii() and first.text.isalpha()
    is_after_value = before[-1].isdigit() or before in (")", "}", "]", "|", "\\pi", "\\infty", "!")
    if unit and (is_after_value or first.is_text or not is_letter or (first.has_gap and len(first.text) > 1)):
        bare = [token for token in rest if token.text.isalpha()]
        is_alone = len(bare) == 1 and not bare[0].is_text and not {"\\degree", "\\Omega", "\\mu"} & set(texts)
        is_loose = is_alone and bare[0].text in _LOOSE
        if not (is_alone and re.fullmatch("[A-Za-z]", bare[0].text)) or is_loose:
            name = "^" if is_loose and "^" in texts else ""
            return Value("quantity", (_quantity(found[:index]),), name, unit=unit, is_loose=is_loose)
    things = [text for text in texts if text not in (".", "-")]
    is_noun = all(re.fullmatch("[A-Za-z]{3,}", text) and text.casefold() not in _TALK for text in things)
    if is_noun and 0 < len(things) < 4 and all(token.is_text for token in rest):
        return Value("quantity", (_quantity(found[:index]),), unit=noun(things))
    return None


def _bracket(found: Sequence[Token]) -> Value | None:
    first, last, inner = found[0].text, found[-1].text, found[1:-1]
    if first not in ("(", "[", "\\{") or closing(found, 0) != len(found) - 1:
        return None
    if first == "\\{":
        if len(sides := split(inner, ("|", ":"))) == 2:
            unknown, condition = map(_value, sides)
            unknown = unknown.parts[0] if unknown.kind == "relation" else unknown
            is_symbol = re.fullmatch(r"\S+", unknown.name) and unknown.symbols
            condition_only = Value("operation", (condition,), "\\cup")
            return condition_only if is_symbol else Value("operation", (unknown, condition), "|")
        inside = _value(inner) if inner else EMPTY
        parts = inside.parts if inside.kind == "list" else (inside,)
        if not inner or all(part.kind == "relation" for part in parts):
            return inside
        return Value("set", tuple(dict.fromkeys(parts)) if inside.name == "," else (inside,))
    pieces = split(inner, (",", ";"))
    if len(pieces) > 1:
        return Value("bracket", tuple(map(_item, pieces)), first + last)
    inside = _value(inner)
    return inside if first == "(" or inside.kind == "matrix" else Value("bracket", (inside,), first + last)


def _matrix(found: Sequence[Token]) -> Value | None:
    index = next((index for index, token in enumerate(found) if _MATRIX.fullmatch(token.text)), None)
    if index is None or closing(found, index) != len(found) - 1:
        return None
    scale = found[:index]
    lines = [
        [_quantity([*scale, Token("("), *cell, Token(")")]) for cell in row] for row in rows(found[index + 1 : -1])
    ]
    cells = tuple(replace(cell, is_computed=False) for line in lines for cell in line)
    return Value("matrix", cells, " ".join(str(len(line)) for line in lines))


def _expression(found: Sequence[Token]) -> Value:
    ratio = split(found, (":",))
    if len(ratio) > 2:
        first = [Token("("), *ratio[0], Token(")")]
        return Value("bracket", tuple(_expression([*term, Token("\\div"), *first]) for term in ratio[1:]), ":")
    reader = Expression(found, 0)
    value, others = reader.whole(), range(1, NUM_POINTS)
    values = [value, *(Expression(found, point, None, reader).whole() if reader.names else value for point in others)]
    name = spelled(found)
    return Value(
        "expression",
        name=name,
        points=tuple(values),
        symbols=frozenset(reader.names),
        decimals=len(name.partition(".")[2]) if _ROUNDED.fullmatch(name) else 0,
        is_computed=reader.is_computed and not reader.names and hasattr(value, "denominator"),
    )
