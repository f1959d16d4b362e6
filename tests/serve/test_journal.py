"""The journal of the service and its cut: the same state after every start, and nothing computed or answered twice."""

import asyncio
import contextlib
import json
import os
from functools import partial

import pytest

from areal.ledger.event_files import event_numbers, events_path, segment_numbers
from areal.serve import audit as audit_module
from areal.serve import journal as journal_module
from areal.serve.audit import audit_service
from areal.serve.journal import CUT_EVENTS, Journal
from areal.serve.service import snapshot_folder
from areal.serve.tenants import MAX_KEPT, MAX_REPLAYED, Tenants
from areal.system.durable import seal_folder
from tests.expect import raises_code
from tests.serve.test_service import Trainer, model_of, opened, results


class SavingTrainer(Trainer):
    """Writes what the audit reads of a snapshot: the number of optimiser steps."""

    num_steps = 0

    async def one(self, **options):
        done = await super().one(**options)
        if "step" in done:
            self.num_steps += 1
        elif "snapshot" in done:
            folder = snapshot_folder(self.service.folder, "s:train:0", int(done.partition("snapshot")[2]))
            folder.mkdir(parents=True)
            (folder / "state.json").write_text(json.dumps({"num_steps": self.num_steps}))
            seal_folder(folder)
        return done


async def trained(service, count, *, first=1, trainer=None):
    """`count` requests to a model, each second one an optimiser step, whose results a client has read."""
    model, trainer = "s:train:0", trainer or SavingTrainer(service)
    for seq in range(first, first + count):
        if seq % 2:
            await service.accept(model, seq, "loss", {"forward_only": False}, b"body %d" % seq)
        else:
            await service.accept(model, seq, "step", {"settings": {"lr": seq}})
        while not (operation := service.tenants.models[model].operations[seq]).is_done:
            await trainer.one()
        operation.is_read = True
    return trainer


def content(tenants):
    """Everything that a journal makes, once all results are read."""
    for model in tenants.models.values():
        for operation in model.operations.values():
            operation.is_read = True
    return json.loads(json.dumps(tenants.shortened(), sort_keys=True))


def start(folder):
    """The state of a start in `folder`."""
    tenants = Tenants()
    Journal(folder / "journal", tenants).close()
    return tenants


async def test_a_cut_keeps_the_state_and_a_start_reads_little(tmp_path):
    count = 3000
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await trained(service, count)
        actual = service.tenants.models[model]
        assert actual.num_done == count + 1
        assert actual.num_steps == count // 2
        expected = content(service.tenants)
        kept = results(service)
    assert len(kept) < 3 * MAX_KEPT
    size = sum(
        events_path(tmp_path / "journal", number).stat().st_size for number in event_numbers(tmp_path / "journal")
    )
    assert size < 500 * (CUT_EVENTS + 4 * MAX_KEPT + 4 * MAX_REPLAYED)
    assert content(start(tmp_path)) == expected
    facts, violations = audit_service(tmp_path)
    assert violations == []
    assert facts == {
        "models": 1, "requests": count + 1, "computed": count + 1, "failed": 0, "waiting": 0,
        "optimiser_steps": count // 2,
    }  # fmt: skip
    async with opened(tmp_path) as service:
        assert {seq: item for seq, item in results(service).items() if seq in kept} == kept
        again = SavingTrainer(service, run_id=1)
        await service.accept(model, count + 1, "loss", {"forward_only": True}, b"x")
        assert (await again.all())[:2] == ["reset", f"0restore{service.tenants.models[model].snapshot}"]


async def test_a_request_before_the_cut_is_answered_again_or_says_that_it_was_computed(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await trained(service, 1500)
        for seq in (1500, 1501 - MAX_KEPT):
            arguments = {"settings": {"lr": seq}} if seq % 2 == 0 else {"forward_only": False}
            body = b"body %d" % seq if seq % 2 else None
            assert await service.accept(model, seq, "loss" if seq % 2 else "step", arguments, body) == f"{model}:{seq}"
            with raises_code("request.duplicate_id", f"request {seq}"):
                await service.accept(model, seq, "step", {"settings": {"lr": 0.5}})
        with raises_code("request.forgotten", "request 2 of s:train:0 was computed once"):
            await service.accept(model, 2, "step", {"settings": {"lr": 2}})
        with raises_code("request.forgotten", "use the next seq_id"):
            service.tenants.operation(f"{model}:2", "me")
        repeated = await SavingTrainer(service, run_id=1).all()
        assert len(repeated) <= MAX_REPLAYED + 2
        assert repeated[:2] == ["reset", f"0restore{service.tenants.models[model].snapshot}"]


async def test_results_that_no_client_has_read_stay_after_a_cut(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        trainer = await trained(service, 1)
        service.tenants.models[model].operations[1].is_read = False
        await trained(service, 1500, first=2, trainer=trainer)
        assert results(service)[1] == {"did": "loss1"}
        assert 3 not in results(service)
    async with opened(tmp_path) as service:
        assert results(service)[1] == {"did": "loss1"}


BODIES = "payload-000003.bin"
"""The new payload file of `cut_of`."""


class Stopped(BaseException):
    """The process is killed here."""


class FileOperations:
    """Stops a process before, or in the middle of, its `last`-th change of the file system."""

    def __init__(self, monkeypatch, last=None, *, is_torn=False):
        self.done, self._last, self._is_torn = [], last, is_torn
        for name in ("write", "fsync", "unlink", "open"):
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name, real, *inputs, **options):
        if name == "open" and not inputs[1] & os.O_CREAT:
            return real(*inputs, **options)
        if len(self.done) == self._last:
            if name == "write" and self._is_torn:
                real(inputs[0], bytes(inputs[1])[: len(inputs[1]) // 2])
            raise Stopped
        what = os.readlink(f"/proc/self/fd/{inputs[0]}") if name in ("write", "fsync") else str(inputs[0])
        self.done.append((name, os.path.basename(what)))
        return real(*inputs, **options)


def cut(service):
    events = service.tenants.shortened()
    service.journal.cut(events)
    service.tenants.relocate(events)
    service.journal.remove_old()


async def cut_of(folder, monkeypatch, last=None, *, is_torn=False):
    """The operations of a cut of a journal with several files, stopped before operation `last`."""
    async with opened(folder) as service:
        await model_of(service)
        await service.record({"event": "sampler", "id": "s:sample:1", "session": "s", "path": "", "seq": None})
        trainer = await trained(service, 2 * MAX_REPLAYED + 3)
    async with opened(folder) as service:
        model = service.tenants.models["s:train:0"]
        for operation in model.operations.values():
            operation.is_read = True
        await service.accept("s:train:0", 2 * MAX_REPLAYED + 4, "loss", {"forward_only": False}, b"waits")
        expected = content(service.tenants)
        with monkeypatch.context() as patch:
            patch.setattr("areal.serve.tenants.MAX_KEPT", 10)
            operations = FileOperations(patch, last, is_torn=is_torn)
            with contextlib.suppress(Stopped):
                cut(service)
        return operations.done, expected, model, trainer


@pytest.fixture(scope="module")
def number_of_operations(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        done, _, _, _ = asyncio.run(cut_of(tmp_path_factory.mktemp("whole"), patch))
    return done


def test_the_new_files_are_durable_before_the_old_ones_are_removed(number_of_operations):
    done = number_of_operations
    first_removed = next(place for place, (name, _) in enumerate(done) if name == "unlink")
    before = done[:first_removed]
    assert [name for name, what in before if what == "events-000003.jsonl"] == ["open", "write", "fsync"]
    made = [place for place, item in enumerate(before) if item[0] == "open"]
    assert all(("fsync", "journal") in before[place:] for place in made)
    removed = [f"{kind}-00000{number}" for kind in ("events", "payload") for number in (1, 2)]
    assert [what.partition(".")[0] for name, what in done if name == "unlink"] == removed
    assert done.index(("fsync", "payload-000003.bin")) < done.index(("write", "events-000003.jsonl"))
    assert done[-1] == ("fsync", "journal")


@pytest.mark.parametrize("is_torn", [False, True])
async def test_a_kill_at_any_point_of_a_cut_leaves_a_valid_journal(
    tmp_path, monkeypatch, number_of_operations, is_torn
):
    for last, (name, _) in enumerate(number_of_operations):
        if (is_torn and name != "write") or number_of_operations[max(last - 2, 0) : last] == [("write", BODIES)] * 2:
            continue  # of the bodies the first two, and what follows the last
        folder = tmp_path / str(last)
        done, expected, model, _ = await cut_of(folder, monkeypatch, last, is_torn=is_torn)
        assert len(done) == last
        facts, violations = audit_service(folder)
        assert violations == [], (last, name)
        assert facts["requests"] == 2 * MAX_REPLAYED + 5
        assert facts["waiting"] == 1
        assert facts["optimiser_steps"] == MAX_REPLAYED + 1
        actual = start(folder)
        assert actual.models[model.id].num_done == model.num_done
        number = 2 * MAX_REPLAYED + 4
        assert actual.models[model.id].operations[number].digest == model.operations[number].digest
        if ("write", "events-000003.jsonl") not in done or is_torn:
            assert content(actual) == expected
        async with opened(folder) as service:  # it continues
            trainer = SavingTrainer(service, run_id=5)
            await service.accept(model.id, number + 1, "step", {"settings": {}})
            assert (await trainer.all())[-2:] == [f"0loss{number}", f"0step{number + 1}"]
        numbers = event_numbers(folder / "journal")
        assert all(item in numbers for item in segment_numbers(folder / "journal") if item >= numbers[0])


async def test_the_audit_finds_changes_of_a_cut_journal(tmp_path, monkeypatch):
    _, _, model, _ = await cut_of(tmp_path, monkeypatch)
    folder = tmp_path / "journal"
    assert audit_service(tmp_path)[1] == []
    async with opened(tmp_path) as service:
        event = {"event": "request", "model": model.id, "seq": 5, "kind": "step", "arguments": {}, "digest": "0"}
        await service.record(event)
    assert audit_service(tmp_path)[1][0] == "request 5 of s:train:0 has a request again after a cut"
    state = snapshot_folder(tmp_path, model.id, model.snapshot) / "state.json"
    facts = state.read_text()
    state.write_text(json.dumps({"num_steps": int(json.loads(facts)["num_steps"]) + 1}))
    violations = audit_service(tmp_path)[1]  # the request with number 5 was not applied
    assert f"has {model.snapshot // 2 + 1} optimiser steps, but the journal {model.snapshot // 2}" in violations[1]
    state.write_text(facts)
    cut = events_path(folder, event_numbers(folder)[0])
    cut.write_bytes(cut.read_bytes().replace(b'"num_steps":65', b'"num_steps":66'))
    with raises_code("ledger.damaged"):
        audit_service(tmp_path)


@pytest.mark.parametrize("moment", ["names", "events"])
async def test_an_audit_during_a_cut_begins_again(tmp_path, monkeypatch, moment):
    async with opened(tmp_path) as service:
        await model_of(service)
        await trained(service, MAX_REPLAYED + 5)
        place, name = (journal_module, "event_numbers") if moment == "names" else (audit_module, "opened_journal")
        real, cuts, is_cutting = vars(place)[name], [], asyncio.Event()

        def during(folder):
            result = real(folder)
            if moment == "events":
                result = result[0], iter(list(result[1]))
            if len(cuts) < 2 and not is_cutting.is_set():
                is_cutting.set()
                cuts.append(cut(service))
                is_cutting.clear()
            return result

        monkeypatch.setattr(place, name, during)
        facts, violations = audit_service(tmp_path)
        assert (facts["requests"], violations) == (MAX_REPLAYED + 6, [])
        assert len(cuts) == 2


async def test_a_damaged_journal_is_read_once(tmp_path, monkeypatch):
    async with opened(tmp_path) as service:
        await model_of(service)
    path = events_path(tmp_path / "journal", 1)
    path.write_bytes(path.read_bytes().replace(b'"rank":4', b'"rank":5', 1))
    reads, real = [], audit_module.opened_journal
    monkeypatch.setattr(audit_module, "opened_journal", lambda folder: reads.append(folder) or real(folder))
    with raises_code("ledger.damaged"):
        audit_service(tmp_path)
    assert len(reads) == 1


async def test_a_cut_keeps_of_ended_sessions_only_what_is_needed_and_one_payload_file(tmp_path):
    async with opened(tmp_path) as service:
        await model_of(service)
        trainer = await trained(service, MAX_REPLAYED + 5)
        await service.record({"event": "ended", "id": "s"})
        cut(service)
        model = service.tenants.models["s:train:0"]
        assert sorted(model.operations) == [0, *range(MAX_REPLAYED + 1, MAX_REPLAYED + 6)]  # nobody has read that of 0
        assert results(service)[MAX_REPLAYED + 1] == {"did": f"loss{MAX_REPLAYED + 1}"}
        assert segment_numbers(tmp_path / "journal") == [2]
        assert audit_service(tmp_path)[1] == []
        again = SavingTrainer(service, run_id=trainer.run_id + 1)
        await service.accept(model.id, MAX_REPLAYED + 6, "step", {"settings": {}})
        assert (await again.all())[:3] == ["reset", f"0restore{MAX_REPLAYED}", f"0loss{MAX_REPLAYED + 1}"]


async def test_a_missing_events_file_is_an_error(tmp_path):
    for _ in range(3):
        async with opened(tmp_path) as service:
            await service.record({"event": "session", "id": "s", "key": "me"})
    events_path(tmp_path / "journal", 3).unlink()
    with raises_code("ledger.damaged", "events-000003.jsonl is missing"):
        start(tmp_path)


async def test_a_model_without_optimiser_steps_has_snapshots(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        for seq in range(1, 2 * MAX_REPLAYED + 1):
            await service.accept(model, seq, "loss", {"forward_only": False}, b"a")
        last = 2 * MAX_REPLAYED - 1
        assert (await Trainer(service).all())[-2:] == [f"0snapshot{last}", f"0loss{last + 1}"]
