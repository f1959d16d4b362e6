"""A trainer rank dies in an update and at each stage of an asynchronous save: the older checkpoint stays, and the run
continues."""

import json
import os
from pathlib import Path

import pytest

from areal.ledger.audit import audit
from areal.system.durable import damage_of
from tests.faults.kill_in_save.sitecustomize import STAGES
from tests.faults.ledger_proof import raw_events
from tests.megatron.expert_model import write_expert_model

pytestmark = pytest.mark.slow


EXPERTS = ("allocation_mode=native:d2+megatron:(attn:d2|ffn:e2)", "actor.router_replay=true")
"""Two ranks with different experts, whose choices are replayed."""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(EXPERTS, marks=pytest.mark.megatron),
        pytest.param(("allocation_mode=native:d2+megatron:p2",), marks=pytest.mark.megatron),
    ],
    ids=["fsdp", "megatron-experts", "megatron-p2"],
)
def test_a_kill_at_each_stage_of_a_save_leaves_the_older_checkpoint(
    make_run, prove_all, data, tmp_path, monkeypatch, overrides
):
    if overrides == EXPERTS:
        write_expert_model(data / "model", tmp_path / "experts")
        overrides = (*overrides, f"actor.path={tmp_path}/experts")
    killed = tmp_path / "killed"
    killed.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("kill_in_save")), prepend=os.pathsep)
    monkeypatch.setenv("AREAL_PRELOAD", "0")  # each process imports sitecustomize at its start
    monkeypatch.setenv("KILLED_IN_SAVE", str(killed))
    run = make_run("recover.freq_steps=2", "total_train_steps=24", *overrides)
    run.wait_for_the_end(limit_s=1500)  # seven starts
    assert run.exit_code == 0, run.log_path.read_text()[-3000:]
    result = sorted(killed.iterdir())
    assert [path.name.partition("-")[2] for path in result] == list(STAGES)
    prove_all(run)
    assert audit(run.folder / "ledger").is_clean
    events = raw_events(run.folder / "ledger")
    starts = [event["step"] for event in events if event["event"] == "attached" and event["step"] > 0]
    kept = [int(path.read_text()) for path in result]
    assert sorted(set(starts)) == sorted(set(kept)), "each start continues from the newest complete checkpoint"
    committed = [event["step"] for event in events if event["event"] == "committed"]
    assert committed[-1] == 24
    assert not any(damage_of(path) for path in (run.folder / "recover").glob("step-*"))
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(25))
