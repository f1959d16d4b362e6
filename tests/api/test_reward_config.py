"""Which reward functions with which weights: what a configuration may say, and what is refused before a run."""

import re
from pathlib import Path

import pytest
import yaml

from areal.api.config import GRPOConfig, RewardConfig, load_config
from areal.api.config.rollout import short_names
from areal.api.config.schema import fields_of, options_without_effect
from areal.api.errors import ConfigError
from areal.reward.table import reward_table
from tests.api.minimal import MINIMAL

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str) -> GRPOConfig:
        path = tmp_path / "x.yaml"
        tree = yaml.safe_load(MINIMAL + "gconfig: {n_samples: 4}")
        for key, value in yaml.safe_load(text).items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return load_config(["--config", str(path)], GRPOConfig)

    return load


def test_functions_are_named_with_weights_for_all_rows_and_by_source(load):
    reward = load(
        "rollout: {should_accept_fn: mixed_rewards}\n"
        "reward:\n"
        "  fns: {exact: 1, 'some/dir.v2/task.py:score': 0.25, my.module:score: -0.5}\n"
        "  by_source: {gsm8k/main: {gsm8k: 1.0, exact: 0}}\n"
        "  filter_on: [exact, gsm8k]\n"
    ).reward
    assert reward.fns == {"exact": 1.0, "some/dir.v2/task.py:score": 0.25, "my.module:score": -0.5}
    assert reward.by_source == {"gsm8k/main": {"gsm8k": 1.0, "exact": 0.0}}
    assert reward.source_key == "data_source"


def test_the_short_form_may_be_the_default_beside_sources(load):
    assert load("reward_fn: exact\nreward: {by_source: {a: {gsm8k: 1}}, source_key: origin}").reward.names_functions


GDPO = "actor: {adv_estimator: {name: gdpo, weights: {gsm8k: 1, score: 0.5}}}\n"


def test_weights_of_gdpo_name_functions_as_the_metrics_do(load):
    fns = "reward: {fns: {gsm8k: 1, 'my.module:score': 1, format: 1}}"
    assert load(GDPO + fns).actor.adv_estimator.weights == {"gsm8k": 1.0, "score": 0.5}
    by_source = "reward: {by_source: {a: {gsm8k: 1}, b: {'my.module:score': 1}}}"
    assert load(GDPO + by_source).actor.adv_estimator.weights == {"gsm8k": 1.0, "score": 0.5}
    assert load(GDPO).actor.adv_estimator.weights  # a script chooses the functions


FILTER = "rollout: {should_accept_fn: mixed_rewards}\n"


@pytest.mark.parametrize(
    ("text", "path", "code"),
    [
        ("reward_fn: exact\nreward: {fns: {gsm8k: 1}}", "reward_fn", "config.conflict"),
        ("reward: {fns: {exact: .nan}}", "reward.fns.exact", "config.out_of_range"),
        ("reward: {fns: {exact: much}}", "reward.fns.exact", "config.wrong_type"),
        ("reward: {fns: {exact: 0, format: 0}}", "reward.fns", "config.conflict"),
        ("reward: {by_source: {a: {}}}", "reward.by_source.a", "config.missing_requirement"),
        ("reward_fn: math\nreward: {timeout_s: 10}", "reward.timeout_s", "config.conflict"),
        ("reward: {by_source: {a: {math: 1}}, timeout_s: 3}", "reward.timeout_s", "config.conflict"),
        ("reward: {by_source: {a: {exact: 1}}, source_key: ''}", "reward.source_key", "config.missing_requirement"),
        (FILTER + "reward: {fns: {exact: 1}, filter_on: [format]}", "reward.filter_on", "config.conflict"),
        (FILTER + "reward: {filter_on: [format]}", "reward.filter_on", "config.conflict"),
        (FILTER + "reward: {fns: {exact: 1, format: 0}, filter_on: [format]}", "reward.filter_on", "config.conflict"),
        (
            FILTER + "reward_fn: format\nreward: {by_source: {a: {exact: 1}}, filter_on: [exact]}",
            "reward.filter_on",
            "config.conflict",
        ),
        ("reward: {fns: {'a/score.py:f': 1, 'b/score.py:f': 1}}", "reward.fns", "config.conflict"),
        (GDPO + "reward: {fns: {gsm8k: 1, format: 1}}", "actor.adv_estimator.weights.score", "config.conflict"),
        (GDPO + "reward_fn: gsm8k", "actor.adv_estimator.weights", "config.conflict"),
        (
            GDPO + "reward_fn: format\nreward: {by_source: {a: {gsm8k: 1, 'my.module:score': 1}}}",
            "actor.adv_estimator.weights",
            "config.conflict",
        ),
        (
            "actor: {adv_estimator: {name: gdpo, weights: {exact: .nan}}}\nreward: {fns: {exact: 1}}",
            "actor.adv_estimator.weights.exact",
            "config.out_of_range",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(load, text, path, code):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert (path, code) in [(problem.path, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("reward: {source_key: origin}", "reward.source_key"),
        ("reward: {fns: {exact: 1}, filter_on: [exact]}", "reward.filter_on"),
    ],
)
def test_what_has_no_effect_is_listed(load, text, path):
    assert [item.path for item in options_without_effect(load(text))] == [path]


def test_a_short_limit_is_fine_where_a_timeout_counts_zero(load):
    assert load("reward_fn: math\nreward: {timeout_s: 3, on_error: zero}").reward.timeout_s == 3
    assert load("reward_fn: exact\nreward: {timeout_s: 3}").reward.timeout_s == 3


def test_metrics_show_the_shortest_name_that_tells_functions_apart():
    assert short_names({"exact", "a/b.py:score", "my.pkg:f"}) == {
        "exact": "exact",
        "a/b.py:score": "score",
        "my.pkg:f": "f",
    }
    shown = short_names({"x/math.py:score", "my.code:score", "math"})
    assert shown == {"x/math.py:score": "math.score", "my.code:score": "code.score", "math": "math"}
    assert short_names({"exact", "my.code:exact"}) == {"exact": "exact", "my.code:exact": "code.exact"}


def page_rows() -> list[tuple[str, str]]:
    """(name, YAML) of every row of the table of rewards."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Rewards\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(cells[0].strip(), "\n".join(re.findall(r"`([^`]+)`", cells[3]))) for cells in rows]


@pytest.mark.parametrize(("name", "text"), page_rows(), ids=[name for name, _ in page_rows()])
def test_the_configuration_of_every_row_of_the_page_loads(load, name, text):
    config = load(text)
    if config.reward_fn or config.reward.names_functions:
        reward_table(config.reward_fn, config.reward)  # every name is a registered one
    else:
        assert config.rollout.should_accept_fn


def test_the_page_tells_of_every_option_of_rewards():
    written = " ".join(text for _, text in page_rows())
    missing = {name for name in fields_of(RewardConfig) if name not in written}
    assert len(page_rows()) > 5
    assert missing == {"workers", "sandbox"}  # where programs run does not change what a reward means
