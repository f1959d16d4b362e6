"""Entry point of a controller or trainer process: runs the user's script, or the configured parts without a script.

python -m areal.trainer [SCRIPT.py] --config RUN/config.yaml
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

from areal.api.config import DPOConfig, PPOConfig, RWConfig, SFTConfig
from areal.api.config.load import load_experiment
from areal.system.process import run_main


def run_configured(argv: list[str]) -> None:
    """Run without a script: the configuration names workflow, rewards and datasets."""
    config = load_experiment(argv)
    if isinstance(config, SFTConfig):
        run_sft(config)
    elif isinstance(config, RWConfig):
        run_reward_model(config)
    elif isinstance(config, DPOConfig):
        run_dpo(config)
    elif isinstance(config, PPOConfig):
        run_ppo(config)
    else:
        raise TypeError(f"no trainer for {type(config).__name__}")


def run_ppo(config: PPOConfig) -> None:
    from areal.data.dataset import load_rows
    from areal.data.tokenizer import load_tokenizer
    from areal.trainer.ppo import PPOTrainer
    from areal.workflow.registry import build_workflow

    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    train_rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer)
    valid_rows = None
    if config.valid_dataset is not None:
        valid_rows = load_rows(config.valid_dataset, default_split="test", tokenizer=tokenizer)
    workflow = build_workflow(config, tokenizer)
    with PPOTrainer(config, train_dataset=train_rows, valid_dataset=valid_rows) as trainer:
        trainer.train(workflow)


def run_sft(config: SFTConfig) -> None:
    from areal.data.dataset import load_sft_rows
    from areal.data.tokenizer import load_tokenizer
    from areal.trainer.sft import SFTTrainer

    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    load = functools.partial(load_sft_rows, tokenizer=tokenizer, train_on=config.sft.train_on)
    train = load(config.train_dataset, default_split="train")
    valid = load(config.valid_dataset, default_split="test") if config.valid_dataset is not None else None
    with SFTTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train()


def run_reward_model(config: RWConfig) -> None:
    from areal.data.dataset import load_pairs
    from areal.data.tokenizer import load_tokenizer
    from areal.trainer.reward_model import RewardModelTrainer

    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    load = functools.partial(load_pairs, tokenizer=tokenizer, use_margin=config.rw.use_margin)
    train = load(config.train_dataset, default_split="train")
    valid = load(config.valid_dataset, default_split="test") if config.valid_dataset is not None else None
    with RewardModelTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train()


def run_dpo(config: DPOConfig) -> None:
    from areal.data.dataset import load_pairs
    from areal.data.tokenizer import load_tokenizer
    from areal.trainer.dpo import DPOTrainer

    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    load = functools.partial(load_pairs, tokenizer=tokenizer)
    train = load(config.train_dataset, default_split="train")
    valid = load(config.valid_dataset, default_split="test") if config.valid_dataset is not None else None
    with DPOTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train()


def main() -> None:
    argv = sys.argv[1:]
    if argv and argv[0].endswith(".py"):
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))  # as `python SCRIPT` would
        runpy.run_path(argv[0], run_name="__main__")
    else:
        run_configured(argv)


if __name__ == "__main__":
    run_main(main)
