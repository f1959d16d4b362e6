"""The command `python -m areal.replay`: trains again from the recorded batches of a run and compares.

It waits only for the ranks that it started.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.config.load import save_config
from areal.api.errors import InputError, LaunchError
from areal.replay.compare import Report
from areal.replay.recorded import RecordedRun, ReplayOrder, checkpoint_of, config_of
from areal.replay.regrade import regrade
from areal.replay.runner import changes_rewards, check_overrides, is_regrade, plan_ranks, run_ranks
from areal.system.process import interrupts_notice, run_main
from areal.system.run_paths import existing_run

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
        found = ", ".join(path.name for path in sorted(run.paths.recover.glob("step-*"))) or "none"
        problem = f"--from-checkpoint {start}: there is no such recovery checkpoint; existing ones: {found}"
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
