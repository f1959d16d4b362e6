"""The configuration of an evaluation: the user's files and options over defaults for what only a training needs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import PPOConfig, load_experiment
from areal.api.errors import ConfigError

_DEFAULTS = Path(__file__).with_name("defaults.yaml")


def load_settings(files: Sequence[str], overrides: Sequence[str]) -> PPOConfig:
    """Read files and `key=value` words. ConfigError with every problem, or for a training without generation."""
    words = [word for path in (str(_DEFAULTS), *files) for word in ("--config", path)]
    config = load_experiment([*words, *overrides])
    if not isinstance(config, PPOConfig):
        message = f"{', '.join(files)} configures a training that generates no answers: give a PPO or GRPO file"
        raise ConfigError(message, code="evaluate.no_generation")
    return config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config FILE` and `key=value` words."""
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="several are merged in order")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the configuration")


def parsed_ks(text: str) -> list[int]:
    """`1,4,16` -> [1, 4, 16]; for argparse."""
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise ValueError("below 1")
    return found
