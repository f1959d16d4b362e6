"""The command `python -m areal.replay`: trains again from the recorded batches of a run and compares.

It waits only for the ranks that it started.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.config.experiment import SERVER_SECTIONS
from areal.api.config.load import save_config
from areal.api.errors import ConfigError, InputError, LaunchError
from areal.launcher.backend import LocalBackend
from areal.launcher.job import PlannedProcess
from areal.replay.recorded import RecordedRun, ReplayOrder, Report, checkpoint_of, config_of
from areal.replay.regrade import regrade
from areal.system.network import TOKEN_VARIABLE, Host, new_token, run_token
from areal.system.process import ERROR_PREFIX, ProcessContext, interrupts_notice, run_main
from areal.system.run_paths import RunPaths, existing_run

# ----------------------------------------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of a replay. They are polled 20 times per second; when one fails, the others are killed.

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
        if errors := [line for line in lines[rank.name] if line.startswith(ERROR_PREFIX)]:
            text = f"{errors[-1].removeprefix(ERROR_PREFIX)} (log: {rank.log_path})"
            raise LaunchError(text, code="replay.rank_failed")
    for rank in failed:
        last = (lines[rank.name] or ["it printed nothing"])[-1]
        text = f"{rank.name} exited with code {backend.poll(rank.name)}: {last} (log: {rank.log_path})"
        raise LaunchError(text, code="replay.rank_failed")


DESCRIPTION = """Train again from the recorded batches of a run: no server, no controller, the same update.

Without key=value the replay must equal the run: the weights after each step are compared with the checksum in the
ledger, loss and gradient norm with metrics.jsonl. Exit status: 0 equal, 1 different, 2 an error.
With key=value (of actor, critic, ref, teacher, reward_model, or ref_reset_*) it is an offline comparison on identical
data, with exit status 0. With reward_fn=new.py:f, reward.*, agent.turn_discount or agent.cut the recorded answers are
scored or cut again first, and the replay trains on the result.

Results are written to RUN/replays/NAME: metrics.jsonl, config.yaml, logs. The run itself is only read: it may have been
killed and recovered, and it may still be running."""


class Request(argparse.Namespace):
    run: Path
    until: int | None
    from_checkpoint: int
    name: str
    export: bool
    json: bool
    overrides: list[str]


def read_command_line(
    argv: Sequence[str], *, prog: str = "python -m areal.replay", usage: str | None = None
) -> Request:
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, usage=usage
    )
    parser.add_argument("--run", type=existing_run, required=True, help="folder of the recorded run")
    parser.add_argument("--until", type=int, metavar="STEP", help="last train step (default: all)")
    parser.add_argument(
        "--from-checkpoint",
        type=int,
        default=0,
        metavar="STEP",
        help="start from RUN/recover/step-STEP instead of the initial weights",
    )
    now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    parser.add_argument("--name", default=now, help="name of the folder for the results (default: the time)")
    parser.add_argument("--export", action="store_true", help="write the last weights to RUN/replays/NAME/export")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options to change, e.g. actor.optimizer.lr=1e-5"
    )
    return parser.parse_args(argv, Request())


def order_of(request: Request, run: RecordedRun) -> ReplayOrder:
    """The steps to replay. Raises InputError when the run has not recorded them."""
    start, end = request.from_checkpoint, run.end_step if request.until is None else request.until
    if start < run.first_step:
        problem = f"the ledger has no batches before step {run.first_step}: start there with --from-checkpoint STEP"
    elif start < run.first_kept_step:
        problem = (
            f"the trajectories before step {run.first_kept_step} were pruned (rollout.keep_payloads="
            f"{run.config().rollout.keep_payloads}): start there or later with --from-checkpoint STEP"
        )
    elif start and not checkpoint_of(run.paths, start).is_dir():
        existing = ", ".join(path.name for path in sorted(run.paths.recover.glob("step-*"))) or "none"
        problem = f"--from-checkpoint {start}: there is no such recovery checkpoint; existing ones: {existing}"
    elif start >= run.end_step:
        problem = f"--from-checkpoint {start}: the run trained only {run.end_step} steps: name an earlier checkpoint"
    elif not start < end <= run.end_step:
        problem = f"--until {end}: name a step from {start + 1} to {run.end_step}, the last one that the run trained"
    else:
        return ReplayOrder(run=str(run.paths.root), start_step=start, end_step=end, export=request.export)
    raise InputError(problem, code="replay.no_such_step")


def make_folder(run: RecordedRun, request: Request, config: PPOConfig, order: ReplayOrder) -> Path:
    if request.name in ("", "..") or Path(request.name).name != request.name:
        message = f"--name {request.name!r}: give the name of one folder, which is created in {run.paths.replays}"
        raise InputError(message, code="replay.folder")
    folder = run.paths.replays / request.name
    try:
        folder.mkdir(parents=True)
        save_config(config, config_of(folder))
        order.write(folder)
    except FileExistsError:
        raise LaunchError(f"{folder} already exists: choose another --name", code="replay.folder") from None
    except OSError as error:
        raise LaunchError(f"{folder} cannot be created: {error.strerror or error}", code="replay.folder") from error
    return folder


def replay(request: Request) -> int:
    check_overrides(request.overrides)
    run = RecordedRun.read(request.run.expanduser().absolute())
    config, order = run.config(request.overrides), order_of(request, run)
    ranks = run.ranks()  # an error here leaves no folder
    folder = make_folder(run, request, config, order)
    if any(is_regrade(word.removeprefix("+").partition("=")[0].strip()) for word in request.overrides):
        steps = range(order.start_step, order.end_step)
        regrade(run, config, steps, folder, new_rewards=changes_rewards(request.overrides))
    if len(run.total_steps) > 1:
        lengths = ", ".join(map(str, run.total_steps))
        sys.stderr.write(f"areal: the run had several lengths ({lengths} steps); the last one sets the learning rate\n")
    if notice := interrupts_notice():
        sys.stderr.write(f"{notice}\n")
    report = Report(run, folder, order, is_exact=not request.overrides, as_json=request.json)
    try:
        run_ranks(plan_ranks(ranks, folder), report.look)
    except KeyboardInterrupt:
        sys.stderr.write(f"areal: interrupted, all processes have ended: {folder}\n")
        raise
    return report.end()


def run_command(words: Sequence[str]) -> int:
    """`areal replay RUN [key=value ...]`, or `areal replay --run RUN`; returns the exit status."""
    is_run = bool(words) and not words[0].startswith("-")
    request = read_command_line(
        ["--run", *words] if is_run else words, prog="areal replay", usage="areal replay RUN [options] [key=value ...]"
    )
    return replay(request)


if __name__ == "__main__":
    run_main(lambda: sys.exit(replay(read_command_line(sys.argv[1:]))))
