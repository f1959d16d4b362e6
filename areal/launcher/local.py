"""The local launcher of `areal run`: runs a configuration on this machine and waits for its end."""

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal.api.config import BaseExperimentConfig, PPOConfig
from areal.api.config.load import load_experiment, save_config, script_keys, script_numbers
from areal.api.config.redaction import is_secret, public_command
from areal.api.config.relevance import notice_of
from areal.api.config.validate import raise_problems
from areal.api.errors import ConfigError, LaunchError
from areal.data.row_check import count_rows
from areal.launcher import attach
from areal.launcher.attach import RequestBox
from areal.launcher.attached import register, wait_until_all_answer, with_attached_servers
from areal.launcher.backend import Cluster, LocalBackend, ProcessBackend
from areal.launcher.first_row_check import TriedRow, tried_row
from areal.launcher.gpu_rules import NcclVersions, with_time_limits
from areal.launcher.job import LaunchPlan, make_plan
from areal.launcher.memory_plan import memory_problems
from areal.launcher.orphans import wait_for_orphans
from areal.launcher.placement import Machine
from areal.launcher.plan_text import given_step_s, plan_text
from areal.launcher.preflight import (
    check_not_complete,
    check_run_folder,
    disk_problem,
    earlier_run,
    earlier_step_s,
    function_problems,
    make_run_folder,
    missing_inputs,
    newest_checkpoint,
    overwrite_run,
    run_lock,
    stored_bytes,
)
from areal.launcher.result import facts_text, goal_text, main_metrics, metrics_text
from areal.launcher.resume_text import changes_text, how_to_continue, keep_changes, read_tree, saved_tree
from areal.launcher.sandbox_check import sandbox_problems
from areal.launcher.server_check import fetch_vision_layout, nccl_versions, notices, server_problems
from areal.launcher.status import EvaluationSource, Source, StatusLine, StatusSource
from areal.launcher.supervisor import Interruptions, Outcome, Supervisor
from areal.launcher.tracker_check import tracker_problems
from areal.launcher.usage import help_if_asked
from areal.observe.step_files import read_step_lines
from areal.system.device import cpu_count, gpu_memory_bytes, host_memory_bytes, visible_gpus
from areal.system.discovery import NameRegistry, registry_of
from areal.system.durable import finish_interrupted_writes, write_atomic
from areal.system.network import TOKEN_VARIABLE, Host, new_token, required_token, run_token
from areal.system.process import interrupts_notice, run_main
from areal.system.run_paths import RunPaths

USAGE = """usage: areal run [--launcher local] [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...]

Runs a configuration on this machine. The first Ctrl-C saves a recovery
checkpoint where recover.mode allows; the second ends the run at once.

Environment variables for servers that already run:
  AREAL_LLM_SERVER_ADDRS=HOST:PORT,...  their addresses, as rollout.server_addrs
  AREAL_SERVER_TOKEN=TEXT               their token or API key
"""
_ORPHANS_LIMIT_S = 10.0
_NO_PROMPT = "no first prompt: the agent makes its prompts itself (areal rehearse, areal test-workflow show them)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the command line requests."""

    config: BaseExperimentConfig
    extras: dict[str, Any]
    """Top-level keys that belong to the script."""
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Their numbers as the user wrote them, by path."""
    script: str | None
    dry_run: bool
    overwrite: bool = False
    """Delete an earlier run in the run folder."""
    as_json: bool = False
    """Print one JSON object: the plan of a dry run, else the summary of the run at its end."""
    step_s: float | None = None
    """Seconds of a train step, for the GPU hours of a dry run; None = as an earlier run measured."""
    launcher: str = "local"
    """The launcher that reads it."""


def read_command_line(argv: Sequence[str], *, launcher: str = "local") -> Launch:
    """Read and check the whole configuration. ConfigError lists every problem."""
    flags = ("--dry-run", "--overwrite", "--json")
    words = [word for word in argv if word not in flags and not word.startswith("--step-s=")]
    script = words.pop(0) if words and words[0].endswith(".py") else None
    config = load_experiment(words, allow_unknown_top_level=script is not None)
    if launcher == "local" and config.cluster.n_nodes > 1:
        message = f"cluster.n_nodes={config.cluster.n_nodes}: the local launcher runs on one machine; use n_nodes=1"
        raise ConfigError(message, code="launch.several_nodes")
    config = with_attached_servers(config, os.environ)
    extras, numbers = dict[str, Any](), dict[str, str]()
    if script is not None:
        path = Path(script)
        extras = script_keys(words, path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
        numbers = script_numbers(words, extras)
    raise_problems(list(function_problems(config, has_script=script is not None)))
    given = {
        "dry_run": "--dry-run" in argv,
        "overwrite": "--overwrite" in argv,
        "as_json": "--json" in argv,
        "launcher": launcher,
    }
    return Launch(config=config, extras=extras, numbers=numbers, script=script, step_s=given_step_s(argv), **given)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """This machine alone. Implements `Cluster`."""

    machine: Machine

    def machines(self) -> Sequence[Machine]:
        return [self.machine]

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> ProcessBackend:
        return LocalBackend(paths, secrets)

    def close(self) -> None:
        """The backend's `stop` has ended everything."""


def this_machine() -> Machine:
    gpus, host = tuple(visible_gpus()), Host(node=socket.gethostname())
    return Machine(cores=cpu_count(), memory_bytes=host_memory_bytes(), gpus=gpus, host=host)


def _public(plan: LaunchPlan) -> LaunchPlan:
    """The plan as it is written to disk: without secrets of the user's flags and variables."""
    processes = tuple(
        dataclasses.replace(one, argv=tuple(public_command(one.argv)), env=_without_secrets(one.env))
        for one in plan.processes
    )
    return dataclasses.replace(plan, processes=processes)


def _without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """A replay starts its ranks with these variables, so secret ones are left out: it inherits its own."""
    return {name: value for name, value in env.items() if not is_secret(name, value)}


def launch(request: Launch, cluster: Cluster) -> int:
    """Check the request, run until the end of the run, and return the exit status."""
    try:
        return _launch(request, cluster)
    finally:
        cluster.close()


def _tried(request: Launch, line: StatusLine) -> TriedRow:
    """The trial of row 0. With a script there is none, because the script builds dataset and workflow."""
    config = request.config
    if not isinstance(config, PPOConfig) or request.script is not None:
        return TriedRow()
    tried = tried_row(config)
    for text in (tried.notice, *(f"warning: {warning}" for warning in tried.warnings)):
        if text:
            line.say(f"areal: {text}")
    return tried


def checked_plan(
    request: Launch, machines: Sequence[Machine], line: StatusLine, *, tries_row: bool = True
) -> LaunchPlan:
    """Check all that is known before the start; print the plan of a dry run. ConfigError lists what is wrong."""
    config = request.config
    nccl = _nccl_of(config, machines)
    if isinstance(config, PPOConfig):
        fetch_vision_layout(config)
    plan = make_plan(config, machines, script=request.script, num_rows=count_rows(config), nccl=nccl)
    launched = dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, type=request.launcher))
    # An evaluation has the options of a training, most of which it does not read.
    for notice in ("" if config.allocation.evaluation else notice_of(launched), plan.warning):
        if notice:
            line.say(f"areal: {notice}")
    problems = missing_inputs(config, request.script) + tracker_problems(config, plan)
    if isinstance(config, PPOConfig):
        for notice in notices(config):
            line.say(notice)
        problems += server_problems(config, plan, line.say) + sandbox_problems(config, line.say)
    if not config.allocation.evaluation:
        card_bytes, host_bytes = gpu_memory_bytes(), host_memory_bytes()
        problems += memory_problems(config, plan, card_bytes=card_bytes, host_bytes=host_bytes)
    tried = _tried(request, line) if tries_row and not problems else TriedRow()
    raise_problems(tried.problems)
    if request.dry_run and request.as_json:
        facts = dataclasses.asdict(_public(plan)) | {"first_prompt": tried.prompt, "prompt_tokens": tried.num_tokens}
        sys.stdout.write(json.dumps(facts | {"script_keys": list(request.extras), "problems": problems}) + "\n")
    elif request.dry_run:
        sys.stdout.write(plan_text(plan, earlier_step_s(RunPaths.of(config)), given_step_s=request.step_s))
        if tried.prompt:
            sys.stdout.write(f"the first prompt ({tried.num_tokens} tokens):\n{tried.prompt}\n")
        elif isinstance(config, PPOConfig) and config.workflow == "agent" and request.script is None:
            sys.stdout.write(_NO_PROMPT)
        if request.extras:
            sys.stdout.write(f"keys that only the script reads: {', '.join(request.extras)}\n")
    if problems:
        raise ConfigError("\n  ".join(problems), code="launch.missing_inputs")
    return plan


def _nccl_of(config: BaseExperimentConfig, machines: Sequence[Machine]) -> NcclVersions | None:
    """Asked only where it decides how weights travel. The second call reads a cache."""
    has_gpus = config.cluster.n_gpus_per_node > 0 and any(machine.gpus for machine in machines)
    if not has_gpus or not isinstance(config, PPOConfig) or config.actor.weight_update_mode in ("disk", "http"):
        return None
    return nccl_versions(config)


def _launch(request: Launch, cluster: Cluster) -> int:
    machines, stored = cluster.machines(), max(map(stored_bytes, request.config.models.values()), default=0)
    on_gpu = request.config.cluster.n_gpus_per_node > 0 and any(machine.gpus for machine in machines)
    config = with_time_limits(request.config, checkpoint_bytes=stored, on_gpu=on_gpu)
    request, paths, line = dataclasses.replace(request, config=config), RunPaths.of(config), StatusLine()
    numbers = checked_plan(request, machines, line, tries_row=request.dry_run).numbers
    if request.dry_run:
        return 0
    if notice := interrupts_notice():
        line.say(notice)
    token = required_token("the run") if run_token() else new_token()
    make_run_folder(paths)
    with run_lock(paths):
        wait_for_orphans(paths, limit_s=_ORPHANS_LIMIT_S, say=line.say)
        finish_interrupted_writes(paths.recover)
        check_run_folder(config, paths, overwrites=request.overwrite)
        raise_problems(_tried(request, line).problems)
        if request.overwrite:
            overwrite_run(paths)
        before = read_tree(paths.config)
        if config.recover.mode in ("auto", "resume"):
            changes = changes_text(before, saved_tree(config, request.extras, request.numbers))
            if complete := check_not_complete(config, paths, total_steps=numbers.total_steps, changes=changes):
                line.say(f"areal: {complete}")
                return _print_summary(request, paths, json.loads(paths.summary.read_bytes()))
        secrets = save_config(config, paths.config, extra=request.extras, numbers=request.numbers)
        secrets[TOKEN_VARIABLE] = token
        write_atomic(paths.token, token.encode(), mode=0o600)
        began_s, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        with counted_interruptions() as interruptions, closing(registry_of(config)) as registry:
            try:
                for change in keep_changes(paths, before) if config.recover.mode != "disabled" else ():
                    line.say(change)
                outcome = _run(request, cluster, machines, paths, numbers.rows, line, interruptions, secrets, registry)
            except OSError as error:
                cause = disk_problem(paths) or f"{error.filename or paths.root}: {error.strerror or error}"
                message = f"the launcher cannot write its files and has ended all processes: {cause}"
                raise LaunchError(message, code="launch.cannot_write") from error
            line.end(None)
            is_complete = outcome.status == "completed"
            rows = read_step_lines(paths.metrics)
            goal = goal_text(rows[-1] if rows else {}, config.evaluator, numbers.total_steps) if is_complete else ""
            times = {"started_at": started_at, "seconds": round(time.monotonic() - began_s, 3)}
            metrics = main_metrics(rows)
            summary = _summary(outcome) | times | {"goal_reached": goal, "metrics": metrics}
            try:
                write_atomic(paths.summary, json.dumps(summary, indent=1).encode())
            except OSError as error:
                line.say(f"areal: {paths.summary} was not written: {error.strerror or error}")
        if outcome.status == "interrupted" and interruptions.may_wait and config.recover.mode != "disabled":
            line.say(how_to_continue(newest_checkpoint(paths), config.recover.mode, sys.orig_argv))
        _print_summary(request, paths, summary)
        for text in metrics_text(metrics):
            line.say(f"areal: {text}")
        return _report(outcome, paths, line, goal)


def _summary(outcome: Outcome) -> dict[str, Any]:
    """How the run ended, JSON-ready."""
    return {
        "status": outcome.status,
        "cause": outcome.cause,
        "server_error": outcome.server_error,
        "peak_rss_gib": round(outcome.peak_rss_bytes / 2**30, 4),
        "exit_codes": outcome.exit_codes,
        "restarts": outcome.restarts,
        "episodes": outcome.episodes,
        "alarms": [dataclasses.asdict(alarm) for alarm in outcome.alarms],
    }


def _print_summary(request: Launch, paths: RunPaths, summary: Mapping[str, Any]) -> int:
    """Print the summary for --json. Returns the exit status of a complete run."""
    if request.as_json:
        sys.stdout.write(json.dumps({"run": str(paths.root), **summary}) + "\n")
    return 0


def _run(
    request: Launch,
    cluster: Cluster,
    machines: Sequence[Machine],
    paths: RunPaths,
    rows: int | None,
    line: StatusLine,
    interruptions: Interruptions,
    secrets: Mapping[str, str],
    registry: NameRegistry,
) -> Outcome:
    """Start all processes, with `secrets` in their environments, and wait until all have ended."""
    config, token = request.config, secrets[TOKEN_VARIABLE]
    recovers = config.recover.mode in ("auto", "resume")
    newest = newest_checkpoint(paths) if recovers else None
    nccl = _nccl_of(config, machines)
    plan = make_plan(config, machines, script=request.script, num_rows=rows, recover=newest is not None, nccl=nccl)
    if recovers and (earlier := earlier_run(paths, newest, has_rollouts=plan.num_servers > 0)):
        line.say(earlier)
    write_atomic(paths.plan, json.dumps(dataclasses.asdict(_public(plan)), indent=1).encode(), mode=0o600)
    registry.clear()
    paths.episodes.unlink(missing_ok=True)
    if plan.attached and isinstance(config, PPOConfig):
        limit_s = config.rollout.setup_timeout
        wait_until_all_answer(plan.attached, limit_s, line.say, token=token, hurry=lambda: interruptions.count > 0)
        register(registry, plan.attached)
    RequestBox(paths).clear()
    paths.alive.unlink(missing_ok=True)
    total_steps = plan.numbers.total_steps
    source: Source = StatusSource(
        registry, paths.metrics, has_controller=plan.num_servers > 0, total_steps=total_steps, token=token
    )
    if config.allocation.evaluation:
        source = EvaluationSource(paths.alive)
    return Supervisor(
        plan,
        config.launcher,
        config.recover,
        paths,
        cluster.backend(plan, paths, secrets),
        registry=registry,
        source=source,
        line=line,
        interruptions=interruptions,
        elastic=config.elastic if isinstance(config, PPOConfig) else None,
    ).run()


def _report(outcome: Outcome, paths: RunPaths, line: StatusLine, goal: str) -> int:
    facts = "; ".join(filter(None, (goal, facts_text(outcome.episodes, outcome.alarms))))
    first = f"; first failure: {one}" if (one := (outcome.episodes or {}).get("first_failure")) else ""
    text, exit_status = {
        "completed": (f"run completed: {paths.root} ({facts}{first})", 0),
        "interrupted": (f"interrupted, all processes have ended: {paths.root} ({facts}{first})", 130),
        "failed": (f"{facts}\nareal: error: run failed: {outcome.cause}", 1),
    }[outcome.status]
    line.say(f"areal: {text}")
    return exit_status


@contextmanager
def counted_interruptions() -> Iterator[Interruptions]:
    """Count Ctrl-C, SIGTERM and SIGHUP while the block runs, instead of ending the process."""
    found = Interruptions()
    # A background job ignores SIGINT, and a command under nohup SIGHUP: they stay ignored.
    numbers = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    numbers.append(signal.SIGTERM)
    before = {number: signal.signal(number, found.add) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(words: Sequence[str]) -> int:
    """Run the words of a command line; returns the exit status."""
    if "--attach" in words:
        return attach.run_command(words)
    help_if_asked(words, USAGE)
    request = read_command_line(words)
    return launch(request, LocalCluster(this_machine()))


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
