import ast
import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.config import RewardConfig
from areal.api.config.rollout import CODE_STARTS_S, CODE_TESTS_S, MATH_NEEDS_S
from areal.api.registry import FunctionRef, registered
from areal.reward import math_symbolic
from areal.reward.code_tests import CodeLimits
from areal.reward.math_answer import last_boxed
from areal.reward.math_symbolic import gold_answer, symbolic_math_reward
from areal.reward.pool import RewardPool
from tests.expect import raises_code

WALL_LIMIT_S = math_symbolic._WALL_LIMIT_S


def score(inputs, gold):
    return symbolic_math_reward("", f"So the answer is \\boxed{{{inputs}}}.", [], [], answer=gold)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"first \boxed{1}, no, \boxed{2}", "2"), (r"\boxed{\frac{1}{2}} ends", r"\frac{1}{2}"), (r"\boxed {3}", "3"),
        (r"$\boxed 7$", "7"), (r"\boxed{1} then \fbox{2}", "2"), (r"\boxed{1} and the cut off \boxed{2 + ", None),
        (r"\boxed{}", ""), (r"\boxed", None), ("42", None),
    ],
)  # fmt: skip
def test_the_last_box_counts(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (18, "18"), ("$\\frac12$", "\\frac12"), ("\\(x+1\\)", "x+1"),
        ("thus $x=3$ and the sum is $\\boxed{12}$.", "12"), ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("2 1/2", r"2\frac{1}{2}"), (r"\frac{\sqrt\pi}{2}", r"\frac{\sqrt{\pi}}{2}"), (r"\sqrt2", r"\sqrt2"),
    ],
)  # fmt: skip
def test_the_rows_answer_may_be_latex_boxed_or_plain(answer, content):
    assert gold_answer(answer) == content


@pytest.mark.parametrize(
    ("inputs", "gold"),
    [
        (r"\frac12", r"\frac{1}{2}"), ("0.5", "1/2"), ("0.333333", r"\frac13"), ("2 1/2", "2.5"),
        (r"2\sqrt2", r"\sqrt{8}"), ("1+x", "x+1"), ("(x+1)(x-1)", "x^2-1"), (r"\{2,1\}", "1,2"),
        (r"\pm2", r"\{-2,2\}"), ("[1,2)", "[1, 2)"), (r"(-\infty,2)", "x<2"),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\left(\frac12,3\right)", "(0.5,3)"), ("x=5", "5"), ("5", "x=5"), ("y-2x=1", "y=2x+1"),
        (r"5\text{ cm}", "5"), (r"90^\circ", "90"), (r"50\%", "50"), ("0.5", r"50\%"), (r"50\%", "0.5"),
        ("50", r"50\%"), (r"\text{Monday}", "Monday"), ("1,234", "1234"), (r"\$18.50", "18.5"), ("2:00", "2:00"),
        ("10^3", "1000"), ("1+2i", "2i+1"),
    ],
)  # fmt: skip
def test_equal(inputs, gold):
    assert score(inputs, gold) == 1.0


@pytest.mark.parametrize(
    ("inputs", "gold"),
    [
        ("-1", "1"), ("0.3333", r"\frac13"), ("3.14", r"\pi"), ("x+2", "x+1"), ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"),
        (r"\{1,2,3\}", r"\{1,2\}"),
        (r"\begin{bmatrix}1&2\\3&5\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"), ("y=5", "x=5"),
        (r"50\%", "5"), (r"0.5\%", r"50\%"), ("y=2x", "y=2x+1"), (r"\text{Monday}", r"\text{Friday}"), ("", "1"),
        (r"\frac{1}{", "1"), ("2:00", "3:00"),
    ],
)  # fmt: skip
def test_not_equal(inputs, gold):
    assert score(inputs, gold) == 0.0


@pytest.mark.parametrize(
    ("inputs", "gold"),
    [
        (r"1.6\times10^{-19}", r"0.16\times10^{-18}"), ("0.333333", r"\frac13"), ("1500 m", r"1.5\text{ km}"),
        (r"120\text{ minutes}", r"2\text{ hours}"), (r"10\text{ cm}", "10"), ("10", r"10\text{ cm}"), ("5€", "5"),
        ("€5", "5"), (r"\$5", "5"), ("1<x<2", "(1,2)"), ("(1,2)", "1<x<2"), ("x>2", r"(2,\infty)"),
        (r"(2,\infty)", "x>2"), (r"1\le x\le 2", "[1,2]"), (r"1\le x\le2", r"x\in[1,2]"),
        (r"x\in[1,2]", r"1\le x\le2"), (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
        (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"), ("1{,}234", "1234"), (r"1\,234", "1234"),
        (r"1\!234", "1234"), (r"12,\!345", "12345"), (r"\frac{1{,}200}{7}", r"\frac{1200}{7}"),
        (r"2\pi\text{ m}", r"200\pi\text{ cm}"), (r"20^\circ\text{C}", r"20\text{ degrees Celsius}"),
        (r"90^\circ", "90"), (r"10\text{ cm}^2", r"10\text{ square centimeters}"),
        (r"36\text{ km/h}", r"10\text{ m/s}"), (r"10\,\mathrm{cm}", "10 cm"), (r"3\text{ apples}", "3"),
        (r"\text{Monday}", "Monday"), (r"\{1,2\}", "1,2"), (r"50\%", "50"), (r"x \ge 3", r"[3,\infty)"),
        ("-3", "x=-3"), (r"\$18.50", "18.5"), ("1{,}234{,}567", "1,234,567"),
        (r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}"), ("18 dollars", "18"), ("18", r"\$18"),
    ],
)  # fmt: skip
def test_units_separators_and_inequalities_are_read(inputs, gold):
    assert score(inputs, gold) == 1.0


@pytest.mark.parametrize(
    ("inputs", "gold"),
    [
        (r"1.6\times10^{-19}", r"9.1\times10^{-31}"), (r"1.602\times10^{-19}\text{ C}", r"9.109\times10^{-31}"),
        ("0.000333", r"\frac{1}{3000}"), ("0.0000001", "0.0000002"), (r"\{0.0000001,2\}", r"\{0.0000002,2\}"),
        ("(0.0000001,2)", "(0.0000002,2)"), (r"\pi\times10^{-9}", r"2\pi\times10^{-9}"),
        (r"10\text{ cm}", r"10\text{ m}"), ("10 cm", "10 m"), ("10 cm", r"10\text{ m}"),
        (r"10\text{ hours}", r"10\text{ minutes}"), (r"\$5", "5€"), (r"5\text{ dollars}", r"5\text{ euros}"),
        ("1<x<2", "[1,2]"), ("x>2", r"[2,\infty)"), (r"(2,\infty)", "x<2"), ("x<3", r"(-\infty,2)"),
        ("x=10^{-7}", "x=10^{-8}"), (r"1\,235", "1234"), (r"2\pi\text{ m}", r"2\pi\text{ cm}"),
        (r"20^\circ\text{C}", r"20^\circ\text{F}"), (r"10\text{ cm}^2", r"10\text{ cm}"),
        ("0.0000001x", "0.0000002x"), ("1000000", "1000001"), ("0.3333", r"\frac13"),
        (r"x<1 \text{ or } x>2", "(1,2)"),
    ],
)  # fmt: skip
def test_tiny_numbers_and_units_that_differ_are_wrong(inputs, gold):
    assert score(inputs, gold) == 0.0


def test_boxes_that_follow_each_other_are_no_set():
    assert symbolic_math_reward("", r"\boxed{3} $\boxed{5}$", [], [], answer="5") == 1.0
    assert symbolic_math_reward("", r"\boxed{3}, \boxed{5}", [], [], answer="3,5") == 0.0


def test_an_answer_outside_a_box_scores_nothing():
    assert symbolic_math_reward("", "it is 5", [], [], answer="5") == 0.0


@pytest.mark.parametrize("gold", ["{{{", r"p \to q", "", "x" * 5000])
def test_an_unreadable_answer_of_a_row_is_an_error(gold):
    with raises_code("reward.bad_row", repr(gold[:200])):
        score("1", gold)
    with raises_code("reward.bad_row"):
        symbolic_math_reward("", "no box", [], [], answer=gold)


@pytest.fixture(scope="module")
def short_limit():
    """The process that compares formulas is started with these limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_symbolic, "_CPU_LIMIT_S", 1)
        patch.setattr(math_symbolic, "_WALL_LIMIT_S", 100.0)  # on a busy machine, too, processor time decides
        math_symbolic._math_process.cache_clear()
        yield
    math_symbolic._math_process().close()
    math_symbolic._math_process.cache_clear()


@pytest.mark.parametrize("inputs", ["9^{9^{9^9}}", "(10^9)!", "(" * 999])
def test_an_answer_that_takes_too_long_is_wrong(short_limit, inputs):
    assert score(inputs, "1") == 0.0
    assert score("x+1", "1+x") == 1.0  # the next one is compared


def in_child(work, **limits):
    """The result of in_child, which may only fork a process without threads."""
    arguments = ", ".join(f"{name}={value}" for name, value in limits.items())
    source = f"import sys, time\nfrom areal.reward.math_process import in_child\nprint(in_child({work}, {arguments}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)


def test_the_child_of_a_comparison_has_limits():
    limits = {"cpu_s": 1, "wall_s": 100.0, "memory_bytes": 1 << 28}
    assert in_child("lambda: True", **limits) == (True, "")
    assert in_child("lambda: False", **limits) == (False, "")
    assert in_child("lambda: bytes(1 << 30)", **limits) == (False, "")  # ended by MemoryError
    assert in_child("lambda: max(iter(int, 1))", **limits) == (False, "SIGKILL")
    assert in_child("lambda: time.sleep(1000)", **limits | {"wall_s": 0.01}) == (False, "SIGKILL")


def test_a_process_that_died_is_started_again():
    process = math_symbolic.MathProcess()
    order = {"gold": "x+1", "given": "1+x"}
    assert process.ask(order) == (True, "")
    process._process.kill()
    process._process.wait()
    assert process.ask(order) == (True, "")
    process.close()


def test_a_process_that_dies_twice_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "dies.py"
    program.write_text("raise SystemExit(1)")
    monkeypatch.setattr(math_symbolic, "_PROGRAM", str(program))
    with raises_code("reward.math_process_died"):
        math_symbolic.MathProcess().ask({"read": "1"})


def test_no_process_with_threads_is_forked():
    """Python 3.12 warns of that."""
    source = (
        "import threading\nfrom areal.reward.math_symbolic import *\nevent = threading.Event()\n"
        "threading.Thread(target=event.wait).start()\n"
        "print(symbolic_math_reward('', r'\\boxed{1+x}', [], [], answer='x+1'))\nevent.set()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.returncode) == ("1.0\n", 0)


@pytest.mark.parametrize("inputs", ["{" * 100_000, "\\boxed{" * 20_000, "\\frac" * 20_000, "1 " * 50_000])
def test_long_answers_are_not_read(monkeypatch, inputs):
    monkeypatch.setattr(math_symbolic, "_math_process", None)
    began_s = time.process_time()
    assert score(inputs, "1") == 0.0
    assert time.process_time() - began_s < 1.0


@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=40)
    | st.text(alphabet="0123456789.,-+/%$^_()[]{}\\xyi= ", max_size=12)
    | st.lists(st.sampled_from([r"\frac", "{", "}", "1", "x", r"\sqrt", "(", ",", "]", r"\infty", "=", "^"])).map(
        "".join
    )
)
def test_any_text_is_scored(short_limit, inputs):
    assert score(inputs, r"\frac{1}{2}x") in (0.0, 1.0)
    assert symbolic_math_reward("", inputs, [], [], answer="12") in (0.0, 1.0)


def test_it_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(score("x+1", "1+x")))
    thread.start()
    thread.join()
    assert results == [1.0]


async def test_it_works_in_a_reward_worker():
    pool = RewardPool(RewardConfig(workers=1, timeout_s=200.0))
    answers = [(f"\\boxed{{{text}}}", []) for text in (r"2\sqrt{2}", "3", "9^{9^{9^9}}", r"\sqrt8")]
    function = FunctionRef(name="math_within_a_second", file=str(Path(__file__).with_name("reward_functions.py")))
    results = await pool.score_many(function, "", [], answers, {"answer": r"\sqrt{8}"})
    assert [(r.status, r.value) for r in results] == [("ok", 1.0), ("ok", 0.0), ("ok", 0.0), ("ok", 1.0)]
    assert registered("rewards", "math").target.module == math_symbolic.__name__
    (bad,) = await pool.score_many(
        registered("rewards", "math").target, "", [], [(r"\boxed{1}", [])], {"answer": "{{{"}
    )
    assert (bad.status, "the row's answer '{{{'" in bad.message) == ("error", True)
    await pool.aclose()


def test_the_missing_library_is_named(monkeypatch):
    math_symbolic._math_process.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_code("reward.missing_library", "math-verify"):
        score("x+1", "x+2")


@pytest.mark.parametrize(
    ("inputs", "gold"),
    [("2x", "2"), ("3i", "3"), ("3!", "3"), ("2x", "2y"), ("5 million", "5"), ("2 1/2", "21/2"), ("4n", "4"),
     ("3e", "3"),
     ("2\\frac{1}{2}", "\\frac{21}{2}"), ("\\frac{1}{2}3", "\\frac{1}{23}"), ("2/3x", "2/3")],
)  # fmt: skip
def test_a_number_does_not_equal_that_number_with_a_suffix(inputs, gold):
    for item, other in ((inputs, gold), (gold, inputs)):
        assert symbolic_math_reward("", f"\\boxed{{{item}}}", [], [], answer=other) == 0
        assert symbolic_math_reward("", f"\\boxed{{{item}}}", [], [], answer=item) == 1


def test_the_limits_in_the_configuration_are_those_of_the_code():
    assert WALL_LIMIT_S < MATH_NEEDS_S <= RewardConfig().timeout_s
    limits = CodeLimits()
    assert limits.total_time_limit_s == CODE_TESTS_S
    assert RewardConfig().timeout_s >= CODE_TESTS_S + CODE_STARTS_S
