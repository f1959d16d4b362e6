"""Measures service times on this machine: a short run of the configuration, which is then read as any other run."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from areal.api.config import PPOConfig, save_config
from areal.api.errors import InputError
from areal.observe.step_files import read_step_lines
from areal.planner.measured import WARMUP_STEPS
from areal.system.process import tied_to_this_process
from areal.system.run_paths import RunPaths

LIMIT_S = 60.0
STEPS, STOP_S = 20, 15.0
_SHOWN_LINES = 5
NAME = ("areal-plan", "calibration")
_OPTIONS = (
    f"experiment_name={NAME[0]}", f"trial_name={NAME[1]}", f"total_train_steps={STEPS}", "total_train_epochs=null",
    "total_train_n_seqs=null", "valid_dataset=null", "evaluator={}", "saver={}",
    "recover.mode=disabled", "strict_config=false", "perf_tracer.enabled=true", "alarms.action=off",
)  # fmt: skip


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def calibrate(config: PPOConfig, folder: Path) -> Path:
    """Run a configuration in `folder`, for at most LIMIT_S; returns the folder of the run.

    InputError when it fails, or does not train enough steps in that time.
    """
    paths, whole, log = RunPaths(folder.joinpath(*NAME)), folder / "config.yaml", folder / "calibration.log"
    secrets = save_config(config, whole)  # with the paths that follow from the names of the experiment and its folder
    command = [sys.executable, "-m", "areal.launcher", "--config", str(whole), *_OPTIONS, f"cluster.fileroot={folder}"]
    has_failed = False
    before = signal.signal(signal.SIGTERM, _exit)  # so that the run is stopped in order
    try:
        with log.open("wb") as output, subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | secrets,
            preexec_fn=tied_to_this_process(),
        ) as run:  # fmt: skip
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    has_failed = run.wait(LIMIT_S - STOP_S) != 0
            finally:
                run.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(STOP_S)
                run.kill()
    finally:
        signal.signal(signal.SIGTERM, before)
    steps = len(read_step_lines(paths.metrics))
    if steps < WARMUP_STEPS + 3:
        last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-_SHOWN_LINES:])
        text = f"trained {steps} steps in {LIMIT_S:.0f} s, {WARMUP_STEPS + 3} are needed: plan with --from a longer "
        text = "failed" if has_failed else f"{text}run, or --card"
        raise InputError(f"the run of --calibrate {text}; its last lines:\n{last}", code="plan.calibration")
    return paths.root
