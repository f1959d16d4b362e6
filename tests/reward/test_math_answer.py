import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.math_answer import answers_equal, extract_answer, math_reward, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is 9 * 2 = 18.\n#### 18", "18"), ("#### 5\nwait\n#### 7\nDone.", "7"),
        (r"thus \boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed {x_{1} = {2}}", "x_{1} = {2}"), (r"#### 3, or better \boxed{4}", "4"),
        (r"\boxed{4} as asked: #### 3", "3"), (r"never closed \boxed{12", "12"),
        ("She makes $1,234.50 in 3 days, so 1,234.50", "1,234.50"), ("costs 12, then 15 dollars.", "15 dollars"),
        ("a ratio of 3/4", "3/4"), ("it fell by -7%", "-7%"), ("from 5-3 we get nothing more", "3"),
        ("no number here", None), ("####", None), ("", None),
    ],
)  # fmt: skip
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ("18", "18"), ("18.0", "18"), ("$18", "18"), (r"\$18.00", "18"), ("1,234", "1234"), ("1234.50", "$1,234.5"),
        ("18 dollars", "18"), (r"18\text{ cm}", "18"), ("12 m/s", "12"), ("45°", "45"), ("50%", "50"),
        (r"50\%", "0.5"), ("1/2", "0.5"), (r"\frac{3}{4}", "0.75"), (r"\dfrac12", ".5"), (r"-\frac{1}{2}", "-0.5"),
        ("2 1/2", "2.5"), ("0.3333", "1/3"), ("x = 5", "5"), ("**7**", "7"), ("-3", "−3"), ("5.", "5"),
        ("1e3", "1000"), (r"\left( 1, 2 \right)", "(1,2)"), ("Paris", "paris"), ("3 + 4 = 7", "7"),
        ("1,000 + 2,000 = 3,000", "3000"), ("f(1, 2) = 7", "7"), ("5 million dollars", "5000000"),
        ("2.5 thousand", "2500"),
    ],
)  # fmt: skip
def test_equal(inputs, wanted):
    assert answers_equal(inputs, wanted)
    assert answers_equal(wanted, inputs)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ("18", "19"), ("-18", "18"), ("0.5", "50"), ("10000", "10001"), ("1/0", "0"), ("1,5", "15"), ("5 or 6", "5"),
        ("", "0"), ("Paris", "London"), ("9" * 5000, "9"), ("a=1, b=2, c=7", "7"), ("a=1; c=7", "7"),
        ("x = 1 or x = 7", "7"), ("1 or x = 7", "7"), ("x >= 7", "7"), ("x <= 7", "7"), ("x != 7", "7"),
        ("7 or more", "7"), ("7 not more", "7"), ("7 million", "7"),
    ],
)  # fmt: skip
def test_not_equal(inputs, wanted):
    assert not answers_equal(inputs, wanted)
    assert not answers_equal(wanted, inputs)


def test_reward_reads_the_answer_column_of_gsm8k():
    answer = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"
    assert math_reward("", "It is 18 dollars", [], [], answer=answer, question="?") == 1.0
    assert math_reward("", "#### 9", [], [], answer=answer) == 0.0
    assert math_reward("", "", [], [], answer=answer) == 0.0
    assert math_reward("", "The answer is 18.", [], [], answer="18") == 1.0


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "${:,}", "{}.0", "{:,}.00", "{} dollars", "x = {}"])
)
def test_every_form_of_an_integer_is_read(number, form):
    assert parse_number(form.format(number)).value == Fraction(number)
    assert answers_equal(form.format(number), str(number))
    assert not answers_equal(form.format(number), str(number + 1))


@given(st.text(alphabet="0123456789.,-+/%$#\\{}boxedfrac= \n", max_size=60), st.text(max_size=20))
def test_any_text_is_scored(completion, answer):
    assert math_reward("", completion, [], [], answer=answer) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["#### " + "a b " * 30_000 + "1", "\\boxed{" * 20_000, "1," * 50_000, "9" * 100_000])
def test_long_junk_takes_no_long_time(text):
    began_s = time.process_time()
    math_reward("", text, [], [], answer="#### 5")
    assert time.process_time() - began_s < 1.0


def test_a_fraction_after_an_integer_is_added_to_it():
    assert answers_equal("2\\frac{1}{2}", "2.5")
    assert answers_equal("-2\\frac12", "-2.5")
    assert not answers_equal("2\\frac{1}{2}", "10.5")
    assert not answers_equal("\\frac{1}{2}3", "1/23")


RIGHT = [
    ("答案是18。", "18"), ("答案是18元", "18"), ("所以他一共有18个苹果。", "18"), ("答案：18", "18"),
    ("答案是：$18$元", "18"),
    ("共計1,234公斤", "1234"), ("一共１８個", "18"), ("答えは18です。", "18"), ("合計は18個になります", "18"),
    ("答えは1,800円です", "1800"),
    ("정답은 18입니다.", "18"), ("답은 18개이다", "18"), ("총 1만2000원", "12000"), ("คำตอบคือ18บาท", "18"),
    ("ทั้งหมด ๑๘ บาท", "18"), ("ดังนั้นคำตอบคือ 1,234", "1234"), ("La réponse est 18.", "18"),
    ("Il gagne 1\u202f234,50 \u20ac", "1234.5"), ("Die Antwort ist 12,5", "12.5"),
    ("Das sind 1.234,56 Euro", "1234.56"), ("Er verdient 70 000 $", "70000"), ("Ответ: 18 рублей", "18"),
    ("Ответ: 1 234", "1234"), ("Всего 5 тысяч рублей", "5000"), ("La respuesta es 18 dólares.", "18"),
    ("Cuesta 1.500.000 pesos", "1500000"), ("উত্তর হল ১৮", "18"), ("उत्तर १८ है", "18"), ("الجواب هو ١٨", "18"),
    ("సమాధానం 18", "18"), ("Jibu ni 18.", "18"), ("A resposta é 2,5 litros", "2.5"), ("\\(18\\)", "18"),
    ("The answer is \\(18\\).", "18"), ("\\[x = 18\\]", "18"), ("$$18$$", "18"), ("The answer is $18$.", "18"),
    ("The answer is $\\frac{3}{4}$", "0.75"), ("\\boxed{\\frac{3}{4}}", "3/4"), ("\\boxed{18\\text{ cm}}", "18"),
    ("\\boxed{18\\,\\mathrm{cm}}", "18 cm"), ("\\boxed{\\text{18 dollars}}", "18"), ("\\boxed{\\$18}", "$18"),
    ("\\boxed{18\\%}", "18%"), ("\\boxed{1{,}234}", "1234"), ("\\boxed{1\\,234}", "1234"),
    ("\\boxed{12,\\!345}", "12345"), ("\\boxed{1\\!234}", "1234"), ("\\boxed{1\u2009234}", "1234"),
    ("\\boxed{1\u202f234}", "1234"), ("\\boxed{1\xa0234}", "1234"), ("\\boxed{1 234 567}", "1234567"),
    ("\\boxed{−18}", "-18"), ("\\boxed{–18}", "-18"), ("\\boxed{－18}", "-18"), ("\\boxed{﹣18}", "-18"),
    ("\\boxed{‐18}", "-18"), ("\\boxed{‑18}", "-18"), ("\\boxed{‒18}", "-18"), ("\\boxed{➖18}", "-18"),
    ("The result is −18", "-18"), ("結果は−18です", "-18"), ("答案是-18", "-18"), ("\\boxed{2\\frac{1}{2}}", "2.5"),
    ("\\boxed{2 \\frac12}", "2.5"), ("2 1/2", "2.5"), ("It takes 2½ hours", "2.5"), ("-2 1/2", "-2.5"), ("½", "0.5"),
    ("\\boxed{2\\tfrac{3}{4}}", "2.75"), ("2 and 1/2", "2.5"), ("-2½", "-2.5"), ("5 million", "5000000"),
    ("$5 million", "5000000"), ("1.5 billion dollars", "1500000000"), ("5 hundred thousand", "500000"),
    ("5万", "50000"), ("1.2億円", "120000000"), ("3억", "300000000"), ("5 ล้านบาท", "5000000"),
    ("5 millones", "5000000"),
    ("2 Millionen", "2000000"), ("3 миллиона", "3000000"), ("2 lakh", "200000"), ("1,00,000", "100000"),
    ("3 dozen", "36"), ("It costs 5 million dollars.", "5000000"), ("#### 18 (eighteen)", "18"), ("#### (18)", "18"),
    ("#### 18 (dollars)", "18"), ("#### 18 (= 9*2)", "18"), ("#### $18$", "18"), ("#### \\(18\\)", "18"),
    ("#### **18**", "18"), ("#### Answer: 18", "18"), ("#### The answer is 18", "18"), ("####18", "18"),
    ("#### 答案是18", "18"), ("#### \\boxed{18}", "18"), ("#### 18 dollars.", "18"), ("#### 18 (x)", "18"),
    ("#### 18（元）", "18"), ("#### $18.00 (total)", "18"), ("#### x = 18", "18"), ("#### ≈ 3.3333", "10/3"),
    ("\\approx 3.3333", "10/3"), ("1.5e3", "1500"), ("1.5\\times10^{3}", "1500"), ("1.5 × 10³", "1500"),
    ("2^{10}", "1024"), ("10^5", "100000"), ("18 %", "18"), ("18 percent", "18%"), ("18％", "18%"),
    ("百分之18", "18%"),
    ("2 h", "120 min"), ("1.5 m", "150 cm"), ("$0.50", "50 cents"), ("10 cm", "10"), ("5 dollars per hour", "$5"),
    ("10 centimeters", "10 cm"), ("5 km", "5000 m"), ("USD 18", "$18"), ("18 euros", "€18"), ("Rs. 18", "18"),
    ("36 km/h", "10 m/s"), ("10 cm^2", "10 square centimeters"), ("90^\\circ", "90"), ("90°", "90 degrees"),
    ("20°C", "20 degrees Celsius"), ("18,00 €", "18"), ("US$18", "18"), ("R$ 18", "18"),
    ("<answer>18</answer>", "18"), ("<<9*2=18>>18", "18"), ("18th", "18"), ("1'234", "1234"), ("1’234", "1234"),
    ("{\"answer\": 18}", "18"), ("**18**", "18"), ("18!", "18"), ("\\boxed{{18}}", "18"), ("\\boxed{x=18}", "18"),
    ("\\boxed{18.}", "18"), ("18 a day", "18"), ("18 an hour", "$18"), ("It is 18, as asked", "18"),
    ("She has 18 in total", "$18"), ("\\SI{5}{cm}", "5 cm"), ("\\num{1234}", "1234"), ("18px", "18"),
    ("\u200f-18", "-18"), ("1\\text{,}234", "1234"), ("three is 3\\$", "3"), ("18円", "18"),
    ("$18-$20? It is $19", "19"), ("$\\$18$", "18"), ("$x = 18$", "18€"), ("10-15", "15"),
    ("The final answer is: \\$1,234.50.", "1234.5"),
    ("答案是42", "42"), ("因此，总共有 1,250 元。", "1250"), ("所以答案为：3.5公里", "3.5"),
    ("小明还剩下12个苹果。", "12"),
    ("答：一共需要48分钟。", "48"), ("故答案为 \\boxed{7}", "7"), ("最终答案：-15℃", "-15"),
    ("利润率为25%", "25"), ("答えは72です。", "72"),
    ("よって、合計は1,080円になる。", "1080"), ("正解：６５", "65"), ("残りは3.2キログラムです", "3.2"),
    ("したがって答えは\\boxed{24}。", "24"),
    ("따라서 답은 36입니다.", "36"), ("총 1,500원이 필요합니다", "1500"), ("정답: 8개", "8"),
    ("평균은 4.25이다.", "4.25"),
    ("ดังนั้นคำตอบคือ 15", "15"), ("รวมเป็นเงิน 1,200 บาท", "1200"), ("เหลือ ๒๔ ลูก", "24"),
    ("La respuesta es 18 dólares.", "18"), ("Por lo tanto, quedan 2,5 litros", "2.5"),
    ("El total es 1.234,50 €", "1234.5"), ("#### 75 manzanas", "75"), ("La réponse est 36 km.", "36"),
    ("Il reste donc 1 200 euros", "1200"), ("Réponse finale : 0,75", "0.75"), ("Die Antwort lautet 54 Euro.", "54"),
    ("Insgesamt sind das 3,5 Stunden.", "3.5"), ("Also bleiben 1.250,00 € übrig", "1250"),
    ("Ответ: 120 рублей", "120"), ("Всего получится 2,5 кг.", "2.5"), ("Итого: 1 500 руб.", "1500"),
    ("A resposta é 21 reais.", "21"), ("Portanto, o total é R$ 1.350,00", "1350"), ("La risposta è 16 metri.", "16"),
    ("Odpowiedź: 14 zł", "14"), ("Het antwoord is 27.", "27"), ("Svaret är 64 kronor.", "64"), ("الجواب هو ٣٥", "35"),
    ("الإجابة النهائية: 12 كتابًا", "12"), ("উত্তর: ৪৮", "48"), ("उत्तर १२५ रुपये है।", "125"),
    ("పూర్తి సమాధానం 18", "18"), ("Vậy còn lại 15 quả.", "15"), ("Jawabannya adalah 40 buku.", "40"),
    ("Cevap: 33 lira", "33"), ("Jibu ni 22", "22"), ("Απάντηση: 19 ευρώ", "19"), ("התשובה היא 45 שקלים", "45"),
]  # fmt: skip
"""(Completion, answer of the row): forms in which models and public sets of word problems write the answer."""
WRONG = [
    ("\\boxed{2x}", "2"), ("\\sqrt{16}", "16"), ("The answer is 5\\sqrt{2}", "5"), ("The answer is 5√2", "2"),
    ("It is 2^3", "3"), ("\\frac{x}{2}", "2"), ("\\boxed{5 or 6}", "6"), ("The answer is 5 or 6", "6"),
    ("x ≥ 7", "7"), ("x \\ge 7", "7"), ("\\boxed{x \\leq 7}", "7"), ("at 2:30", "30"), ("1.2.3", "3"), ("2,4,6", "6"),
    ("(1,2)", "1.2"), ("(1,2)", "12"), ("1,5", "15"), ("5 million", "5"), ("5", "5 million"), ("5万", "5"),
    ("10 cm", "10 m"), ("10 hours", "10 minutes"), ("$5", "5€"), ("5 dollars", "5 euros"), ("5 美元", "5 欧元"),
    ("10 kg", "10 g"), ("18%", "18 dollars"), ("-18", "18"), ("−18", "18"), ("答案是-18", "18"),
    ("結果は−18です", "18"),
    ("2 1/2", "21/2"), ("2½", "21/2"), ("½", "12"), ("10³", "103"), ("5²", "52"), ("1\\,234", "235"),
    ("1\\,23", "123"), ("#### 18 (or 20)", "18"), ("#### 18 (not 20)", "20"), ("#### not 18", "18"),
    ("#### the answer is not 18", "18"), ("#### 7 or more", "7"), ("#### 3 (4)", "3"), ("3(4)", "34"),
    ("\\boxed{2\\pi}", "2"), ("5π", "5"), ("±5", "5"), ("\\pm 5", "5"), ("≠5", "5"), ("x_1", "1"), ("5 x", "5"),
    ("5k", "5"), ("3 dozen", "3"), ("1,234", "1.234"), ("0,5", "5"), ("1.234,56", "1.23456"), ("7以上", "7"),
    ("7이상", "7"), ("18 ou 20", "20"), ("7 или 8", "8"), ("1/0", "0"), ("3:4", "4"), ("\\frac{1}{2}3", "23"),
    ("1 2", "12"), ("12", "1 2"), ("10^5", "5"), ("10^5", "10"), ("3 \\times 10^5", "3"), ("10 cm^2", "10 cm"),
    ("10 km/h", "10 m/s"), ("20°C", "20°F"), ("2xy", "2"), ("5i", "5"), ("\\boxed{18-20}", "18"),
    ("\\boxed{18-20}", "20"), ("18~20", "20"), ("x > 7", "7"), ("", "0"), ("18 + x", "18"),
    ("\\boxed{\\{5\\}}", "55"), ("1e3", "1"), ("0x10", "10"), ("①", "2"), ("2 years", "2 months"),
    ("5 thousand", "5 million"),
    ("答案是42", "24"), ("总共1250元", "125"), ("合計は1,080円", "108"), ("정답: 8개", "88"),
    ("El total es 1.234,50 €", "1.2345"),
    ("Ответ: 120", "12"), ("الجواب ٣٥", "53"), ("২৫", "52"), ("เหลือ ๒๔", "42"), ("12个或13个", "12"),
    ("约12米", "12 cm"),
    ("3个苹果和4个梨", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_a_form_of_the_right_answer_is_read(completion, answer):
    assert math_reward("", completion, [], [], answer=answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_no_form_of_a_wrong_answer_is_paid(completion, answer):
    assert math_reward("", completion, [], [], answer=answer) == 0.0
