"""A real run in which one server has other weights than the version that it reports, until its process is a new one."""

import pytest

from tests.faults.ledger_proof import raw_events
from tests.faults.test_replicas import REWARD

pytestmark = pytest.mark.slow

LIMIT_S = 900.0
SMALL = ["allocation_mode=native:d3+fsdp:d1", "evaluator.freq_steps=null", "total_train_steps=60"]
SMALL += ["rollout.setup_timeout=600", "launcher.ready_timeout_s=900", "rollout.schedule_policy=round_robin"]
SWAPPED_LAYERS = '''
"""Python imports this module at its start: the first process of server-1 swaps two layers after each weight update."""

import json
import os
import pathlib
import sys

if "areal.inference.server" in sys.orig_argv and json.loads(os.environ["AREAL_PROCESS"])["index"] == 1:
    from areal.inference.weight_update import ServedWeights

    install = ServedWeights.install

    def install_and_swap(self):
        install(self)
        one, other = [place[0] for name, place in self._places.items() if name.endswith("up_proj.weight")][:2]
        one.data, other.data = other.data, one.data

    try:
        pathlib.Path({flag!r}).touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        ServedWeights.install = install_and_swap
'''


def test_a_server_with_swapped_layers_is_updated_again_and_then_restarted(
    make_run, prove_all, data, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(SWAPPED_LAYERS.format(flag=str(tmp_path / "flag")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("AREAL_PRELOAD", "0")  # each process imports sitecustomize at its start
    is_over = tmp_path / "is_over"
    (tmp_path / "slow.py").write_text(REWARD.format(is_over=is_over))
    few = tmp_path / "held_out.jsonl"  # their rewards are slow too
    few.write_text("".join((data / "held_out.jsonl").read_text().splitlines(keepends=True)[:16]))
    run = make_run(*SMALL, f"reward_fn={tmp_path}/slow.py:share_of_ones", f"valid_dataset.path={few}")

    def events(kind: str) -> list[dict]:
        return [event for event in raw_events(run.folder / "ledger") if event["event"] == kind]

    def differing() -> list[dict]:
        return [event for event in events("published") if event.get("canary", {}).get("differing")]

    assert run.wait_for(differing, LIMIT_S), run.log_path.read_text()[-3000:]
    [first] = differing()[:1]
    canary = first["canary"]
    assert canary["differing"] == ["server-1"]
    assert canary["digest"]
    assert canary["difference"] > canary["tolerance"]
    assert run.wait_for(lambda: "rollout.canary" in run.log_path.read_text(), LIMIT_S), "the launcher restarts it"

    def serves_again() -> bool:
        return any("server-1" in event["replicas"] for event in events("accepted"))

    assert run.wait_for(serves_again, LIMIT_S)
    is_over.touch()
    run.wait_for_the_end()
    compared = [event["canary"] for event in events("compared")]
    assert compared
    assert not any(report["differing"] for report in compared), "the trainer agrees with the majority"
    prove_all(run)
