import builtins
import resource
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.config import RewardConfig
from areal.api.config.reward import CODE_STARTS_S, CODE_TESTS_S, MATH_NEEDS_S
from areal.api.errors import InputError
from areal.reward import math_symbolic
from areal.reward.code import CodeLimits
from areal.reward.math_answer import last_boxed
from areal.reward.math_symbolic import gold_answer, symbolic_math_reward
from areal.reward.pool import RewardPool
from areal.reward.table import REWARD_FUNCTIONS


def score(given, gold):
    return symbolic_math_reward("", f"So the answer is \\boxed{{{given}}}.", [], [], answer=gold)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"first \boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} ends", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{1} and the cut off \boxed{2 + ", None),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("42", None),
    ],
)
def test_the_last_box_counts(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (18, "18"),
        ("$\\frac12$", "\\frac12"),
        ("\\(x+1\\)", "x+1"),
        ("thus $x=3$ and the sum is $\\boxed{12}$.", "12"),
        ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("2 1/2", r"2\frac{1}{2}"),
        (r"\frac{\sqrt\pi}{2}", r"\frac{\sqrt{\pi}}{2}"),
        (r"\sqrt2", r"\sqrt2"),
    ],
)
def test_the_rows_answer_may_be_latex_boxed_or_plain(answer, content):
    assert gold_answer(answer) == content


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        ("0.5", "1/2"),
        ("0.333333", r"\frac13"),
        ("2 1/2", "2.5"),
        (r"2\sqrt2", r"\sqrt{8}"),
        ("1+x", "x+1"),
        ("(x+1)(x-1)", "x^2-1"),
        (r"\{2,1\}", "1,2"),
        (r"\pm2", r"\{-2,2\}"),
        ("[1,2)", "[1, 2)"),
        (r"(-\infty,2)", "x<2"),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\left(\frac12,3\right)", "(0.5,3)"),
        ("x=5", "5"),
        ("5", "x=5"),
        ("y-2x=1", "y=2x+1"),
        (r"5\text{ cm}", "5"),
        (r"90^\circ", "90"),
        (r"50\%", "50"),
        ("0.5", r"50\%"),
        (r"50\%", "0.5"),
        ("50", r"50\%"),
        (r"\text{Monday}", "Monday"),
        ("1,234", "1234"),
        (r"\$18.50", "18.5"),
        ("2:00", "2:00"),
        ("10^3", "1000"),
        ("1+2i", "2i+1"),
    ],
)
def test_equal(given, gold):
    assert score(given, gold) == 1.0


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ("-1", "1"),
        ("0.3333", r"\frac13"),
        ("3.14", r"\pi"),
        ("x+2", "x+1"),
        ("(2,1)", "(1,2)"),
        ("[1,2]", "(1,2)"),
        (r"\{1,2,3\}", r"\{1,2\}"),
        (r"\begin{bmatrix}1&2\\3&5\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ("y=5", "x=5"),
        (r"50\%", "5"),
        (r"0.5\%", r"50\%"),
        ("y=2x", "y=2x+1"),
        (r"\text{Monday}", r"\text{Friday}"),
        ("", "1"),
        (r"\frac{1}{", "1"),
        ("2:00", "3:00"),
    ],
)
def test_not_equal(given, gold):
    assert score(given, gold) == 0.0


def test_the_comparison_is_not_symmetric():
    assert score("(1,2)", "1<x<2") == 1.0  # an interval answers an inequality
    assert score("1<x<2", "(1,2)") == 0.0  # the wanted value may be a point


def test_an_answer_outside_a_box_scores_nothing():
    assert symbolic_math_reward("", "it is 5", [], [], answer="5") == 0.0


@pytest.mark.parametrize("gold", ["{{{", r"p \to q", "", "x" * 5000])
def test_an_unreadable_answer_of_a_row_is_an_error(gold):
    with pytest.raises(InputError) as error:
        score("1", gold)
    assert error.value.code == "reward.bad_row"
    assert repr(gold[:200]) in str(error.value)
    with pytest.raises(InputError) as error:
        symbolic_math_reward("", "no box", [], [], answer=gold)
    assert error.value.code == "reward.bad_row"


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(math_symbolic, "_CPU_LIMIT_S", 1)
    monkeypatch.setattr(math_symbolic, "_WALL_LIMIT_S", 100.0)  # on a busy machine, too, processor time decides


@pytest.mark.parametrize("given", ["9^{9^{9^9}}", "(10^9)!", "(" * 999])
def test_an_answer_that_takes_too_long_is_wrong(short_limit, given):
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert score(given, "1") == 0.0
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime < 3


def test_an_answer_that_takes_too_much_memory_is_wrong():
    def work(write):
        held = []
        while True:
            held.append(bytes(1 << 20))

    assert math_symbolic._in_child(work) == (b"", "")  # ended by MemoryError


def test_a_child_that_waits_is_killed(monkeypatch):
    monkeypatch.setattr(math_symbolic, "_WALL_LIMIT_S", 0.01)
    output, ending = math_symbolic._in_child(lambda write: threading.Event().wait())
    assert output == b""
    assert "SIGKILL" in ending


@pytest.mark.parametrize("given", ["{" * 100_000, "\\boxed{" * 20_000, "\\frac" * 20_000, "1 " * 50_000])
def test_long_answers_are_not_read(monkeypatch, given):
    monkeypatch.setattr(math_symbolic, "_in_child", None)
    began_s = time.process_time()
    assert score(given, "1") == 0.0
    assert time.process_time() - began_s < 1.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=40)
    | st.text(alphabet="0123456789.,-+/%$^_()[]{}\\xyi= ", max_size=12)
    | st.lists(st.sampled_from([r"\frac", "{", "}", "1", "x", r"\sqrt", "(", ",", "]", r"\infty", "=", "^"])).map(
        "".join
    )
)
def test_any_text_is_scored(short_limit, given):
    assert score(given, r"\frac{1}{2}x") in (0.0, 1.0)
    assert symbolic_math_reward("", given, [], [], answer="12") in (0.0, 1.0)


def test_it_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(score("x+1", "1+x")))
    thread.start()
    thread.join()
    assert results == [1.0]


async def test_it_works_in_a_reward_worker():
    pool = RewardPool(RewardConfig(workers=1, timeout_s=200.0))
    answers = [(f"\\boxed{{{text}}}", []) for text in (r"2\sqrt{2}", "3", "9^{9^{9^9}}", r"\sqrt8")]
    results = await pool.score_many(REWARD_FUNCTIONS["math"], "", [], answers, {"answer": r"\sqrt{8}"})
    assert [(r.status, r.value) for r in results] == [("ok", 1.0), ("ok", 0.0), ("ok", 0.0), ("ok", 1.0)]
    (bad,) = await pool.score_many(REWARD_FUNCTIONS["math"], "", [], [(r"\boxed{1}", [])], {"answer": "{{{"})
    assert (bad.status, "the row's answer '{{{'" in bad.message) == ("error", True)
    await pool.aclose()


def test_the_missing_library_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "math_verify":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    math_symbolic._library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="math-verify") as error:
        score("x+1", "x+2")
    assert error.value.code == "reward.missing_library"


@pytest.mark.parametrize(
    ("given", "gold"),
    [("2x", "2"), ("3i", "3"), ("3!", "3"), ("2x", "2y"), ("5 million", "5"), ("2 1/2", "21/2"), ("4n", "4"),
     ("3e", "3"),
     ("2\\frac{1}{2}", "\\frac{21}{2}"), ("\\frac{1}{2}3", "\\frac{1}{23}"), ("2/3x", "2/3")],
)  # fmt: skip
def test_a_number_does_not_equal_that_number_with_a_suffix(given, gold):
    for one, other in ((given, gold), (gold, given)):
        assert symbolic_math_reward("", f"\\boxed{{{one}}}", [], [], answer=other) == 0
        assert symbolic_math_reward("", f"\\boxed{{{one}}}", [], [], answer=one) == 1


def test_the_limits_in_the_configuration_are_those_of_the_code():
    assert math_symbolic._WALL_LIMIT_S < MATH_NEEDS_S <= RewardConfig().timeout_s
    limits = CodeLimits()
    assert limits.total_time_limit_s == CODE_TESTS_S
    assert RewardConfig().timeout_s >= CODE_TESTS_S + CODE_STARTS_S
