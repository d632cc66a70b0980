"""Evaluates expressions at sample points by recursive descent over tokens: rationals exactly, others in 60 digits.

A symbol has another value at each point. An unknown command or word is unreadable, and so is a number or a computation
that is too large: an answer takes milliseconds, and never more than seconds.
"""

from __future__ import annotations

import math
import operator
import re
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from mpmath import MPContext

from mobula.rewards.functions.parsing.math_tokens import Token, UnreadableError, closing, refuse, spelled, split
from mobula.rewards.functions.parsing.unicode_latex import GREEK_NAMES

mp = MPContext()
mp.dps = 60
NUM_POINTS = 6
MULTIPLIERS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ANGLE = frozenset("sin cos tan cot sec csc".split())
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(mp, name) for name in (*_ANGLE, "sinh", "cosh", "tanh", "exp", "arg")},
    **{"arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "ln": mp.log, "log": mp.log, "lg": mp.log},
    **{"max": max, "min": min, "gcd": math.gcd, "lcm": math.lcm},
}
FUNCTIONS = frozenset({*_FUNCTIONS, *"tr rank dim ker deg sgn inf sup Re Im det".split()})
_DECORATIONS = frozenset(
    "vec bar hat tilde dot ddot overline overrightarrow overleftrightarrow widehat widetilde mathbb mathcal mathscr"
    " mathfrak angle triangle square odot partial nabla neg".split()
)
_READ_BOTH_WAYS = frozenset({"angle", "overline", "overleftrightarrow", "widehat"})  # ABC and CBA are one angle
_SYMBOLS = GREEK_NAMES | {"emptyset", "ell", "hbar", "sum", "int", "top"}
_BASES = dict(zip("two three four five eight ten twelve sixteen".split(), "2 3 4 5 8 10 12 16".split(), strict=True))
_BARS = {"|": "|", "\\|": "\\|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_MAX_BITS = 40_000  # of an exact number, and of the logarithm of any other
_MAX_STEPS = 8_000  # of the evaluation of an expression


class Expression:
    """Reads the tokens of one expression at a point.

    Attributes:
        names: of the symbols in it.
        is_computed: whether it has an operation between its parts, such as 3 + 4, but not 3/4 or 2 * 10^3.
    """

    def __init__(
        self, found: Sequence[Token], point: int, bound: dict[str, Any] | None = None, outer: Any = None
    ) -> None:
        self._tokens, self._at, self._point = list(found), 0, point
        self._bound: dict[str, Any] = bound or {}  # values of the variables of sums and integrals
        self.names: set[str] = outer.names if outer else set()
        self._steps: list[None] = outer._steps if outer else []
        self._is_angle = outer is not None and outer._is_angle
        self.is_computed = False

    def whole(self) -> Any:
        if len(chosen := split(self._tokens, ("\\choose",))) == 2:
            return _binomial(*map(self._read, chosen))
        result = self._sum()
        return result if self._at == len(self._tokens) else refuse("no expression")

    def _read(self, found: Sequence[Token], **bound: Any) -> Any:
        return Expression(found, self._point, {**self._bound, **bound}, self).whole()

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[self._at + ahead].text if self._at + ahead < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        self._steps.append(None)
        return self._peek(-1) if len(self._steps) < _MAX_STEPS and self._peek(-1) else refuse("an end")

    def _taken(self, *texts: str) -> bool:
        self._at += (is_next := self._peek() in texts)
        return is_next

    def _inner(self) -> list[Token]:
        """Takes a bracket and returns its content, or takes one token."""
        start = self._at
        self._at = closing(self._tokens, start) + 1
        return self._tokens[start + 1 : self._at - 1] if self._at - start > 1 else self._tokens[start : self._at]

    def _sign(self) -> int:
        return 1 if self._taken("+") else 1 - 2 * self._taken("-")

    def _sum(self) -> Any:
        total = self._product()
        while self._peek() in ("+", "-"):
            sign, self.is_computed = self._sign(), True
            if self._peek() == "c" and len(self._tokens) == self._at + 1:
                self._tokens[-1] = Token("C")  # the constant of integration
            total = _combined(operator.add, total, sign * self._product())
        return total

    def _product(self, *, is_argument: bool = False) -> Any:
        result = self._sign() * self._power()
        is_divided = False
        while token := self._peek():
            operation: Callable[[Any, Any], Any] = operator.mul
            if not is_argument and self._taken("\\times", "\\cdot", "*"):
                self.is_computed = self.is_computed or (self._peek(), self._peek(1)) != ("10", "^")
            elif not is_argument and not is_divided and self._taken("/", "\\div", ":"):
                operation, is_divided = operator.truediv, True
                self.is_computed = self.is_computed or token == "\\div"
            elif self._starts_factor(token) and not (is_argument and token[1:] in FUNCTIONS):
                self.is_computed = self.is_computed or token not in MULTIPLIERS
            else:
                break
            result = _combined(operation, result, self._power())
        return result

    def _starts_factor(self, token: str) -> bool:
        is_command = re.fullmatch(r"\\[A-Za-z]+|\\begin.*", token) and token not in ("\\rfloor", "\\rceil", "\\degree")
        return token in ("(", "[", "{", "|") or token.isalpha() or bool(is_command)

    def _power(self) -> Any:
        base = self._atom()
        while self._peek():
            if self._taken("^"):
                first = self._peek(int(self._peek() == "{"))
                if first == "T":
                    raise UnreadableError("a transpose")
                is_star = first == "*" and self._inner()
                base = self._symbol(f"{mp.nstr(base)} *") if is_star else _power(base, self._script())
            elif self._taken("!"):
                step = 1 + self._taken("!")
                if isinstance(base, Fraction) and base.denominator == 1:
                    base = Fraction(math.prod(range(_natural(base), 0, -step)))
                else:
                    base = mp.fac2(base) if step == 2 else mp.factorial(base)
            elif self._taken("\\degree"):
                base = mp.convert(base) * mp.pi / 180 if self._is_angle else base
            else:
                break
        return base

    def _script(self) -> Any:
        """Reads an exponent or a limit: a group, or a number or name with an optional sign."""
        return self._read(self._inner()) if self._peek() == "{" else self._sign() * self._atom()

    def _scripts(self, read: Callable[[], Any]) -> dict[str, Any]:
        scripts: dict[str, Any] = {}
        while (mark := self._peek()) and self._taken("_", "^"):
            scripts[mark] = read()
        return scripts

    def _argument(self) -> Any:
        r"""Reads an argument of \frac or \sqrt: a group, one digit, or one symbol."""
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._at] = Token(token[1:])
            return Fraction(token[0])
        return self._read(self._inner()) if token == "{" else self._atom()

    def _atom(self) -> Any:
        token = self._take()
        if token[0] in "0123456789.":
            number = self._symbol if self._peek() == "_" else Fraction
            return number(token) if len(token) < 1000 else refuse("a long number")
        if token in _BARS:
            start, texts = self._at, [one.text for one in self._tokens]
            self._at = texts.index(_BARS[token], start) + 1
            content = self._read(self._tokens[start : self._at - 1])
            return self._opaque("norm", content) if token == "\\|" else _BAR_VALUES[token](content)
        if token in ("(", "[", "{"):
            self._at -= 1
            inner = self._inner()
            return self._read(inner) if len(split(inner, (",", ";"))) == 1 else self._symbol(spelled(inner))
        if token == "\\begin{vmatrix}":
            self._at -= 1
            return mp.det([[self._read(cell) for cell in row] for row in rows(self._inner())])
        return self._command(token[1:]) if token[0] == "\\" else self._word(token)

    def _word(self, word: str) -> Any:
        if word in MULTIPLIERS:
            return Fraction(MULTIPLIERS[word])
        if word in FUNCTIONS:
            return self._call(word)
        is_hexadecimal = re.match(r"[A-Fa-f]+ _ (\{ )?(16|sixteen)", spelled(self._tokens[self._at - 1 :]))
        if not word.isalpha() or (len(word) > 3 and not is_hexadecimal) or word in ("not", "nor", "is", "isn", "the"):
            raise UnreadableError(f"the word {word}")
        if len(word) > 1 and not is_hexadecimal and not re.fullmatch("d[a-z]", word):
            self._tokens[self._at : self._at] = [Token(letter) for letter in word[1:]]
            word = word[0]
        if word in ("e", "i") and word not in self._bound and self._peek() not in ("_", "'"):
            return mp.e if word == "e" else mp.mpc(0, 1)
        return self._symbol(word)

    def _symbol(self, name: str) -> Any:
        if self._taken("_"):
            script = "".join(token.text for token in self._inner())
            script = _BASES.get(script, script)
            name = f"{name.upper() if script == '16' or name.isdigit() else name}_{script}"
        while self._peek() == "'":
            name += self._take()
        if name in self._bound:
            return self._bound[name]
        if self._peek() == "(":
            inner = self._tokens[self._at + 1 : closing(self._tokens, self._at)]
            arguments = split(inner, (",", ";"))
            if "|" in [token.text for token in inner] and not name[0].isdigit():  # P(A|B)
                self._inner()
                return self._opaque(f"{name}({spelled(inner)})")
            if name[0] in "fgh" or len(arguments) > 1:
                self._inner()
                return self._opaque(name, *map(self._read, arguments))
        return self._opaque(name)

    def _opaque(self, name: str, *arguments: Any) -> Any:
        """Returns the value of a symbol at this point, or of an unknown function of values."""
        self.names.add(name)
        return sample("|".join((name, *(mp.nstr(mp.convert(argument), 25) for argument in arguments))), self._point)

    def _command(self, name: str) -> Any:
        if name in ("pi", "infty"):
            return +mp.pi if name == "pi" else mp.inf
        if name == "frac":
            return _combined(operator.truediv, self._argument(), self._argument())
        if name == "sqrt":
            index = self._read(self._inner()) if self._peek() == "[" else Fraction(2)
            argument = self._argument()
            is_odd = isinstance(argument, Fraction) and argument < 0 and index in (3, 5, 7)
            exponent = _combined(operator.truediv, Fraction(1), index)
            return -_power(-argument, exponent) if is_odd else _power(argument, exponent)
        if name == "binom":
            return _binomial(self._argument(), self._argument())
        if name in ("sum", "prod", "int", "lim") and self._peek():
            return self._bounded(name)
        if name in FUNCTIONS:
            return self._call(name)
        if name in _DECORATIONS or (name == "Delta" and self._peek() and self._starts_factor(self._peek())):
            letters = "".join(token.text for token in self._inner())
            letters = min(letters, letters[::-1]) if name in _READ_BOTH_WAYS else letters
            return self._symbol(f"{name} {''.join(sorted(letters)) if name == 'triangle' else letters}")
        return self._symbol(name) if name in _SYMBOLS else refuse(f"the command {name}")

    def _call(self, name: str) -> Any:
        scripts = self._scripts(self._script)
        was_angle, self._is_angle = self._is_angle, self._is_angle or name in _ANGLE
        if self._peek() in ("(", "[") or (self._peek() == "{" and name in ("max", "min", "gcd", "lcm")):
            arguments = [*map(self._read, split(self._inner(), (",",)))]
        else:
            arguments = [self._product(is_argument=True)]
        self._is_angle = was_angle
        if name not in _FUNCTIONS:
            return self._opaque(name, *arguments)
        if name in ("gcd", "lcm"):
            return Fraction(_FUNCTIONS[name](*(_natural(abs(argument), 10**1000) for argument in arguments)))
        if any(abs(argument) > _MAX_BITS for argument in arguments) and name not in ("ln", "log", "lg", "max", "min"):
            raise UnreadableError("a large argument")
        exponent = scripts.get("^", Fraction(1))
        if name in _ANGLE and exponent == -1:
            return getattr(mp, f"a{name}")(*map(mp.convert, arguments))
        if name in ("log", "lg"):
            arguments.append(scripts.get("_", Fraction(10)))
        elif "_" in scripts:
            raise UnreadableError("a function with an index")
        values = arguments if name in ("max", "min") else map(mp.convert, arguments)
        return _power(_FUNCTIONS[name](*values), exponent)

    def _bounded(self, name: str) -> Any:
        """Evaluates a sum, product, integral or limit; without numbers as bounds it is an unknown function of them."""
        scripts = self._scripts(self._inner)
        start = self._at
        if name == "int":
            texts = [token.text for token in self._tokens]
            end = min(i for i in range(start, len(texts)) if re.fullmatch("[a-z]*d[a-z]", texts[i]))
            variable, self._at = texts[end][-1], end + 1
            body = [*self._tokens[start:end], *(Token(letter) for letter in texts[end][:-2])] or [Token("1")]
            low = scripts.get("_", [])
        else:
            (unknown,), low = split(scripts.get("_", []), ("=", "\\to"))
            variable = unknown.text
            inner = Expression(self._tokens[start:], self._point, {**self._bound, variable: Fraction(1, 3)}, self)
            inner._product()
            self._at += inner._at
            body = self._tokens[start : self._at]
        values = [self._read(found) for found in (low, scripts.get("^", [])) if found]
        value = self._read(body, **{variable: sample(variable, self._point)})
        if name == "int" and len(values) == 2 and not self._bound and not self.names:
            points = [*map(mp.convert, values)]
            return mp.quad(lambda x: mp.convert(self._read(body, **{variable: x})), points, maxdegree=5)
        if name in ("sum", "prod") and all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
            if not 0 <= values[1] - values[0] < 1000:
                raise UnreadableError("bounds")
            indices = map(Fraction, range(int(values[0]), int(values[1]) + 1))
            terms = (self._read(body, **{variable: index}) for index in indices)
            combine = partial(_combined, operator.add if name == "sum" else operator.mul)
            return reduce(combine, terms, Fraction(name == "prod"))
        if name == "lim" and mp.isfinite(mp.convert(values[0])):
            return self._read(body, **{variable: values[0]})  # fails where the expression has no value
        return self._opaque(name, value, *values)


def sample(name: str, point: int) -> Fraction:
    """Returns the value of a symbol at a point, positive at those with an even number."""
    seed = zlib.crc32(f"{name}|{point}".encode())
    sign = 1 if point % 2 == 0 else -1 if point == 1 else (-1) ** (seed >> 16)
    return sign * Fraction(seed % 7919 + 1000, 3000)


def rows(found: Sequence[Token]) -> list[list[list[Token]]]:
    return [split(row, ("&",)) for row in split(found, ("\\\\",)) if row]


def _combined(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    is_exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    value = operation(one, other) if is_exact else operation(mp.convert(one), mp.convert(other))
    is_large = is_exact and max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS
    return refuse("a number") if is_large or value != value else value


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length())
        return base**exponent.numerator if bits < _MAX_BITS and (base or exponent > 0) else refuse("a power")
    if base == 0:
        return Fraction(0) if mp.re(mp.convert(exponent)) > 0 else refuse("a power")
    base, exponent = mp.convert(base), mp.convert(exponent)
    if abs(mp.log(base) * exponent) > _MAX_BITS:
        raise UnreadableError("a power")
    return mp.power(base, exponent)


def _binomial(above: Any, below: Any) -> Any:
    try:
        return Fraction(math.comb(_natural(above), _natural(below)))
    except UnreadableError:
        return mp.binomial(above, below)


def _natural(value: Any, limit: int = 3000) -> int:
    is_natural = isinstance(value, Fraction) and value.denominator == 1 and 0 <= value < limit
    return int(value) if is_natural else refuse("no natural number of this size")


_BAR_VALUES: dict[str, Callable[[Any], Any]] = {
    "|": lambda value: abs(value),
    "\\lfloor": lambda value: Fraction(math.floor(value)),
    "\\lceil": lambda value: Fraction(math.ceil(value)),
}
