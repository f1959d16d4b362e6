"""Workflows of environments with a scripted policy, over fake packages or real ones."""

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal.api.config import AgentConfig, GenerationHyperparameters
from tests.agent.policies import ScriptedEngine, tool_tokenizer
from tests.faults.driver import ROOT, Run

FAKES = Path(__file__).parent / "fakes"  # Workers import from the working directory: tests change to it.


def build(kind, *, n_samples=1, agent=None, **arguments):
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=400, max_tokens=8000)
    return kind(gconfig, tool_tokenizer(), agent_config=AgentConfig(**(agent or {})), **arguments)


def policy(answer):
    """An engine that answers with what `answer` makes of the last message of the user."""

    def reply(prompt: str) -> str:
        return answer(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1])

    return ScriptedEngine(reply)


def trained_text(trajectory) -> str:
    pairs = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    return tool_tokenizer().decode([token for token, mask in pairs if mask])


CONFIG = """
experiment_name: environments
trial_name: KIND
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: RUNS, n_gpus_per_node: 0}
total_train_steps: 12
train_dataset: {path: ROWS, batch_size: 4}
workflow: KIND
workflow_args: ARGS
gconfig: {n_samples: 2, max_new_tokens: 8, max_tokens: 96}
rollout: {max_head_offpolicyness: 2}
native: {dtype: float32, max_running_requests: 64, context_length: 96}
actor:
  path: MODEL
  dtype: float32
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
recover: {mode: auto, freq_steps: 3, retries: 9}
"""


def run_of(folder, kind, rows, args, options=()) -> Run:
    """A run of a tiny model, not yet started."""
    task = {"openenv": "guess"}.get(kind, "mixture")
    prepare = runpy.run_path(str(ROOT / "examples" / "environments" / "prepare.py"))
    with pytest.MonkeyPatch.context() as patch:  # in this process, which has imported torch
        patch.setattr(sys, "argv", ["prepare.py", str(folder / "data"), "--task", task])
        prepare["main"]()
    values = {"KIND": kind, "RUNS": folder, "ROWS": json.dumps(rows), "MODEL": folder / "data/model"}
    values["ARGS"] = json.dumps(args)
    text = CONFIG
    for name, value in values.items():
        text = text.replace(name, str(value))
    (folder / "config.yaml").write_text(text)
    return Run(
        arguments=["--config", str(folder / "config.yaml"), *options],
        folder=folder / "environments" / kind,
        log_path=folder / "launcher.log",
    )


def workers(run):
    """Processes of the environment's worker program, and what they have started."""
    roots = [item for item in psutil.process_iter(["cmdline"]) if "worker.py" in " ".join(item.info["cmdline"] or [])]
    result = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):  # a game may end at any moment
            if root.environ().get("HOME", "").startswith(str(run.folder)):
                result |= {root, *root.children(recursive=True)}
    return result


def kill_worker_then_controller(run) -> None:
    """Play a whole run with both kills: the worker ends with its controller, the run ends well, its audit is clean."""
    run.start()
    try:
        run.train_up_to(3)
        killed = workers(run)
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.train_up_to(6)
        left = workers(run)
        assert killed
        assert left - killed
        run.kill(["controller"])
        assert not psutil.wait_procs(left, timeout=30)[1], "a worker is alive after the end of its controller"
        assert run.wait_for_the_end(200) == 0, run.log_path.read_text()[-3000:]
        assert not workers(run)
    finally:
        run.abandon()
    audit = [sys.executable, "-m", "areal.ledger", "audit", str(run.folder)]
    audited = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout
