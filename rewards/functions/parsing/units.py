"""Units of measure: names, symbols, prefixes, and products of them such as `kg m/s^2`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Unit = frozenset[tuple[str, int]]  # unit -> power: m/s is {("m", 1), ("s", -1)}

# symbol: its prefixes: its names
_SI = """
m:kcdmμn:meter metre|g:kmμ:gram|s:mμn:second sec|mol:mμk:mole|L:mcdμ:liter litre l|N:mkM:newton|J:mkMG:joule
W:mkMG:watt|V:mμk:volt|A:mμk:ampere amp|Ω:mkM:ohm|C:mμn:coulomb|F:mμnp:farad|H:mμ:henry|T:mμ:tesla|Wb:m:weber
Hz:kMG:hertz|Pa:hkMG:pascal|K:m:kelvin|eV:kMG:electronvolt|cal:k:calorie|bar:m:bar|B:kKMGT:byte|rad:m:radian
"""
_PREFIXES = {
    **{"kilo": "k", "centi": "c", "deci": "d", "milli": "m", "micro": "μ", "nano": "n", "pico": "p", "hecto": "h"},
    **{"mega": "M", "giga": "G", "tera": "T"},
}
# unit: its names
_OTHER = """
in:in inch inche|ft:ft foot feet|yd:yd yard|mi:mi mile|lb:lb pound £ gbp|oz:oz ounce|t:t ton tonne 吨|gal:gal gallon
qt:qt quart|pt:pint|acre:acre|ha:ha hectare|min:min minute 分 分钟|h:h hr hour 小时 时|day:day 天 日|week:week 周
month:month 月|year:year yr 年 岁|°:° deg degree 度|°C:°C celsius 摄氏度|°F:°F fahrenheit|cm^3:cc 立方厘米
m^3:立方米|m^2:平方米|cm^2:平方厘米|km^2:平方千米|mi/h:mph|km/h:kmh kph kmph|rpm:rpm|atm:atm|dB:dB|$:$ dollar usd
€:€ euro eur|¥:¥|元:yuan cny rmb 元|円:yen jpy 円|₹:₹ rupee rs inr|¢:¢ cent|%:% percent percentage pct|mL:ml 毫升
mm:毫米|cm:厘米|dm:分米|m:米|km:千米 公里|g:克|kg:千克 公斤|mg:毫克|L:升|s:秒|N:牛|J:焦|W:瓦|V:伏|A:安|Ω:欧
apple:apple|people:people person|student:student|unit:unit
"""
_COUNTERS = "个人只条本张件颗块名次页种辆棵枚個"
_COMMANDS = {
    **{"\\Omega": "Ω", "\\mu": "μ", "\\degree": "°", "\\cdot": "·", "\\times": "·", "*": "·", "\\$": "$", "\\%": "%"},
    **{"\\pounds": "£", "\\textsterling": "£", "\\euro": "€", "\\texteuro": "€", "\\textyen": "¥", "\\cent": "¢"},
}
CURRENCIES = frozenset("\\$ $ £ € ¥ ₹ \\pounds \\euro \\textsterling \\texteuro \\textyen Rs USD EUR GBP INR".split())
_PREFIX = re.compile(r"(?<!\S)(μ|°(?= [CF](?!\S))|[kMGm](?= Ω(?!\S))) ")  # joins the name after it
_DIMENSIONS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_YEN_SIGN: Unit = frozenset({("¥", 1)})
_YEN_AND_YUAN: tuple[Unit, ...] = (frozenset({("円", 1)}), frozenset({("元", 1)}))  # both are written ¥


def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """Returns two maps to unit symbols: from symbols, case-sensitive, and from names, lower case and singular."""
    symbols = {counter: counter for counter in _COUNTERS}
    names: dict[str, str] = {}
    for symbol, prefixes, words in (entry.split(":") for entry in _SI.strip().replace("\n", "|").split("|")):
        symbols |= {prefix + symbol: prefix + symbol for prefix in ("", *prefixes)}
        names |= dict.fromkeys(words.split(), symbol)
        names |= {long + word: short + symbol for long, short in _PREFIXES.items() for word in words.split()}
    for unit, words in (entry.split(":") for entry in _OTHER.strip().replace("\n", "|").split("|")):
        symbols |= dict.fromkeys(words.split(), unit)
        names |= {word.casefold(): unit for word in words.split() if len(word) > 1 or not word.isascii()}
    return symbols, names


_SYMBOLS, _NAMES = _tables()


def same_unit(one: Unit, other: Unit) -> bool:
    """Whether two units are equal; of two counted nouns one may have more words: "apples" and "red apples"."""
    if one == other or (_YEN_SIGN in (one, other) and (one in _YEN_AND_YUAN or other in _YEN_AND_YUAN)):
        return True
    nouns = [set(next(iter(unit))[0].split()) for unit in (one, other) if len(unit) == 1]
    return len(nouns) == 2 and max(map(len, nouns)) > 1 and (nouns[0] <= nouns[1] or nouns[1] <= nouns[0])


def noun(words: Sequence[str]) -> Unit:
    """Returns the unit of counted things, such as `red apples`."""
    return frozenset({(" ".join(singular(word.casefold()) for word in words), 1)})


def read_unit(tokens: Sequence[str]) -> Unit | None:
    r"""Reads a product of known units; None if another token occurs. A `/` inverts the next name or group, and a power
    applies to the last name. `\frac{m}{s}` is m / (s)."""
    powers: Counter[str] = Counter()
    group, inverted, dimension, depth = 1, False, 1, 0
    last: list[tuple[str, int]] = []
    spelled = " ".join(_COMMANDS.get(token, token) for token in tokens if token not in ("{", "."))
    texts = _PREFIX.sub(r"\1", spelled).split()
    for index, token in enumerate(texts):
        if token == "}":  # the end of the numerator of \frac
            group, inverted = (-1, False) if depth else (group, inverted)
            depth = 0
        elif token == "\\frac":
            depth = 1
        elif token in ("/", "per"):
            inverted = True
        elif token == "(":
            group, inverted = -1 if inverted else 1, False
        elif token == ")":
            group = 1
        elif token.casefold() in _DIMENSIONS:
            dimension = _DIMENSIONS[token.casefold()]
        elif last and index + 1 < len(texts) and (token == "^" or (token == "-" and texts[index - 1] == "^")):
            continue
        elif token in ("1", "2", "3", "4") and last:
            sign = -1 if index and texts[index - 1] == "-" else 1
            powers.update({name: power * (sign * int(token) - 1) for name, power in last})
            last = []
        elif symbol := _symbol(token):
            last = [(name, power * (-1 if inverted else 1) * group * dimension) for name, power in _base(symbol)]
            powers.update(dict(last))
            inverted, dimension = False, 1
        elif token != "·":
            return None
    return frozenset((name, power) for name, power in powers.items() if power) or None


def _symbol(token: str) -> str | None:
    """Returns the symbol of a unit, such as "cm" for "centimeters"."""
    folded = token.casefold()
    return _SYMBOLS.get(token) or _NAMES.get(folded) or _NAMES.get(singular(folded))


def _base(symbol: str) -> list[tuple[str, int]]:
    if "/" in symbol:
        above, below = symbol.split("/")
        return [(above, 1), (below, -1)]
    name, _, power = symbol.partition("^")
    return [(name, int(power or 1))]


def singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
