"""Owns which options a replay may change: those of the update. Others would change nothing, or the data."""

from __future__ import annotations

from collections.abc import Sequence

from areal.api.allocation_grammar import INFERENCE_BACKENDS
from areal.api.errors import ConfigError

UPDATED = ("actor", "critic", "ref", "teacher", "reward_model", "ref_reset_steps", "ref_reset_optimizer")
"""Sections of the models, in which everything may change but for the keys below, and what goes on between models."""

_IN_MODELS = {
    "weight_update_mode": "a replay sends weights nowhere",
    "weight_chunked_mem_mb": "a replay sends weights nowhere",
    "group_size": "it only repeats gconfig.n_samples",
}
_OTHERS = {
    "gconfig": "the answers are recorded: sampling cannot change any more",
    "eval_gconfig": "a replay evaluates nothing",
    "rollout": "the rollouts are recorded",
    **dict.fromkeys(INFERENCE_BACKENDS, "a replay has no servers"),
    "server_python": "a replay has no servers",
    "workflow": "the rollouts are recorded",
    "workflow_args": "the rollouts are recorded",
    "reward": "the rewards are recorded",
    "reward_fn": "the rewards are recorded",
    "train_dataset": "the batches are recorded as they are: rows, order and size",
    "valid_dataset": "a replay evaluates nothing",
    "evaluator": "a replay evaluates nothing",
    "tokenizer_path": "the batches hold token ids",
    "seed": "it decided which rows were drawn",
    "total_train_epochs": "the number of steps is that of the recorded run; --until STEP ends earlier",
    "total_train_steps": "the number of steps is that of the recorded run; --until STEP ends earlier",
    "total_train_n_seqs": "the number of steps is that of the recorded run; --until STEP ends earlier",
    "allocation_mode": "a replay has the trainer ranks of the recorded run and no servers",
    "cluster": "a replay runs on this machine, in the folder of the recorded run",
    "launcher": "a replay has the threads and the environment of the recorded run",
    "experiment_name": "a replay is told apart by --name",
    "trial_name": "a replay is told apart by --name",
    "saver": "a replay exports its last weights with --export, and only them",
    "recover": "a replay writes no recovery checkpoints",
    "stats_logger": "a replay writes metrics.jsonl in its own folder, and nothing else",
    "perf_tracer": "a replay is not traced",
}


def check_overrides(words: Sequence[str]) -> None:
    """ConfigError, naming each, when some cannot matter in a replay or would need other data."""
    problems: list[str] = []
    for word in words:
        path, equals, _ = word.removeprefix("+").partition("=")
        section, _, key = path.strip().partition(".")
        if not equals:
            problems.append(f"{word}: is not an override: write key.sub=value")
        elif section not in UPDATED:
            reason = _OTHERS.get(section, "nothing in a replay reads it")
            problems.append(f"{path}: {reason}")
        elif key in _IN_MODELS:
            problems.append(f"{path}: {_IN_MODELS[key]}")
    if problems:
        rule = f"a replay takes keys of {', '.join(UPDATED)} only"
        raise ConfigError("\n  ".join([f"these cannot be changed in a replay; {rule}:", *problems]))
