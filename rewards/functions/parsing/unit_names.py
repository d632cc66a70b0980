"""Names and symbols of units: SI with prefixes, imperial, time, temperature, money, and Chinese names."""

from __future__ import annotations

# symbol: its prefixes, its names
_SI = """
m: k c d m μ n: meter metre
g: k m μ: gram
s: m μ n: second sec
mol: m μ k: mole
L: m c d μ: liter litre l
N: m k M: newton
J: m k M G: joule
W: m k M G: watt
V: m μ k: volt
A: m μ k: ampere amp
Ω: m k M: ohm
C: m μ n: coulomb
F: m μ n p: farad
H: m μ: henry
T: m μ: tesla
Wb: m: weber
Hz: k M G: hertz
Pa: h k M G: pascal
K: m: kelvin
eV: k M G: electronvolt
cal: k: calorie
bar: m: bar
B: k K M G T: byte
rad: m: radian
"""
_PREFIXES = {
    **{"kilo": "k", "centi": "c", "deci": "d", "milli": "m", "micro": "μ", "nano": "n", "pico": "p", "hecto": "h"},
    **{"mega": "M", "giga": "G", "tera": "T"},
}
# unit: its names
_OTHER = """
in: in inch inche
ft: ft foot feet
yd: yd yard
mi: mi mile
lb: lb pound £ gbp
oz: oz ounce
t: t ton tonne 吨
gal: gal gallon
qt: qt quart
pt: pint
acre: acre
ha: ha hectare
min: min minute 分 分钟
h: h hr hour 小时 时
day: day 天 日
week: week 周
month: month 月
year: year yr 年 岁
°: ° deg degree 度
°C: °C celsius 摄氏度
°F: °F fahrenheit
cm^3: cc 立方厘米
m^3: 立方米
m^2: 平方米
cm^2: 平方厘米
km^2: 平方千米
mi/h: mph
km/h: kmh kph kmph
rpm: rpm
atm: atm
dB: dB
$: $ dollar usd
€: € euro eur
¥: ¥
元: yuan cny rmb 元
円: yen jpy 円
₹: ₹ rupee rs inr
¢: ¢ cent
mL: ml 毫升
mm: 毫米
cm: 厘米
dm: 分米
m: 米
km: 千米 公里
g: 克
kg: 千克 公斤
mg: 毫克
L: 升
s: 秒
N: 牛
J: 焦
W: 瓦
V: 伏
A: 安
Ω: 欧
apple: apple
people: people person
student: student
unit: unit
"""
_COUNTERS = "个人只条本张件颗块名次页种辆棵枚個"


def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """Returns two maps to unit symbols: from symbols, case-sensitive, and from names, lower case and singular."""
    symbols = {counter: counter for counter in _COUNTERS}
    names: dict[str, str] = {}
    for line in _SI.strip().splitlines():
        symbol, prefixes, words = (part.strip() for part in line.split(":"))
        symbols |= {prefix + symbol: prefix + symbol for prefix in ("", *prefixes.split())}
        names |= dict.fromkeys(words.split(), symbol)
        names |= {long + word: short + symbol for long, short in _PREFIXES.items() for word in words.split()}
    for line in _OTHER.strip().splitlines():
        unit, words = line.split(": ")
        symbols |= dict.fromkeys(words.split(), unit)
        names |= {word.casefold(): unit for word in words.split() if len(word) > 1 or not word.isascii()}
    return symbols, names


_SYMBOLS, _NAMES = _tables()


def unit_symbol(name: str) -> str | None:
    """Returns the symbol of a unit, such as "cm" for "centimeters" and "mi/h" for "mph"; None if it is unknown."""
    folded = name.casefold()
    return _SYMBOLS.get(name) or _NAMES.get(folded) or _NAMES.get(singular(folded))


def singular(word: str) -> str:
    """Removes the plural s of an English word."""
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
