"""The rules of the alarms, with rows of metrics worked by hand: just within the limit, at it, and beyond."""

import pytest

from areal.api.alarm_rules import ALARM_NAMES, ALARM_RULES
from areal.api.config import AlarmRuleConfig, AlarmsConfig
from areal.observe.alarms import MEASURES, AlarmRules, by_meaning


def rules(*names, action="warn", **changes):
    """Only the rules `names`, all with `changes`."""
    others = [AlarmRuleConfig(name=name, action="off") for name in ALARM_NAMES if name not in names]
    return AlarmRules(
        AlarmsConfig(action=action, rules=[*others, *(AlarmRuleConfig(name=n, **changes) for n in names)]).chosen()
    )


def steps_of_alarms(result, rows):
    """The steps, counted from 1, after which an alarm was raised."""
    return [step for step, row in enumerate(rows, start=1) if result.step(step, row)]


def first_alarm(name, rows, **changes):
    return (steps_of_alarms(rules(name, **changes), rows) or [None])[0]


SIMPLE = {
    "effective_sample_size": ("batch/mismatch/ess_token", 0.05, 0.049, 3),
    "failed_deltas": ("rollout/failed_deltas", 0.0, 1.0, 1),
    "grad_norm": ("actor/grad_norm", 100.0, 100.1, 3),
    "logprob_gap": ("batch/prox_rollout_gap_abs", 1.0, 1.01, 2),
    "logprob_k3": ("batch/mismatch/k3", 1.0, 1.01, 2),
    "stale_tokens": ("rollout/stale_tokens_frac", 0.1, 0.11, 5),
    "truncated_answers": ("batch/unfinished_ratio", 0.5, 0.51, 3),
    "update_kl": ("actor/approx_kl", 1.0, 1.01, 3),
    "budget_stops": ("rollout/ended/budget_stops", 0.5, 0.51, 3),
    "drifts": ("rollout/ended/drifts", 0.5, 0.51, 3),
    "zeros_by_load": ("rollout/ended/zeros_by_load", 0.1, 0.11, 2),
}
"""Rules of one metric: the value at the limit, which raises nothing, one beyond it, and the steps."""


@pytest.mark.parametrize("name", SIMPLE)
def test_an_alarm_needs_a_value_beyond_the_limit_in_all_of_its_steps(name):
    metric, at, beyond, steps = SIMPLE[name]
    assert first_alarm(name, [{metric: at}] * 20) is None
    assert first_alarm(name, [{metric: beyond}] * 20) == steps
    interrupted = [{metric: beyond}] * (steps - 1) + [{metric: at}] + [{metric: beyond}] * steps
    assert first_alarm(name, interrupted) == 2 * steps
    assert first_alarm(name, [{"other": beyond}] * 20) is None


def test_the_gradient_norm_of_supervised_training_counts():
    assert first_alarm("grad_norm", [{"grad_norm": 101.0}] * 3) == 3


def test_a_step_without_the_value_changes_nothing():
    rows = [{"batch/mismatch/k3": 2.0}, {}, {"batch/mismatch/k3": 2.0}]
    assert steps_of_alarms(rules("logprob_k3"), rows) == [3]


def test_an_alarm_comes_again_only_after_its_value_was_within_the_limit_for_as_long():
    high, low = {"batch/mismatch/k3": 2.0}, {"batch/mismatch/k3": 0.5}
    assert steps_of_alarms(rules("logprob_k3"), [high] * 6) == [2]
    assert steps_of_alarms(rules("logprob_k3"), [high, high, low, high, high]) == [2]
    assert steps_of_alarms(rules("logprob_k3"), [high, high, low, low, high, high]) == [2, 6]


def test_the_gap_of_fresh_tokens_is_strict_and_only_of_fresh_tokens():
    def row(gap, staleness):
        return {"batch/prox_rollout_gap_abs": gap, "rollout/staleness_max": staleness}

    assert first_alarm("fresh_logprob_gap", [row(0.2, 0.0)]) is None
    assert first_alarm("fresh_logprob_gap", [row(0.21, 0.0)]) == 1
    assert first_alarm("fresh_logprob_gap", [row(0.21, 1.0)]) is None
    assert first_alarm("fresh_logprob_gap", [{"batch/prox_rollout_gap_abs": 0.21}]) is None


def test_a_low_entropy_is_expected_of_a_solved_task():
    def row(entropy, reward):
        return {"actor/entropy": entropy, "batch/reward": reward, "batch/reward_max": 1.0}

    assert first_alarm("entropy_collapse", [row(0.02, 0.5)] * 9) is None
    assert first_alarm("entropy_collapse", [row(0.019, 0.5)] * 9) == 5
    assert first_alarm("entropy_collapse", [row(0.019, 0.94)] * 9) == 5
    assert first_alarm("entropy_collapse", [row(0.019, 0.95)] * 9) is None
    assert first_alarm("entropy_collapse", [{**row(0.019, 0.0), "batch/reward_max": 0.0}] * 9) == 5


def test_answers_of_an_evaluation_without_a_reward_raise_an_alarm():
    def row(missing, answers, name="eval/greedy"):
        return {f"{name}/missing": missing, f"{name}/answers": answers, f"{name}/reward": 0.5}

    assert first_alarm("evaluation_missing", [row(5.0, 100.0)]) is None
    assert first_alarm("evaluation_missing", [row(41.0, 128.0)]) == 1
    assert first_alarm("evaluation_missing", [row(0.0, 9.0) | row(1.0, 9.0, "eval/greedy/set")]) == 1


def memory(values):
    return [{"memory/server-0": 1.0, "memory/controller": value} for value in values]


def test_memory_that_grows_steadily_raises_an_alarm():
    growing = [2.0 + 0.05 * step for step in range(60)]
    # the lowest of the newest 10 is 11 steps above the highest of those that end 20 steps earlier: 0.55 GiB
    assert first_alarm("memory_growth", memory(growing)) == 37
    slower = [2.0 + 0.045 * step for step in range(60)]  # 0.495 GiB
    assert first_alarm("memory_growth", memory(slower)) is None
    large = [20.0 + 0.05 * step for step in range(60)]  # 0.55 GiB of 20 are less than 5%
    assert first_alarm("memory_growth", memory(large)) is None


def test_memory_that_grows_once_or_goes_up_and_down_raises_none():
    assert first_alarm("memory_growth", memory([2.0] * 40 + [2.6] + [2.0] * 40)) is None
    assert first_alarm("memory_growth", memory([2.0 + 2.0 * (step % 9 > 4) for step in range(90)])) is None
    assert first_alarm("memory_growth", memory([1.0 + 0.5 * step for step in range(5)] + [4.0] * 60)) is None


def reward_row(mean, low=0.0, high=1.0):
    return {"batch/reward": mean, "batch/reward_min": low, "batch/reward_max": high}


def test_a_reward_that_falls_to_almost_zero_raises_an_alarm():
    rising = [reward_row(0.5)] * 5
    # means over five steps: 0.4, 0.3, 0.2, 0.1, then zero, which is the first one below a tenth of 0.5
    assert first_alarm("reward_collapse", rising + [reward_row(0.0)] * 9) == 12
    assert first_alarm("reward_collapse", rising + [reward_row(0.05)] * 9) is None
    assert first_alarm("reward_collapse", [reward_row(0.04)] * 5 + [reward_row(0.0)] * 9) is None
    assert first_alarm("reward_collapse", [reward_row(0.5, low=-1.0)] * 5 + [reward_row(0.0)] * 9) is None
    assert first_alarm("reward_collapse", [reward_row(0.0)] * 20 + rising) is None


def test_one_reward_for_all_answers_raises_an_alarm_and_the_groups_none():
    constant = [reward_row(0.3, 0.3, 0.3) | {"batch/uniform_reward_ratio": 1.0}] * 9
    assert first_alarm("reward_constant", constant) == 6
    assert first_alarm("uniform_groups", constant) is None
    changing = [reward_row(value, value, value) for value in (0.0, 1.0) * 6]
    assert first_alarm("reward_constant", changing) is None


def test_groups_with_one_reward_each_raise_an_alarm():
    assert first_alarm("uniform_groups", [reward_row(0.5) | {"batch/uniform_reward_ratio": 0.99}] * 9) is None
    assert first_alarm("uniform_groups", [reward_row(0.5) | {"batch/uniform_reward_ratio": 1.0}] * 9) == 5


def speeds(*values):
    return {f"rollout/replica_tokens_per_s/server-{i}": value for i, value in enumerate(values)}


def test_a_replica_with_less_than_half_of_the_speed_of_the_others_raises_an_alarm():
    assert first_alarm("slow_replica", [speeds(100.0, 50.0)] * 20) is None
    assert first_alarm("slow_replica", [speeds(100.0, 49.0)] * 20) == 14
    assert first_alarm("slow_replica", [speeds(49.0, 100.0, 120.0)] * 20) == 14  # the median of the others is 110
    assert first_alarm("slow_replica", [speeds(49.0)] * 20) is None
    one_slow_step = [speeds(100.0, 100.0)] * 14 + [speeds(100.0, 1.0)] + [speeds(100.0, 100.0)] * 9
    assert first_alarm("slow_replica", one_slow_step) is None
    removed = [speeds(100.0, 49.0)] * 13 + [speeds(100.0)] * 9
    assert first_alarm("slow_replica", removed) is None


def test_a_replica_that_joins_is_not_compared_before_it_is_warm():
    alone = [speeds(100.0)] * 20
    assert first_alarm("slow_replica", [*alone, *[speeds(100.0, 1.0)] * 5, *[speeds(100.0, 100.0)] * 20]) is None
    assert first_alarm("slow_replica", [*alone, *[speeds(100.0, 1.0)] * 20]) == 20 + 14
    while_it_starts = [speeds(100.0, 100.0)] * 20 + [speeds(100.0, 100.0, 5.0)] * 9 + [speeds(100.0, 100.0, 90.0)] * 20
    assert first_alarm("slow_replica", while_it_starts) is None


def test_limit_steps_and_action_of_one_rule_can_be_changed():
    row = {"actor/grad_norm": 7.0}
    assert first_alarm("grad_norm", [row] * 9, limit=6.0) == 3
    assert first_alarm("grad_norm", [row] * 9, limit=6.0, steps=1) == 1
    (alarm,) = rules("grad_norm", limit=6.0, steps=1, action="stop").step(4, row)
    assert (alarm.step, alarm.name, alarm.code, alarm.value, alarm.limit) == (4, "grad_norm", "alarm.grad_norm", 7.0, 6)
    assert (alarm.side, alarm.steps, alarm.action) == ("above", 1, "stop")
    assert AlarmsConfig(action="off").chosen() == []
    only = AlarmsConfig(action="off", rules=[AlarmRuleConfig(name="grad_norm", action="warn")]).chosen()
    assert [(chosen.rule.name, chosen.action) for chosen in only] == [("grad_norm", "warn")]


def test_an_alarm_that_stops_the_run_stops_it_again_after_a_new_start():
    row, result = {"actor/grad_norm": 101.0}, rules("grad_norm", action="stop")
    assert steps_of_alarms(result, [row] * 4) == [3, 4]


def test_alarms_of_one_cause_are_one_line():
    names = ("logprob_gap", "logprob_k3", "grad_norm")
    result = rules(*names, steps=1).step(
        1, {"batch/prox_rollout_gap_abs": 3.0, "batch/mismatch/k3": 104.0, "actor/grad_norm": 500.0}
    )
    assert [[alarm.name for alarm in group] for group in by_meaning(result)] == [
        ["grad_norm"],
        ["logprob_gap", "logprob_k3"],
    ]


def test_every_rule_has_a_value():
    assert set(MEASURES) == {rule.name for rule in ALARM_RULES if rule.per == "step"}
    assert sorted(ALARM_NAMES) == list(ALARM_NAMES)
    assert all(rule.code == f"alarm.{rule.name}" for rule in ALARM_RULES)
