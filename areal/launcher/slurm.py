"""The command `python -m areal.launcher.slurm`: runs a configuration as one job of Slurm, and follows the job."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import BaseExperimentConfig
from areal.api.config.load import save_config
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.local import Launch, checked_plan, read_command_line
from areal.launcher.placement import Machine
from areal.launcher.preflight import check_run_folder, make_run_folder
from areal.launcher.slurm_client import SlurmClient
from areal.launcher.slurm_follow import Follower, SubmittedJob
from areal.launcher.slurm_inside import run_inside
from areal.launcher.slurm_job import gpu_hours, resources_of, script_of
from areal.launcher.slurm_states import meaning_of
from areal.launcher.status import StatusLine
from areal.system.device import cpu_count
from areal.system.durable import write_atomic
from areal.system.network import Host
from areal.system.process import run_main
from areal.system.run_paths import RunPaths

USAGE = """usage: python -m areal.launcher.slurm [SCRIPT.py] --config FILE.yaml [key.sub=value ...]
       [--detach] [--dry-run]
       python -m areal.launcher.slurm --attach RUN

Submits a configuration as one job of cluster.n_nodes nodes, from a login node, and follows it. The options of the job
are in launcher.slurm. The working directory, cluster.fileroot and the Python environment must be at the same path on
all nodes. Ctrl-C cancels the job; a closed terminal leaves it, and --attach follows it again. --detach prints its id
and leaves. --dry-run prints the plan and the script, and submits nothing.
Exit status: 0 the run completed, 1 it failed, 2 it could not start as configured, 130 it was cancelled.

"""


def expected_machines(config: BaseExperimentConfig) -> list[Machine]:
    """The machines for the plan before any is known: equal ones with the GPUs that the job requests."""
    gpus = tuple(str(index) for index in range(config.cluster.n_gpus_per_node))
    names = [f"node{index + 1}" for index in range(config.cluster.n_nodes)]
    return [Machine(cores=cpu_count(), gpus=gpus, host=Host(node=name)) for name in names]


def submit(request: Launch, *, detach: bool) -> int:
    """Submit the job of a run and follow it. Returns the exit status."""
    config, paths, line, slurm = request.config, RunPaths.of(request.config), StatusLine(), SlurmClient()
    plan = checked_plan(request, expected_machines(config), line)
    needs = resources_of(plan, config)
    words = [*([] if request.script is None else [str(Path(request.script).absolute())]), "--config"]
    script = script_of(
        config,
        needs,
        folder=paths.slurm,
        directory=Path.cwd(),
        words=[*words, str(paths.slurm / "config.yaml")],
        python=sys.executable,
    )
    if request.dry_run:
        hours = gpu_hours(needs, config.launcher.slurm.time_limit)
        most = "unknown without launcher.slurm.time_limit" if hours is None else f"at most {hours:g} in one turn"
        sys.stdout.write(f"GPU hours: {most}\njob script:\n{script}")
        return 0
    make_run_folder(paths)
    check_run_folder(config, paths)
    _refuse_second_job(slurm, paths)
    paths.slurm.mkdir(exist_ok=True)
    variables = save_config(config, paths.slurm / "config.yaml", extra=request.extras)
    file = paths.slurm / "job.sh"
    write_atomic(file, script.encode(), mode=0o700)
    job = slurm.submit(file, {**os.environ, **variables}, str(needs))
    submitted = SubmittedJob(job=job, log=str(paths.slurm / f"job-{job}.log"))
    write_atomic(paths.slurm / "job.json", json.dumps(dataclasses.asdict(submitted)).encode())
    line.say(f"areal: job {job} is submitted: {file}, log {submitted.log}")
    if detach:
        sys.stdout.write(f"{job}\n")
        return 0
    return Follower(slurm, submitted, paths, line).run(from_start=True)


def _refuse_second_job(slurm: SlurmClient, paths: RunPaths) -> None:
    """LaunchError while an earlier job of the run has not ended."""
    earlier = SubmittedJob.read(paths)
    facts = slurm.look(earlier.job) if earlier else None
    if earlier and facts and meaning_of(facts).phase != "ended":
        advice = f"follow it (--attach {paths.root}), cancel it (scancel {earlier.job}) or change trial_name"
        message = f"job {earlier.job} of {paths.root} has not ended ({facts.state}): {advice}"
        raise LaunchError(message, code="launch.run_in_use")


def follow(folder: str) -> int:
    """Follow the newest job of a run again. Returns the exit status."""
    paths = RunPaths(Path(folder).expanduser().absolute())
    submitted = SubmittedJob.read(paths)
    if submitted is None:
        message = f"--attach {folder}: no job was submitted for this folder; give the run folder"
        raise ConfigError(message, code="launch.no_run_folder")
    return Follower(SlurmClient(), submitted, paths, StatusLine()).run(from_start=False)


def run_command(words: Sequence[str]) -> int:
    match words:
        case ["--inside", *rest]:
            return run_inside(rest, USAGE, os.environ)
        case ["--attach", folder]:
            return follow(folder)
        case _:
            rest = [word for word in words if word != "--detach"]
            request = read_command_line(rest, usage=USAGE, on_one_machine=False)
            return submit(request, detach="--detach" in words)


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    run_main(main)
