"""The options that a replay may change: those of the update. Others have no effect or would change the data."""

from collections.abc import Sequence

from areal.api.allocation_grammar import INFERENCE_BACKENDS
from areal.api.errors import ConfigError

UPDATED = ("actor", "critic", "ref", "teacher", "reward_model", "ref_reset_steps", "ref_reset_optimizer")
"""Sections of the models, except for the keys in _IN_MODELS, and options of the reference resets."""
_REWARDS = ("reward_fn", "reward")
_OF_SESSIONS = ("agent.turn_discount", "agent.cut")
REGRADED = (*_REWARDS, *_OF_SESSIONS)
"""Options that change what was recorded: the rewards of the answers, or the rows of sessions."""

_IN_MODELS = {
    "weight_update_mode": "a replay sends weights nowhere",
    "weight_chunked_mem_mb": "a replay sends weights nowhere",
    "group_size": "it only repeats gconfig.n_samples",
}
_OTHERS = {
    "gconfig": "the answers are recorded: sampling has no effect",
    **dict.fromkeys(("rollout", "workflow", "workflow_args"), "the rollouts are recorded"),
    **dict.fromkeys((*INFERENCE_BACKENDS, "server_python", "server_defaults"), "a replay has no servers"),
    "agent": f"the sessions are recorded, except for {', '.join(_OF_SESSIONS)}",
    "train_dataset": "the batches are recorded with rows, order and size",
    **dict.fromkeys(("eval_gconfig", "valid_dataset", "evaluator"), "a replay evaluates nothing"),
    **dict.fromkeys(("tokenizer_path", "chat_template"), "the batches hold token ids"),
    "vision": "the images of the batches are recorded",
    "seed": "it determined the rows, which are recorded",
    **dict.fromkeys(
        ("total_train_epochs", "total_train_steps", "total_train_n_seqs"),
        "a replay has the steps of the recorded run; --until STEP ends it earlier",
    ),
    "allocation_mode": "a replay has the trainer ranks of the recorded run and no servers",
    "cluster": "a replay runs on this machine, in the folder of the recorded run",
    "elastic": "a replay has no servers",
    "launcher": "a replay has the threads and the environment of the recorded run",
    "strict_config": "the configuration was checked when the run started",
    **dict.fromkeys(("experiment_name", "trial_name"), "--name names a replay"),
    "saver": "a replay exports its final weights with --export",
    "recover": "a replay writes no recovery checkpoints",
    "stats_logger": "a replay writes only metrics.jsonl in its folder",
    "perf_tracer": "a replay is not traced",
    "alarms": "a replay checks no alarms",
    "benchmark": "only areal benchmark reads it",
}


def check_overrides(words: Sequence[str]) -> None:
    """Raise ConfigError that lists the overrides which have no effect in a replay or would need other data."""
    problems: list[str] = []
    for word in words:
        path, equals, _ = word.removeprefix("+").partition("=")
        section, _, key = path.strip().partition(".")
        if not equals:
            problems.append(f"{word}: is not an override: write key.sub=value")
        elif is_regrade(path.strip()):
            continue
        elif section not in UPDATED:
            problems.append(f"{path}: {_OTHERS.get(section, 'nothing in a replay reads it')}")
        elif key in _IN_MODELS:
            problems.append(f"{path}: {_IN_MODELS[key]}")
    if problems:
        rule = f"a replay can change only keys of {', '.join((*UPDATED, *REGRADED))}:"
        raise ConfigError("\n  ".join([rule, *problems]), code="replay.override")


def is_regrade(path: str) -> bool:
    """Whether an option changes the recorded rewards or rows."""
    return path.partition(".")[0] in _REWARDS or path in _OF_SESSIONS


def changes_rewards(words: Sequence[str]) -> bool:
    """Whether overrides name another reward function."""
    return any(word.removeprefix("+").partition("=")[0].strip().partition(".")[0] in _REWARDS for word in words)
