"""Math answer: 1 if the answer of the response is mathematically equal to a reference, else 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import (
    check_true_or_false,
    closing_boxes,
    given_references,
    request_extractor,
)
from mobula.rewards.functions.parsing.math_expressions import mp, sample
from mobula.rewards.functions.parsing.math_tokens import Token
from mobula.rewards.functions.parsing.math_values import Value, _expression, readings
from mobula.rewards.functions.parsing.units import same_unit
from mobula.rewards.tools import Tools

_LITERAL = re.compile(r"[0-9]{1,2} : [0-5][0-9]|[0-9]+( [-/] )[0-9]+\1[0-9]+")  # a time or a date
_SAME_POINT = mp.mpf(10) ** -35
_ZERO = mp.mpf(10) ** -50
_MAX_ITEMS = 100  # of lists whose order does not count
_PERCENT = frozenset({("%", 1)})
Region = tuple[str, frozenset[Any], Callable[[Any], bool]]  # name of the unknown, end points, membership


def equals(answer: str, reference: str) -> bool:
    ours, theirs = readings(answer), readings(reference)
    if len(ours) > 1 and len(theirs) > 1:  # both write numbers in the same way
        ours, theirs = ours[:1], theirs[:1]
    return any(_same(one, other) for one in ours for other in theirs)


def _same(answer: Value, reference: Value) -> bool:
    if answer == reference:
        return answer.kind != "text" or answer.name != ""
    if answer.is_loose or reference.is_loose:  # an answer may add 5m, a reference 5m may be a product
        if answer.kind == reference.kind:
            return same_unit(answer.unit, reference.unit) and _same(answer.parts[0], reference.parts[0])
        return answer.is_loose and not answer.name and _same(answer.parts[0], reference)
    kinds = (answer.kind, reference.kind)
    return next((rule(answer, reference) for kind, rule in _RULES.items() if kind in kinds), False)


def _same_option(answer: Value, reference: Value) -> bool:
    both = (answer, reference)
    letters = [value.name for value in both if value.kind == "option" or re.fullmatch("[A-J]", value.name)]
    if len(letters) == 2:
        return letters[0] == letters[1]
    values = [part for value in both for part in (value.parts if value.kind == "option" else (value,))]
    return len(values) == 2 and _same(*values)


def _same_congruence(answer: Value, reference: Value) -> bool:
    if answer.kind != reference.kind:
        whole, other = (answer, reference) if answer.kind == "congruence" else (reference, answer)
        return whole.parts[0].kind == "relation" and other.is_number and _same(whole.parts[0].parts[1], other)
    (ours, modulus), (theirs, other_modulus) = answer.parts, reference.parts
    if not _same(modulus, other_modulus) or ours.kind != theirs.kind:
        return False
    if ours.kind != "relation" or not _same(ours.parts[0], theirs.parts[0]):
        return _same(ours, theirs)
    residues = [value.points[0] for value in (ours.parts[1], theirs.parts[1], modulus) if value.is_number]
    is_exact = len(residues) == 3 and all(isinstance(residue, Fraction) for residue in residues) and residues[2] != 0
    return (residues[0] - residues[1]) % residues[2] == 0 if is_exact else _same(ours.parts[1], theirs.parts[1])


def _same_relation(answer: Value, reference: Value) -> bool:
    ours, theirs = _named(answer), _named(reference)
    if ours and theirs and max(len(ours), len(theirs)) > 1:
        return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)
    if answer.kind == reference.kind == "relation" and answer.name == reference.name:
        (left, *_, right), (other_left, *_, other_right) = answer.parts, reference.parts
        is_left = left == other_left or (not left.is_number and _same(left, other_left))
        if is_left and _is_consistent(answer) and _same(right, other_right):
            return True
        if answer.name == "\\ne" and _same(left, other_right) and _same(right, other_left):
            return True
        if answer.name in ("=", "<", "\\le") and _same_equation(answer, reference):
            return True
    if _same_region(answer, reference):
        return True
    if ours and not theirs and reference.kind != "relation":
        return _same_named(ours, reference, _same)
    if theirs and not ours and answer.kind != "relation" and not any(re.search("[+-]", name.name) for name in theirs):
        return _same_named(theirs, answer, lambda value, bare: _same(bare, value))
    return answer.kind == reference.kind == "list" and _same_items(answer, reference)


def _is_consistent(chain: Value) -> bool:
    """Whether the sides of a chain are equal, without its first one if this is a name."""
    sides = chain.parts if chain.parts[0].is_number else chain.parts[1:]
    return len(sides) == 1 or all(_same_points(side.points, sides[-1].points) for side in sides)


def _named(value: Value) -> dict[Value, Value] | None:
    """Returns the values of names in an equation or a list of equations of different names, or None."""
    if value.kind == "relation" and value.name == "=" and _is_consistent(value):
        left, right = value.parts[0], value.parts[-1]
        is_tuple = left.kind == right.kind == "bracket" and len(left.parts) == len(right.parts)
        return dict(zip(left.parts, right.parts, strict=True)) if is_tuple else {left: right}
    if value.kind == "list" and value.name != "or":
        entries = [_named(part) or {} for part in value.parts]
        merged = {name: item for entry in entries for name, item in entry.items()}
        return merged if all(entries) and len(merged) == sum(map(len, entries)) else None
    return None


def _same_named(named: dict[Value, Value], bare: Value, same: Callable[[Value, Value], bool]) -> bool:
    """Compares named values with bare ones, in the order of the names; roots x_1, x_2 have no order."""
    if not all(map(_is_name, named)):
        return False
    if len(named) == 1:
        return same(next(iter(named.values())), bare)
    values = tuple(named[name] for name in sorted(named, key=lambda name: name.name))
    are_roots = len({name.name.partition("_")[0] for name in named}) == 1
    if are_roots and bare.kind in ("set", "list"):
        return _same_items(Value("list", values, ","), bare)
    is_ordered = bare.kind == "list" or (bare.kind, bare.name) == ("bracket", "()")
    return is_ordered and _pairwise(values, bare.parts, same)


def _is_name(value: Value) -> bool:
    """Whether a side of an equation names the value on the other side: x, f(x), AB, a + b, "Area"."""
    if value.kind == "bracket":
        names = [part.name for part in value.parts]
        return all(map(_is_name, value.parts)) and names == sorted(names)
    if value.kind != "expression" or value.is_computed:
        return value.is_computed or value.kind == "operation" or (value.kind == "text" and "the " not in value.name)
    digits = re.search("[0-9]", re.sub(r"_ (\{[^{}]*\}|\S+)|\([^()]*\)", "", value.name))
    return bool(value.symbols) and digits is None


def _same_equation(answer: Value, reference: Value) -> bool:
    """Whether the sides of two relations have differences of a constant ratio: 2x + 4y = 6 and x + 2y = 3."""
    if not all(part.kind == "expression" for value in (answer, reference) for part in value.parts):
        return False
    symbols = [value.parts[0].symbols | value.parts[-1].symbols for value in (answer, reference)]
    if symbols[0] != symbols[1] or not symbols[0] or len(answer.parts) + len(reference.parts) > 4:
        return False
    sides = [zip(*(part.points for part in value.parts), strict=True) for value in (answer, reference)]
    differences = [[mp.convert(left) - mp.convert(right) for left, right in pairs] for pairs in sides]
    if 0 in differences[1]:
        return False
    ratios = [one / other for one, other in zip(*differences, strict=True)]
    is_direction = answer.name == "=" or mp.re(ratios[0]) > 0
    return is_direction and ratios[0] != 0 and all(_close(ratio, ratios[0]) for ratio in ratios)


def _same_items(answer: Value, reference: Value) -> bool:
    """Compares lists, sets and brackets: a list has no order but a number of each value, a set has neither."""
    kinds = {answer.kind, reference.kind}
    if "bracket" in kinds and not (kinds == {"set", "bracket"} and "()" in (answer.name, reference.name)):
        is_list = kinds == {"list", "bracket"} and {answer.name, reference.name} == {",", "()"}
        is_tuple = kinds == {"bracket"} and answer.name == reference.name
        return (is_list or is_tuple) and _pairwise(answer.parts, reference.parts, _same)
    if not kinds <= {"list", "set"}:
        whole, other = (answer, reference) if answer.kind in ("list", "set") else (reference, answer)
        is_single = whole.kind == "set" and len(whole.parts) == 1
        return is_single and (_same(whole.parts[0], other) if whole is answer else _same(other, whole.parts[0]))
    is_long = max(len(answer.parts), len(reference.parts)) > _MAX_ITEMS
    if is_long or (kinds == {"list"} and {answer.name, reference.name} == {"and", "or"}):
        return False
    ours, theirs = [_different(value.parts) if value.kind == "set" else [*value.parts] for value in (answer, reference)]
    if len(ours) != len(theirs):
        return False
    for one in ours:
        match = next((index for index, other in enumerate(theirs) if _pairwise([one], [other], _same)), None)
        if match is None:
            return False
        theirs.pop(match)
    return True


def _pairwise(ours: Sequence[Value], theirs: Sequence[Value], same: Callable[[Value, Value], bool]) -> bool:
    """Whether items are equal in order. In a list, a bare value stands for no equation and no set."""
    kinds = [[value.kind if value.kind in ("relation", "set") else "" for value in side] for side in (ours, theirs)]
    return kinds[0] == kinds[1] and all(map(same, ours, theirs))


def _different(values: Sequence[Value]) -> list[Value]:
    kept: list[Value] = []
    for value in values:
        kept += [] if any(_same(value, other) for other in kept) else [value]
    return kept


def _same_operation(answer: Value, reference: Value) -> bool:
    if (answer.kind, answer.name) == (reference.kind, reference.name):
        is_unordered = answer.name in ("\\lor", "\\land", "\\cup", "\\cap")
        lists = [Value("list" if is_unordered else "bracket", value.parts, "()") for value in (answer, reference)]
        if _same_items(*lists):
            return True
    return _same_region(answer, reference)


def _same_region(answer: Value, reference: Value) -> bool:
    ours, theirs = _region(answer), _region(reference)
    if not ours or not theirs or (ours[0] and theirs[0] and ours[0] != theirs[0]):
        return False
    is_point = reference.name == "()" and all(mp.isfinite(end) for end in theirs[1])
    if is_point and answer.kind in ("relation", "list") and answer.name != "\\in":
        return False  # a pair of numbers as reference may be a point
    ends = sorted({end for end in ours[1] | theirs[1] if mp.isfinite(end)}) or [mp.zero]
    ends = [end for end, before in zip(ends, [None, *ends], strict=False) if before is None or not _close(end, before)]
    middles = [(one + other) / 2 for one, other in zip(ends, ends[1:], strict=False)]
    return all(ours[2](end) == theirs[2](end) for end in (*ends, *middles, ends[0] - 1, ends[-1] + 1))


def _region(value: Value) -> Region | None:
    kind, name, parts = value.kind, value.name, value.parts
    if kind in ("operation", "list"):
        return _joined(value)
    if name == "\\mathbb { R }":
        return "", frozenset(), lambda x: True
    numbers = [mp.re(mp.convert(part.points[0])) for part in parts if part.is_number and mp.im(part.points[0]) == 0]
    if kind == "set" and len(numbers) == len(parts):
        return "", frozenset(numbers), lambda x: any(_close(x, number) for number in numbers)
    if kind == "bracket" and name[0] in "([" and len(numbers) == len(parts) == 2 and numbers[0] < numbers[1]:
        return "", frozenset(numbers), _between(numbers[0], numbers[1], name[0] == "[", name[1] == "]")
    if kind != "relation" or len(parts) != 2:
        return None
    left, right = parts
    if name in ("\\in", "\\ne"):
        items = right.parts if right.kind == "list" else (right,)
        inside = (
            _region(right if name == "\\in" else Value("set", items)) if name == "\\in" or _is_symbol(left) else None
        )
        return inside and (left.name, inside[1], lambda x: inside[2](x) == (name == "\\in"))
    unknown = right if left.is_number else left
    if name not in ("<", "\\le") or len(numbers) != 1 or not _is_symbol(unknown):
        return None
    ends = (numbers[0], mp.inf) if left.is_number else (-mp.inf, numbers[0])
    return unknown.name, frozenset(numbers), _between(ends[0], ends[1], name != "<", name != "<")


def _joined(value: Value) -> Region | None:
    regions = [region for region in map(_region, value.parts) if region]
    unknowns = {region[0] for region in regions} - {""}
    joint = value.name if value.kind == "operation" else "\\cap" if value.name == "and" else "\\cup"
    if len(regions) < len(value.parts) or len(unknowns) > 1 or (value.kind == "list" and not unknowns):
        return None
    first, *others = [region[2] for region in regions]
    rules: dict[str, Callable[[Any], bool]] = {
        "\\cup": lambda x: first(x) or any(test(x) for test in others),
        "\\cap": lambda x: first(x) and all(test(x) for test in others),
        "\\setminus": lambda x: first(x) and not any(test(x) for test in others),
    }
    ends = frozenset().union(*(region[1] for region in regions))
    return (next(iter(unknowns), ""), ends, rules[joint]) if joint in rules else None


def _between(low: Any, high: Any, has_low: bool, has_high: bool) -> Callable[[Any], bool]:
    return lambda x: has_low if _close(x, low) else has_high if _close(x, high) else bool(low < x < high)


def _is_symbol(value: Value) -> bool:
    return len(value.symbols) == 1 and value.points[0] == sample(next(iter(value.symbols)), 0)


def _same_quantity(answer: Value, reference: Value) -> bool:
    """Compares measured values: a unit may be missing or added, but not replaced; 10% is both 10 and 0.1."""
    if answer.kind == reference.kind:
        return same_unit(answer.unit, reference.unit) and _same(answer.parts[0], reference.parts[0])
    measured, other = (answer, reference) if answer.kind == "quantity" else (reference, answer)
    number = measured.parts[0]
    if _same(number, other) or measured.unit != _PERCENT or not number.is_number:
        return _same(number, other)
    share = Value(
        "expression",
        points=tuple(point / 100 for point in number.points),
        decimals=number.decimals and number.decimals + 2,
    )
    return _same(share, other)


def _same_text(answer: Value, reference: Value) -> bool:
    if answer.kind == reference.kind:
        return answer.name == reference.name
    value, text = (answer, reference) if reference.kind == "text" else (reference, answer)
    if value.kind != "expression" or not re.fullmatch("[A-Za-z]{2,3}", text.name):
        return False
    letters = _expression([Token(letter) for letter in text.name])
    return len(value.symbols) > 1 and _same_points(value.points, letters.points)


def _same_expressions(answer: Value, reference: Value) -> bool:
    """Compares expressions. A sum or product of numbers is not the number that it results in."""
    if _LITERAL.fullmatch(answer.name) and _LITERAL.fullmatch(reference.name):
        return False
    if answer.is_number != reference.is_number or (answer.is_computed != reference.is_computed and answer.is_number):
        if answer.is_number and reference.is_number or not (answer.symbols and reference.symbols):
            return answer.is_number != reference.is_number and _same_points(answer.points, reference.points)
    one, other = answer.points[0], reference.points[0]
    decimals = answer.decimals or reference.decimals
    if decimals and answer.is_number and reference.is_number and not (_is_decimal(one) and _is_decimal(other)):
        return bool(abs(mp.convert(one) - mp.convert(other)) < mp.mpf(10) ** -decimals)
    return _same_points(answer.points, reference.points)


def _is_decimal(value: Any) -> bool:
    return isinstance(value, Fraction) and 10 ** value.denominator.bit_length() % value.denominator == 0


def _same_points(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Compares values at the same points, the real ones if there are enough. Only expressions have points."""
    pairs = list(zip(ours, theirs, strict=False))
    real = [pair for pair in pairs if all(mp.im(value) == 0 for value in pair)]
    return bool(pairs) and all(_close(*pair) for pair in (real if len(real) > 2 else pairs))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = mp.convert(one), mp.convert(other)
    if not (mp.isfinite(one) and mp.isfinite(other)):
        return bool(one == other)
    if one == 0 or other == 0:
        return bool(abs(one - other) < _ZERO)
    return bool(abs(one - other) <= _SAME_POINT * abs(other))


_RULES: dict[str, Callable[[Value, Value], bool]] = {
    "option": _same_option,
    "congruence": _same_congruence,
    "relation": _same_relation,
    "list": lambda answer, reference: _same_relation(answer, reference) or _same_items(answer, reference),
    "set": lambda answer, reference: _same_items(answer, reference) or _same_region(answer, reference),
    "bracket": lambda answer, reference: _same_items(answer, reference) or _same_region(answer, reference),
    "operation": _same_operation,
    "quantity": _same_quantity,
    "matrix": lambda one, other: one.name == other.name and all(map(_same, one.parts, other.parts)),
    "text": _same_text,
    "expression": _same_expressions,
}

MAX_ANSWER_CHARS = 1000  # longer answers are refused, unless a reference is half as long


class MathAnswer:
    r"""Compares the answer with each reference: the types first (list, tuple, set, interval, equations, quantity,
    expression, text), then the values.

    One of two options selects the part of the response with the answer. `require_boxed`: true is the last balanced box,
    or the list of boxes that ends the response (`\boxed{2}, \boxed{3}`); false takes a response without a box as a
    whole, so that a number in prose does not count. `extract`: a method of `rewards.functions.parsing.extraction`, such
    as `json:answer`; a box in the extracted text is opened.

    A unit may be missing or added, but not replaced; units are not converted. Words that change the meaning of a
    number ("5 or more", "not 5") make the answer wrong.
    """

    def __init__(self, tools: Tools, *, require_boxed: bool | None = None, extract: str | None = None) -> None:
        if require_boxed is not None and extract is None:
            check_true_or_false(require_boxed=require_boxed)
            extract = "boxed" if require_boxed else "whole"
        elif require_boxed is not None or extract is None:
            raise ValueError(f"require_boxed={require_boxed!r} and extract={extract!r}: set exactly one of the two")
        self._is_boxed = extract == "boxed"
        self._extract = request_extractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        references = [closing_boxes(text) or text for text in given_references(request.references)]
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        boxed = closing_boxes(request.response.text if self._is_boxed else answer)
        answer = answer if boxed is None else boxed.strip()
        if not answer:
            return Score(0.0, "empty answer")
        if len(answer) > max(MAX_ANSWER_CHARS, 2 * max(map(len, references))):
            return Score(0.0, f"answer of {len(answer)} characters")
        is_equal = any(equals(answer, reference) for reference in references)
        return Score(float(is_equal), "" if is_equal else "another value")
