import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.registry import entries, load_function, registered
from areal.reward.table import resolve_reward_fn
from areal.reward.text import exact_reward, format_reward
from tests.expect import raises_code


def test_exact():
    assert exact_reward("", " 12345\n", [], [], answer="12345") == 1.0
    assert exact_reward("", "12345", [], [], answer=12345) == 1.0
    assert exact_reward("", "123456", [], [], answer="12345") == 0.0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0), ("  <think></think><answer>4</answer>\n", 1.0),
        ("<answer>4</answer>", 0.0), ("<think>a</think><answer>4", 0.0), ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0), ("Well <think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> I hope", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a <answer>3</answer></think><answer>4</answer>", 0.0), ("a</think><answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_format(completion, score):
    assert format_reward("2+2=?", completion, [], []) == score


def test_a_tag_at_the_end_of_the_prompt_counts():
    assert format_reward("2+2=?<think>\n", "a</think><answer>4</answer>", [], []) == 1.0
    assert format_reward("2+2=?<think>\n", "<think>a</think><answer>4</answer>", [], []) == 0.0


def test_a_row_may_have_its_own_format():
    assert format_reward("", "a\nb", [], [], format_pattern="a.b") == 1.0
    assert format_reward("", "a\nbc", [], [], format_pattern="a.b") == 0.0
    assert format_reward("", "<think>a</think><answer>4</answer>", [], [], format_pattern=None) == 1.0
    with raises_code("reward.bad_row", "format_pattern"):
        format_reward("", "", [], [], format_pattern="(")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", "\n"])).map("".join))
def test_any_text_has_the_format_or_not(text):
    pattern = r"\s*<think>[^<]*</think>\s*<answer>\s*[^<\s][^<]*</answer>\s*"
    assert format_reward("", text, [], []) == float(re.fullmatch(pattern, text) is not None)


def test_every_registered_function_exists():
    for name, entry in entries("rewards").items():
        ref = entry.target
        assert callable(load_function(ref)), name


def test_names_functions_and_paths_are_resolved(tmp_path):
    assert resolve_reward_fn("gsm8k").name == "math_reward"
    assert resolve_reward_fn(exact_reward) == registered("rewards", "exact").target
    assert resolve_reward_fn("areal.reward.text:exact_reward") == registered("rewards", "exact").target
    file = tmp_path / "mine.py"
    file.write_text("def score(*a, **k): return 1.0")
    assert resolve_reward_fn(f"{file}:score").file == str(file)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gsm8", ["'gsm8k'"]),
        ("", ["choice, clevr_count_70k, code, exact"]),
        ("nowhere.mod:f", ["nowhere.mod"]),
        ("nowhere.py:f", ["nowhere.py"]),
        ("a:b:c d", ["'a:b:c d'"]),
    ],
)
def test_unknown_names_say_what_to_do(text, values):
    with raises_code("config.bad_reference", *values):
        resolve_reward_fn(text)


def test_functions_that_other_processes_cannot_import_are_errors():
    def nested(*a, **k):
        return 1.0

    for function in (nested, lambda *a, **k: 1.0, [].append):
        with raises_code("config.bad_reference"):
            resolve_reward_fn(function)
