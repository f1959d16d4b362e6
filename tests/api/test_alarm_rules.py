"""The options of the alarms."""

import pytest

from areal.api.errors import ConfigError


def test_rules_are_changed_on_the_command_line(load):
    words = "[{name: grad_norm, limit: 7, steps: 2, action: stop}, {name: update_kl, action: 'off'}]"
    config = load(f"alarms.rules={words}")
    chosen = {item.rule.name: item for item in config.alarms.chosen()}
    assert (chosen["grad_norm"].limit, chosen["grad_norm"].steps, chosen["grad_norm"].action) == (7.0, 2, "stop")
    assert "update_kl" not in chosen
    assert chosen["logprob_k3"].action == "warn"


@pytest.mark.parametrize(
    ("override", "path", "code"),
    [
        ("alarms.action=panic", "alarms.action", "config.not_a_choice"),
        ("alarms.rules=[{name: grad_nrom}]", "alarms.rules[0].name", "config.not_a_choice"),
        ("alarms.rules=[{limit: 3}]", "alarms.rules[0].name", "config.required"),
        ("alarms.rules=[{name: grad_norm, steps: 0}]", "alarms.rules[0].steps", "config.out_of_range"),
        ("alarms.rules=[{name: grad_norm, limit: .inf}]", "alarms.rules[0].limit", "config.out_of_range"),
        ("alarms.rules=[{name: grad_norm}, {name: grad_norm}]", "alarms.rules", "config.conflict"),
    ],
)
def test_wrong_options_are_refused(load, override, path, code):
    with pytest.raises(ConfigError) as error:
        load(override)
    assert [(problem.path, problem.code) for problem in error.value.problems] == [(path, code)]
