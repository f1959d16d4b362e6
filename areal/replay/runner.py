"""The processes of a replay: starts the ranks and waits until all have exited.

It polls its children 20 times per second. When one fails, the others are killed.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from areal.api.errors import LaunchError
from areal.launcher.backend import LocalBackend
from areal.launcher.job import PlannedProcess
from areal.system.network import TOKEN_VARIABLE, Host, new_token, run_token
from areal.system.process import ERROR_PREFIX, ProcessContext
from areal.system.run_paths import RunPaths

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
