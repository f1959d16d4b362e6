"""The ledger's command line and what it prints: exit status, histories, stats, progress."""

import io
import json
import subprocess
import sys

import pytest

from areal.ledger.__main__ import main
from areal.ledger.audit import audit
from areal.ledger.event_files import Progress, events_path, payload_path, recover_folder
from areal.ledger.show import Samples, show_episode, show_step
from areal.ledger.stats import Histogram, ledger_stats
from tests.expect import raises_code


def run(capsys, *arguments):
    """Exit status, standard output, standard error."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def a_life(forge):
    """Two steps; the trainer goes back to step 1; the controller dies; episode 5 is run again and trained on."""
    forge.group_size = 1
    forge.two_steps()
    forge.published(1)
    forge.attached(1, 1)
    forge.trained(1, weights="cc", again=True)
    forge.committed(2)
    forge.started()
    forge.admitted(5, attempt=1, version=2)
    forge.admitted(6, version=2)
    forge.accepted(5, version=2, replicas=["server-0", "server-1"], interruptions=3)
    forge.failed(6)
    forge.batched(2, 4, 5)
    forge.trained(2, weights="dd")
    forge.events.append(
        {"event": "evaluated", "step": 3, "mode": "accuracy", "result": {"reward": 0.5, "num": 8.0}, "at": 1.0}
    )
    forge.write(at=lambda number: 1e9 + number)


def test_exit_status_of_clean_broken_and_missing_ledgers(forge, capsys, tmp_path):
    a_life(forge)
    status, out, err = run(capsys, "audit", tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("admitted 7 = running 0 + waiting 0 + rejected 0 + failed 1 + batched 0 + consumed 6\n")
    assert "steps trained again: 1, bitwise equal: 0\n" in out
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in forge.folder.iterdir()}
    payload_path(forge.folder, 1).rename(tmp_path / "aside")
    status, out, _ = run(capsys, "audit", tmp_path)
    assert status == 1
    assert "VIOLATION [payload]" in out
    (tmp_path / "aside").rename(payload_path(forge.folder, 1))
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in forge.folder.iterdir()}
    (tmp_path / "empty").mkdir()
    missing = {
        tmp_path / "none": "launch.no_run_folder",
        tmp_path / "empty": "ledger.not_found",
        events_path(forge.folder, 1): "ledger.not_found",
    }
    for nothing, code in missing.items():
        for command in ("audit", "stats"):
            status, out, err = run(capsys, command, nothing)
            assert (status, out) == (2, "")
            assert err.startswith("areal: error: ")
            assert err.endswith(f"[{code}]\n")
            assert err.count("\n") == 1


def test_json_output_is_complete(forge, capsys, tmp_path):
    a_life(forge)
    forge.events.clear()
    forge.admitted(*range(7, 57), version=9)
    events_path(forge.folder, 1).rename(tmp_path / "kept")
    forge.write()
    status, out, _ = run(capsys, "audit", tmp_path, "--json")
    result = json.loads(out)
    assert status == 1
    assert not result["clean"]
    assert [number for violation in result["violations"] for number in violation["episodes"]][-50:] == list(
        range(7, 57)
    )
    (tmp_path / "kept").rename(events_path(forge.folder, 1))
    status, out, _ = run(capsys, "audit", tmp_path, "--json")
    result = json.loads(out)
    assert (status, result["clean"], result["num_admitted"], result["trained_again"]) == (0, True, 7, [1])


def test_the_history_of_an_episode(forge):
    a_life(forge)
    lines = [line.partition(" s  ")[2] or line for line in show_episode(forge.folder, 3)]
    assert lines[0] == "episode 3: consumed"
    assert lines[1].startswith("admitted at policy version 0: row ")
    assert lines[1].endswith(" of the dataset, epoch 0, position 3")
    assert lines[2] == (
        "accepted: reward 3, 1 trajectories with 2 tokens (1 in the loss) by versions 0 to 0; 0.250 s on server-0, "
        "0 interruptions, num_turns 1"
    )
    assert lines[3:] == [
        "in batch 1, place 2 of 2, for policy version 1, staleness 1",
        "consumed: trained on in step 1, which made version 2",
        "included in the checkpoint after 2 steps (recover/step2)",
        "the trainer recovered at step 1: batch 1 is trained on again",
        "trained on again in step 1; the weights differ",
        "included in the checkpoint after 2 steps (recover/step2)",
    ]
    out = "\n".join(show_episode(forge.folder, 5))
    assert "the controller restarted: this attempt is lost" in out
    assert "admitted at policy version 2, attempt 1: row " in out
    assert "0.250 s on server-0, server-1, 3 interruptions" in out
    lines = show_episode(forge.folder, 6)
    assert lines[0] == "episode 6: failed"
    assert lines[-1].endswith("failed: ValueError: no")
    payload_path(forge.folder, 1).unlink()
    assert show_episode(forge.folder, 3)[-1].startswith("the trajectories cannot be read: ")


def test_the_history_of_the_batch_of_a_step(forge):
    a_life(forge)
    lines = show_step(forge.folder, 2)
    assert lines[0] == "batch of step 2"
    assert [line.partition(" s  ")[2] for line in lines[1:4]] == [
        "composed of 2 episodes for policy version 2",
        "consumed, which made version 3 with checksum dd",
        "evaluated after this step (accuracy): reward 0.5, num 8",
    ]
    assert [line.split()[:2] for line in lines[5:]] == [["1", "4"], ["2", "5"]]
    assert lines[5].endswith(" 4        2  0 to 0")
    assert any("trained on again; the weights differ" in line for line in show_step(forge.folder, 1))


def test_the_history_of_a_batch_has_the_set_point_of_staleness(forge):
    forge.two_steps()
    batch = next(event for event in forge.events if event["event"] == "batched" and event["step"] == 1)
    batch["stats"] = {"setpoint/target": 1.5, "setpoint/value": 1.4, "setpoint/error": -0.1, "setpoint/lead": 1.75}
    forge.write()
    line = "set-point of staleness: target 1.5, value 1.4, error -0.1; lead 1.75 versions"
    assert line in show_step(forge.folder, 1)
    assert not any("set-point" in line for line in show_step(forge.folder, 0))


def test_missing_episodes_and_steps_name_the_known_ones(forge):
    a_life(forge)
    with raises_code("ledger.not_found", forge.folder, "0 to 6"):
        show_episode(forge.folder, 7)
    with raises_code("ledger.not_found", "0 to 2"):
        show_step(forge.folder, 3)


def test_stats_of_a_ledger(forge, capsys, tmp_path):
    a_life(forge)
    stats = ledger_stats(forge.folder)
    assert stats.staleness.counts == {0: 3, 1: 2, 2: 1}  # batches 0 and 1 and 2, each token with its own age
    assert stats.length.counts == {2: 6}
    assert stats.latency.counts == {250: 6}
    assert stats.interruptions.counts == {0: 5, 3: 1}
    assert stats.attempts.counts == {1: 6, 2: 1}
    assert stats.reasons == {"failed: ValueError": 1}
    assert stats.seconds == pytest.approx(len(forge.events) - 2), "one group a second, less the gap before a restart"
    assert stats.rates()["payload_bytes_per_episode"] == len(forge.payloads) / 6
    status, out, _ = run(capsys, "stats", tmp_path)
    assert status == 0
    assert "staleness of trained tokens (versions): 6, mean 0.6667, median 0, 99% 2, maximum 2" in out
    assert "  0 ######################################## 3 (50.0%)\n" in out
    assert "  2 ##############                           1 (16.7%)\n" in out
    status, out, _ = run(capsys, "stats", tmp_path, "--json")
    result = json.loads(out)
    assert result["histograms"]["staleness"]["bins"][2] == {"from": 2.0, "to": 2.0, "count": 1}
    assert result["reasons"] == {"failed: ValueError": 1}


def test_stats_skip_unreadable_payloads(forge, capsys, tmp_path):
    a_life(forge)
    path = payload_path(forge.folder, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert ledger_stats(forge.folder).unreadable == [5]
    path = events_path(forge.folder, 1)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    status, out, _ = run(capsys, "stats", tmp_path)
    assert status == 0
    assert "staleness of trained tokens: no values" in out
    assert "incomplete: " in out


def test_histogram_bins_of_large_values_double():
    histogram = Histogram("time", "s", scale=0.001)
    histogram.counts.update([0, 3, 4, 7, 1000])
    assert histogram.bins() == [
        (0, 0, 1), (1, 1, 0), (2, 3, 1), (4, 7, 2), (8, 15, 0), (16, 31, 0), (32, 63, 0), (64, 127, 0),
        (128, 255, 0), (256, 511, 0), (512, 1023, 1),
    ]  # fmt: skip
    assert histogram.quantile(0.5) == pytest.approx(0.004)
    assert sum(line.endswith("(20.0%)") for line in histogram.lines()) == 3
    assert "0.512 to 1.023 ########" in histogram.lines()[-1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        (io.StringIO(), "512 rows ...\n768 rows ...\n1024 rows ...\n"),
        (Terminal(), "\r512 rows ...\r768 rows ...\r1024 rows ...\r1280 rows ...\r\x1b[K"),
    ],
    ids=["file", "terminal"],
)
def test_progress_is_printed_during_long_reads(stream, shown):
    now_s = [0.0]
    with Progress("rows", stream=stream, clock=lambda: now_s[0]) as progress:
        for _ in range(256):
            progress.step()
        assert stream.getvalue() == "", "nothing in the first two seconds"
        for _ in range(4 * 256):
            now_s[0] += 1.0 / 64
            progress.step()
    assert stream.getvalue() == shown


def test_a_closed_output_pipe_is_no_error(forge, tmp_path):
    a_life(forge)
    command = f"{sys.executable} -m areal.ledger stats {tmp_path} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=250)
    assert done.stderr == ""


def test_a_batch_that_no_trainer_consumed_is_skipped_once(forge, capsys, tmp_path):
    forge.two_steps()
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.write()
    assert run(capsys, "skip", tmp_path)[0] == 0
    state = recover_folder(forge.folder).state
    assert (state.next_step, sorted(state.batches), state.reasons["rejected: skipped"]) == (2, [0, 1], 2)
    assert audit(forge.folder).is_clean
    assert ledger_stats(forge.folder).reasons["rejected: skipped"] == 2
    status, _, err = run(capsys, "skip", tmp_path)
    assert (status, "[ledger.no_open_batch]" in err) == (2, True)


def test_the_step_of_a_skipped_batch_gets_another_one(forge):
    forge.two_steps()
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.skipped(2, 4, 5)
    forge.started()
    forge.attached(2, 2)
    forge.admitted(6, 7, version=2)
    forge.accepted(6, 7, version=2)
    forge.batched(2, 6, 7)
    forge.trained(2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert report.counts["rejected"] == report.reasons["rejected: skipped"] == 2
    assert show_episode(forge.folder, 4)[0] == "episode 4: rejected"
    assert sum("skipped" in line for line in show_step(forge.folder, 2)) == 1
    records = Samples.read(forge.folder)
    assert [records.episode(number).reason for number in (4, 6)] == ["skipped", ""]


@pytest.mark.parametrize("step", [1, 3])
def test_a_skip_of_a_consumed_or_unknown_batch_is_a_violation(forge, step):
    forge.two_steps()
    forge.skipped(step, 2, 3)
    forge.write()
    assert {violation.rule for violation in audit(forge.folder).violations} == {"skipped"}
    with raises_code("ledger.broken_rule"):
        recover_folder(forge.folder)
