"""Each alarm is raised in a real run by its cause. Several causes share a run.

Limits that would need many steps are lowered; every other number is the default.
"""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from areal.data.tiny_model import tiny_model
from tests.test_end_to_end import ROOT, load_prepare

pytestmark = pytest.mark.slow
CONFIG = """
experiment_name: alarms
trial_name: t
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: FOLDER/runs, n_gpus_per_node: 0}
total_train_epochs: 99
total_train_steps: 8
train_dataset: {path: FOLDER/train.jsonl, batch_size: 4}
reward_fn: FOLDER/causes.py:constant
gconfig: {n_samples: 2, max_new_tokens: 4}
rollout: {max_head_offpolicyness: 1}
native: {dtype: float32, max_running_requests: 64, context_length: 32}
actor:
  path: FOLDER/model
  dtype: float32
  use_decoupled_loss: true
  kl_ctl: 0.0
  adv_norm: null
  reward_norm: null
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
recover: {mode: auto, freq_steps: 100}
"""
CAUSES = '''"""Workflows and rewards that break a run."""

import asyncio
import dataclasses
import itertools
import zlib

from areal.workflow.rlvr import RLVRWorkflow

KEPT = []


def constant(prompt, completion, prompt_ids, completion_ids, **row):
    if zlib.crc32(prompt.encode()) % 3 == 0:
        raise KeyError("answer")
    return 0.25


def of_prompt(prompt, completion, prompt_ids, completion_ids, **row):
    """Large, and equal for all answers to one prompt."""
    return 1e4 * (zlib.crc32(prompt.encode()) % 7)


class Shifted(RLVRWorkflow):
    """The tokens of an answer are shifted by one, its log-probabilities are not."""

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        return dataclasses.replace(group, trajectories=[self.shifted(one) for one in group.trajectories])

    def shifted(self, trajectory):
        token_ids, first = list(trajectory.token_ids), list(trajectory.loss_mask).index(1)
        moved = token_ids[:first] + token_ids[first + 1 :] + token_ids[first : first + 1]
        return dataclasses.replace(trajectory, token_ids=moved)


class FallsToZero(RLVRWorkflow):
    """After 32 episodes no answer is right. It keeps 3 MiB of every episode."""

    number = itertools.count()

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        KEPT.append(b"x" * (3 << 20))
        if next(self.number) < 32:
            return group
        wrong = [dataclasses.replace(one, reward=0.0) for one in group.trajectories]
        return dataclasses.replace(group, trajectories=wrong)


class Stragglers(RLVRWorkflow):
    """Every fourth episode takes longer, and others pass it."""

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        await asyncio.sleep(3.0 if zlib.crc32(data["prompt"].encode()) % 4 == 0 else 0.0)
        return group
'''

AGENT = '''"""An agent whose service serves 16 sessions at the same time, and which does much else wrong."""

import zlib

from openai import BadRequestError

OPEN, FAILED = set(), set()


async def run(row, client, session):
    """It changes the answers in its history, takes turns until its budget ends, and fails in a session of some rows."""
    OPEN.add(session.key)
    is_served = len(OPEN) <= 16
    question = row["question"]
    messages = [{"role": "user", "content": question}]
    try:
        while True:
            completion = await client.chat.completions.create(model="policy", messages=messages)
            if zlib.crc32(question.encode()) % 4 == 0 and question not in FAILED:
                FAILED.add(question)
                raise LookupError("no such page")
            changed = {"role": "assistant", "content": f"So: {completion.choices[0].message.content}"}
            messages += [changed, {"role": "user", "content": "?"}]
    except BadRequestError as error:
        if error.code != "agent.turn_budget":
            raise
    finally:
        OPEN.remove(session.key)
    return float(is_served)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("alarms")
    prepare = load_prepare()
    tokenizer = prepare.build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    model = tiny_model(tokenizer, 1, vocab_size=16)
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)  # certain about most tokens, as a trained model is
    model.save_pretrained(folder / "model")
    prepare.write_rows(folder / "train.jsonl", prepare.task.make_rows(256, seed=1))
    (folder / "causes.py").write_text(CAUSES)
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def command(folder: Path, trial: str, *words: str) -> list[str]:
    config = [str(folder / "c.yaml"), f"trial_name={trial}"]
    return [sys.executable, "-m", "areal.launcher.local", "--config", *config, *words]


def launch(folder: Path, trial: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, trial, *words), cwd=ROOT, capture_output=True, text=True, timeout=900)


def alarms_of(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["name"]) for line in map(json.loads, (run / "alarms.jsonl").read_text().splitlines())]


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_a_workflow_that_shifts_tokens_and_a_reward_that_fails_or_is_constant(folder):
    """The first launch is ended by an alarm; the second continues and only warns."""
    run = folder / "runs" / "alarms" / "shifted"
    words = (f"workflow={folder}/causes.py:Shifted", "actor.optimizer.lr=1.0e-12")
    few_tokens = "{name: effective_sample_size, limit: 0.3}"  # it is at least 1/32 for 32 tokens
    ended = launch(
        folder, "shifted", *words, f"alarms.rules=[{few_tokens}, {{name: reward_constant, steps: 2, action: stop}}]"
    )
    assert ended.returncode == 1, ended.stderr
    assert "alarm.reward_constant" in summary_of(run)["cause"]
    first = alarms_of(run)
    assert first[-1][0] == 3
    assert (3, "reward_constant") in first
    assert {"fresh_logprob_gap", "truncated_answers", "failed_episodes"} <= {name for _, name in first}
    assert [path.name for path in (run / "recover").iterdir()] == ["step-000003"]

    done = launch(folder, "shifted", *words, f"alarms.rules=[{few_tokens}]")
    assert done.returncode == 0, done.stderr
    result = alarms_of(run)
    assert [item for item in result if item in first] == first
    of_steps = [item for item in result if item[1] != "failed_episodes"]
    assert len(set(of_steps)) == len(of_steps)
    names = {name for _, name in result}
    assert {"logprob_gap", "logprob_k3", "effective_sample_size", "reward_constant"} <= names
    assert "uniform_groups" not in names
    summary = summary_of(run)
    episodes = summary["episodes"]
    assert [(alarm["step"], alarm["name"]) for alarm in summary["alarms"]] == result
    assert episodes["consumed"] == 32
    assert episodes["failed"] == episodes["reasons"]["failed: workflow.reward_failed"] > 3
    last = done.stderr.strip().splitlines()[-1]
    assert f"{episodes['failed']} failed" in last
    assert all(name in last for name in names)
    new = [line for line in done.stderr.splitlines() if line.startswith("areal: alarm at step")]
    assert new
    new = [line for line in new if "failed_episodes" not in line]  # the second controller raises it again
    assert not [line for line in new if int(line.removeprefix("areal: alarm at step ").partition(":")[0]) <= 3]


def test_large_rewards_of_the_prompt_and_a_high_learning_rate(folder):
    run = folder / "runs" / "alarms" / "diverges"
    rules = "[{name: update_kl, steps: 1}, {name: entropy_collapse, steps: 2}, {name: grad_norm, steps: 1}]"
    done = launch(
        folder,
        "diverges",
        *(f"reward_fn={folder}/causes.py:of_prompt", f"alarms.rules={rules}", "actor.optimizer.lr=0.05"),
        *("actor.ppo_n_minibatches=4", "train_dataset.batch_size=8", "total_train_steps=10"),
    )
    assert done.returncode == 0, done.stderr
    names = {name for _, name in alarms_of(run)}
    assert {"grad_norm", "uniform_groups", "update_kl", "entropy_collapse"} <= names
    assert "failed_episodes" not in names


def test_a_reward_that_falls_to_zero_and_a_workflow_that_leaks(folder):
    run = folder / "runs" / "alarms" / "falls"
    words = ("total_train_steps=44", "actor.optimizer.lr=1.0e-6", "reward.on_error=zero")
    rules = "alarms.rules=[{name: memory_growth, limit: 0.02, steps: 1}]"
    done = launch(folder, "falls", *words, f"workflow={folder}/causes.py:FallsToZero", rules)
    assert done.returncode == 0, done.stderr
    assert {"reward_collapse", "memory_growth"} <= {name for _, name in alarms_of(run)}


def test_a_slow_replica_and_stragglers(folder):
    run = folder / "runs" / "alarms" / "slow"
    rules = "[{name: slow_replica, steps: 1}, {name: stale_tokens, limit: 0.01, steps: 1}]"
    words = command(
        folder,
        "slow",
        *("allocation_mode=native:d2+fsdp:d1", f"workflow={folder}/causes.py:Stragglers"),
        *("total_train_steps=20", "reward.on_error=zero", f"alarms.rules={rules}", "gconfig.max_new_tokens=16"),
    )
    ended = threading.Event()
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as started:
        brake = threading.Thread(target=slow_down, args=(run, ended))
        brake.start()
        try:
            _, text = started.communicate(timeout=900)
        finally:
            ended.set()
            brake.join()
    assert started.returncode == 0, text
    assert {"slow_replica", "stale_tokens"} <= {name for _, name in alarms_of(run)}


def test_an_agent_that_fails_uses_its_budget_changes_its_history_and_suffers_under_load(folder):
    data, example = folder / "agents", ROOT / "examples" / "agents"
    subprocess.run([sys.executable, str(example / "prepare.py"), str(data)], check=True)
    (folder / "agent.py").write_text(AGENT)
    words = [
        *("--config", str(example / "calculator.yaml"), "experiment_name=alarms", "trial_name=agents"),
        *(f"cluster.fileroot={folder}/runs", f"workflow_args.agent={folder}/agent.py:run"),
        *(f"actor.path={data}/model", f"train_dataset.path={data}/train.jsonl", "valid_dataset=null"),
        *("evaluator.stop_at={}", "evaluator.eval_before_train=false", "total_train_steps=4"),
        *("train_dataset.batch_size=8", "gconfig.n_samples=4", "gconfig.max_new_tokens=4"),
        *("~rollout.should_accept_fn", "rollout.max_head_offpolicyness=0"),
        *("agent.inline=true", "agent.max_turns=2", "agent.missing_reward=leave_out"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "areal.launcher.local", *words], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    names = {name for _, name in alarms_of(folder / "runs" / "alarms" / "agents")}
    assert {"agent_errors", "budget_stops", "drifts", "zeros_by_load"} <= names
    assert "failed_episodes" not in names


def slow_down(run: Path, ended: threading.Event) -> None:
    """Stop server-1 for four fifths of the time, in short turns."""
    sign = run / "names" / "ready" / "server-1.json"
    while not sign.exists() and not ended.wait(0.1):
        pass
    if ended.is_set():
        return
    server = psutil.Process(json.loads(sign.read_text())["pid"])
    while not ended.is_set():
        try:
            server.send_signal(signal.SIGSTOP)
            ended.wait(0.04)
            server.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return
        ended.wait(0.01)
