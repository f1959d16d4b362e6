"""Replays of a recorded run: equal to the bit, different where something was changed, refused where they cannot be."""

import dataclasses
import hashlib
import json
import re
import shutil
import struct
import zlib
from pathlib import Path

import pytest

from areal.api.errors import ArealError, ConfigError, LedgerError
from areal.ledger.event_files import LedgerReader, events_path, payload_path
from areal.replay import __main__ as command
from areal.replay.__main__ import check_overrides
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

STEPS = 4


pytestmark = pytest.mark.usefixtures("ranks_in_process")


@pytest.fixture
def run(recorded, tmp_path) -> RunPaths:
    """A copy of the recorded run, to be harmed."""
    shutil.copytree(recorded.folder, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def replay(folder: Path, *words: str) -> int:
    root = folder.root if isinstance(folder, RunPaths) else folder
    return command.replay(command.read_command_line(["--run", str(root), *words]))


def file_hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "replays" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def first_difference(text: str) -> int | None:
    result = re.search(r"DIFFERENT from step (\d+) on", text)
    return int(result[1]) if result else None


@pytest.mark.parametrize("name", ["recorded", "recorded_with_all"])
def test_a_replay_equals_its_run_to_the_bit_and_leaves_it_as_it_was(name, request, capsys):
    folder = request.getfixturevalue(name).folder
    before = file_hashes(folder)
    assert replay(folder, "--name", "exact") == 0
    told = capsys.readouterr().out
    for step in range(1, STEPS + 1):
        assert f"step {step}: weights equal; actor/loss, actor/grad_norm" in told
    assert ("critic/loss" in told) == (name == "recorded_with_all")
    assert told.splitlines()[-1] == "equal: 4 steps, 4 with checksums, 4 with metrics"
    assert file_hashes(folder) == before
    live, ours = read_metrics(folder / "metrics.jsonl"), read_metrics(folder / "replays" / "exact" / "metrics.jsonl")
    timed = ("seconds", "time", "trained_tokens_per_s", "weights")
    assert list(ours) == [1, 2, 3, 4]
    for step, row in ours.items():
        kept = {key: value for key, value in row.items() if not key.startswith(timed)}
        assert kept == {key: live[step][key] for key in kept}
    assert ours[1]["rollout/reward"] == 0.5


def change_reward(run: RunPaths, step: int) -> int:
    """Change one byte of a reward in the batch of `step`, with a checksum that fits; returns the episode."""
    events = list(LedgerReader(run.ledger).events())
    episode = next(event["ids"][0] for event in events if event["event"] == "batched" and event["step"] == step)
    where = next(event["payload"] for event in events if event["event"] == "accepted" and event["id"] == episode)
    path, (_, offset, size) = payload_path(run.ledger, where[0]), where
    data = bytearray(path.read_bytes())
    record = data[offset : offset + size]
    num, tokens = struct.unpack_from("<II", record, 16)
    record[28 + 4 * num + 8 * tokens + 2] ^= 0x40
    record[4:8] = struct.pack("<I", zlib.crc32(record[8:]))
    data[offset : offset + size] = record
    path.write_bytes(data)
    return episode


def test_other_bytes_in_a_batch_show_at_their_step(run, capsys):
    change_reward(run, step=2)
    assert replay(run) == 1
    told = capsys.readouterr().out
    assert "step 2: weights equal" in told
    assert "step 3: weights DIFFER at step 3" in told
    assert first_difference(told) == 3


def test_a_damaged_payload_is_named(run):
    episode = change_reward(run, step=1)
    where = next(
        event["payload"]
        for event in list(LedgerReader(run.ledger).events())
        if event["event"] == "accepted" and event["id"] == episode
    )
    path = payload_path(run.ledger, where[0])
    data = bytearray(path.read_bytes())
    data[where[1] + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=f"episode {episode} is damaged"):
        replay(run)


def test_a_replay_of_a_moved_run_reads_its_own_image_files(recorded_with_images, tmp_path, capsys):
    shutil.copytree(recorded_with_images.folder, tmp_path / "run")
    run = RunPaths(tmp_path / "run")
    assert replay(run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal: 4 steps, 4 with checksums, 4 with metrics"
    for path in run.images.glob("*/*.png"):
        path.write_bytes(b"other")
    with raises_code("data.image_changed"):
        replay(run)


def test_another_learning_rate_in_the_configuration_shows_at_the_first_step(run, capsys):
    text = run.config.read_text()
    run.config.write_text(text.replace("lr: 0.01", "lr: 0.011"))
    assert run.config.read_text() != text
    assert replay(run) == 1
    assert first_difference(capsys.readouterr().out) == 1


def test_another_learning_rate_as_an_override_is_a_comparison_on_the_same_data(run, capsys):
    assert replay(run, "--name", "lr", "actor.optimizer.lr=0.011") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "loss" in lines[0]
    assert "grad norm" in lines[0]
    rows = [line.split("|") for line in lines[2 : 2 + STEPS]]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    first_live, first_own = rows[0][1].split()
    assert first_live != first_own or rows[0][2].split()[0] != rows[0][2].split()[1]
    assert lines[-1] == "weights: different from step 1 on"
    live, ours = read_metrics(run.metrics), read_metrics(run.replays / "lr" / "metrics.jsonl")
    assert ours[1]["batch/reward"] == live[1]["batch/reward"], "the data are the same"
    assert ours[1]["actor/lr"] != live[1]["actor/lr"]


def test_an_option_without_effect_leaves_the_weights_equal(run, capsys):
    assert replay(run, "actor.c_clip=1000000.0") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "weights: equal at every step"


def test_other_initial_weights_are_noticed(run, recorded, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(recorded.folder.parent / "model", other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    run.config.write_text(run.config.read_text().replace(f"path: {recorded.folder.parent}/model", f"path: {other}"))
    with raises_code("replay.other_weights", "actor"):
        replay(run)
    shutil.rmtree(other)
    with raises_code("model.not_found"):
        replay(run)


def test_a_comparison_may_begin_with_other_weights(run, recorded, tmp_path, capsys):
    other = tmp_path / "model"
    shutil.copytree(recorded.folder.parent / "model", other)
    assert replay(run, f"actor.path={other}", "--until", "1") == 0
    assert "weights: equal" in capsys.readouterr().out


def test_a_replay_ends_where_it_is_told_to(run, capsys):
    assert replay(run, "--until", "2", "--export", "--name", "two") == 0
    assert "equal: 2 steps" in capsys.readouterr().out
    assert (run.replays / "two" / "export" / "actor" / "model.safetensors").is_file()
    for until in ("0", "5"):
        with raises_code("replay.no_such_step", "1 to 4"):
            replay(run, "--until", until)


def test_a_replay_goes_on_from_a_recovery_checkpoint(run, capsys):
    shutil.rmtree(run.root.parent / "model", ignore_errors=True)
    run.initial_weights.write_text('{"actor": "of something else"}')
    assert replay(run, "--from-checkpoint", "2") == 0
    assert "equal: 2 steps" in capsys.readouterr().out
    with raises_code("replay.no_such_step", "--from-checkpoint 3", "step-000002"):
        replay(run, "--from-checkpoint", "3")


def test_a_run_that_still_goes_on_is_replayed_as_far_as_it_is_on_disk(run, capsys):
    """The ledger ends in the middle of a group, the metrics in the middle of a line."""
    events = events_path(run.ledger, 1)
    whole = events.read_bytes()
    last = whole.rindex(b'{"event":"group"', 0, whole.rindex(b'{"event":"consumed","step":3'))
    events.write_bytes(whole[: last + 40])
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    before = file_hashes(run.root)
    assert replay(run) == 0
    told = capsys.readouterr().out
    assert "step 3: weights equal\n" in told
    assert told.splitlines()[-1] == "equal: 3 steps, 3 with checksums, 2 with metrics"
    assert file_hashes(run.root) == before


def test_the_name_of_a_replay_is_taken_once(run):
    assert replay(run, "--until", "1", "--name", "mine") == 0
    with raises_code("replay.folder", "mine"):
        replay(run, "--until", "1", "--name", "mine")


@pytest.mark.parametrize("name", ["", "..", "../mine", "a/b", "/tmp/mine"])
def test_a_replay_writes_into_its_own_folder_only(run, name):
    before = set(run.root.parent.rglob("*"))  # earlier tests of the recorded run left replays in the copy
    with raises_code("replay.folder"):
        replay(run, "--until", "1", "--name", name)
    assert set(run.root.parent.rglob("*")) == before


def test_an_interrupted_replay_says_so(run, monkeypatch, capsys):
    def interrupted(ranks, on_poll):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_ranks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay(run, "--name", "mine")
    assert capsys.readouterr().err.endswith(f"areal: interrupted, all processes have ended: {run.replays / 'mine'}\n")


def test_a_checkpoint_with_no_step_after_it_is_refused_as_such(run):
    (run.recover / "step-000004").mkdir(parents=True, exist_ok=True)
    with raises_code("replay.no_such_step", "--from-checkpoint 4"):
        replay(run, "--from-checkpoint", "4")


def test_what_cannot_be_replayed_says_why(run, tmp_path):
    with raises_code("replay.no_run", tmp_path):
        replay(tmp_path)
    plan = run.plan.read_text()
    run.plan.unlink()
    with raises_code("replay.damaged_run", run.plan):
        replay(run)
    run.plan.write_text(json.dumps({"processes": []}))
    with raises_code("replay.damaged_run", run.plan):
        replay(run)
    run.plan.write_text(plan)
    run.config.unlink()
    with pytest.raises(ConfigError, match="no such configuration file"):
        replay(run)
    shutil.rmtree(run.ledger)
    run.ledger.mkdir()
    with raises_code("replay.no_run"):
        replay(run)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("train_dataset.batch_size=4", "the batches are recorded"),
        ("gconfig.n_samples=4", "the answers are recorded"),
        ("rollout.max_head_offpolicyness=0", "the rollouts are recorded"),
        ("native.dtype=float32", "no servers"),
        ("allocation_mode=native:d1+fsdp:d2", "the trainer ranks of the recorded run"),
        ("actor.weight_update_mode=disk", "sends weights nowhere"),
        ("total_train_steps=2", "--until"),
        ("key_of_a_script=2", "nothing in a replay reads it"),
        ("actor", "is not an override"),
    ],
)
def test_options_that_cannot_matter_or_need_other_data_are_refused(word, reason):
    with raises_code("replay.override", word.partition("=")[0], reason):
        check_overrides(["actor.eps_clip=0.3", word])


def test_every_section_of_the_configuration_is_either_updated_or_refused_with_a_reason(recorded):
    from areal.replay.__main__ import _OTHERS, REGRADED, UPDATED

    regraded = {path for path in REGRADED if "." not in path}
    assert {*UPDATED, *_OTHERS, *regraded} == {field.name for field in dataclasses.fields(recorded.config)}


def test_an_override_of_the_update_is_checked_like_any_option(run):
    with pytest.raises(ArealError, match=r"actor\.eps_clipp"):
        replay(run, "actor.eps_clipp=0.3")
