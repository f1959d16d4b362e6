"""The local launcher of `areal run`: runs a configuration on this machine and waits for its end."""

import dataclasses
import itertools
import json
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

from areal.api.config import BaseExperimentConfig, PPOConfig
from areal.api.config.load import load_experiment, save_config, script_keys, script_numbers
from areal.api.config.redaction import is_secret, public_command, public_environment
from areal.api.config.schema import notice_of
from areal.api.config.validate import raise_problems
from areal.api.errors import ConfigError, LaunchError
from areal.data.row_check import count_rows
from areal.launcher import attach
from areal.launcher.attach import RequestBox, register, wait_until_all_answer, with_attached_servers
from areal.launcher.backend import Cluster, LocalBackend, ProcessBackend
from areal.launcher.job import LaunchPlan, at_import, make_plan, recovering, with_adapters, with_time_limits
from areal.launcher.memory_plan import memory_problems, memory_texts
from areal.launcher.placement import Machine
from areal.launcher.preflight import (
    TriedRow,
    check_not_complete,
    check_run_folder,
    disk_problem,
    earlier_run,
    earlier_step_s,
    fetch_vision_layout,
    function_problems,
    make_run_folder,
    missing_inputs,
    nccl_versions,
    newest_checkpoint,
    notices,
    overwrite_run,
    precision_notice,
    refused_models,
    reward_notice,
    run_lock,
    sandbox_problems,
    server_problems,
    stored_bytes,
    tracker_problems,
    tried_row,
    with_dtypes,
)
from areal.launcher.preloaded import PRELOAD, PreloadedParent
from areal.launcher.result import facts_text, goal_text, help_if_asked, main_metrics, metrics_text, unscored_lines
from areal.launcher.status import (
    EvaluationSource,
    Source,
    StatusLine,
    StatusSource,
    changes_text,
    how_to_continue,
    keep_changes,
    read_tree,
    saved_tree,
)
from areal.launcher.supervisor import Interruptions, Outcome, Supervisor
from areal.observe.step_files import read_step_lines
from areal.system.device import cpu_count, gpu_memory_bytes, host_memory_bytes, visible_gpus
from areal.system.discovery import NameRegistry, registry_of
from areal.system.durable import finish_interrupted_writes, write_atomic
from areal.system.network import TOKEN_VARIABLE, Host, new_token, required_token, run_token
from areal.system.process import AREAL_PROCESS, ProcessContext, interrupts_notice, run_main
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# Orphans: processes of a run that still run on this machine after their launcher has ended.
#
# Children die with their launcher, so there are normally none; the kernel can hold one (a hung disk or GPU). A new
# launcher waits a short time for their end, because two processes of one role must never work on one run.

_POLL_S = 0.1
_REPORTED_AFTER_S = 1.0


class Orphan(NamedTuple):
    pid: int
    name: str


def find_orphans(paths: RunPaths) -> list[Orphan]:
    """The processes on this machine whose environment names this run."""
    return [orphan for process in psutil.process_iter() if (orphan := _orphan(process, paths)) is not None]


def wait_for_orphans(paths: RunPaths, *, limit_s: float, say: Callable[[str], None]) -> None:
    """Return once none is left. LaunchError, with their pids, after `limit_s`."""
    began_s, was_reported = time.monotonic(), False
    while orphans := find_orphans(paths):
        waited_s = time.monotonic() - began_s
        names = ", ".join(f"{orphan.name} (pid {orphan.pid})" for orphan in orphans)
        if waited_s >= limit_s:
            pids = " ".join(str(orphan.pid) for orphan in orphans)
            message = f"{paths.root} is in use by processes of an earlier launcher: {names}; end them: kill -9 {pids}"
            raise LaunchError(message, code="launch.run_in_use")
        if not was_reported and waited_s >= _REPORTED_AFTER_S:
            was_reported = True
            say(f"areal: waiting up to {limit_s:g} s for the end of processes of an earlier launcher: {names}")
        time.sleep(_POLL_S)


def _orphan(process: psutil.Process, paths: RunPaths) -> Orphan | None:
    try:
        text = process.environ().get(AREAL_PROCESS)
        if text is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        context = ProcessContext.from_env({AREAL_PROCESS: text})
        # Processes that user code starts inherit the environment and do not count. A server runs no user code, so
        # every process with its name belongs to it, also one that SGLang or vLLM started.
        words = itertools.pairwise(process.cmdline())
        runs_areal = any(flag == "-m" and module.startswith("areal.") for flag, module in words)
        is_ours = context is not None and (context.role == "server" or runs_areal)
    except (psutil.Error, OSError, LaunchError):  # ended meanwhile, of another user, or with another format
        return None
    if context is not None and is_ours and context.run_dir == str(paths.root):
        return Orphan(process.pid, context.name)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The text of a plan, which --dry-run prints.


def plan_text(
    plan: LaunchPlan,
    step_s: float | None,
    *,
    given_step_s: float | None = None,
    memory_of: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The plan as text. `step_s`: seconds of a train step, if an earlier run has measured it; `given_step_s`: as the
    user expects them, which comes first. `memory_of`: what a process needs in all, by its name."""
    hosts = ", ".join(sorted({process.host.bind for process in plan.processes}))
    lines = [f"run folder: {plan.run_dir}", f"allocation: {plan.allocation}", f"ports: chosen at start, on {hosts}"]
    if len({process.host for process in plan.processes}) > 1:
        lines += ["placement:", *(f"  {row}" for row in _table(plan))]
    lines.append("processes:")
    for process in plan.processes:
        where = f"GPU {','.join(process.gpus)}" if process.gpus else process.device
        memory = "" if process.memory_bytes == 0 else f", model state {bytes_text(process.memory_bytes)}"
        memory += f", {memory_of[process.name]}" if process.name in memory_of else ""
        lines.append(f"  {process.name}: {where}, CPU threads {process.num_threads}{memory}")
        lines.append(f"    {shlex.join(public_command(process.argv))}")
        if process.role != "controller":
            lines.append(f"    with {_variables(process.env)}")
    lines += [f"  server-{index}: already runs at {url}" for index, url in enumerate(plan.attached)]
    if plan.weight_path is not None:
        lines.append(f"weight updates: {plan.weight_path.transport} ({plan.weight_path.reason})")
    if plan.evaluations:
        how = {"background": "during training, on one server that keeps the version", "blocking": "training waits"}
        lines.append(f"evaluations: {plan.evaluations} ({how[plan.evaluations]})")
    if any(process.role == "trainer" for process in plan.processes):  # else an evaluation, which has no train steps
        lines.append("numbers:")
        lines += [f"  {name}: {value}" for name, value in describe(plan).items()]
        lines.append(f"  GPU hours: {_gpu_hours(plan, step_s, given_step_s)}")
    lines.append("Model state: weights, gradients, optimiser state and KV cache, without activations and libraries.")
    return "\n".join(lines) + "\n"


def _table(plan: LaunchPlan) -> list[str]:
    """One row for each process, by node."""
    rows = [("node", "address", "process", "GPUs", "CPU threads", "model state")]
    nodes = dict.fromkeys(process.host for process in plan.processes)
    for host in nodes:
        for process in (process for process in plan.processes if process.host == host):
            memory = bytes_text(process.memory_bytes) if process.memory_bytes != 0 else "-"
            gpus = ",".join(process.gpus) or "-"
            rows.append((host.node, host.advertise, process.name, gpus, str(process.num_threads), memory))
        rows += [
            (host.node, host.advertise, "free", ",".join(gpus), "", "") for at, gpus in plan.spare_gpus if at == host
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _gpu_hours(plan: LaunchPlan, measured_s: float | None, given_s: float | None) -> str:
    gpus, steps = sum(len(process.gpus) for process in plan.processes), plan.numbers.total_steps
    if not gpus:
        return "0 (the run uses no GPU: cluster.n_gpus_per_node=0, or the machines have none)"
    step_s = measured_s if given_s is None else given_s
    if steps is None or step_s is None:
        return "unknown (they need the number of steps, and an earlier run in this folder or --step-s=SECONDS)"
    source = "measured before" if given_s is None else "given by --step-s"
    return f"about {gpus * steps * step_s / 3600:.1f} ({gpus} GPUs, {steps} steps of {step_s:.1f} s as {source})"


def bytes_text(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _variables(env: Mapping[str, str]) -> str:
    """The variables in shell syntax, as a start by hand needs them. Secrets and PATH are not shown."""
    shown = {name: value for name, value in public_environment(env).items() if name not in (AREAL_PROCESS, "PATH")}
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items()))


def describe(plan: LaunchPlan) -> dict[str, Any]:
    """The numbers of a plan under readable names."""
    numbers = plan.numbers
    shown: dict[str, Any] = {
        "episodes per train step": numbers.episodes_per_step,
        "samples per train step": numbers.samples_per_step,
        "optimiser steps per train step": numbers.optimizer_steps_per_train_step,
    }
    if numbers.max_staleness is not None:
        late = "; older episodes are trained on too" if numbers.on_stale == "train" else ""
        limit = f"{numbers.max_staleness} versions (on_stale={numbers.on_stale}{late})"
        shown["maximum episodes in flight"] = numbers.max_concurrent_episodes
        shown["maximum staleness at admission"] = limit
    shown["rows of train_dataset"] = numbers.rows
    shown["maximum train steps per epoch"] = numbers.steps_per_epoch
    shown["maximum train steps"] = numbers.total_steps
    return {name: "known after the dataset is read" if value is None else value for name, value in shown.items()}


def given_step_s(argv: Sequence[str]) -> float | None:
    """The number of `--step-s=SECONDS`; None without this word. ConfigError when it is not positive."""
    for text in (word.partition("=")[2] for word in argv if word.startswith("--step-s=")):
        try:
            step_s = float(text)
        except ValueError:
            step_s = math.nan
        if not 0 < step_s < math.inf:
            raise ConfigError(f"--step-s={text}: give seconds, such as --step-s=90", code="config.bad_override")
        return step_s
    return None


USAGE = """usage: areal run [--launcher local] [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...]

Runs a configuration on this machine. The first Ctrl-C saves a recovery
checkpoint where recover.mode allows; the second ends the run at once.

Environment variables for servers that already run:
  AREAL_LLM_SERVER_ADDRS=HOST:PORT,...  their addresses, as rollout.server_addrs
  AREAL_SERVER_TOKEN=TEXT               their token or API key

AREAL_PRELOAD=0 starts every process by itself. Without it, processes of a run
without GPUs on Linux are forked from one that has imported torch.
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
    is_service: bool = False
    """There are no train steps: the heartbeat of the controller says what it does."""


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
    options = {
        "dry_run": "--dry-run" in argv,
        "overwrite": "--overwrite" in argv,
        "as_json": "--json" in argv,
        "launcher": launcher,
    }
    return Launch(config=config, extras=extras, numbers=numbers, script=script, step_s=given_step_s(argv), **options)


class LocalCluster(Cluster):
    """This machine alone."""

    def __init__(self, machine: Machine, *, preloads: bool = False) -> None:
        """`preloads`: fork processes from a parent that has done their imports, where this is possible."""
        self._machine = machine
        # A process that uses a GPU cannot be forked from one that has looked for GPUs.
        can_preload = preloads and sys.platform == "linux" and not machine.gpus and os.environ.get(PRELOAD) != "0"
        self._preloaded = PreloadedParent(at_import()) if can_preload else None

    def machines(self) -> Sequence[Machine]:
        return [self._machine]

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> ProcessBackend:
        return LocalBackend(paths, secrets, self._preloaded)

    def close(self) -> None:
        """The backend's `stop` has ended the processes of the run."""
        if self._preloaded is not None:
            self._preloaded.close()


def this_machine() -> Machine:
    gpus, host = tuple(visible_gpus()), Host(node=socket.gethostname())
    return Machine(cores=cpu_count(), memory_bytes=host_memory_bytes(), gpus=gpus, host=host)


def _public(plan: LaunchPlan) -> LaunchPlan:
    """The plan as it is written to disk: without secrets of the user's flags and variables."""
    processes = tuple(
        dataclasses.replace(process, argv=tuple(public_command(process.argv)), env=_without_secrets(process.env))
        for process in plan.processes
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


def checked_plan(request: Launch, machines: Sequence[Machine], line: StatusLine) -> LaunchPlan:
    """Plan, check all that is known before the start, and print the plan of a dry run.

    ConfigError lists what is wrong. The trial of row 0 comes last, because it runs the user's code.
    """
    config, nccl = request.config, None
    if isinstance(config, PPOConfig):
        fetch_vision_layout(config)
        has_gpus = config.cluster.n_gpus_per_node > 0 and any(machine.gpus for machine in machines)
        if has_gpus and config.actor.weight_update_mode in ("auto", "xccl"):  # it decides how weights travel
            nccl = nccl_versions(config)
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
        problems += memory_problems(config, plan, card_bytes=gpu_memory_bytes(), host_bytes=host_memory_bytes())
    refused = [] if problems else refused_models(config)
    problems += [text for text, _ in refused]
    tried, notice = TriedRow(), ""
    if isinstance(config, PPOConfig) and request.script is None and not problems:  # a script has rows of its own
        with ThreadPoolExecutor(1) as thread:
            checked = thread.submit(reward_notice, config) if request.dry_run else None
            tried = tried_row(config)
            notice = checked.result() if checked is not None and not tried.problems else ""
    slow = "" if problems else precision_notice(config, machines)
    for text in (tried.notice, notice, slow, *(f"warning: {warning}" for warning in tried.warnings)):
        if text:
            line.say(f"areal: {text}")
    raise_problems(tried.problems)
    if request.dry_run and request.as_json:
        facts = dataclasses.asdict(_public(plan)) | {"first_prompt": tried.prompt, "prompt_tokens": tried.num_tokens}
        sys.stdout.write(json.dumps(facts | {"script_keys": list(request.extras), "problems": problems}) + "\n")
    elif request.dry_run:
        step_s, memory_of = earlier_step_s(RunPaths.of(config)), memory_texts(config, plan)
        sys.stdout.write(plan_text(plan, step_s, given_step_s=request.step_s, memory_of=memory_of))
        if tried.prompt:
            sys.stdout.write(f"the first prompt ({tried.num_tokens} tokens):\n{tried.prompt}\n")
        elif isinstance(config, PPOConfig) and config.workflow == "agent" and request.script is None:
            sys.stdout.write(_NO_PROMPT)
        if tried.reward_time:
            sys.stdout.write(f"{tried.reward_time}\n")
        if request.extras:
            sys.stdout.write(f"keys that only the script reads: {', '.join(request.extras)}\n")
    if problems:
        raise ConfigError("\n  ".join(problems), code=refused[0][1] if refused else "launch.missing_inputs")
    return plan


def _launch(request: Launch, cluster: Cluster) -> int:
    machines, stored = cluster.machines(), max(map(stored_bytes, request.config.models.values()), default=0)
    on_gpu = request.config.cluster.n_gpus_per_node > 0 and any(machine.gpus for machine in machines)
    config = with_time_limits(request.config, checkpoint_bytes=stored, on_gpu=on_gpu)
    config = with_adapters(config, num_machines=len(machines), on_gpu=on_gpu)
    any_dtype, config = config, with_dtypes(config, machines)
    request, paths, line = dataclasses.replace(request, config=config), RunPaths.of(config), StatusLine()
    plan = checked_plan(request, machines, line)
    if config != any_dtype:
        line.say("areal: dtype=auto is float32: this processor has no bfloat16 products, and emulation is slow")
    if request.dry_run:
        if paths.root.is_dir():
            check_run_folder(config, paths, overwrites=request.overwrite)
        return 0
    if notice := interrupts_notice():
        line.say(notice)
    token = required_token("the run") if run_token() else new_token()
    make_run_folder(paths)
    with run_lock(paths):
        wait_for_orphans(paths, limit_s=_ORPHANS_LIMIT_S, say=line.say)
        finish_interrupted_writes(paths.recover)
        check_run_folder(config, paths, overwrites=request.overwrite)
        if request.overwrite:
            overwrite_run(paths)
        before = read_tree(paths.config)
        changes = changes_text(before, saved_tree(config, request.extras, request.numbers)) if before else []
        continues, total_steps = config.recover.mode in ("auto", "resume"), plan.numbers.total_steps
        if continues and (text := check_not_complete(config, paths, total_steps=total_steps, changes=changes)):
            line.say(f"areal: {text}")
            return _print_summary(request, paths, json.loads(paths.summary.read_bytes()))
        secrets = save_config(config, paths.config, extra=request.extras, numbers=request.numbers)
        secrets[TOKEN_VARIABLE] = token
        write_atomic(paths.token, token.encode(), mode=0o600)
        began_s, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        with counted_interruptions() as interruptions, closing(registry_of(config)) as registry:
            try:
                if changes and config.recover.mode != "disabled":
                    keep_changes(paths, changes)
                    line.say("\n".join(changes))
                outcome = _run(request, cluster, plan, paths, line, interruptions, secrets, registry)
            except OSError as error:
                cause = disk_problem(paths) or f"{error.filename or paths.root}: {error.strerror or error}"
                message = f"the launcher cannot write its files and has ended all processes: {cause}"
                raise LaunchError(message, code="launch.cannot_write") from error
            line.end(None)
            is_complete = outcome.status == "completed"
            rows = read_step_lines(paths.metrics)
            goal = goal_text(rows[-1] if rows else {}, config.evaluator, total_steps) if is_complete else ""
            times = {"started_at": started_at, "seconds": round(time.monotonic() - began_s, 3)}
            metrics = main_metrics(rows)
            summary = _summary(outcome) | times | {"goal_reached": goal, "metrics": metrics}
            try:
                write_atomic(paths.summary, json.dumps(summary, indent=1).encode())
            except OSError as error:
                line.say(f"areal: {paths.summary} was not written: {error.strerror or error}")
        if outcome.status == "interrupted" and config.recover.mode != "disabled":
            line.say(how_to_continue(newest_checkpoint(paths), config.recover.mode, sys.orig_argv))
        _print_summary(request, paths, summary)
        for row in [*metrics_text(metrics), *unscored_lines(rows)]:
            line.say(f"areal: {row}")
        return _report(outcome, paths, line, goal, total_steps=total_steps)


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
    plan: LaunchPlan,
    paths: RunPaths,
    line: StatusLine,
    interruptions: Interruptions,
    secrets: Mapping[str, str],
    registry: NameRegistry,
) -> Outcome:
    """Start all processes, with `secrets` in their environments, and wait until all have ended."""
    config, token = request.config, secrets[TOKEN_VARIABLE]
    recovers = config.recover.mode in ("auto", "resume")
    newest = newest_checkpoint(paths) if recovers else None
    plan = plan if newest is None else recovering(plan)
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
    if config.allocation.evaluation or request.is_service:
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


def _report(outcome: Outcome, paths: RunPaths, line: StatusLine, goal: str, *, total_steps: int | None) -> int:
    """`total_steps`: those of the plan; None = not known."""
    is_trained = total_steps is not None and outcome.steps_done >= total_steps
    when = f" after all {total_steps} train steps, before its last evaluation and export" if is_trained else ""
    facts = "; ".join(filter(None, (goal, facts_text(outcome.episodes, outcome.alarms))))
    first = f"; first failure: {failure}" if (failure := (outcome.episodes or {}).get("first_failure")) else ""
    text, exit_status = {
        "completed": (f"run completed: {paths.root} ({facts}{first})", 0),
        "interrupted": (f"interrupted{when}, all processes have ended: {paths.root} ({facts}{first})", 130),
        "failed": (f"{facts}\nareal: error: run failed: {outcome.cause}", 1),
    }[outcome.status]
    line.say(f"areal: {text}")
    return exit_status


@contextmanager
def counted_interruptions() -> Iterator[Interruptions]:
    """Count Ctrl-C, SIGTERM and SIGHUP while the block runs, instead of ending the process."""
    interruptions = Interruptions()
    # A background job ignores SIGINT, and a command under nohup SIGHUP: they stay ignored.
    numbers = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    numbers.append(signal.SIGTERM)
    before = {number: signal.signal(number, interruptions.add) for number in numbers}
    try:
        yield interruptions
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(words: Sequence[str]) -> int:
    """Run the words of a command line; returns the exit status."""
    if "--attach" in words:
        return attach.run_command(words)
    help_if_asked(words, USAGE)
    cluster = LocalCluster(this_machine(), preloads="--dry-run" not in words)
    with closing(cluster):
        return launch(read_command_line(words), cluster)


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
