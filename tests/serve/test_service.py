"""The service with its journal, without HTTP: order of requests, failures, turns, restarts of both sides."""

import asyncio
import contextlib
import json

import pytest

from areal.serve.audit import audit_command, audit_service
from areal.serve.service import MAX_DELIVERIES, ServedModel, Service
from areal.serve.tenants import MAX_REPLAYED, MAX_TURN, Schedule, Tenants
from tests.expect import raises_code

SERVED = ServedModel(name="base", tokenizer="t", context_length=64, max_rank=8, max_resident=2)
SETTINGS = {"rank": 4}


@contextlib.asynccontextmanager
async def opened(folder, served=SERVED, world_size=1):
    service = Service(folder, served, world_size=world_size)
    task = asyncio.create_task(service.journal.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        service.journal.close()


async def model_of(service, number=0):
    if "s" not in service.tenants.sessions:
        await service.record({"event": "session", "id": "s", "key": "me"})
    model = f"s:train:{number}"
    event = {"event": "model", "id": model, "session": "s", "settings": SETTINGS, "created_at": 0.0}
    await service.record(event | {"user_metadata": None})
    await service.accept(model, 0, "create", {"settings": SETTINGS})
    return model


class Trainer:
    """A trainer rank that reports a fixed result for each command, without computing."""

    def __init__(self, service, run_id=0, rank=0):
        self.service, self.run_id, self.rank = service, run_id, rank
        self.epoch, self.number, self.resident = "", 0, {}

    async def ask(self):
        return await self.service.command(self.run_id, self.epoch, self.number + 1)

    async def one(self, *, fails=(), fails_of=""):
        """The next command, executed; None = there is none."""
        async with asyncio.timeout(0.2):
            head, _body = await self.ask()
        if head["kind"] == "reset":
            self.epoch, self.number, self.resident = head["epoch"], 0, {}
            return "reset"
        self.number += 1
        kind, seq = head["kind"], head["seq"]
        failed = (seq in fails and kind not in ("clear", "restore")) or kind == fails_of
        result = json.dumps({"error": "bad", "category": "user"} if failed else {"did": f"{kind}{seq}"}).encode()
        await self.service.finish(self.epoch, self.number, self.rank, result=result, failed=failed)
        return f"{head['model'][-1]}{kind}{seq}"

    async def all(self, **options):
        result = []
        with contextlib.suppress(TimeoutError):
            while True:
                result.append(await self.one(**options))
        return result


def results(service, model="s:train:0"):
    operations = service.tenants.models[model].operations
    return {seq: json.loads(service.journal.read(item.result)) for seq, item in operations.items() if item.is_done}


async def test_requests_run_in_the_order_of_their_numbers(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await service.accept(model, 2, "loss", {"forward_only": False}, b"b")
        await service.accept(model, 3, "loss", {"forward_only": False}, b"c")
        trainer = Trainer(service)
        assert await trainer.all() == ["reset", "0create0"]
        assert await service.accept(model, 1, "loss", {"forward_only": False}, b"a") == "s:train:0:1"
        await service.accept(model, 4, "step", {"settings": {}})
        assert await trainer.all() == ["0loss1", "0loss2", "0loss3", "0step4"]
        assert results(service)[3] == {"did": "loss3"}


async def test_a_repeated_request_is_computed_once(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        for _ in range(3):
            assert await service.accept(model, 1, "loss", {"forward_only": False}, b"a") == f"{model}:1"
        with raises_code("request.duplicate_id", "request 1"):
            await service.accept(model, 1, "loss", {"forward_only": False}, b"other")
        trainer = Trainer(service)
        assert await trainer.all() == ["reset", "0create0", "0loss1"]


async def test_a_step_after_failed_gradients_fails_and_clears_them(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        for seq in (1, 2):
            await service.accept(model, seq, "loss", {"forward_only": False}, b"a")
        for seq in (3, 4):
            await service.accept(model, seq, "step", {"settings": {"lr": seq}})
        trainer = Trainer(service)
        assert await trainer.all(fails=(1,)) == ["reset", "0create0", "0loss1", "0loss2", "0clear3", "0step4"]
        result = results(service)
        assert result[3]["error"] == "the gradients of request 1 failed: nothing was updated"
        assert "did" in result[4]
        again = Trainer(service, run_id=1)  # the same effects, from the beginning
        assert await again.all() == ["reset", "0create0", "0clear1", "0loss2", "0clear3", "0step4"]
        assert results(service) == result


@pytest.mark.parametrize("both", [False, True])
async def test_after_a_restart_results_stay_and_the_rest_is_computed(tmp_path, both):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await service.accept(model, 1, "loss", {"forward_only": False}, b"a")
        await service.accept(model, 2, "step", {"settings": {}})
        await service.accept(model, 3, "save", {"name": "one"})
        trainer = Trainer(service)
        await trainer.all()
        result = results(service)
        assert result[3] == {"path": "tinker://s:train:0/weights/one"}
    async with opened(tmp_path) as service:
        assert results(service) == result
        trainer.service = service
        if both:
            trainer = Trainer(service)
        await service.accept(model, 4, "loss", {"forward_only": True}, b"x")
        assert await trainer.all() == ["reset", "0create0", "0loss1", "0step2", "0loss4"]
        assert results(service)[3] == result[3]


async def test_a_snapshot_ends_what_a_restart_repeats(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        for seq in range(1, MAX_REPLAYED + 2):
            kind = "step" if seq % 2 == 0 else "loss"
            await service.accept(model, seq, kind, {"forward_only": False}, b"a" if kind == "loss" else None)
        trainer = Trainer(service)
        last = MAX_REPLAYED
        assert (await trainer.all())[-3:] == [f"0step{last}", f"0snapshot{last}", f"0loss{last + 1}"]
        again = Trainer(service, run_id=1)
        assert await again.all() == ["reset", f"0restore{last}", f"0loss{last + 1}"]


async def test_models_take_turns_and_leave_for_others(tmp_path):
    async with opened(tmp_path) as service:
        models = [await model_of(service, number) for number in range(3)]
        for seq in (1, 2):
            for model in models:
                await service.accept(model, seq, "step", {"settings": {"n": seq}})
        result = await Trainer(service).all()
        steps = [item for item in result if "step" in item]
        assert [step[0] for step in steps[:2]] == ["0", "1"]
        assert len(steps) == 6
        assert any("drop" in item for item in result)
        assert any("restore" in item for item in result)
        resident = [model for model in service.tenants.models.values() if model.is_resident]
        assert len(resident) == SERVED.max_resident
        assert all(len(results(service, model)) == 3 for model in models)


async def test_a_turn_goes_on_until_an_optimiser_step_and_has_a_limit(tmp_path):
    async with opened(tmp_path) as service:
        models = [await model_of(service, number) for number in range(2)]
        for model in models:
            for seq in range(1, 4):
                await service.accept(model, seq, "step" if seq == 3 else "loss", {"forward_only": False}, b"a")
        trainer = Trainer(service)
        result = await trainer.all()
        assert result == ["reset", "0create0", "1create0", *(f"{item}{what}" for item in (0, 1)
                         for what in ("loss1", "loss2", "step3"))]  # fmt: skip
        for seq in range(4, 4 + 2 * MAX_TURN):
            await service.accept(models[0], seq, "loss", {"forward_only": True}, b"a")
        await service.accept(models[1], 4, "loss", {"forward_only": True}, b"a")
        assert (await trainer.all()).index("1loss4") == MAX_TURN


async def test_an_export_goes_before_the_passes_of_others_but_not_one_after_another(tmp_path):
    async with opened(tmp_path) as service:
        models = [await model_of(service, number) for number in range(2)]
        trainer = Trainer(service)
        assert await trainer.all() == ["reset", "0create0", "1create0"]
        for seq, model in enumerate([models[0], models[1], models[1]]):
            await service.accept(model, max(seq, 1), "loss", {"forward_only": True}, b"a")
        assert [await trainer.one(), await trainer.one()] == ["0loss1", "1loss1"]
        await service.accept(models[0], 2, "step", {"settings": {}})
        await service.accept(models[1], 3, "step", {"settings": {}})
        for seq in (3, 4):
            await service.accept(models[0], seq, "export", {"where": "sampler_weights", "name": f"w{seq}"})
        for seq in (4, 5):
            await service.accept(models[1], seq, "loss", {"forward_only": True}, b"a")
        assert await trainer.all() == [
            "1loss2", "1step3", "0step2", "0export3", "1loss4", "1loss5", "0export4",
        ]  # fmt: skip


async def test_a_request_that_ends_the_trainer_again_and_again_fails(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await service.accept(model, 1, "loss", {"forward_only": False}, b"a")
        for run_id in range(MAX_DELIVERIES):
            trainer = Trainer(service, run_id=run_id)
            assert await trainer.one() == "reset"
            await trainer.one()  # create
            head, _ = await trainer.ask()
            assert head["kind"] == "loss"  # and it dies
        assert await Trainer(service, run_id=9).all() == ["reset", "0create0", "0clear1"]
        assert results(service)[1]["error"] == "the trainer died 3 times of this request"


async def test_a_command_ends_when_every_rank_has_executed_it(tmp_path):
    async with opened(tmp_path, world_size=2) as service:
        model = await model_of(service)
        first, second = Trainer(service), Trainer(service, rank=1)
        assert [await first.one(), await second.one()] == ["reset", "reset"]
        assert await first.one() == "0create0"
        assert not service.tenants.models[model].operations[0].is_done
        assert await second.one() == "0create0"
        assert service.tenants.models[model].operations[0].is_done


async def test_a_rank_that_is_ahead_waits_for_the_others(tmp_path):
    async with opened(tmp_path, world_size=2) as service:
        await model_of(service)
        first, second = Trainer(service), Trainer(service, rank=1)
        for item in (first, second, first):
            await item.one()
        ahead = asyncio.create_task(first.ask())
        await asyncio.sleep(0)
        assert not ahead.done()
        await second.one()
        assert await ahead is None  # it asks again


async def test_a_late_report_of_an_earlier_start_changes_nothing(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        old = Trainer(service)
        await old.one()
        await old.ask()
        new = Trainer(service, run_id=1)
        assert await new.one() == "reset"
        await service.finish(old.epoch, 1, 0, result=b"{}", failed=False)
        assert not service.tenants.models[model].operations[0].is_done
        assert await new.one() == "0create0"


async def test_simultaneous_equal_requests_are_one(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        ids = await asyncio.gather(*(service.accept(model, 1, "loss", {"forward_only": False}, b"a") for _ in range(5)))
        assert set(ids) == {f"{model}:1"}
    assert audit_service(tmp_path) == ({**COUNTS, "models": 1, "requests": 2, "waiting": 2}, [])


COUNTS = {"models": 0, "requests": 0, "computed": 0, "failed": 0, "waiting": 0, "optimiser_steps": 0}


async def test_a_failed_create_makes_room_for_nobody_and_stops_nobody(tmp_path):
    async with opened(tmp_path) as service:
        models = [await model_of(service, number) for number in range(4)]
        for model in models:
            await service.accept(model, 1, "step", {"settings": {}})
        trainer = Trainer(service)
        actual = [await trainer.one(), await trainer.one(fails=(0,))]  # the first create fails
        actual += await trainer.all()
        assert len(actual) < 30
        assert [
            json.loads(service.journal.read(service.tenants.models[item].operations[1].result)) for item in models
        ] == [
            {"error": "the gradients of request 0 failed: nothing was updated", "category": "user"},
            *({"did": "step1"} for _ in range(3)),
        ]


async def test_the_answer_of_a_load_comes_with_its_snapshot(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        load = {
            "path": "tinker://x/weights/y",
            "saved_seq": 3,
            "optimizer": True,
            "settings": {"rank": 8},
            "num_steps": 5,
        }
        await service.accept(model, 1, "loss", {"forward_only": False}, b"a")
        await service.accept(model, 2, "load", load)
        trainer = Trainer(service)
        assert [await trainer.one() for _ in range(4)] == ["reset", "0create0", "0loss1", "0load2"]
        assert not service.tenants.models[model].operations[2].is_done
        assert await trainer.one() == "0snapshot2"
        assert service.tenants.models[model].operations[2].is_done
        await service.accept(model, 3, "step", {"settings": {}})
        assert await Trainer(service, run_id=1).all() == ["reset", "0restore2", "0step3"]
        assert service.tenants.models[model].settings == {"rank": 8}


async def test_a_failed_step_is_undone_by_what_was_before_it(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        for seq in (1, 2):
            await service.accept(model, seq, "step", {"settings": {"lr": seq}})
        await service.accept(model, 3, "loss", {"forward_only": True}, b"a")
        trainer = Trainer(service)
        result = await trainer.all(fails=(2,))
        assert result == ["reset", "0create0", "0step1", "0step2", "0create0", "0step1", "0clear2", "0loss3"]


async def test_a_failed_forward_pass_leaves_the_gradients(tmp_path):
    async with opened(tmp_path) as service:
        model = await model_of(service)
        await service.accept(model, 1, "loss", {"forward_only": False}, b"a")
        await service.accept(model, 2, "loss", {"forward_only": True}, b"b")
        await service.accept(model, 3, "step", {"settings": {}})
        assert await Trainer(service).all(fails=(2,)) == ["reset", "0create0", "0loss1", "0loss2", "0step3"]
        assert results(service)[3] == {"did": "step3"}
        assert await Trainer(service, run_id=1).all() == ["reset", "0create0", "0loss1", "0step3"]


async def test_a_model_whose_state_cannot_be_restored_computes_nothing_else(tmp_path):
    async with opened(tmp_path) as service:
        model, other = await model_of(service), await model_of(service, 1)
        await service.accept(model, 1, "step", {"settings": {}})
        trainer = Trainer(service)
        await trainer.all()
        await service.record({"event": "snapshot", "model": model, "seq": 1})
        for item in (model, other):
            await service.accept(item, 2 if item == model else 1, "step", {"settings": {"lr": 2}})
        result = await Trainer(service, run_id=1).all(fails_of="restore")
        assert sorted(result) == ["0restore1", "1create0", "1step1", "reset"]
        failed = results(service)[2]
        assert failed["category"] == "server"
        assert "restore of request 1 failed" in failed["error"]


async def test_the_audit_of_a_service_counts_and_finds_damage(tmp_path, capsys):
    folder = tmp_path / "serve"
    async with opened(folder) as service:
        model = await model_of(service)
        await service.accept(model, 1, "loss", {"forward_only": False}, b"abc")
        await service.accept(model, 2, "step", {"settings": {}})
        await service.accept(model, 3, "step", {"settings": {"lr": 1}})
        trainer = Trainer(service)
        assert (await trainer.all(fails=(3,)))[:5] == ["reset", "0create0", "0loss1", "0step2", "0step3"]
        await service.accept(model, 4, "loss", {"forward_only": False}, b"x")
    assert audit_command([str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = {"models": 1, "requests": 5, "computed": 3, "failed": 1, "waiting": 1, "optimiser_steps": 1}
    assert facts == expected | {"violations": []}
    payload = folder / "journal" / "payload-000001.bin"
    payload.write_bytes(payload.read_bytes().replace(b"abc", b"abd"))
    (folder / "journal" / "events-000001.jsonl").chmod(0o600)
    assert audit_command([str(tmp_path)]) == 1
    assert f"request 1 of {model}" in capsys.readouterr().out
    async with opened(folder) as service:
        await service.record({"event": "result", "model": model, "seq": 2, "ok": True}, b"again")
        await service.record(
            {
                "event": "saved",
                "model": model,
                "kind": "weights",
                "name": "lost",
                "at": 0.0,
                "settings": {},
                "seq": 9,
                "num_steps": 0,
            }
        )
    assert audit_command([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "request 2 of s:train:0 has 2 records of its result" in output
    assert "weights/lost: its state" in output


def test_nothing_is_scheduled_without_requests():
    assert Schedule(Tenants(), max_resident=1).next() is None
