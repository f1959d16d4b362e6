"""The newest events of a ledger are lost while its trainer lives, or while its checkpoint exists."""

import itertools

import pytest

from areal.api.data import WeightUpdate
from areal.ledger.audit import audit
from areal.ledger.event_files import LedgerReader, events_path
from areal.ledger.ledger import Ledger
from areal.ledger.state import LedgerState
from tests.expect import raises_code
from tests.rollout import rollout_kit

TRAINED, TOTAL = 3, 6
BEHIND = "ledger.behind_trainer"


async def record(folder):
    """A run of `TRAINED` steps whose trainer lives when the controller dies. Returns the offset behind each group."""
    controller = rollout_kit.make_controller(Ledger.open(folder), total_steps=TOTAL)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(TRAINED))
    await controller.close()
    data = events_path(folder, 1).read_bytes()
    mark = b'{"event":"group"'
    starts = [i for i in range(len(data)) if data.startswith(mark, i)]
    return data, [*starts, len(data)]


def calls_of(controller):
    """What the trainer, which has done `TRAINED` steps, may call next; the last three end a step."""
    step = TRAINED
    return {
        "batch": lambda: controller.next_batch(step, timeout_s=30.0),
        "evaluate": lambda: controller.evaluate(step, "greedy", timeout_s=30.0),
        "committed": lambda: controller.committed(step, "recover/step-000003"),
        "publish": lambda: controller.weights.publish(
            WeightUpdate(version=step + 1, kind="disk", path="v4"), timeout_s=30.0
        ),
        "consumed": lambda: controller.consumed(step, step + 1, "aa"),
    }


def restarted(folder, version):
    workflow = rollout_kit.ScriptedWorkflow()
    return rollout_kit.make_controller(
        Ledger.open(folder),
        total_steps=TOTAL,
        fleet=rollout_kit.FakeFleet(version=version),
        eval_sets={"": [{"index": 0}]},
        eval_workflows={"greedy": workflow},
    )


async def test_a_trainer_ahead_of_the_ledger_is_refused_at_every_call_wherever_the_ledger_ends(tmp_path):
    data, ends = await record(tmp_path / "whole")
    refused = dict.fromkeys(calls_of(None), 0)
    for size, name in itertools.product(ends, refused):
        folder = tmp_path / f"{size}-{name}"
        folder.mkdir()
        events_path(folder, 1).write_bytes(data[:size])
        payload = (tmp_path / "whole" / "payload-000001.bin").read_bytes()
        (folder / "payload-000001.bin").write_bytes(payload)
        state = LedgerState.replay(LedgerReader(folder).events())
        controller = restarted(folder, version=TRAINED)
        await controller.start()
        # a batch that is not recorded was never served, so only a damaged ledger lacks that of the step in training
        is_behind = state.trained_steps != TRAINED or name == "consumed"
        if name == "publish":
            is_behind = state.trained_steps is not None and state.next_step <= TRAINED
        if is_behind:
            refused[name] += 1
            with raises_code(BEHIND) as error:
                await calls_of(controller)[name]()
            assert error.value.newest_step == state.newest_step
            step = state.newest_step or 0
            back = WeightUpdate(version=step, kind="disk", path=f"v{step}")
            assert await controller.weights.publish(back, timeout_s=30.0)
            await controller.attach(rank=0, world_size=1, dp_size=1, step=step, version=step)
            await rollout_kit.train(controller, range(step, TOTAL))
        else:
            await calls_of(controller)[name]()
        await controller.close()
        report = audit(folder)
        if is_behind or name != "publish":
            assert report.is_clean, report.lines()
    assert all(refused.values())


def three_steps(forge):
    forge.started()
    forge.attached(0, 0)
    for step in range(3):
        forge.admitted(2 * step, 2 * step + 1, version=step)
        forge.accepted(2 * step, 2 * step + 1, version=step)
        forge.batched(step, 2 * step, 2 * step + 1)
        forge.trained(step)


@pytest.mark.parametrize(
    ("lost", "newest"),
    [(0, 3), (1, 2), (2, 2), (3, 2)],
    ids=["nothing", "consumed", "consumed and published", "and the batch"],
)
def test_the_newest_step_of_a_trainer_is_the_last_one_recorded_as_trained(forge, lost, newest):
    three_steps(forge)
    state = LedgerState.replay(forge.events[: len(forge.events) - lost])
    assert state.newest_step == newest
    state.apply({"event": "attached", "step": newest, "version": newest})
    with raises_code(BEHIND):
        state.apply({"event": "attached", "step": newest + 1, "version": newest + 1})
    assert state.newest_step == newest


def test_a_trainer_that_went_back_must_repeat_its_steps_before_it_asks_for_later_ones(forge):
    three_steps(forge)
    forge.attached(1, 1)
    state = LedgerState.replay(forge.events)
    assert state.newest_step == 3
    state.require_reached(1)
    with raises_code(BEHIND):
        state.require_reached(2)


def test_a_new_ledger_takes_a_trainer_at_any_step_and_then_none_above_it(forge):
    forge.started()
    state = LedgerState.replay(forge.events)
    assert state.newest_step is None
    with raises_code(BEHIND):
        state.require_reached(0)
    state.apply({"event": "attached", "step": 7, "version": 7})
    assert state.newest_step == 7
    with raises_code(BEHIND):
        state.apply({"event": "attached", "step": 8, "version": 8})
    state.apply({"event": "attached", "step": 5, "version": 5})


def test_a_trainer_before_the_first_batch_of_the_ledger_is_of_another_run(forge):
    forge.started()
    forge.attached(7, 7)
    forge.admitted(0, 1, version=7)
    forge.accepted(0, 1, version=7)
    forge.batched(7, 0, 1)
    state = LedgerState.replay(forge.events)
    with raises_code("ledger.other_run", 6, 7):
        state.apply({"event": "attached", "step": 6, "version": 6})
