"""The Slurm launcher of `areal run`: runs a configuration as one job of Slurm, and follows the job."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import BaseExperimentConfig
from areal.api.config.load import save_config
from areal.api.config.redaction import is_secret
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.agent_command import check_containers
from areal.launcher.job import parse_env_vars
from areal.launcher.local import Launch, checked_plan, read_command_line
from areal.launcher.preflight import check_run_folder, make_run_folder
from areal.launcher.slurm_client import SlurmClient
from areal.launcher.slurm_follow import Follower, SubmittedJob
from areal.launcher.slurm_inside import run_inside
from areal.launcher.slurm_job import (
    Resources,
    component_script,
    components_of,
    gpu_hours,
    greatest,
    machines_of,
    resources_of,
    run_script,
)
from areal.launcher.slurm_states import meaning_of
from areal.launcher.slurm_sweep import SweepRun, follow_sweep, read_sweep, runs_of_sweep, write_sweep
from areal.launcher.status import StatusLine
from areal.launcher.usage import help_if_asked
from areal.system.durable import write_atomic
from areal.system.process import run_main
from areal.system.run_paths import RunPaths

USAGE = """usage: areal run --launcher slurm [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...] [--sweep KEY=A,B ... [--at-once N]]
                 [--detach]
       areal run --launcher slurm --attach RUN

Submits a configuration as one job of cluster.n_nodes nodes, from a login node,
and follows it. The options of the job are in launcher.slurm. The working
directory, cluster.fileroot and the Python environment must be at the same path
on all nodes. Ctrl-C cancels the job; a closed terminal does not.

  --detach       prints the id of the job and does not follow it
  --attach RUN   follows the job of a run folder again
  --sweep KEY=A,B
                 submits an array of jobs: one run, named TRIAL_0, TRIAL_1, ...,
                 for each combination of the values; repeatable
  --at-once N    maximum number of runs of a sweep at the same time
  --dry-run      prints the plan and the job script, and submits nothing
"""


def submit(requests: Sequence[Launch], paths: RunPaths, *, at_once: int, detach: bool) -> int:
    """Submit the job of a run, or an array of jobs for the runs of a sweep, and follow it. Returns the exit status.

    `paths`: of the run, or of the sweep.
    """
    line, slurm, first = StatusLine(), SlurmClient(), requests[0]
    runs = [RunPaths.of(request.config) for request in requests]
    is_sweep = runs != [paths]
    for request in requests:
        options = request.config.launcher.slurm
        check_containers(options, has_srun=True, has_shared_agents=not options.separate_jobs)
    plans = [checked_plan(request, machines_of(request.config), line) for request in requests]
    needs = greatest([resources_of(plan, request.config) for plan, request in zip(plans, requests, strict=True)])
    exclude = slurm.excluded(first.config.launcher)
    script = run_script(
        first.config,
        needs,
        folder=paths.slurm,
        script=first.script,
        exclude=exclude,
        runs=[run.root for run in runs] if is_sweep else (),
        at_once=at_once,
    )
    if first.dry_run:
        sys.stdout.write(_dry_run_text(first, needs, script, exclude))
        return 0
    if first.as_json:
        message = "--json prints the plan of --dry-run; the facts of a run are printed by `areal watch RUN --json`"
        raise ConfigError(message, code="config.bad_override")
    _check_grace(first.config, slurm.kill_wait_s())
    variables = dict[str, str]()
    for request, run in zip(requests, runs, strict=True):
        make_run_folder(run)
        check_run_folder(request.config, run)
        _refuse_second_job(slurm, run)
        run.slurm.mkdir(exist_ok=True)
        variables |= _secret_variables(request.config)
        file = run.slurm / "config.yaml"
        variables |= save_config(request.config, file, extra=request.extras, numbers=request.numbers)
    paths.slurm.mkdir(parents=True, exist_ok=True)
    file = paths.slurm / "job.sh"
    write_atomic(file, script.encode(), mode=0o700)
    job = slurm.submit(file, {**os.environ, **variables}, str(needs))
    jobs = [f"{job}_{index}" for index in range(len(runs))] if is_sweep else [job]
    members = [
        SweepRun(run_dir=str(run.root), job=one, log=str(paths.slurm / f"job-{one}.log"))
        for run, one in zip(runs, jobs, strict=True)
    ]
    for run, member in zip(runs, members, strict=True):
        submitted = SubmittedJob(job=member.job, log=member.log)
        write_atomic(run.slurm / "job.json", json.dumps(dataclasses.asdict(submitted)).encode())
    write_sweep(paths, members if is_sweep else [])
    line.say(f"areal: job {job} is submitted: {file}, log {', '.join(member.log for member in members)}")
    if detach:
        sys.stdout.write(f"{job}\n")
        return 0
    return _follow(slurm, paths, line, from_start=True)


def _secret_variables(config: BaseExperimentConfig) -> dict[str, str]:
    """Variables of the processes that are in no file: they reach the job through its environment."""
    options = config.launcher
    lists = [parse_env_vars(text) for text in (options.inference_server_env_vars, options.trainer_env_vars)]
    return {name: value for given in lists for name, value in given.items() if is_secret(name, value)}


def _dry_run_text(request: Launch, needs: Resources, script: str, exclude: str) -> str:
    """GPU hours and scripts; for --json one line after those of the plans."""
    config, folder = request.config, RunPaths.of(request.config).slurm
    others = components_of(config)[1:] if config.launcher.slurm.separate_jobs else []
    hours = gpu_hours([needs, *(component.needs for component in others)], config.launcher.slurm.time_limit)
    most = "unknown without launcher.slurm.time_limit" if hours is None else f"at most {hours:g} until the time limit"
    texts = [component_script(config, one, folder=folder, main_job="JOB", exclude=exclude) for one in others]
    if request.as_json:
        return json.dumps({"max_gpu_hours": hours, "job_scripts": [script, *texts]}) + "\n"
    return f"GPU hours: {most}\n" + "\n".join(f"job script:\n{text}" for text in (script, *texts))


def _check_grace(config: BaseExperimentConfig, kill_wait_s: float | None) -> None:
    """ConfigError when Slurm kills the launcher before it has ended its processes."""
    grace_s = config.launcher.stop_grace_s
    if kill_wait_s is not None and grace_s >= kill_wait_s:
        reason = f"this Slurm kills a job {kill_wait_s:g} s after SIGTERM (KillWait of scontrol show config)"
        message = f"launcher.stop_grace_s={grace_s:g}, but {reason}: use a smaller value"
        raise ConfigError(message, code="launch.slurm_kill_wait")


def _refuse_second_job(slurm: SlurmClient, paths: RunPaths) -> None:
    """LaunchError while an earlier job of the run has not ended."""
    earlier = SubmittedJob.read(paths)
    facts = slurm.look(earlier.job) if earlier else None
    if earlier and facts and meaning_of(facts).phase != "ended":
        advice = f"follow it (--attach {paths.root}), cancel it (scancel {earlier.job}) or change trial_name"
        message = f"job {earlier.job} of {paths.root} has not ended ({facts.state}): {advice}"
        raise LaunchError(message, code="launch.run_in_use")


def _follow(slurm: SlurmClient, paths: RunPaths, line: StatusLine, *, from_start: bool) -> int:
    """Follow the newest job or sweep of a run folder. Returns the exit status."""
    if runs := runs_of_sweep(paths):
        return follow_sweep(slurm, runs, line)
    submitted = SubmittedJob.read(paths)
    if submitted is None:
        message = f"--attach {paths.root}: no job was submitted for this folder; give the run folder"
        raise ConfigError(message, code="launch.no_run_folder")
    return Follower(slurm, submitted, paths, line).run(from_start=from_start)


def run_command(words: Sequence[str]) -> int:
    help_if_asked(words, USAGE)
    match words:
        case ["--inside", *rest]:
            return run_inside(rest, os.environ)
        case ["--attach", folder]:
            return _follow(
                SlurmClient(), RunPaths(Path(folder).expanduser().absolute()), StatusLine(), from_start=False
            )
        case _:
            sweep = read_sweep([word for word in words if word != "--detach"])
            request = read_command_line(sweep.words, launcher="slurm")
            trial = request.config.trial_name
            requests = [
                read_command_line([*sweep.words, *overrides, f"trial_name={trial}_{index}"], launcher="slurm")
                for index, overrides in enumerate(sweep.overrides)
            ]
            paths = RunPaths.of(request.config)
            return submit(requests or [request], paths, at_once=sweep.at_once, detach="--detach" in words)


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    run_main(main)
