"""The kind of training that a configuration file is for, which its sections decide."""

from collections.abc import Mapping
from typing import Any, cast

from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.api.config.legacy_rules import legacy_rule
from areal.api.config.offline import DPOConfig, RWConfig, SFTConfig
from areal.api.config.schema import fields_of
from areal.api.errors import ConfigError, ConfigProblem

Kind = type[BaseExperimentConfig]

KINDS: dict[Kind, str] = {
    GRPOConfig: "reinforcement learning (PPO, GRPO)",
    SFTConfig: "supervised fine-tuning",
    RWConfig: "a reward model",
    DPOConfig: "DPO",
}
"""Every kind that runs without a script, in words. The first one is the default where no section decides."""


def kind_of(given: Mapping[str, Any], *, allow_unknown: bool = False) -> Kind:
    """The class of the top-level keys `given`. ConfigError when they belong to several kinds.

    `model` alone is a reward model with train_dataset.type=rw, else SFT; `actor` alone is DPO with it, else GRPO.
    `allow_unknown`: a script may define keys too, so the kind with most of the keys is chosen.
    """
    takers = {key: set(_takers(key)) for key in given}
    telling = {key: kinds for key, kinds in takers.items() if kinds and len(kinds) < len(KINDS)}
    possible = [kind for kind in KINDS if all(kind in kinds for kinds in telling.values())]
    if not possible and allow_unknown:
        return max(KINDS, key=lambda kind: sum(kind in kinds for kinds in telling.values()))
    if not possible:
        problems = [
            ConfigProblem(key, " or ".join(KINDS[kind] for kind in _takers(key)), "config.mixed_kinds")
            for key in sorted(telling)
        ]
        lines = ["sections of different kinds of training: keep those of one kind:", *map(str, problems)]
        raise ConfigError("\n  ".join(lines), problems=problems)
    row_type = _row_type(given)
    named = [kind for kind in possible if _row_type_of(kind) == row_type]
    return named[0] if named else possible[0]


def kind_of_section(path: str) -> Kind:
    """The first kind that has the dotted option `path`; GRPO when none has."""
    return next(iter(_takers(path.split(".")[0])), GRPOConfig)


def sections() -> list[str]:
    """The sections of all kinds."""
    return list(dict.fromkeys(name for kind in KINDS for name, spec in fields_of(kind).items() if spec.is_section))


def _takers(key: str) -> list[Kind]:
    """The kinds that read a top-level key or accept it from a file of AReaL."""
    return [kind for kind in KINDS if key in fields_of(kind) or legacy_rule(kind, key, "") is not None]


def _row_type_of(kind: Kind) -> str:
    return kind.row_type if issubclass(kind, SFTConfig | RWConfig | DPOConfig) else "rl"


def _row_type(given: Mapping[str, Any]) -> str:
    data = given.get("train_dataset")
    return str(cast("dict[str, Any]", data).get("type", "")) if isinstance(data, dict) else ""
