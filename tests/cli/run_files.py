"""The files of a run that has trained some steps, as its processes leave them."""

import json
from pathlib import Path
from typing import Any

from areal.system.run_paths import RunPaths
from tests.cli.test_command import QUICKSTART


def row(step: int, **values: Any) -> dict[str, Any]:
    phases = {"seconds/step": 2.0, "seconds/rollout": 0.5, "seconds/publish_weights": 0.1, "seconds/update": 1.4}
    shares = {"rollout/staleness_frac/0": 0.25, "rollout/staleness_frac/1": 0.75, "rollout/staleness_mean": 0.75}
    ours = {"rollout/reward": step / 10, "actor/entropy": 1.0, "rollout/running": 0.0, "memory/server-0": 0.5}
    return {"step": step, "time": 100.0 + 3 * step, **phases, **shares, **ours, **values}


def write_run(root: Path) -> RunPaths:
    """A run that has trained 4 of 10 steps."""
    paths = RunPaths(root)
    paths.samples.mkdir(parents=True)
    with open(QUICKSTART) as file:
        paths.config.write_text(file.read())
    process = {"role": "server", "host": {"node": "node-a"}, "gpus": [], "device": "cpu"}
    processes = [process | {"name": "server-0"}, process | {"name": "controller", "role": "controller"}]
    paths.plan.write_text(json.dumps({"processes": processes, "numbers": {"total_steps": 10}}))
    rows = [{"step": 0, "time": 100.0, "eval/greedy/reward": 0.1, "eval/greedy/episode/reward": 0.1}]
    evaluated = {"eval/greedy/reward": 0.4, "eval/greedy/missing": 2, "eval/greedy/answers": 8}
    rows += [
        row(1),
        row(2),
        row(3, **evaluated, **{"eval/loss": 2.5, "batch/ref_kl": 0.01}),
        row(4, **{"actor/entropy": None}),
    ]
    paths.metrics.write_text("".join(json.dumps(item) + "\n" for item in rows))
    names = {"reward_parts": {"format": 1.0}, "prompt": "a \x1b[31mprompt", "num_generated": 3, "stop_reason": "stop"}
    samples = [names | {"reward": reward, "answer": f"answer {reward}"} for reward in (1.0, 0.8, 0.5, 0.2, 0.0)]
    (paths.samples / "step-000004.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (paths.samples / "step-000001.jsonl").write_text("")
    alarm = {"name": "grad_norm", "code": "alarm.grad_norm", "value": 9.0, "limit": 5.0, "side": "above", "steps": 1}
    alarm |= {"step": 3, "time": 1.0, "action": "warn", "meaning": "m", "causes": "c", "look_at": "l"}
    paths.alarms.write_text(json.dumps(alarm) + "\n")
    return paths
