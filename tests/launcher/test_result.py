"""What a run states about its episodes and alarms, while it runs and at its end."""

import json

from areal.api.config import AlarmsConfig, EvaluatorConfig
from areal.launcher.result import (
    HeldOutLines,
    RunAlarmLines,
    episodes_of,
    facts_text,
    goal_text,
    main_metrics,
    metrics_text,
)
from areal.observe.step_files import JsonlTracker
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import RunAlarms

HIGH = {"actor/grad_norm": 500.0}


def train(paths, first_step, rows):
    JsonlTracker(paths.metrics, first_step=first_step).close()
    alarms = RunAlarms(AlarmsConfig().chosen(), paths, first_step=first_step)
    for step, row in enumerate(rows, start=first_step):
        alarms.look(step, row)
    alarms.close()


def test_every_alarm_is_shown_once(tmp_path):
    paths = RunPaths(tmp_path)
    lines = RunAlarmLines(paths, steps_done=0)
    assert list(lines.new()) == []
    train(paths, 1, [HIGH] * 4)
    assert len(list(lines.new())) == 1
    assert list(lines.new()) == []
    train(paths, 1, [HIGH] * 5)  # the trainers started again from the beginning
    assert list(lines.new()) == []
    assert [(alarm.step, alarm.name) for alarm in lines.all()] == [(3, "grad_norm")]


def test_a_new_launch_shows_the_alarms_after_its_checkpoint(tmp_path):
    paths = RunPaths(tmp_path)
    train(paths, 1, [HIGH] * 4)
    assert list(RunAlarmLines(paths, steps_done=3).new()) == []
    lines = RunAlarmLines(paths, steps_done=2)
    assert list(lines.new()) == []
    train(paths, 1, [HIGH] * 4)
    assert len(list(lines.new())) == 1


def test_a_damaged_line_is_left_out(tmp_path):
    paths = RunPaths(tmp_path)
    lines = RunAlarmLines(paths, steps_done=0)
    paths.alarms.write_text('{"step": 1}\n{"ste\nnull\n{"step": 2')
    assert list(lines.new()) == []


def test_the_episodes_are_those_at_the_end_of_the_controller(tmp_path):
    paths = RunPaths(tmp_path)
    assert episodes_of(paths, None) is None
    status = {"admitted": 9, "consumed": 4, "failed": 1, "rejected": 0, "reasons": {"failed: KeyError": 1}, "step": 2}
    assert episodes_of(paths, status) == {name: status[name] for name in status if name != "step"}
    paths.episodes.write_text(json.dumps({"admitted": 11}))
    assert episodes_of(paths, status) == {"admitted": 11}


def test_the_last_line_names_failures_rejections_and_alarms(tmp_path):
    reasons = {"failed: KeyError": 11, "rejected: stale": 2, "rejected: filter": 3}
    episodes = {"admitted": 64, "consumed": 48, "failed": 11, "rejected": 5, "reasons": reasons}
    text = facts_text(episodes, [])
    for part in ("48 of 64", "11 failed", "KeyError 11", "5 rejected", "filter 3", "stale 2"):
        assert part in text
    paths = RunPaths(tmp_path)
    train(paths, 1, [HIGH] * 3)
    assert "grad_norm" in facts_text(None, RunAlarmLines(paths, steps_done=9).all())


def test_a_run_that_a_goal_ended_names_the_step_the_reward_and_the_goal():
    config, record = EvaluatorConfig(stop_at={"sampled": 0.97}), {"step": 25, "eval/sampled/reward": 0.9766}
    assert goal_text(record, config, 60) == "stopped at step 25: sampled 0.977 >= 0.97"
    assert goal_text(record, config, 25) == "", "it was the last step"
    assert goal_text(record | {"eval/sampled/reward": 0.9}, config, 60) == ""
    assert goal_text(record, EvaluatorConfig(), 60) == ""
    assert goal_text({}, config, 60) == ""


def test_the_main_metrics_are_means_of_the_first_and_last_tenth():
    rows = [{"step": step, "rollout/reward": step / 2, "other": 1.0} for step in range(1, 21)]
    rows[0]["eval/greedy/reward"] = 0.25
    rows[1]["eval/greedy/reward"] = None  # was not finite
    rows[1]["eval/greedy/episode/reward"] = 9.0
    result = main_metrics(rows)
    assert result == {
        "rollout/reward": {"first": (0.5 + 1.0) / 2, "last": (9.5 + 10.0) / 2},
        "eval/greedy/reward": {"first": 0.25, "last": 0.25},
    }
    head, *lines = metrics_text(result)
    assert [line.split() for line in lines] == [
        ["rollout/reward", "0.75", "9.75"],
        ["eval/greedy/reward", "0.25", "0.25"],
    ]
    assert len({len(line) for line in (head, *lines)}) == 1
    assert metrics_text(main_metrics([])) == []


def test_held_out_results_are_shown_once_with_their_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "eval/greedy/reward": 0.1, "eval/greedy/answers": 4}\n')
    lines = HeldOutLines(file)
    assert list(lines.new()) == []
    whole = '{"step": 2, "loss": 1.0}\n{"step": 3, "eval/sampled/reward": 0.25, "eval/sampled/answers": 8}\n'
    with open(file, "a") as out:
        out.write(whole + '{"step": 4, "eval/loss": 0')
    assert list(lines.new()) == ["held-out rows after step 3: sampled 0.250"]
    with open(file, "a") as out:
        out.write(".5}\n")
    assert list(lines.new()) == ["held-out rows after step 4: loss 0.5"]
    file.write_text('{"step": 4, "eval/loss": 0.5}\n')  # a recovery removed lines, and the step was trained again
    assert list(lines.new()) == []
