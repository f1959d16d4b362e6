"""Compares areal with TRL's GRPOTrainer: same checkpoint, rows, group, batch, minibatches, lengths, learning rate.

    make bench-trl           creates .venv-trl on the first call, then runs both workloads (about 6 minutes, idle)
    python benchmark/versus_trl.py [--only quickstart|wide] [--seeds 0 1] [--batch 32 16] [--staleness 0 2]

quickstart: the model of examples/quickstart after its supervised stage, with the example's prompts and answers in a
train step, or those of --batch. Both systems train until the same held-out goals (greedy 0.96, sampled 0.87, evaluated
every 10 train steps). Counted: seconds from the moment at which all processes are ready to the end of the evaluation
that reaches the goals. wide: a random model of 24M parameters, 8 x 8 answers of at most 256 tokens. Counted: seconds
per train step in the middle of a run.

TRL's settings are derived from areal's configuration (`trl_settings`). What differs by design: areal generates while it
trains (rollout.max_head_offpolicyness), with the decoupled loss, and its quickstart leaves groups of equal rewards,
whose gradient is zero, out of the batch. TRL gets all cores, one batch for generation, fused AdamW and no gradient
checkpointing. Prints one line of JSON at the end, with ratios TRL / areal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from versus_task import areal_figures

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.system.process import run_to_its_end

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
QUICKSTART = "examples/quickstart/grpo.yaml"
WIDE = "benchmark/versus_trl.yaml"
WIDE_FOLDER = "versus/wide_model"
MEASURED = (4, 11)
"""Of the 14 steps of the second workload: after the start, before the last steps, for which less is generated."""


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
        "bf16": False,
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
        columns = [name for name in json.loads(rows.readline()) if name != "prompt"]
    return {
        "model": config.actor.path,
        "train": train,
        "held_out": held_out,
        "columns": columns,
        "reward_fn": config.reward_fn,
        "minibatches": config.actor.ppo_n_minibatches,
        "eval_every": config.evaluator.freq_steps or 1,
        "goals": config.evaluator.stop_at,
        "threads": os.cpu_count() or 1,
        "first": measured[0],
        "last": measured[1],
        "grpo": trl_settings(config, folder=folder),
    }


def run_trl(config: PPOConfig, measured: tuple[int, int | None]) -> dict[str, Any]:
    python = REPOSITORY / ".venv-trl/bin/python"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spec.json")
        path.write_text(json.dumps(trl_spec(config, folder=folder, measured=measured)))
        argv = [str(python), str(HERE / "versus_trl_side.py"), str(path)]
        found = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def run_areal(path: str, measured: tuple[int, int | None], *overrides: str) -> tuple[dict[str, Any], PPOConfig]:
    run("-m", "areal", "run", "--config", path, *overrides)
    config = load_experiment(["--config", path, *overrides])
    assert isinstance(config, PPOConfig)
    folder = REPOSITORY / config.cluster.fileroot / config.experiment_name / config.trial_name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # TRL's clock starts with its model in memory, areal's trainer may wait for the servers in its first step
    ready_s = max(one.stat().st_mtime for one in (folder / "names/ready").iterdir())
    return areal_figures(rows, ready_s=ready_s, first=measured[0], last=measured[1]), config


def run(*argv: str) -> None:
    print("$ python " + " ".join(argv), file=sys.stderr, flush=True)
    if code := run_to_its_end([sys.executable, *argv], cwd=REPOSITORY):
        sys.exit(code)


def compare_quickstart(seed: int, batch: list[int] | None, fileroot: str) -> dict[str, Any]:
    common = (f"seed={seed}", f"cluster.fileroot={fileroot}")
    own = ("evaluator.eval_before_train=false",)  # TRL does not evaluate before its first train step either
    if batch is not None:
        own += (f"train_dataset.batch_size={batch[0]}", f"gconfig.n_samples={batch[1]}")
    run("examples/quickstart/prepare.py", f"{fileroot}/quickstart/data", "--seed", str(seed))
    run("-m", "areal", "run", "--config", "examples/quickstart/sft.yaml", *common)
    areal, config = run_areal(QUICKSTART, (5, None), *common, *own)
    trl = run_trl(config, (5, None))
    return {"seed": seed, "areal": areal, "trl": trl, "ratio": round(trl["seconds"] / areal["seconds"], 2)}


def compare_wide(staleness: list[int], fileroot: str) -> dict[str, Any]:
    make_wide_model(REPOSITORY / fileroot / WIDE_FOLDER)
    found: dict[str, Any] = {}
    for eta in staleness:
        overrides = (f"cluster.fileroot={fileroot}", f"trial_name=wide-{eta}", f"rollout.max_head_offpolicyness={eta}")
        found[f"areal_staleness_{eta}"], config = run_areal(WIDE, MEASURED, *overrides)
    found["trl"] = run_trl(config, MEASURED)
    seconds = found["trl"]["seconds_per_step"]
    for eta in staleness:
        found[f"ratio_staleness_{eta}"] = round(seconds / found[f"areal_staleness_{eta}"]["seconds_per_step"], 2)
    return found


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
    parser.add_argument("--only", choices=("quickstart", "wide"), help="one of the two workloads")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the first workload")
    parser.add_argument(
        "--batch",
        type=int,
        nargs=2,
        metavar=("PROMPTS", "ANSWERS"),
        help="of a train step of the first workload: prompts, answers to each (default: as the example has)",
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2], help="of areal in the second workload")
    parser.add_argument("--fileroot", default="runs/versus_trl", help="root of the run folders, which must be new")
    args = parser.parse_args()
    if not (REPOSITORY / ".venv-trl/bin/python").exists():
        sys.exit("there is no .venv-trl: make bench-trl creates it")
    if Path(args.fileroot).exists():
        sys.exit(f"{args.fileroot} exists, and complete runs do not run again: delete it or choose another --fileroot")
    found: dict[str, Any] = {"cores": os.cpu_count(), "load": [round(one, 1) for one in os.getloadavg()]}
    if args.only != "wide":
        found["quickstart"] = [compare_quickstart(seed, args.batch, f"{args.fileroot}/{seed}") for seed in args.seeds]
        for name, mean in (("medians", median), ("means", fmean)):
            trl, areal = (mean(one[side]["seconds"] for one in found["quickstart"]) for side in ("trl", "areal"))
            found[f"ratio_of_{name}"] = round(trl / areal, 2)
    if args.only != "quickstart":
        found["wide"] = compare_wide(args.staleness, args.fileroot)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
