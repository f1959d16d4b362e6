"""Compares areal with TRL's GRPOTrainer: same checkpoint, rows, group, batch, minibatches, lengths, learning rate.

    make bench-trl           creates .venv-trl on the first call, then runs all workloads (about 25 minutes, idle)
    python benchmark/versus_trl.py [--only WORKLOAD] [--seeds 0 1] [--batch 32 16] [--staleness 0 2]

quickstart: the model of examples/quickstart after its supervised stage, with the example's prompts and answers in a
train step, or those of --batch. Both systems train until the same held-out goals (greedy 0.96, sampled 0.87, evaluated
every 10 train steps). Counted: seconds from the moment at which all processes are ready to the end of the evaluation
that reaches the goals. wide: a random model of 24M parameters, 8 x 8 answers of random lengths (at most 256 tokens,
mean about 48), so that TRL computes much padding. equal: the same with 48 tokens in each answer. smollm2: the
pretrained model and the task of examples/smollm2 with LoRA, 64 answers in each step. Counted in these three: seconds
per train step in the middle of a run.

TRL's settings are derived from areal's configuration (`trl_settings`). What differs by design: areal generates while it
trains (rollout.max_head_offpolicyness), with the decoupled loss, and its quickstart leaves groups of equal rewards,
whose gradient is zero, out of the batch. TRL gets one batch for generation, fused AdamW, no gradient checkpointing,
bfloat16 where areal computes in it, and what short runs of the same workload choose: all cores or one thread, then
padded generation or continuous batching. Prints one line of JSON at the end, with the versions of both sides, the load
of the machine and ratios TRL / areal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from versus_task import areal_figures

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.launcher.job import SPINNING
from areal.system.process import run_to_its_end

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"
QUICKSTART = "examples/quickstart/grpo.yaml"
WIDE = "benchmark/versus_trl.yaml"
WIDE_FOLDER = "versus/wide_model"
MEASURED = (4, 11)
"""Of the 14 steps of wide and equal: after the start, before the last steps, for which less is generated."""
EQUAL_LENGTH = 48
SMOLLM2 = "examples/smollm2/grpo.yaml"
SMOLLM2_STEPS, SMOLLM2_MEASURED = 8, (3, 6)
MEASURED_OF_TRL = (1, 4)
"""TRL does not generate ahead, so that its steps are alike from the second on."""
TRIAL_STEPS = 2
WORKLOADS = ("quickstart", "wide", "equal", "smollm2")
ALL_CORES = os.cpu_count() or 1
VERSIONS = "import json, torch, transformers; print(json.dumps([transformers.__version__, torch.__version__]))"


def trl_settings(config: PPOConfig, *, folder: str) -> dict[str, Any]:
    """The arguments of GRPOConfig that train as `config` does, synchronously and on the policy of the batch."""
    actor, answers = config.actor, config.gconfig
    optimizer = actor.optimizer
    assert optimizer is not None
    assert config.total_train_steps is not None
    assert actor.loss_aggregation == "token-mean"
    assert config.ref is None  # neither system has a KL term
    completions = config.train_dataset.batch_size * answers.n_samples
    minibatches = actor.ppo_n_minibatches
    least = {"min_new_tokens": answers.min_new_tokens} if answers.min_new_tokens else None
    return {
        "output_dir": folder,
        "seed": config.seed,
        "num_generations": answers.n_samples,
        "per_device_train_batch_size": completions // minibatches,
        "steps_per_generation": minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": actor.ppo_epochs,
        "max_steps": config.total_train_steps * minibatches,
        "max_completion_length": answers.max_new_tokens,
        "temperature": answers.temperature,
        "top_p": answers.top_p,
        "top_k": 0,
        "epsilon": actor.eps_clip,
        "beta": 0.0,
        "scale_rewards": "group",
        "loss_type": "bnpo",  # the mean over the tokens of a minibatch
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.gradient_clipping,
        "lr_scheduler_type": optimizer.lr_scheduler_type,
        "warmup_steps": int(optimizer.warmup_steps_proportion * config.total_train_steps * minibatches),
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "bf16": actor.dtype == "bfloat16",
        "generation_kwargs": least,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": minibatches,
        "disable_tqdm": True,
    }


def trl_spec(config: PPOConfig, *, folder: str, measured: tuple[int, int | None]) -> dict[str, Any]:
    """What versus_trl_side.py reads."""
    train, held_out = config.train_dataset.path, config.valid_dataset.path if config.valid_dataset is not None else ""
    assert isinstance(train, str)
    with open(REPOSITORY / train) as rows:
        columns = [name for name in json.loads(rows.readline()) if name not in ("prompt", "messages")]
    lora = config.actor.lora
    return {
        "model": config.actor.path,
        "train": train,
        "held_out": held_out,
        "columns": columns,
        "reward_fn": config.reward_fn,
        "minibatches": config.actor.ppo_n_minibatches,
        "eval_every": config.evaluator.freq_steps or 1,
        "goals": config.evaluator.stop_at,
        "threads": ALL_CORES,
        "first": measured[0],
        "last": measured[1],
        "lora": None if lora is None else {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout},
        "grpo": trl_settings(config, folder=folder),
    }


@dataclass(frozen=True)
class Trial:
    """Settings of TRL that decide its speed, and what a short run with them measured; None for one that failed."""

    threads: int
    continuous_batching: bool
    seconds_per_step: float | None = None

    def applied(self, spec: dict[str, Any]) -> dict[str, Any]:
        batching = {"use_transformers_continuous_batching": self.continuous_batching}
        return spec | {"threads": self.threads, "grpo": spec["grpo"] | batching}

    def tried(self, spec: dict[str, Any], folder: str, least: int) -> Trial:
        """`least`: tokens of an answer; a generator that does not know min_new_tokens would do less work."""
        short = {"held_out": "", "goals": {}, "first": 1, "last": TRIAL_STEPS}
        steps = {"max_steps": TRIAL_STEPS * spec["minibatches"]}
        figures = trl_figures(self.applied(spec | short | {"grpo": spec["grpo"] | steps}), folder)
        is_whole = figures is not None and figures["tokens_per_answer"] >= least
        return replace(self, seconds_per_step=figures["seconds_per_step"] if figures is not None and is_whole else None)


def fastest(trials: list[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.seconds_per_step or math.inf)


def run_trl(config: PPOConfig, measured: tuple[int, int | None]) -> dict[str, Any]:
    """TRL's figures with the fastest of its trials."""
    with tempfile.TemporaryDirectory() as folder:
        spec, least = trl_spec(config, folder=folder, measured=measured), config.gconfig.min_new_tokens
        trials = [Trial(threads, False).tried(spec, folder, least) for threads in sorted({ALL_CORES, 1})]
        trials.append(Trial(fastest(trials).threads, True).tried(spec, folder, least))
        figures = trl_figures(fastest(trials).applied(spec), folder)
    if figures is None:
        sys.exit("TRL failed")
    return figures | {"chosen": asdict(fastest(trials)), "trials": [asdict(trial) for trial in trials]}


def trl_figures(spec: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """One run of TRL, with the wait policy of areal's processes; None when it fails."""
    path = Path(folder, "spec.json")
    path.write_text(json.dumps(spec))
    argv = [str(TRL_PYTHON), str(HERE / "versus_trl_side.py"), str(path)]
    env = os.environ | SPINNING
    done = subprocess.run(argv, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, list[str]]:
    """transformers and torch of both sides."""
    pythons = {"areal": sys.executable, "trl": str(TRL_PYTHON)}
    return {side: json.loads(subprocess.check_output([python, "-c", VERSIONS])) for side, python in pythons.items()}


def run_areal(path: str, measured: tuple[int, int | None], *overrides: str) -> tuple[dict[str, Any], PPOConfig]:
    run("-m", "areal", "run", "--config", path, *overrides)
    config = load_experiment(["--config", path, *overrides])
    assert isinstance(config, PPOConfig)
    folder = REPOSITORY / config.cluster.fileroot / config.experiment_name / config.trial_name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # TRL's clock starts with its model in memory, areal's trainer may wait for the servers in its first step
    ready_s = max(path.stat().st_mtime for path in (folder / "names/ready").iterdir())
    return areal_figures(rows, ready_s=ready_s, first=measured[0], last=measured[1]), config


def run(*argv: str) -> None:
    print("$ python " + " ".join(argv), file=sys.stderr, flush=True)
    if code := run_to_its_end([sys.executable, *argv], cwd=REPOSITORY):
        sys.exit(code)


def compare_quickstart(seed: int, batch: list[int] | None, fileroot: str) -> dict[str, Any]:
    common = (f"seed={seed}", f"cluster.fileroot={fileroot}")
    options = ("evaluator.eval_before_train=false",)  # TRL does not evaluate before its first train step either
    if batch is not None:
        options += (f"train_dataset.batch_size={batch[0]}", f"gconfig.n_samples={batch[1]}")
    run("examples/quickstart/prepare.py", f"{fileroot}/quickstart/data", "--seed", str(seed))
    run("-m", "areal", "run", "--config", "examples/quickstart/sft.yaml", *common)
    areal, config = run_areal(QUICKSTART, (5, None), *common, *options)
    trl = run_trl(config, (5, None))
    return {"seed": seed, "areal": areal, "trl": trl, "ratio": round(trl["seconds"] / areal["seconds"], 2)}


def compare_wide(staleness: list[int], fileroot: str, *, equal: bool) -> dict[str, Any]:
    """`equal`: all answers have EQUAL_LENGTH tokens, so that nothing is padded."""
    make_wide_model(REPOSITORY / fileroot / WIDE_FOLDER)
    lengths = [f"gconfig.{name}={EQUAL_LENGTH}" for name in ("min_new_tokens", "max_new_tokens")] if equal else []
    return compare_steps(WIDE, staleness, fileroot, MEASURED, *lengths)


def compare_smollm2(staleness: list[int], fileroot: str) -> dict[str, Any]:
    """All 64 answers are trained on, as TRL does it."""
    run("-m", "areal", "fetch", "smollm2")
    run("examples/smollm2/prepare.py", f"{fileroot}/smollm2/data")
    run("-m", "areal", "run", "--config", "examples/smollm2/warm_up.yaml", f"cluster.fileroot={fileroot}")
    changes = (f"total_train_steps={SMOLLM2_STEPS}", "rollout.dynamic_bs=false", "rollout.should_accept_fn=")
    return compare_steps(SMOLLM2, staleness, fileroot, SMOLLM2_MEASURED, *changes)


def compare_steps(
    path: str, staleness: list[int], fileroot: str, measured: tuple[int, int], *changes: str
) -> dict[str, Any]:
    """Seconds per train step of areal at each staleness, and of TRL, whose last step is the last measured one."""
    result: dict[str, Any] = {}
    for eta in staleness:
        overrides = (f"cluster.fileroot={fileroot}", f"trial_name=staleness-{eta}", *changes)
        figures, config = run_areal(path, measured, *overrides, f"rollout.max_head_offpolicyness={eta}")
        result[f"areal_staleness_{eta}"] = figures
    result["trl"] = run_trl(replace(config, total_train_steps=MEASURED_OF_TRL[1]), MEASURED_OF_TRL)
    seconds = result["trl"]["seconds_per_step"]
    for eta in staleness:
        result[f"ratio_staleness_{eta}"] = round(seconds / result[f"areal_staleness_{eta}"]["seconds_per_step"], 2)
    return result | {"load": load()}


def load() -> list[float]:
    """Runnable processes in the mean of 1, 5 and 15 minutes: the cores do other work when it exceeds their number."""
    return [round(average, 1) for average in os.getloadavg()]


def make_wide_model(folder: Path) -> None:
    """24M random parameters over 48 tokens, so that an answer ends after 48 tokens in the mean; and its rows."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from areal.data.tiny_model import character_tokenizer

    tokens = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHI"]
    tokenizer = character_tokenizer(tokens, context_length=512)
    tokenizer.pad_token = "<eos>"  # areal ends an answer at a padding token, TRL does not
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choice("abcdefgh") for _ in range(12))} for _ in range(8 * 32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, help="one of the workloads")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the first workload")
    parser.add_argument(
        "--batch",
        type=int,
        nargs=2,
        metavar=("PROMPTS", "ANSWERS"),
        help="of a train step of the first workload: prompts, answers to each (default: as the example has)",
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2], help="of areal in wide, equal and smollm2")
    parser.add_argument("--fileroot", default="runs/versus_trl", help="root of the run folders, which must be new")
    args = parser.parse_args()
    if not TRL_PYTHON.exists():
        sys.exit("there is no .venv-trl: make bench-trl creates it")
    if Path(args.fileroot).exists():
        sys.exit(f"{args.fileroot} exists, and complete runs do not run again: delete it or choose another --fileroot")
    chosen = WORKLOADS if args.only is None else (args.only,)
    result: dict[str, Any] = {"cores": ALL_CORES, "load": load(), "transformers_and_torch": versions()}
    if "quickstart" in chosen:
        result["quickstart"] = [compare_quickstart(seed, args.batch, f"{args.fileroot}/{seed}") for seed in args.seeds]
        for name, mean in (("medians", median), ("means", fmean)):
            trl, areal = (mean(row[side]["seconds"] for row in result["quickstart"]) for side in ("trl", "areal"))
            result[f"ratio_of_{name}"] = round(trl / areal, 2)
    for name in ("wide", "equal"):
        if name in chosen:
            result[name] = compare_wide(args.staleness, f"{args.fileroot}/{name}", equal=name == "equal")
    if "smollm2" in chosen:
        result["smollm2"] = compare_smollm2(args.staleness, args.fileroot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
