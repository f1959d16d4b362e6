"""`areal watch`: the facts of running, finished and dead runs, and the picture."""

import dataclasses
import io
import json
import os

import numpy as np
import pytest
from rich.console import Console

from areal.cli import watch as watch_facts
from areal.cli.main import run_command
from areal.cli.watch import Watched, view
from areal.launcher.preflight import run_lock
from areal.launcher.status import StatusSource
from areal.observe.step_files import JsonlTracker, append_step_line
from areal.system.heartbeat import Beat, write_beats
from areal.trainer.ppo_loop import sample_rows
from tests.cli.run_files import row
from tests.expect import raises_code
from tests.ledger.forge import Forge
from tests.serve.test_service import Trainer, model_of, opened
from tests.shares import make_share
from tests.trainer.test_sample_table import Letters

BEAT = Beat(pid=1, beats=1, doing="work", for_s=0.0, step=None, node="node-b")


def drawn(result, width):
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(view(result, width))
    return out.getvalue()


def test_a_dead_run_is_described_from_its_files(run, json_of):
    result = json_of("watch", run.root)
    assert (result["state"], result["step"], result["total_steps"], result["eta_s"]) == ("dead", 4, 10, None)
    assert result["curves"]["reward"] == {"steps": [1, 2, 3, 4], "values": [0.1, 0.2, 0.3, 0.4], "note": ""}
    assert result["curves"]["entropy"]["steps"] == [1, 2, 3]
    loss = {"steps": [3], "values": [2.5], "note": ""}  # of supervised training
    assert result["held_out"] == {"greedy": {"steps": [0, 3], "values": [0.1, 0.4], "note": ""}, "loss": loss}
    assert result["unscored"] == ["eval/greedy/reward: 0.400, 2 of 8 without a reward"]
    assert result["staleness"] == {"0": 0.25, "1": 0.75}
    assert list(result["seconds_by_phase"]) == ["update", "rollout", "publish_weights"]
    assert result["waits"]["the trainer waits for answers"] == 0.25
    assert result["waits"]["the servers wait for the trainer"] == 1.0
    assert result["step_s"] == 3.0
    assert [sample["reward"] for sample in result["samples"]] == [1.0, 0.5, 0.0]
    assert (result["samples_step"], result["alarms"][0]["name"]) == (4, "grad_norm")
    server = result["processes"][0]
    assert (server["node"], server["memory_gib"], server["silent_s"]) == ("node-a", 0.5, None)


def test_a_set_point_has_a_line(run):
    assert Watched(run.root).look().setpoint == {}
    for step, value in ((5, 1.0), (6, 2.0)):
        setpoint = {"target": 1.25, "value": value, "error": value - 1.25, "lead": 2.0}
        values = {f"rollout/setpoint/{name}": number for name, number in setpoint.items()}
        append_step_line(run.metrics, step, row(step, **values))
    result = Watched(run.root).look()
    assert result.setpoint["setpoint/value"] == 1.5
    assert "set-point of staleness: target 1.25, value 1.5, error 0.25; lead 2 versions" in drawn(result, 200)


def test_restarts_are_known_before_the_end_of_a_run(run):
    assert Watched(run.root).look().restarts == {}
    for unit in ("trainers", "server-0", "trainers"):
        append_step_line(run.restarts, 3, {"unit": unit, "cause": f"{unit} was killed"})
    with open(run.restarts, "a") as file:
        file.write('{"unit": "server-1"\n{"step": 4, "other": 1}\n')
    result = Watched(run.root).look().restarts
    assert result == {"trainers": ["trainers was killed"] * 2, "server-0": ["server-0 was killed"]}


def test_the_episodes_of_a_killed_controller_come_from_its_ledger(run):
    assert Watched(run.root).look().episodes == {}
    forge = Forge(run.ledger)
    forge.two_steps()
    forge.rejected(5, "filter")
    forge.write()
    result = Watched(run.root).look().episodes
    assert (result["admitted"], result["consumed"], result["waiting"], result["rejected"]) == (6, 4, 1, 1)
    assert result["reasons"] == {"rejected: filter": 1}


@pytest.mark.parametrize("width", [60, 140])
def test_the_picture_fits_the_terminal_and_has_no_control_characters(run, width):
    text = drawn(Watched(run.root).look(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for part in ("exp/trial", "dead", "step 4/10", "greedy 0.4", "KL", "update", "answer 0.5", "server-0", "grad_norm"):
        assert part in text


def test_a_dialogue_is_shown_with_what_was_inserted_and_its_last_answer(run):
    dialogue = "ask(57)" + "<|tool|>a result with \x1b[2J<|assistant|>" + "ok 57"
    text, versions = "Stock?" + dialogue, [-1] * len("Stock?") + [3] * 7 + [-1] * (len(dialogue) - 12) + [4] * 5
    share = make_share(
        step=5,
        version=4,
        token_ids=np.array([ord(letter) for letter in text], np.int32),
        lengths=np.array([len(text)], np.int32),
        loss_mask=(np.array(versions) >= 0).astype(np.uint8),
        rollout_logprobs=np.zeros(len(text), np.float32),
        output_versions=np.array(versions, np.int32),
        rewards=np.ones(1, np.float32),
        group_index=np.zeros(1, np.int32),
        finished=np.ones(1, np.uint8),
    )
    tracker = JsonlTracker(run.metrics, first_step=5)
    tracker.log_samples(5, sample_rows(share, Letters(), 1))
    tracker.close()
    result = Watched(run.root).look()
    (sample,) = result.samples
    assert (sample["prompt"], sample["num_generated"], sample["versions"]) == ("Stock?", 12, [3, 4])
    shown = drawn(result, 140)
    assert "ask(57)<|tool|>a result" in shown
    assert "ok 57" in shown
    assert "\x1b" not in shown


def test_the_summary_counts_unless_a_later_launch_has_died(run):
    run.summary.write_text(json.dumps({"status": "failed", "cause": "a cause"}))
    result = Watched(run.root).look()
    assert (result.state, result.cause) == ("failed", "a cause")
    os.utime(run.summary, (1.0, 1.0))
    assert Watched(run.root).look().state == "dead"


def test_a_running_run_has_what_it_waits_for_and_an_eta(run, monkeypatch):
    status = {"waiting_for": "the trainer", "tokens_per_s": 70.0, "total_steps": 10, "first_failure": "KeyError: 'x'"}
    status |= {"admitted": 9, "running": 3, "failed": 1, "reasons": {"failed: KeyError": 1}}
    monkeypatch.setattr(StatusSource, "status", lambda source: status)
    run.token.write_text("secret-token")
    write_beats(run.alive, {"server-0": BEAT})
    watched = Watched(run.root)
    with run_lock(run):
        result = watched.look()
        assert (result.state, result.waiting_for, result.tokens_per_s) == ("running", "the trainer", 70.0)
        assert result.eta_s == 18.0
        assert "ETA 0:00:18" in drawn(result, 80).splitlines()[0]
        assert result.episodes["reasons"] == {"failed: KeyError": 1}
        assert result.processes[0].silent_s is not None
        assert result.processes[0].node == "node-b", "a server that moved is shown where it was planned"
        assert "secret-token" not in drawn(result, 140)
        with run.metrics.open("a") as file:
            file.write(json.dumps(row(5)) + "\n" + '{"step": 6, "ti')
        assert watched.look().step == 5
        run.metrics.unlink()  # a recovery replaces the file
        run.metrics.write_text(json.dumps(row(1)) + "\n")
        assert watched.look().curves["reward"].steps == [1]
    assert watched.look().state == "dead"


def test_silence_is_measured_with_the_times_of_the_files(run, monkeypatch):
    """The clock of this machine is hours from that of the file system."""
    local_s = [50.0]
    monkeypatch.setattr(watch_facts.time, "monotonic", lambda: local_s[0])
    monkeypatch.setattr(watch_facts.time, "time", lambda: pytest.fail("the local clock was read"))
    write_beats(run.alive, {"server-0": dataclasses.replace(BEAT, silent_s=30.0), "controller": BEAT})
    os.utime(run.alive, (9030.0, 9030.0))
    os.utime(run.metrics, (9020.0, 9020.0))
    watched = Watched(run.root)

    def silences():
        return {process.name: process.silent_s for process in watched.look().processes if process.silent_s is not None}

    assert silences() == {"server-0": 30.0, "controller": 0.0}
    local_s[0] += 2.0  # nothing new
    assert silences() == {"server-0": 32.0, "controller": 2.0}
    write_beats(run.alive, {"server-0": BEAT})
    os.utime(run.alive, (9033.0, 9033.0))
    assert silences() == {"server-0": 0.0}


def test_without_a_terminal_the_picture_is_printed_once(run, text_of):
    assert "exp/trial" in text_of("watch", run.root)


async def test_a_service_has_its_tenants(run, json_of):
    async with opened(run.root / "serve") as service:
        model = await model_of(service)
        await service.accept(model, 1, "loss", {"forward_only": False}, b"a")
        await service.accept(model, 2, "step", {"settings": {}})
        trainer = Trainer(service)
        await trainer.all()
        await service.accept(model, 3, "loss", {"forward_only": False}, b"b")
        await trainer.all(fails=(3,))
        await service.accept(model, 5, "step", {"settings": {}})
        assert service.describe() == "serves 1 models; 1 of 2 slots taken"
        await service.record({"event": "session", "id": "\x1b[31m", "key": "you"})
        await service.record({"event": "ended", "id": "\x1b[31m"})
    result = json_of("watch", run.root)["service"]
    assert result == {"sessions": 1, "samplers": 0, "saved_weights": 0, "models": [
        {"user": "me", "model": model, "rank": 4, "steps": 1, "answered": 4, "failed": 1, "waiting": 1, "missing": 4},
    ]}  # fmt: skip
    text = drawn(Watched(run.root).look(), 100)
    assert "1 sessions, 0 samplers" in text
    assert "1 for request 4" in text
    assert "step 4/10" not in text


def test_a_run_before_its_first_step_has_a_picture(run):
    run.metrics.unlink()
    run.plan.unlink()
    assert "no train step yet" in drawn(Watched(run.root).look(), 80)


def test_wrong_words_are_refused(tmp_path):
    with raises_code("launch.no_run_folder"):
        run_command(["watch", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_command(["watch", str(tmp_path), "--interval", "0"])
