"""Incomplete and damaged files: cut at every byte, flipped at every byte, missing or of another run. All detected."""

import itertools
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.errors import LedgerError
from areal.ledger.audit import audit
from areal.ledger.event_files import AppendFile, LedgerReader, events_path, payload_path, read_payload, recover_folder
from areal.ledger.ledger import GroupWriter, Ledger
from areal.ledger.payload import check_payload
from areal.ledger.state import LedgerState
from tests.expect import raises_code


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Thousands of them would take minutes, and no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def continue_ledger(folder, started):
    """What the next controller does: recover, then write."""
    result = recover_folder(folder)
    writer = GroupWriter(folder, result.next_number, after=result.end)
    writer.write([started], [])
    writer.close()
    return result


def group_ends(data):
    """Offsets behind each group of a file."""
    starts = [0]
    while (result := data.find(b'{"event":"group","number":', starts[-1] + 1)) >= 0:
        starts.append(result)
    return [*starts[1:], len(data)]


def restore(folder, files):
    """Make the folder hold just these files."""
    for path in folder.iterdir():
        if path not in files:
            path.unlink()
    for path, data in files.items():
        path.write_bytes(data)


def contents_of(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def is_prefix(events, of):
    return events == of[: len(events)]


def one_step(forge):
    """Small, for tests that look at every byte."""
    forge.group_size = 2
    forge.started()
    forge.attached(0, 0)
    forge.admitted(0, 1)
    forge.accepted(0, 1)
    forge.batched(0, 0, 1)
    forge.trained(0)


def test_events_cut_at_any_byte_lose_only_the_last_group(forge):
    one_step(forge)
    forge.write()
    files, said = contents_of(forge.folder), list(LedgerReader(forge.folder).events())
    whole = files[events_path(forge.folder, 1)]
    ends, audited = group_ends(whole), set()
    assert len(ends) == 5
    for size in range(len(whole) + 1):
        restore(forge.folder, files | {events_path(forge.folder, 1): whole[:size]})
        intact = [end for end in ends if end <= size]
        result = continue_ledger(forge.folder, forge.events[0])
        assert result.end.number == len(intact)
        assert events_path(forge.folder, 1).stat().st_size == (intact or [0])[-1], "the incomplete tail is cut"
        reader = LedgerReader(forge.folder)
        again = list(reader.events())
        assert reader.incomplete is None
        assert is_prefix(again[:-2], said)
        assert result.state == LedgerState.replay(again[:-2])
        if len(intact) not in audited:
            audited.add(len(intact))
            assert audit(forge.folder).is_clean
    assert len(audited) == len(ends) + 1


def test_a_payload_cut_at_any_byte_is_reported_and_not_served(forge):
    forge.two_steps()
    forge.write()
    path = payload_path(forge.folder, 1)
    wheres = {event["id"]: tuple(event["payload"]) for event in forge.events if event["event"] == "accepted"}
    for size in range(len(forge.payloads)):
        path.write_bytes(forge.payloads[:size])
        cut = [number for number, (_, offset, length) in wheres.items() if offset + length > size]
        violations = audit(forge.folder).violations
        assert {violation.rule for violation in violations} == {"payload"}
        assert [number for violation in violations for number in violation.episodes] == cut
        with raises_code("ledger.bad_payload"):
            read_payload(forge.folder, wheres[cut[0]])


def test_a_payload_cut_short_whose_event_was_not_written_is_ignored(forge):
    """Payloads are written first: after a kill in between, the ledger has bytes that no event names."""
    forge.started()
    forge.attached(0, 0)
    forge.admitted(0, 1)
    before = len(forge.events)
    forge.accepted(0, 1)
    accepted, forge.events = forge.events[before:], forge.events[:before]
    forge.write()
    files = contents_of(forge.folder)
    for size in range(len(forge.payloads) + 1):
        restore(forge.folder, files | {payload_path(forge.folder, 1): forge.payloads[:size]})
        result = recover_folder(forge.folder)
        assert sorted(result.state.running) == [0, 1]
        writer = GroupWriter(forge.folder, result.next_number, after=result.end)
        again = [event | {"payload": (result.next_number, *event["payload"][1:])} for event in accepted]
        writer.write(again, [(result.next_number, forge.payloads)])
        writer.close()
        report = audit(forge.folder)
        assert report.is_clean, report.lines()
        assert report.counts["waiting"] == 2


def test_a_changed_event_byte_is_an_error_or_cuts_the_last_group(forge):
    one_step(forge)
    forge.write()
    path, said = events_path(forge.folder, 1), list(LedgerReader(forge.folder).events())
    whole = path.read_bytes()
    last_group = group_ends(whole)[-2]
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
        reader = LedgerReader(forge.folder)
        result = list(itertools.chain.from_iterable(reader.groups()))
        assert is_prefix(result, said)
        if offset < last_group:
            assert reader.damage
            assert reader.incomplete is None
        else:
            assert not reader.damage
            assert reader.incomplete.offset == last_group
    path.write_bytes(whole[:50] + b"?" + whole[51:])
    assert [violation.rule for violation in audit(forge.folder).violations] == ["damage"]
    with raises_code("ledger.damaged", "events-000001.jsonl is damaged at byte 0"):
        recover_folder(forge.folder)
    assert len(path.read_bytes()) == len(whole), "durable data is not cut, so that it can be repaired"


def test_a_changed_payload_byte_is_reported_and_not_served(forge):
    forge.two_steps()
    forge.write()
    path = payload_path(forge.folder, 1)
    wheres = {event["id"]: tuple(event["payload"]) for event in forge.events if event["event"] == "accepted"}
    for number, where in wheres.items():
        for offset in range(where[1], where[1] + where[2]):
            path.write_bytes(
                forge.payloads[:offset] + bytes([forge.payloads[offset] ^ 4]) + forge.payloads[offset + 1 :]
            )
            (violation,) = audit(forge.folder).violations
            assert (violation.rule, violation.episodes) == ("payload", (number,))
            with pytest.raises(LedgerError):
                check_payload(number, read_payload(forge.folder, where))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_never_yield_events_that_were_not_written(forge, data):
    """Some pieces of the file are replaced, removed, doubled: a reader finds a beginning of it, or refuses it."""
    if not forge.events:
        forge.two_steps()
        forge.group_size = 4
    forge.write()
    path, said = events_path(forge.folder, 1), list(LedgerReader(forge.folder).events())
    harmed = path.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(harmed))] * 2)))
        inserted = data.draw(st.one_of(st.binary(max_size=40), st.just(harmed[begin:end] * 2), st.just(harmed[:end])))
        harmed = harmed[:begin] + inserted + harmed[end:]
    path.write_bytes(harmed)
    reader = LedgerReader(forge.folder)
    assert is_prefix(list(itertools.chain.from_iterable(reader.groups())), said)
    if not reader.damage:
        continue_ledger(forge.folder, forge.events[0])
        assert audit(forge.folder).is_clean


@pytest.mark.parametrize("garbage", [b"\0" * 4096, b"\n", b'{"event":"group","number":9', b"\xff\xfe{}\n"])
def test_garbage_after_the_events_is_cut(forge, garbage):
    forge.two_steps()
    end = forge.write()
    with events_path(forge.folder, 1).open("ab") as file:
        file.write(garbage)
    assert audit(forge.folder).incomplete.size == len(garbage)
    assert continue_ledger(forge.folder, forge.events[0]).end == end
    assert audit(forge.folder).is_clean


def three_files(forge):
    forge.two_steps()
    end = forge.write()
    for number in (2, 3):
        forge.events, forge.payloads = [], b""
        forge.started()
        for earlier in range(5, 4 + number):
            forge.admitted(earlier, attempt=4 + number - earlier, version=2)
        forge.admitted(4 + number, version=2)
        end = forge.write(number=number, after=end)
    assert audit(forge.folder).is_clean


def test_a_missing_events_file_is_refused_unless_it_is_the_last(forge):
    three_files(forge)
    files = contents_of(forge.folder)
    for number in (1, 2):
        restore(forge.folder, files)
        events_path(forge.folder, number).unlink()
        with pytest.raises(LedgerError, match=f"events-00000{number + 1}.jsonl") as error:
            recover_folder(forge.folder)
        assert error.value.code == "ledger.damaged"
        assert "damage" in {violation.rule for violation in audit(forge.folder).violations}
    restore(forge.folder, files)
    events_path(forge.folder, 3).unlink()
    assert [violation.rule for violation in audit(forge.folder).violations] == ["lost events"]
    assert recover_folder(forge.folder).lost == (events_path(forge.folder, 3),)
    assert continue_ledger(forge.folder, forge.events[0]).next_number == 4, "no name is used twice"
    report = audit(forge.folder)
    assert report.is_clean
    assert [str(events_path(forge.folder, 3)) in note for note in report.notes].count(True) == 1
    assert recover_folder(forge.folder).lost == ()


def test_a_further_payload_segment_needs_no_events_file(forge, monkeypatch):
    forge.two_steps()
    forge.write()
    payload_path(forge.folder, 2).write_bytes(b"incomplete group")
    assert recover_folder(forge.folder).lost == (events_path(forge.folder, 2),)
    monkeypatch.setattr("areal.ledger.event_files.SEGMENT_BYTES", len(forge.payloads))
    assert recover_folder(forge.folder).lost == ()
    assert audit(forge.folder).is_clean


def test_a_writer_killed_before_its_first_group_leaves_no_payload_without_an_events_file(forge):
    def refuse(path):
        raise OSError(28, "No space left on device", str(path))

    forge.folder.mkdir()
    with pytest.raises(OSError, match="No space"):
        GroupWriter(forge.folder, 1, open_file=refuse).write([{"event": "started"}], [(1, b"payload")])
    writer = GroupWriter(
        forge.folder, 1, open_file=lambda path: AppendFile(path) if "events" in path.name else refuse(path)
    )
    with pytest.raises(OSError, match="No space"):
        writer.write([{"event": "started"}], [(1, b"payload")])
    assert [path.name for path in forge.folder.iterdir()] == ["events-000001.jsonl"]


def test_a_payload_file_that_is_too_short_is_found_at_the_start_with_its_remedy(forge):
    forge.two_steps()
    forge.write()
    path = payload_path(forge.folder, 1)
    waiting = LedgerState.replay(forge.events).waiting[4].payload
    path.write_bytes(forge.payloads[: waiting[1] + waiting[2] - 1])
    with raises_code("ledger.bad_payload", path, "step 2"):
        recover_folder(forge.folder)
    path.unlink()
    with raises_code("ledger.bad_payload", path, "step 2"):
        recover_folder(forge.folder)


def test_a_damaged_payload_of_a_served_batch_names_the_remedy(forge):
    forge.two_steps()
    forge.write()
    path = payload_path(forge.folder, 1)
    path.write_bytes(bytes([forge.payloads[0] ^ 1]) + forge.payloads[1:])
    result = recover_folder(forge.folder).state
    ledger = Ledger.open(forge.folder)
    with raises_code("ledger.bad_payload", "episode 0", "step 2"):
        ledger.payload(0, result.batches[0].payloads[0])


def test_a_file_of_another_ledger_or_of_a_second_writer_is_refused(forge, tmp_path):
    three_files(forge)
    files = contents_of(forge.folder)
    shutil.copy(events_path(forge.folder, 2), events_path(forge.folder, 3))
    with raises_code("ledger.damaged", "events-000003.jsonl"):
        recover_folder(forge.folder)
    restore(forge.folder, files)
    result = recover_folder(forge.folder)
    first, second = (GroupWriter(forge.folder, number, after=result.end) for number in (4, 5))
    for writer in (first, second):
        writer.write([forge.events[0]], [])
        writer.close()
    with raises_code("ledger.damaged", "events-000005.jsonl"):
        recover_folder(forge.folder)


def test_damage_before_a_later_file_is_an_error(forge):
    three_files(forge)
    path = events_path(forge.folder, 2)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        LedgerError, match=r"events-000002.jsonl is damaged at byte \d+, .*events-000003.jsonl"
    ) as error:
        recover_folder(forge.folder)
    assert error.value.code == "ledger.damaged"
    assert audit(forge.folder).incomplete is None


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_recovery_killed_at_any_point_can_be_repeated(forge, monkeypatch):
    forge.two_steps()
    forge.write()
    path = events_path(forge.folder, 1)
    whole = path.read_bytes()
    expected = None
    for die_at in itertools.count():
        path.write_bytes(whole[:-7])
        calls = itertools.count()

        def fsync(descriptor, calls=calls, die_at=die_at):
            if next(calls) == die_at:
                raise Killed

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            expected = recover_folder(forge.folder)
        except Killed:
            monkeypatch.setattr(os, "fsync", lambda descriptor: None)
            again = recover_folder(forge.folder)
            assert again.end.number == len(group_ends(whole)) - 1
            assert audit(forge.folder).incomplete is None
            continue
        break
    assert die_at >= 3
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert recover_folder(forge.folder) == expected


def test_data_of_a_killed_controller_is_fsynced_before_the_next_one_continues(forge, monkeypatch):
    """Data written without fsync can be read, but a power failure would remove it after the next writer continued."""
    forge.two_steps()
    forge.write()
    sure = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: sure.add(os.fstat(descriptor).st_ino))
    recover_folder(forge.folder)
    wanted = [events_path(forge.folder, 1), payload_path(forge.folder, 1), forge.folder.parent]
    assert {path.stat().st_ino for path in wanted} <= sure
