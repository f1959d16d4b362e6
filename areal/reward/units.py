"""Units and magnitudes after (or before) a number, in the languages of public sets of word problems.

A unit that is not in the table, such as apples, has no name here: it agrees with every other.
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

RowT = TypeVar("RowT")
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3100-\u31bf\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff"  # noqa: E501
"""Scripts that put no space between a word and a number: Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean."""
LETTER = rf"[^\W{SPACELESS}]"
"""A letter, digit or underscore of every other script, next to which a digit is part of a word."""


class Unit(NamedTuple):
    kind: str
    factor: Fraction  # Size in the first unit of its kind.


_TABLE = r"""
percent 1 % percent percents pct per\scent por\sciento pour\scent por\scento prozent prosent процент* パーセント 퍼센트 เปอร์เซ็นต์
dollar 1 [$﹩] us[$﹩] usd dollar dollars dólar dólares dolares 美元 美金 ドル 달러 ดอลลาร์ доллар*
dollar 1/100 ¢ cent cents 美分 セント 센트 เซ็นต์
euro 1 € eur euro euros 欧元 ユーロ 유로 ยูโร евро
sterling 1 £ gbp sterling 英镑 ポンド 파운드
yuan 1 cny rmb yuan 元 人民币
yen 1 jpy yen 円 日元 엔
won 1 ₩ krw 원
rupee 1 ₹ inr rs rs\. rupee rupees रुपये টাকা
rouble 1 ₽ rub руб\. рубл*
baht 1 ฿ thb baht บาท
real 1 r[$﹩] brl reais
peso 1 ₱ mxn peso pesos
length 1 m metre metres meter meters mètre mètres metro metros 米 公尺 メートル 미터 เมตร метр*
length 1/1000 mm millimet* milímetro* 毫米 ミリメートル 밀리미터 มิลลิเมตร миллиметр*
length 1/100 cm centimet* centímetro* centimètre* zentimeter 厘米 公分 センチメートル センチ 센티미터 เซนติเมตร сантиметр* см
length 1/10 dm decimet* decímetro* 分米
length 1000 km kilomet* kilómetro* kilomètre* quilômetro* 千米 公里 キロメートル 킬로미터 กิโลเมตร километр* км
length 254/10000 inch inches pulgada* zoll 英寸 インチ 인치 นิ้ว дюйм*
length 3048/10000 ft foot feet 英尺 フィート 피트 ฟุต фут*
length 9144/10000 yd yds yard yards 码 ヤード 야드 หลา ярд*
length 1609344/1000 mi mile miles milla* meile* 英里 マイル 마일 ไมล์ мил[яьи]
mass 1 g gram grams gramm gramo* gramme* 克 グラム 그램 กรัม грамм*
mass 1/1000 mg milligram* miligramo* 毫克 ミリグラム 밀리그램
mass 1000 kg kgs kilo kilos kilogram* kilogramo* 千克 公斤 キログラム キロ 킬로그램 กิโลกรัม килограмм* кг
mass 1000000 ton tons tonne tonnes tonelada* 吨 トン 톤
mass 45359237/100000 lb lbs
mass 45359237/1600000 oz ounce ounces
time 1 s sec secs second seconds segundo* seconde* sekunde* 秒 秒钟 초 วินาที секунд*
time 1/1000 ms millisecond milliseconds 毫秒
time 60 min mins minute minutes minuto* minuten 分钟 分鐘 分間 분 นาที минут*
time 3600 h hr hrs hour hours hora horas heure* stunde* 小时 小時 時間 시간 ชั่วโมง час час[аы] часов
time 86400 day days día días dia dias jour jours tag tage 天 日間 วัน день дн[яе]й? дней
time 604800 week weeks semana* semaine* woche* 周 星期 週間 주일 สัปดาห์ недел*
month 1 month months mes meses mois monat* 个月 か月 ヶ月 개월 เดือน месяц*
month 12 year years año años ano anos ans année* jahr* 年 年間 ปี год года лет
volume 1 l liter liters litre litres litro* 升 リットル 리터 ลิตร литр*
volume 1/1000 ml milliliter* millilitre* mililitro* 毫升 ミリリットル 밀리리터 มิลลิลิตร
volume 3785411784/1000000000 gal gallon gallons galón galones 加仑 ガロン 갤런
degree 1 ° degree degrees grado* grad degré* 度
degree\sc 1 °\s?c celsius 摄氏度 °\s?celsius
degree\sf 1 °\s?f fahrenheit 华氏度 °\s?fahrenheit
radian 1 rad radian radians
speed 1 mph
"""  # noqa: E501
_MAGNITUDES = r"""
12 dozen dozens docena* douzaine* dutzend 打
100 hundred 百
1000 thousand thousands mil mille tausend 千 천 พัน тысяч* тыс\.? k
10000 万 萬 만 หมื่น
100000 lakh lakhs แสน
1000000 million millions millón millones milhão milhões millionen mio mn mln 百万 백만 ล้าน миллион* млн
10000000 crore crores
100000000 亿 億 억
1000000000 billion billions milliard milliards milliarden миллиард* млрд bn
1000000000000 trillion trillions 兆 조
"""
_TOO_SHORT = frozenset({"m", "s", "h", "l", "g", "k"})  # `5M` is no 5 m: units of one letter are read in lower case.


@functools.cache
def _units() -> list[tuple[re.Pattern[str], Unit]]:
    rows = (line.split() for line in _TABLE.strip().splitlines())
    return [(_words(words), Unit(kind.replace(r"\s", " "), Fraction(factor))) for kind, factor, *words in rows]


@functools.cache
def _magnitudes() -> list[tuple[re.Pattern[str], int]]:
    return [(_words(words), int(factor)) for factor, *words in map(str.split, _MAGNITUDES.strip().splitlines())]


def _words(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(words))


def _alternatives(words: Sequence[str]) -> str:
    """Words in any case (`L` too, else one letter in lower case), longest first, where none goes on."""
    parts: list[str] = []
    for word in sorted(words, key=len, reverse=True):
        body = word[:-1] + r"[^\W\d]*" if word.endswith("*") else word
        if word not in _TOO_SHORT:
            body = f"(?i:{body})"
        parts.append("[lL]" if word == "l" else "[kK]" if word == "k" else body)
    ending = rf"(?:(?<={LETTER})(?!{LETTER})|(?<!{LETTER}))"
    return rf"(?:{'|'.join(parts)}){ending}"


@functools.cache
def suffixes() -> str:
    """The regular expression of a unit or magnitude."""
    rows = [*_TABLE.strip().splitlines(), *(f"- {line}" for line in _MAGNITUDES.strip().splitlines())]
    return _alternatives([word for row in rows for word in row.split()[2:]])


def magnitude_at(text: str) -> tuple[int, str]:
    """The product of the magnitudes that `text` starts with (`hundred thousand`), and what follows them."""
    product, rest = 1, text
    while found := _longest(_magnitudes(), rest.lstrip()):
        length, factor = found
        if (unit := _longest(_units(), rest.lstrip())) and unit[0] > length:  # a kilogram, in Chinese: thousand grams
            break
        product, rest = product * factor, rest.lstrip()[length:]
    return product, rest


def unit_at(text: str) -> tuple[Unit | None, str]:
    """The unit that `text` starts with (`cm^2`, `square metres`, `km/h`), and what follows it."""
    rest = text.lstrip()
    shape = re.match(r"(?i:(square|sq\.?|cubic|平方|立方|ตาราง|квадратных)\s*)", rest)
    found = _longest(_units(), rest[shape.end() :] if shape else rest)
    if found is None:
        return (Unit("length", Fraction(254, 10000)), "") if re.fullmatch(r"in\.?", rest) else (None, text)
    length, unit = found
    rest = rest[(shape.end() if shape else 0) + length :]
    power = re.match(r"\s?\^\s?\{?([23])\}?|([23])(?!\d)", rest) if unit.kind == "length" else None
    size = int(power[1] or power[2]) if power else 1
    if shape:
        size = 3 if shape[1].lower() in ("cubic", "立方") else 2
    rest = rest[power.end() :] if power else rest
    unit = Unit(f"{unit.kind}^{size}", unit.factor**size) if size > 1 else unit
    if unit.kind == "length^3":
        unit = Unit("volume", unit.factor * 1000)
    if (per := re.match(r"\s?(?:/|(?i:per|pro|por|par)\s)\s?", rest)) and unit.kind in ("length", "mass", "volume"):
        below, after = unit_at(rest[per.end() :])
        if below is not None:
            return Unit(f"{unit.kind}/{below.kind}", unit.factor / below.factor), after
    return unit, rest


def _longest(rows: list[tuple[re.Pattern[str], RowT]], text: str) -> tuple[int, RowT] | None:
    matches = [(match.end(), value) for pattern, value in rows if (match := pattern.match(text))]
    return max(matches, key=lambda pair: pair[0], default=None)


def ratio(given: Unit | None, wanted: Unit | None) -> Fraction | None:
    """By what to multiply a number of `given` for one of `wanted`; 1 when a side names no unit, None when the units
    differ."""
    if given is None or wanted is None:
        return Fraction(1)
    if given.kind == wanted.kind:
        return given.factor / wanted.factor
    kinds = sorted((given.kind, wanted.kind))
    return Fraction(1) if kinds[0] == "degree" and kinds[1].startswith("degree ") else None
