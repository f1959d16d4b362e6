"""Tokens until a student reaches 95% of its teacher: on-policy distillation against GRPO, on the quickstart's task.

    python benchmark/distillation.py [--seeds 0 1 2] [--staleness 2] [--fileroot runs/distillation]

Each seed runs the quickstart, whose last model is the teacher, on a native server. Then the same warm start learns from
the teacher alone: KL(policy || teacher) over its 16 likeliest tokens, no reward, and one answer to each prompt, because
nothing compares answers. Rules: the tokens that the servers generated until the first evaluation whose sampled accuracy
is at least .95 of the teacher's are at most half of those of GRPO; while the trainer waits for a batch, only calls of
the teacher run in less than 5% of the time, by the trace. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from areal.system.network import TEACHER_TOKEN, TOKEN_VARIABLE

REPOSITORY = Path(__file__).resolve().parent.parent
SHARE = 0.95
NUM_FIRST = 3
SECRET = "secret-of-the-benchmark"


def run(*argv: str) -> None:
    print("$ python " + " ".join(argv), file=sys.stderr, flush=True)
    subprocess.run(
        [sys.executable, *argv], cwd=REPOSITORY, env=os.environ | {TEACHER_TOKEN: SECRET}, stdout=sys.stderr, check=True
    )


def tokens_until(metrics: Path, goal: float) -> int | None:
    """Generated tokens before the first evaluation at or above `goal`; None = none is."""
    tokens = 0.0
    for line in metrics.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        tokens += row.get("rollout/produced_tokens", 0.0)
        if row.get("eval/sampled/reward", 0.0) >= goal:
            return int(tokens)
    return None


def last_accuracy(metrics: Path) -> float:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["eval/sampled/reward"] for row in rows if "eval/sampled/reward" in row][-1]


def teacher_share(trace: Path) -> float:
    """The part of the time in which the trainer waits for a batch and only calls of the teacher run, no generation. The
    first steps do not count: their rollouts begin with an empty pipeline."""
    changes: list[tuple[float, str, int]] = []
    for file, phases in (("controller", ("generate", "teacher")), ("trainer-0", ("wait_batch",))):
        for line in (trace / f"{file}.jsonl").read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            name, begin = event["name"], event.get("ts", 0.0)
            if name in phases and event.get("cat") in ("episode", "phase"):
                changes += [(begin, name, -1 if event["ph"] == "e" else 1)]
                changes += [(begin + event["dur"], name, -1)] if event["ph"] == "X" else []
    start = [begin for begin, name, _ in sorted(changes) if name == "wait_batch"][2 * NUM_FIRST]
    changes.sort()
    running, waited = Counter[str](), 0.0
    for (begin, name, change), (end, _, _) in itertools.pairwise(changes):
        running[name] += change
        is_only = running["wait_batch"] and running["teacher"] and not running["generate"]
        waited += (end - begin) * bool(is_only and begin >= start)
    return waited / (changes[-1][0] - start)


def start_teacher(model: Path) -> tuple[subprocess.Popen[str], str]:
    """A native server with the model, and its address."""
    options = ["--model-path", str(model), "--dtype", "float32", "--num-threads", "1", "--context-length", "32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "areal.inference.server", *options],
        env=os.environ | {TOKEN_VARIABLE: SECRET},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()  # it is printed when the server answers
    if not address:
        raise SystemExit(f"the server with {model} ended with {process.wait()}")
    return process, address


def compare(seed: int, fileroot: str, staleness: int) -> dict[str, Any]:
    root = f"{fileroot}/seed-{seed}"
    run("examples/quickstart/quickstart.py", "--seed", str(seed), "--fileroot", root)
    base = REPOSITORY / root / "quickstart"
    teacher, goal = base / "grpo", SHARE * last_accuracy(base / "grpo" / "metrics.jsonl")
    model = max((teacher / "checkpoints" / "actor").glob("step-*"))
    server, address = start_teacher(model)
    try:
        section = f"{{servers: [{{server_addrs: ['{address}']}}], rl_weight: 0, advantage_coef: 0, "
        run(
            *(
                "-m",
                "areal",
                "run",
                "--config",
                "examples/quickstart/grpo.yaml",
                f"seed={seed}",
                "trial_name=distilled",
            ),
            *(f"cluster.fileroot={root}", f"teacher={section}loss_coef: 1, top_k: 16}}"),
            *("rollout.should_accept_fn=", "rollout.dynamic_bs=false", "actor.optimizer.lr=1e-3"),
            *("gconfig.n_samples=1", "actor.group_size=1", "actor.reward_norm=null", "train_dataset.batch_size=256"),
            *(f"rollout.max_head_offpolicyness={staleness}", "perf_tracer={enabled: true}"),
            *("total_train_epochs=4", "total_train_steps=120", f"evaluator.stop_at={{sampled: {goal}}}"),
        )
    finally:
        server.terminate()
        server.wait(timeout=30)
    tokens = {name: tokens_until(base / name / "metrics.jsonl", goal) for name in ("grpo", "distilled")}
    theirs, ours = tokens["grpo"], tokens["distilled"]
    return {
        "seed": seed,
        "goal": round(goal, 4),
        "accuracy": round(last_accuracy(base / "distilled" / "metrics.jsonl"), 4),
        "tokens": tokens,
        "ratio": round(ours / theirs, 3) if ours and theirs else None,
        "waits_for_teacher": round(teacher_share(base / "distilled" / "trace"), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fileroot", default="runs/distillation", help="folder of the runs, below the repository")
    parser.add_argument("--staleness", type=int, default=2, help="maximum staleness of the distillation")
    options = parser.parse_args()
    results = [compare(seed, options.fileroot, options.staleness) for seed in options.seeds]
    for result in results:
        print(result)
    ratios = [result["ratio"] for result in results]
    passes = all(ratio is not None and ratio <= 0.5 for ratio in ratios)
    passes = passes and all(result["waits_for_teacher"] < 0.05 for result in results)
    print(json.dumps({"benchmark": "distillation", "results": results, "passes": passes}))


if __name__ == "__main__":
    main()
