"""What an audit says of a whole ledger: the equation, what is no violation, lists for people and for programs."""

import contextlib
from dataclasses import replace

import orjson

from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.data.image_files import ImageFiles
from areal.ledger.audit import audit
from areal.ledger.event_files import AppendFile, PayloadReader, events_path
from areal.ledger.ledger import GroupWriter
from areal.ledger.payload import encode_episode, read_table
from areal.ledger.state import LedgerState


def test_counts_of_a_clean_ledger_add_up(forge):
    forge.two_steps()
    forge.rejected(5)
    forge.admitted(6, version=2)
    forge.failed(6)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    first = "admitted 7 = running 0 + waiting 1 + rejected 1 + failed 1 + batched 0 + consumed 4"
    assert report.lines()[0] == first
    assert report.lines()[-1] == "clean"
    assert report.reasons == {"rejected: workflow": 1, "failed: ValueError": 1}


def test_audit_checks_payloads_with_and_without_baselines(forge):
    forge.baseline = 0.5
    forge.two_steps()
    forge.baseline = None
    forge.accepted(5)
    forge.write()
    assert audit(forge.folder).is_clean
    with contextlib.closing(PayloadReader(forge.folder)) as reader:
        accepted = [event for event in forge.events if event["event"] == "accepted"]
        assert [read_table(reader, event).finished.tolist() for event in accepted] == [[1]] * 6


def test_a_ledger_that_starts_after_step_0_is_noted(forge):
    forge.started()
    forge.published(3)
    forge.attached(3, 3)
    forge.admitted(0, 1, version=3)
    forge.accepted(0, 1, version=3)
    forge.batched(3, 0, 1, version=3)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert any("starts at step 3;" in line for line in report.lines())


def test_steps_trained_again_are_valid_and_compared_by_weights(forge):
    forge.two_steps()
    forge.started()
    forge.published(0)
    forge.attached(0, 0)
    forge.trained(0, weights="aa", again=True)
    forge.trained(1, weights="other", again=True)
    forge.published(1)
    forge.attached(1, 1)
    forge.trained(1, weights="", again=True)
    forge.admitted(5, attempt=1, version=2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert "steps trained again: 3, bitwise equal: 1" in report.lines()
    assert "trained again to other weights than before: step 1" in report.lines()
    assert (report.num_controllers, report.num_attaches, report.num_attempts) == (2, 3, 7)


def test_a_trainer_that_goes_back_without_batches_ends_all_attempts(forge):
    """No recorded batch leads to their version again, so they run again."""
    forge.started()
    forge.attached(3, 3)
    forge.admitted(0, 1, version=3)
    forge.published(2)
    forge.attached(2, 2)
    forge.admitted(0, attempt=1, version=2)
    forge.accepted(0, version=2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    forge.accepted(1, version=3)
    forge.write()
    assert [violation.rule for violation in audit(forge.folder).violations] == ["verdict"]


def test_interrupted_episodes_that_the_run_does_not_need_are_noted(forge):
    """The controller after them trains no further step, so it starts nothing. A longer run starts them first."""
    forge.two_steps()
    forge.started(total_steps=2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert report.counts["running"] == 1
    assert any(note.startswith("1 running episodes were interrupted") for note in report.notes)
    forge.started(total_steps=9)
    forge.admitted(5, attempt=1, version=2)
    forge.admitted(6, version=2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert report.notes == []


def test_a_last_version_out_of_order_is_valid(forge):
    forge.two_steps()
    forge.published(1)
    forge.write()
    assert audit(forge.folder).is_clean


def test_a_trainer_that_goes_back_twice_before_it_attaches_breaks_no_rule(forge):
    """It died after its first publication, and its checkpoint was found damaged at the next start."""
    forge.two_steps()
    forge.published(1)
    forge.published(0)
    forge.attached(0, 0)
    forge.trained(0, again=True)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()


def test_a_trainer_that_goes_back_and_then_less_far_before_it_attaches_breaks_no_rule(forge):
    """Its checkpoint could not be read at the first start only."""
    forge.two_steps()
    forge.published(1)
    forge.published(2)
    forge.attached(2, 2)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()


def test_an_episode_that_was_never_admitted_breaks_the_sum(forge):
    forge.two_steps()
    forge.accepted(77)
    forge.write()
    assert audit(forge.folder).lines()[0].startswith("admitted 6 != running 1 + waiting 2 ")


def test_audit_reports_a_difference_to_the_state_machine(forge, monkeypatch):
    forge.two_steps()
    forge.failed(5)
    forge.write()
    with monkeypatch.context() as patch:
        patch.setitem(LedgerState._HANDLERS, "failed", lambda state, event: None)
        assert [violation.rule for violation in audit(forge.folder).violations] == ["state machine"]

    def refuse(state, event):
        raise LedgerError("refused", code="ledger.broken_rule")

    monkeypatch.setitem(LedgerState._HANDLERS, "failed", refuse)
    (violation,) = audit(forge.folder).violations
    assert violation.rule == "state machine"
    assert violation.message.endswith(": refused")


def test_a_trajectory_whose_versions_decrease_is_noted(forge):
    forge.started()
    forge.attached(0, 0)
    forge.admitted(*range(7))
    trajectory = {"loss_mask": [0, 1, 1], "rollout_logprobs": [0.0] * 3, "reward": 1.0, "finished": True}
    rising, falling, equal = (
        Trajectory(token_ids=[1, 2, 3], output_versions=[-1, *versions], **trajectory)
        for versions in [(0, 1), (1, 0), (0, 0)]
    )
    episode = encode_episode(6, TrajectoryGroup(trajectories=[rising, falling, equal, rising]))
    where = (1, len(forge.payloads), len(episode.payload))
    forge.accepted(6, payload=where, trajectories=4, tokens=12, generated=8, max_version=1, reward=1.0)
    forge.payloads = forge.payloads[: where[1]] + episode.payload
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()
    assert [note.split()[:2] for note in report.notes] == [["1", "trajectories"]]


def test_long_lists_are_shortened_in_text_but_not_in_json(forge):
    forge.two_steps()
    forge.admitted(*range(6, 6 + 40), version=2)
    for number in range(6, 6 + 40):
        forge.accepted(number, version=2, payload=(9, 0, 60))
    for number in range(6, 6 + 30):
        forge.failed(number)
    forge.write()
    report = audit(forge.folder)
    assert len(report.violations) == 31
    text = "\n".join(report.lines())
    assert "it holds episodes 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 ... and 30 more" in text
    assert "VIOLATION [verdict] ... and 20 more (--json lists all)" in text
    result = report.to_json()
    assert result["violations"][-1]["episodes"] == tuple(range(6, 46))
    assert len(result["violations"]) == 31
    orjson.dumps(result)


def test_audit_may_run_while_the_ledger_is_written(forge):
    """Between any two bytes: what is half there is no violation, and nothing is changed."""
    forge.two_steps()
    audits = []

    class Slow(AppendFile):
        def write(self, data):
            for begin in range(0, len(data), 97):
                super().write(data[begin : begin + 97])
                if events_path(forge.folder, 1).exists():
                    audits.append(audit(forge.folder))

    forge.folder.mkdir()
    writer, payloads = GroupWriter(forge.folder, 1, open_file=Slow), [(1, forge.payloads)]
    for begin in range(0, len(forge.events), 5):
        writer.write(forge.events[begin : begin + 5], payloads)
        payloads = []
    writer.close()
    assert len(audits) > 20
    assert any(report.incomplete for report in audits)
    assert all(report.is_clean for report in audits)
    assert audits[-1].num_admitted == 6


def test_images_of_payloads_must_be_unchanged_files(forge):
    files = ImageFiles(forge.folder.parent / "images")
    images = tuple(ImageRef(files.put(data), (1, 2, 2)) for data in (b"one", b"two"))
    for number in (0, 4):
        group = forge._short_answer(number, 0)
        forge.answers[number] = replace(group, trajectories=[replace(group.trajectories[0], images=images)])
    forge.two_steps()
    forge.write()
    assert audit(forge.folder).is_clean
    files.path(images[1].sha256).write_bytes(b"2")
    report = audit(forge.folder)
    assert [(violation.rule, violation.episodes) for violation in report.violations] == [("image", (0,))]
    files.path(images[0].sha256).unlink()
    assert len(audit(forge.folder).violations) == 2
