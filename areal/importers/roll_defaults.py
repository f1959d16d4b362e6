"""Defaults of ROLL that differ from ours, by its keys: of its BaseConfig, PPOConfig and arguments of the roles."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal.importers.draft import Draft, Note

_TRAINING = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
}
_GENERATING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "output_dir": "./output",
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "track_with": "tensorboard",
    "resume_from_checkpoint": False,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "lambd": 0.95,
    "loss_agg_mode": "seq-mean-token-mean",
    "reward_clip": 1e9,
    **{f"{role}.training_args.{key}": value for role in ("actor_train", "critic") for key, value in _TRAINING.items()},
    **{f"{role}.generating_args.{key}": value for role in ("actor_infer", "validation")
       for key, value in _GENERATING.items()},
}  # fmt: skip
"""reward_clip: ROLL has no limit without it."""


def is_agentic(values: Mapping[str, Any]) -> bool:
    """Whether the file is one of ROLL's agentic pipeline."""
    return any(key.startswith("train_env_manager.") for key in values)


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and the default of each key that is absent or null."""
    unread = {"prompt_length"} if is_agentic(values) else set[str]()  # an environment writes the prompts
    return {**values, **{key: DEFAULTS[key] for key in DEFAULTS.keys() - unread if values.get(key) is None}}


def name_defaults(draft: Draft, values: Mapping[str, Any]) -> None:
    """Name the defaults in the origins of options, and leave only the keys of `values`, the file, in the report."""
    for key in DEFAULTS:
        if values.get(key) is not None or key not in draft.values:
            continue
        for path, option in draft.options.items():
            if option.origin == f"{draft.system}: {key}":
                draft.options[path] = replace(option, origin=f"{draft.system}: its default of {key}")
            elif key in option.keys:
                draft.options[path] = replace(option, origin=f"{option.origin}; {key} has its default")
        if key in values:
            draft.values[key], draft.notes[key] = None, Note("dropped", "null: the default is used")
        else:
            del draft.values[key], draft.notes[key]
