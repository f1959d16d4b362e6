"""The processes of a replay: starts the ranks and waits until all have exited.

It polls its children 20 times per second. When one fails, the others are killed.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from areal.api.config.experiment import SERVER_SECTIONS
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.backend import LocalBackend
from areal.launcher.job import PlannedProcess
from areal.system.network import TOKEN_VARIABLE, Host, new_token, run_token
from areal.system.process import ERROR_PREFIX, ProcessContext
from areal.system.run_paths import RunPaths

# The options that a replay may change: those of the update. Others have no effect or would change the data.

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
    **dict.fromkeys(SERVER_SECTIONS, "a replay has no servers"),
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
    return path.partition(".")[0] in _REWARDS or path in _OF_SESSIONS


def changes_rewards(words: Sequence[str]) -> bool:
    return any(word.removeprefix("+").partition("=")[0].strip().partition(".")[0] in _REWARDS for word in words)


_POLL_S = 0.05
_GRACE_S = 2.0
_COMMAND = (sys.executable, "-m", "areal.replay.rank")


def plan_ranks(recorded: Sequence[tuple[ProcessContext, dict[str, str]]], folder: Path) -> list[PlannedProcess]:
    """The ranks of the recorded run, in the folder of a replay. All run on this machine."""
    contexts = [
        (replace(context, host=Host(), run_dir=str(folder), run_id=0, recover=False), env) for context, env in recorded
    ]
    return [
        PlannedProcess(
            name=context.name,
            role=context.role,
            index=context.index,
            host=context.host,
            argv=_COMMAND,
            env=env | context.to_env(),
            log_path=str(RunPaths(folder).log_of(context.name)),
            device=context.device,
            gpus=(),
            num_threads=context.num_threads,
            memory_bytes=None,
        )
        for context, env in contexts
    ]


def run_ranks(ranks: Sequence[PlannedProcess], on_poll: Callable[[], None]) -> None:
    """Run all ranks to their end. When one fails, kill the others and raise LaunchError with its last output."""
    secrets = {TOKEN_VARIABLE: run_token() or new_token()}
    backend = LocalBackend(RunPaths(Path(ranks[0].log_path).parents[1]), secrets)
    try:
        for rank in ranks:
            backend.start(rank)
        while any(backend.poll(rank.name) is None for rank in ranks):
            _raise_failed(ranks, backend)
            on_poll()
            time.sleep(_POLL_S)
        _raise_failed(ranks, backend)
        on_poll()
    finally:
        backend.stop([rank.name for rank in ranks], _GRACE_S, hurry=lambda: False)


def _raise_failed(ranks: Sequence[PlannedProcess], backend: LocalBackend) -> None:
    """Prefer a rank that printed an error: the others often only lost their connection to it."""
    failed = [rank for rank in ranks if backend.poll(rank.name)]
    lines = {rank.name: backend.last_lines(rank.name).lines for rank in failed}
    for rank in failed:
        if found := [line for line in lines[rank.name] if line.startswith(ERROR_PREFIX)]:
            text = f"{found[-1].removeprefix(ERROR_PREFIX)} (log: {rank.log_path})"
            raise LaunchError(text, code="replay.rank_failed")
    for rank in failed:
        last = (lines[rank.name] or ["it printed nothing"])[-1]
        text = f"{rank.name} exited with code {backend.poll(rank.name)}: {last} (log: {rank.log_path})"
        raise LaunchError(text, code="replay.rank_failed")
