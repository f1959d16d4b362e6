"""The whole loop through the launcher's command line: launcher, server, controller, trainer, weights back."""

import importlib.util
import json
import os
import subprocess
import sys
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from areal.data.prompt_stream import PromptStream
from areal.data.tiny_model import tiny_model
from areal.ledger.audit import AuditReport, audit
from areal.ledger.event_files import LedgerReader
from areal.observe.metric_table import entry_of
from tests.run_checks import check_evaluations, check_exports, check_samples

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(900)
QUICKSTART = ROOT / "examples" / "quickstart"
MAX_STALENESS, BATCH = 2, 4
CONFIG = f"""
experiment_name: e2e
trial_name: run
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {{fileroot: FOLDER/runs}}
total_train_epochs: 9
total_train_steps: 4
train_dataset: {{path: FOLDER/train.jsonl, batch_size: {BATCH}}}
valid_dataset: {{path: FOLDER/held_out.jsonl, batch_size: 8}}
reward_fn: FOLDER/script.py:share_of_ones
gconfig: {{n_samples: 4, max_new_tokens: 8}}
rollout: {{max_head_offpolicyness: {MAX_STALENESS}, check_trajectory_format: true}}
native: {{dtype: float32, max_running_requests: 64, context_length: 32}}
actor:
  path: FOLDER/model
  dtype: float32
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  weight_update_mode: xccl
  kl_ctl: 0.0
  adv_norm: null
  reward_norm: {{mean_level: group, std_level: null}}
  optimizer: {{lr: 3.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}}
evaluator: {{eval_before_train: true, modes: [greedy]}}
"""
SCRIPT = '''"""Rewards and filters of the runs, and a script that trains with its own objects."""

import asyncio
import functools
import json
import pathlib
import sys
import zlib

from areal.api.config import GRPOConfig
from areal.api.config.load import load_config
from areal.data.dataset import load_rows
from areal.data.tokenizer import load_tokenizer
from areal.system.process import ProcessContext
from areal.trainer.__main__ import run_configured
from areal.trainer.ppo import PPOTrainer
from areal.workflow.rlvr import RLVRWorkflow

FOLDER = pathlib.Path(__file__).parent


def share_of_ones(prompt, completion, prompt_ids, completion_ids, **row):
    return completion.count("1") / 8


def raises_for_some(prompt, completion, prompt_ids, completion_ids, fails=False, **row):
    if fails:
        raise LookupError("no answer is known")
    return share_of_ones(prompt, completion, prompt_ids, completion_ids)


@functools.cache
def unwanted_prompts():
    tokenizer = load_tokenizer(FOLDER / "model")
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").open()]
    return {tuple(tokenizer.encode(row["prompt"])) for row in rows if row["unwanted"]}


def accept(group):
    first = group.trajectories[0]
    return tuple(first.token_ids[: first.loss_mask.index(1)]) not in unwanted_prompts()


class Stragglers(RLVRWorkflow):
    """Every fourth prompt's answers come late: others pass them."""

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        await asyncio.sleep(1.0 if zlib.crc32(data["prompt"].encode()) % 4 == 0 else 0.0)
        return group


def main(argv):
    config = load_config(argv, GRPOConfig)
    if config.reward_fn.endswith("raises_for_some") and ProcessContext.from_env().role == "controller":
        run_configured(argv)  # one run uses both ways: configured functions, and in the trainer a script's objects
        return
    tokenizer = load_tokenizer(config.actor.path)
    rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer)
    held_out = load_rows(config.valid_dataset, default_split="test", tokenizer=tokenizer)
    workflow = RLVRWorkflow(raises_for_some, config.gconfig, tokenizer, reward=config.reward)
    with PPOTrainer(config, train_dataset=rows, valid_dataset=held_out) as trainer:
        trainer.train(workflow, should_accept_fn=accept)


if __name__ == "__main__":
    main(sys.argv[1:])
'''


@dataclass(frozen=True)
class Run:
    """What a launch left behind."""

    folder: Path
    status: int
    stderr: str
    steps: list[dict[str, Any]]
    """Metrics by line."""
    events: list[dict[str, Any]]
    report: AuditReport

    def column(self, name: str) -> list[Any]:
        """A metric of every train step."""
        return [row[name] for row in self.steps if row["step"] > 0]

    def batch_staleness(self) -> list[int]:
        """Of every batch, how many versions its oldest episode lags, by the ledger."""
        oldest = {event["id"]: event["min_version"] for event in self.events if event["event"] == "accepted"}
        batches = [event for event in self.events if event["event"] == "batched"]
        return [event["step"] - min(oldest[episode] for episode in event["ids"]) for event in batches]


def load_prepare() -> ModuleType:
    """examples/quickstart/prepare.py, which imports its neighbour as a script does."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        spec = importlib.util.spec_from_file_location("quickstart_prepare", QUICKSTART / "prepare.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(QUICKSTART))
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    prepare = load_prepare()
    tokenizer = prepare.build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model(tokenizer, 1, vocab_size=16).save_pretrained(folder / "model")
    rows = prepare.task.make_rows(256, seed=1)
    for row in rows:
        number = zlib.crc32(row["prompt"].encode()) % 100
        row |= {"unwanted": number < 30, "fails": 30 <= number < 35, "heat": 0.6 + number / 100}
    prepare.write_rows(folder / "train.jsonl", rows)
    prepare.write_rows(folder / "held_out.jsonl", prepare.task.make_rows(8, seed=2))
    prepare.write_rows(folder / "more.jsonl", prepare.task.make_rows(4, seed=3))
    (folder / "script.py").write_text(SCRIPT)
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def run(folder: Path, *overrides: str, script: bool = False, timeout_s: float = 800.0) -> Run:
    """Launch, wait for the end, check what holds for every run that completes."""
    mark = uuid.uuid4().hex
    scripts = [str(folder / "script.py")] if script else []
    name = f"trial_name={mark}"
    argv = [
        sys.executable,
        "-m",
        "areal.launcher.local",
        *scripts,
        "--config",
        str(folder / "c.yaml"),
        name,
        *overrides,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "AREAL_TEST_MARK": mark}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("areal: run completed: ")
    assert processes_of(mark) == []
    root = folder / "runs" / "e2e" / mark
    report = audit(root / "ledger")
    assert report.is_clean, report.lines()
    assert report.incomplete is None
    assert sum(report.counts.values()) == report.num_admitted
    steps = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert not [name for row in steps for name in row if entry_of(name) is None], (
        "add it to areal/observe/metric_table.py"
    )
    episodes = json.loads((root / "summary.json").read_text())["episodes"]
    assert {name: episodes[name] for name in report.counts} == report.counts
    assert episodes["reasons"] == report.reasons
    return Run(root, done.returncode, done.stderr, steps, list(LedgerReader(root / "ledger").events()), report)


def processes_of(mark: str) -> list[psutil.Process]:
    result = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
        except psutil.Error:
            continue
    return result


def versions(result: Run) -> list[int]:
    return [event["version"] for event in result.events if event["event"] == "published"]


STEPS = 12
RECOVER = ("recover.mode=auto", "recover.freq_steps=99")
"""One recovery checkpoint, at the end."""


def test_asynchronous_grpo_with_rejected_and_failed_episodes(folder, tmp_path, capsys):
    """Both ways to start training in one run: the controller uses the configured functions, the trainer a script."""
    functions = [f"reward_fn={folder}/script.py:raises_for_some", f"rollout.should_accept_fn={folder}/script.py:accept"]
    several = [
        "evaluator.modes=[greedy, sampled]",
        "evaluator.n_samples=2",
        f"evaluator.sets={{more: {folder}/more.jsonl}}",
    ]
    each = "gconfig.temperature_key=heat"  # the trainer's log-probabilities are the server's only at this temperature
    result = run(folder, f"total_train_steps={STEPS}", *functions, *RECOVER, *several, each, script=True)
    check_training(result, folder)
    check_evaluations(result.steps)
    check_replacements(result, folder)
    check_exports(result.folder, tmp_path, step=STEPS)
    capsys.readouterr()
    check_samples(result.folder, capsys)


@pytest.mark.slow
def test_a_script_trains_with_its_own_objects(folder):
    result = run(folder, f"total_train_steps={STEPS}", script=True)
    check_training(result, folder)
    check_replacements(result, folder)


def check_training(result: Run, folder: Path) -> None:
    """Every step trains, on tokens of versions within the bound, and the checkpoint is another model."""
    assert [row["step"] for row in result.steps] == list(range(STEPS + 1))
    assert result.steps[0]["eval/greedy/num"] == 8.0
    assert result.column("actor/optimizer_steps") == [2.0] * STEPS
    assert len(result.column("rollout/reward")) == STEPS
    assert any(norm > 0 for norm in result.column("actor/grad_norm")), "nothing was learned from"
    # fresh weights: the trainer's log-probabilities of the first batch are the server's
    assert result.column("rollout/staleness_max")[0] == 0
    assert result.column("batch/prox_rollout_gap_max")[0] < 1e-4
    assert result.column("batch/prox_rollout_gap_max")[-1] > 1e-4, "later batches are of older weights"
    # every token bears a version that was published before its batch
    assert versions(result) == list(range(1, STEPS + 1))
    assert result.column("rollout/staleness_max") == result.batch_staleness()
    assert all(value <= min(step, MAX_STALENESS + 1) for step, value in enumerate(result.batch_staleness()))
    assert max(result.batch_staleness()) > 0, "nothing was asynchronous"
    check_checkpoint(result.folder / "checkpoints" / "actor" / f"step-{STEPS:06}", folder / "model")


def check_checkpoint(path: Path, start: Path) -> None:
    """transformers loads it, tokenizer included, and it is not what training started from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    trained, before = (AutoModelForCausalLM.from_pretrained(folder) for folder in (path, start))
    ids = torch.tensor([tokenizer.encode("73915=")])
    assert ids.shape == (1, 6)
    assert trained(ids).logits.shape == (1, 6, 16)
    assert (trained(ids).logits - before(ids).logits).abs().max() > 1e-3


def check_replacements(result: Run, folder: Path) -> None:
    """Rejected and failed episodes are replaced by further ones, and each is accounted for."""
    counts, rows = result.report.counts, [json.loads(line) for line in (folder / "train.jsonl").open()]
    stream = PromptStream(rows, seed=3, batch_size=BATCH)
    fate = Counter(
        "rejected" if row["unwanted"] else "failed" if row["fails"] else "consumed" for row in taken(result, stream)
    )
    assert counts["consumed"] == STEPS * BATCH
    assert {name: counts[name] for name in fate} == dict(fate)
    assert fate["rejected"] >= 8
    assert fate["failed"] >= 1
    reasons = {"rejected: filter": fate["rejected"], "failed: workflow.reward_failed": fate["failed"]}
    assert result.report.reasons == reasons
    assert counts["running"] == counts["waiting"] == counts["batched"] == 0


def taken(result: Run, stream: PromptStream[dict[str, Any]]) -> list[dict[str, Any]]:
    return [stream.row(k) for k in range(result.report.num_admitted)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disk", "http"])
def test_two_servers_two_ranks_and_weights_by_folder(folder, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    traces = [
        "perf_tracer.session_tracer.enabled=true",
        "perf_tracer.profile_steps=[2]",
        "perf_tracer.profile_ranks=[1]",
    ]
    result = run(folder, "allocation_mode=native:d2+fsdp:d2", f"actor.weight_update_mode={mode}", *traces, *RECOVER)
    assert [path.name for path in (result.folder / "profile").iterdir()] == ["trainer-1-step-000002.json.gz"]
    sessions = (result.folder / "trace" / "sessions.ndjson").read_text().splitlines()
    assert len(sessions) >= 4 * BATCH
    assert all(json.loads(line) for line in sessions)
    assert [event["kind"] for event in result.events if event["event"] == "published"] == [mode] * 4
    assert (result.folder / "weights").is_dir() == (mode == "disk")
    assert list(tmp_path.glob("areal-*/*")) == [], "copies of weights are left on the disk of a machine"
    assert result.column("batch/prox_rollout_gap_max")[0] < 1e-4
    assert versions(result) == [1, 2, 3, 4]
    assert max(result.batch_staleness()) <= MAX_STALENESS + 1
    servers = {name for event in result.events if event["event"] == "accepted" for name in event["replicas"]}
    assert servers == {"server-0", "server-1"}
    check_checkpoint(result.folder / "checkpoints" / "actor" / "step-000004", folder / "model")
    check_exports(result.folder, tmp_path / "exports", step=4)


@pytest.mark.slow
def test_ppo_with_a_critic_and_a_reference(folder, tmp_path):
    model = f"{{path: {folder}/model, dtype: float32, optimizer: {{lr: 1.0e-3}}}}"
    frozen = f"{{path: {folder}/model, dtype: float32}}"
    result = run(folder, f"critic={model}", f"ref={frozen}", "actor.kl_ctl=0.1", *RECOVER)
    assert result.column("batch/ref_kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert result.column("batch/ref_kl")[-1] > 0
    assert all(value > 0 for value in result.column("critic/grad_norm"))
    for role in ("actor", "critic"):
        check_exports(result.folder, tmp_path / role, step=4, role=role)


@pytest.mark.slow
def test_eta_zero_is_synchronous(folder):
    result = run(folder, "rollout.max_head_offpolicyness=0")
    assert result.column("rollout/staleness_max") == [0.0] * 4
    assert max(result.column("batch/prox_rollout_gap_max")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("on_stale", ["train", "drop", "mask", "wait"])
def test_every_treatment_of_stale_episodes_keeps_its_promise(folder, on_stale):
    """Stragglers pass the bound; what then happens to them is what rollout.on_stale says."""
    words = [
        f"rollout.on_stale={on_stale}",
        "rollout.max_head_offpolicyness=1",
        f"workflow={folder}/script.py:Stragglers",
    ]
    result = run(folder, *words, "total_train_steps=20", "evaluator.eval_before_train=false")
    staleness, stale = result.batch_staleness(), result.column("rollout/stale_tokens_frac")
    assert result.report.counts["consumed"] == 20 * BATCH
    assert result.column("rollout/staleness_max") == staleness
    dropped = result.report.reasons.get("rejected: stale", 0)
    assert (dropped > 0) == (on_stale == "drop")
    if on_stale in ("drop", "wait"):
        assert max(staleness) <= 1
    else:
        assert max(staleness) > 1
        assert [share > 0 for share in stale] == [value > 1 for value in staleness]
    trained = [
        a < b
        for a, b in zip(
            result.column("batch/num_trained_tokens"), result.column("rollout/generated_tokens"), strict=True
        )
    ]
    assert trained == [on_stale == "mask" and value > 1 for value in staleness]
