"""Entry point of a controller or trainer process: runs the user's script, or the configured parts without a script.

python -m areal.trainer [SCRIPT.py] --config RUN/config.yaml
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.config import DPOConfig, PPOConfig, RWConfig, SFTConfig
from areal.api.config.load import load_experiment
from areal.system.process import run_main

if TYPE_CHECKING:
    from areal.api.config import DatasetConfig
    from areal.data.supervised_rows import EncodedRow
    from areal.data.tokenizer import Tokenizer
    from areal.trainer.row_loop import RowTrainer


def run_configured(argv: list[str]) -> None:
    """Run without a script: the configuration names workflow, rewards and datasets."""
    from areal.data.dataset import load_pairs, load_sft_rows
    from areal.data.images import PromptImages

    config = load_experiment(argv)
    if isinstance(config, SFTConfig):
        from areal.trainer.supervised import SFTTrainer

        train_on, image_key = config.sft.train_on, config.vision.image_key

        def load_sft(data: DatasetConfig, tokenizer: Tokenizer, *, default_split: str) -> list[EncodedRow]:
            images = PromptImages.of(config, tokenizer)
            return load_sft_rows(
                data, tokenizer, default_split=default_split, train_on=train_on, images=images, image_key=image_key
            )

        _run_rows(SFTTrainer, config, load_sft, model_path=config.model.path)
    elif isinstance(config, RWConfig):
        from areal.trainer.reward_model import RewardModelTrainer

        load = partial(load_pairs, use_margin=config.rw.use_margin, image_key=config.vision.image_key)
        _run_rows(RewardModelTrainer, config, load, model_path=config.model.path)
    elif isinstance(config, DPOConfig):
        from areal.trainer.supervised import DPOTrainer

        load = partial(load_pairs, image_key=config.vision.image_key)
        _run_rows(DPOTrainer, config, load, model_path=config.actor.path)
    elif isinstance(config, PPOConfig):
        _run_ppo(config)
    else:
        raise TypeError(f"no trainer for {type(config).__name__}")


def _run_ppo(config: PPOConfig) -> None:
    from areal.data.dataset import load_rows
    from areal.data.images import PromptImages
    from areal.data.tokenizer import tokenizer_of
    from areal.trainer.ppo import PPOTrainer
    from areal.workflow.registry import build_workflow

    tokenizer = tokenizer_of(config, config.actor.path)
    images = PromptImages.of(config, tokenizer)
    train_rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer, images=images)
    sets: dict[str, list[dict[str, Any]]] = {}
    if (valid := config.valid_dataset) is not None:
        for name, path in {"": valid.path, **config.evaluator.sets}.items():
            data = replace(valid, path=path)
            sets[name] = load_rows(data, default_split="test", tokenizer=tokenizer, images=images)
    workflow = build_workflow(config, tokenizer)
    with PPOTrainer(config, train_dataset=train_rows, valid_dataset=sets.pop("", None), valid_sets=sets) as trainer:
        trainer.train(workflow)


def _run_rows(
    trainer_class: type[RowTrainer[Any, Any]],
    config: SFTConfig | RWConfig | DPOConfig,
    load: Callable[..., list[Any]],
    *,
    model_path: str,
) -> None:
    from areal.data.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(config, model_path)
    train = load(config.train_dataset, tokenizer, default_split="train")
    valid = load(config.valid_dataset, tokenizer, default_split="test") if config.valid_dataset is not None else None
    with trainer_class(config, train_dataset=train, valid_dataset=valid) as trainer:
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
