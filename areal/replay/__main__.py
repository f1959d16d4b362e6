"""The command `python -m areal.replay`: trains again from the recorded batches of a run and compares.

It waits only for the ranks that it started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.config.load import save_config
from areal.api.errors import InputError, LaunchError
from areal.replay.order import ReplayOrder, checkpoint_of, config_of
from areal.replay.overrides import check_overrides
from areal.replay.recorded import RecordedRun
from areal.replay.report import Report
from areal.replay.runner import plan_ranks, run_ranks
from areal.system.process import run_main

DESCRIPTION = """Train again from the recorded batches of a run: no server, no controller, the same update.

Without key=value the replay must equal the run: the weights after each step are compared with the checksum in the
ledger, loss and gradient norm with metrics.jsonl. Exit status: 0 equal, 1 different, 2 an error.
With key=value (of actor, critic, ref, teacher, reward_model, or ref_reset_*) it is an offline comparison on identical
data, with exit status 0.

Results are written to RUN/replays/NAME: metrics.jsonl, config.yaml, logs. The run itself is only read: it may have been
killed and recovered, and it may still be running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of the command line."""

    run: Path
    until: int | None
    from_checkpoint: int
    name: str
    export: bool
    overrides: tuple[str, ...]


def read_command_line(argv: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(
        prog="python -m areal.replay", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of the recorded run")
    parser.add_argument("--until", type=int, metavar="STEP", help="last train step (default: all)")
    parser.add_argument(
        "--from-checkpoint",
        type=int,
        default=0,
        metavar="STEP",
        help="start from RUN/recover/step-STEP instead of the initial weights",
    )
    parser.add_argument("--name", help="name of the folder for the results (default: the time)")
    parser.add_argument("--export", action="store_true", help="write the last weights to RUN/replays/NAME/export")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options to change, e.g. actor.optimizer.lr=1e-5"
    )
    given = parser.parse_args(argv)
    return Request(
        run=given.run,
        until=given.until,
        from_checkpoint=given.from_checkpoint,
        name=datetime.now().strftime("%Y%m%d-%H%M%S-%f") if given.name is None else given.name,
        export=given.export,
        overrides=tuple(given.overrides),
    )


def order_of(request: Request, run: RecordedRun) -> ReplayOrder:
    """The steps to replay. Raises InputError when the run has not recorded them."""
    start, end = request.from_checkpoint, run.end_step if request.until is None else request.until
    if start < run.first_step:
        raise InputError(
            f"the ledger has no batches before step {run.first_step}, because its folder was new then: start from a "
            "recovery checkpoint with --from-checkpoint STEP",
            code="replay.no_such_step",
        )
    if start and not checkpoint_of(run.paths, start).is_dir():
        found = ", ".join(path.name for path in sorted(run.paths.recover.glob("step-*"))) or "none"
        raise InputError(
            f"--from-checkpoint {start}: there is no such recovery checkpoint; existing ones: {found}",
            code="replay.no_such_step",
        )
    if start >= run.end_step:
        raise InputError(
            f"--from-checkpoint {start}: the run trained {run.end_step} steps, none after it: name an earlier one",
            code="replay.no_such_step",
        )
    if not start < end <= run.end_step:
        raise InputError(
            f"--until {end}: name a step from {start + 1} to {run.end_step}, the last one that the run trained",
            code="replay.no_such_step",
        )
    return ReplayOrder(run=str(run.paths.root), start_step=start, end_step=end, export=request.export)


def make_folder(run: RecordedRun, request: Request, config: PPOConfig, order: ReplayOrder) -> Path:
    if request.name in ("", "..") or Path(request.name).name != request.name:
        raise InputError(
            f"--name {request.name!r}: give the name of one folder, which is created in {run.paths.replays}",
            code="replay.folder",
        )
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
    """Run the replay and return the exit status."""
    check_overrides(request.overrides)
    run = RecordedRun.read(request.run.expanduser().absolute())
    config, order = run.config(request.overrides), order_of(request, run)
    ranks = run.ranks()
    folder = make_folder(run, request, config, order)
    if len(run.total_steps) > 1:
        lengths = ", ".join(map(str, run.total_steps))
        sys.stderr.write(
            f"areal: the run was continued with other lengths ({lengths} steps); the replay uses the learning-rate "
            "schedule of the last one\n"
        )
    report = Report(run, folder, order, is_exact=not request.overrides)
    try:
        run_ranks(plan_ranks(ranks, folder), report.look)
    except KeyboardInterrupt:
        sys.stderr.write(f"areal: interrupted, all processes have ended: {folder}\n")
        raise
    return report.end()


def main() -> None:
    sys.exit(replay(read_command_line(sys.argv[1:])))


if __name__ == "__main__":
    run_main(main)
