import pytest

from areal.api.errors import ConfigError
from areal.api.functions import load_function
from areal.reward.registry import REWARD_FUNCTIONS, resolve_reward_fn
from areal.reward.text import choice_reward, exact_reward, extract_choice, format_reward


def test_exact():
    assert exact_reward("", " 12345\n", [], [], answer="12345") == 1.0
    assert exact_reward("", "12345", [], [], answer=12345) == 1.0
    assert exact_reward("", "123456", [], [], answer="12345") == 0.0


def test_format():
    assert format_reward("", "<think>a\nb</think>\n<answer>4</answer>", [], []) == 1.0
    assert format_reward("", "<answer>4</answer>", [], []) == 0.0
    assert format_reward("", "ab", [], [], format_pattern="a.") == 1.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("A is wrong, so C", "C"),
        (r"\boxed{\text{D}}", "D"),
        ("#### e", "E"),
        ("Answer: **B**", "B"),
        ("I think A. The answer is B because A is not", "B"),
        ("Nothing at all", None),
    ],
)
def test_choice(text, letter):
    assert extract_choice(text) == letter


def test_choice_reward():
    assert choice_reward("", "so it is (C)", [], [], answer="C") == 1.0
    assert choice_reward("", "none", [], [], answer="C") == 0.0


def test_every_registered_function_exists():
    for name, ref in REWARD_FUNCTIONS.items():
        assert callable(load_function(ref)), name


def test_names_functions_and_paths_are_resolved(tmp_path):
    assert resolve_reward_fn("gsm8k").name == "math_reward"
    assert resolve_reward_fn(exact_reward) == REWARD_FUNCTIONS["exact"]
    assert resolve_reward_fn("areal.reward.text:exact_reward") == REWARD_FUNCTIONS["exact"]
    file = tmp_path / "mine.py"
    file.write_text("def score(*a, **k): return 1.0")
    assert resolve_reward_fn(f"{file}:score").file == str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("", "registered are choice, code, exact"),
        ("nowhere.mod:f", "no module nowhere.mod"),
        ("nowhere.py:f", "there is no file"),
        ("a:b:c d", "neither a registered name"),
    ],
)
def test_unknown_names_say_what_to_do(text, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward_fn(text)


def test_functions_that_no_other_process_can_find_are_refused():
    def nested(*a, **k):
        return 1.0

    for function in (nested, lambda *a, **k: 1.0, [].append):
        with pytest.raises(ConfigError, match="top level of a module"):
            resolve_reward_fn(function)
