"""What survives a controller: episodes, batches and positions; a full disk loses nothing that it has promised."""

import asyncio
import dataclasses
import errno
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.data import CanaryReport, Trajectory, TrajectoryGroup, WeightUpdate
from areal.api.errors import LedgerError, WeightSyncError
from areal.ledger.audit import audit
from areal.ledger.event_files import LedgerReader, payload_path
from areal.ledger.ledger import GroupCommitLog, GroupWriter, Ledger
from areal.ledger.payload import encode_episode
from areal.ledger.state import LedgerState
from areal.rollout.share_codec import decode_share
from tests.expect import raises_code
from tests.rollout import rollout_kit


async def run_steps(ledger, num_steps=3, **options):
    controller = rollout_kit.make_controller(ledger, total_steps=10, **options)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    blobs = await rollout_kit.train(controller, range(num_steps))
    await controller.committed(num_steps, "recover/step")
    await controller.close()
    return blobs


@pytest.fixture
async def recorded(tmp_path):
    """A ledger folder of three trained steps with rejections and failures, and the blobs that were served."""
    outcomes = ["accept", "reject", "accept", "fail", "nan"]
    workflow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(outcome=outcomes[index % 5], token_s=1e-4))
    blobs = await run_steps(Ledger.open(tmp_path / "ledger"), workflow=workflow)
    return tmp_path / "ledger", blobs


async def test_the_recovered_state_equals_the_running_state(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger")
    await run_steps(ledger)
    again = Ledger.open(tmp_path / "ledger")
    assert again.state == ledger.state
    assert len(again.state.consumed_steps) == 3
    assert again.state.committed_step == 3
    again.state.check_integrity()


async def test_a_damaged_payload_is_reported_and_not_served(recorded):
    folder, _ = recorded
    path = payload_path(folder, 1)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    report = audit(folder)
    assert len(report.violations) == 1
    assert "checksum" in report.violations[0].message
    ledger = Ledger.open(folder)
    batch = ledger.state.batches[0]
    first = min(batch.payloads)
    with raises_code("ledger.bad_payload"):
        ledger.payload(batch.episode_ids[batch.payloads.index(first)], first)


async def test_recorded_batches_are_served_again_byte_for_byte(recorded):
    folder, blobs = recorded
    controller = rollout_kit.make_controller(
        Ledger.open(folder), total_steps=10, fleet=rollout_kit.FakeFleet(version=3)
    )
    await controller.start()
    for step in range(3):
        await controller.attach(rank=0, world_size=1, dp_size=1, step=step, version=step)
        assert [await rollout_kit.answer(controller, step)] == blobs[step]
        assert controller.status()["reward_mean"] == decode_share(blobs[step][0]).stats["reward"]
    await controller.close()


async def test_a_new_controller_continues_where_the_ledger_ends(tmp_path):
    """Dies with episodes running and waiting: those are kept or run again, and every row is used once per epoch."""
    folder = tmp_path / "ledger"
    first = Ledger.open(folder)
    workflow = rollout_kit.ScriptedWorkflow()
    controller = rollout_kit.make_controller(first, workflow=workflow, total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(1))
    held = first.state.num_admitted + 2  # two of the next ones never end
    workflow.script_of = lambda index: rollout_kit.Script(token_s=3600.0 if len(workflow.seen) <= held else 1e-5)
    await rollout_kit.train(controller, range(1, 2))
    while not first.state.waiting:
        await asyncio.sleep(0)
    await controller.close()
    before = Ledger.open(folder).state
    assert before.running
    assert before.waiting
    kept = set(before.waiting)

    workflow = rollout_kit.ScriptedWorkflow()
    ledger = Ledger.open(folder)
    controller = rollout_kit.make_controller(
        ledger, num_rows=40, workflow=workflow, total_steps=10, fleet=rollout_kit.FakeFleet(version=2)
    )
    await controller.start()  # the trainers live on: nobody attaches again
    await rollout_kit.train(controller, range(2, 10))
    await controller.close()

    assert audit(folder).is_clean
    used = [episode_id for step in range(10) for episode_id in ledger.state.batches[step].episode_ids]
    assert sorted(used) == list(range(40))
    assert kept <= set(used)
    assert not [index for index in workflow.seen if workflow.seen.count(index) > 1]
    attempts = [event["attempt"] for event in list(LedgerReader(folder).events()) if event["event"] == "admitted"]
    assert attempts.count(1) == len(before.running)


async def test_episodes_left_running_wait_for_the_version_they_were_admitted_at(tmp_path):
    """Everything dies and the trainer goes back: run again at once, they would be older than the bound."""
    folder = tmp_path / "ledger"
    ledger = Ledger.open(folder)
    workflow = rollout_kit.ScriptedWorkflow()
    controller = rollout_kit.make_controller(ledger, workflow=workflow, total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    workflow.script_of = lambda index: rollout_kit.Script(token_s=3600.0)
    await rollout_kit.train(controller, range(3, 4))
    await controller.close()
    assert ledger.state.running

    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            if update.version == 4 and self.version == 0:
                raise WeightSyncError("the files of version 4 are missing")
            await super().update_weights(update)

    again = Ledger.open(folder)
    config = rollout_kit.make_config(on_stale="wait")
    controller = rollout_kit.make_controller(again, config=config, fleet=Fleet(), total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    assert {episode.attempt for episode in again.state.running.values()} == {0}
    blobs = await rollout_kit.train(controller, range(10))
    await controller.close()
    assert max(decode_share(blob).stats["staleness_max"] for shares in blobs for blob in shares) <= 1
    assert audit(folder).is_clean


async def test_a_trainer_that_restarts_from_step_0_gets_no_later_weights(tmp_path):
    """The servers start at version 0 again, and so does the trainer: neither may be given version 3 from the files."""
    folder = tmp_path / "ledger"
    ledger = Ledger.open(folder)
    controller = rollout_kit.make_controller(ledger, total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=2, dp_size=2, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    await controller.close()

    fleet, again = rollout_kit.FakeFleet(), Ledger.open(folder)
    controller = rollout_kit.make_controller(again, fleet=fleet, total_steps=10)
    num_admitted = again.state.num_admitted
    await controller.start()
    await controller.attach(rank=1, world_size=2, dp_size=2, step=0, version=0)
    assert await controller.next_batch(0, timeout_s=200.0) is not None  # rank 1 is ahead of rank 0
    await controller.attach(rank=0, world_size=2, dp_size=2, step=0, version=0)
    assert (fleet.version, fleet.updates, again.state.num_admitted) == (0, [], num_admitted)
    await rollout_kit.train(controller, range(10))
    await controller.close()
    assert audit(folder).is_clean


async def test_a_surviving_trainer_finds_the_servers_at_its_version(tmp_path):
    """Controller and servers died, the trainer did not: its calls continue, and servers load the published files."""
    folder = tmp_path / "ledger"
    controller = rollout_kit.make_controller(Ledger.open(folder), total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    await controller.close()

    fleet = rollout_kit.FakeFleet()
    controller = rollout_kit.make_controller(Ledger.open(folder), fleet=fleet, total_steps=10)
    await controller.start()
    assert fleet.updates == []
    await rollout_kit.train(controller, range(3, 10))
    assert [update.version for update in fleet.updates] == [3, 4, 5, 6, 7, 8, 9, 10]
    await controller.close()
    assert audit(folder).is_clean


async def test_a_trainer_that_goes_back_trains_on_the_same_batches_and_then_on_new_ones(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger")
    controller = rollout_kit.make_controller(ledger, total_steps=6)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    first = await rollout_kit.train(controller, range(4))
    await controller.attach(rank=0, world_size=1, dp_size=1, step=2, version=2)
    again = await rollout_kit.train(controller, range(2, 6))
    await controller.close()
    assert again[:2] == first[2:]
    assert len(ledger.state.batches) == 6
    report = audit(tmp_path / "ledger")
    assert report.is_clean
    assert report.counts["consumed"] == 24


async def test_other_data_settings_are_refused(recorded):
    folder, _ = recorded
    controller = rollout_kit.make_controller(Ledger.open(folder), num_rows=44)
    with raises_code("ledger.other_data", "num_rows: 40 -> 44"):
        await controller.start()
    await controller.close()


class FullDisk:
    """Files that take `room` bytes in all."""

    def __init__(self, room):
        self.room = room

    def open(self, path):
        return FullDiskFile(self, path)


class FullDiskFile:
    def __init__(self, disk, path):
        self._disk, self._path = disk, path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, data):
        part = data[: self._disk.room]
        self._file.write(part)
        self._disk.room -= len(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device", str(self._path))

    def sync(self):
        pass

    def cut(self, size):
        self._file.truncate(size)

    def close(self):
        self._file.close()


@pytest.mark.parametrize("room", [0, 10, 700, 1500, 2500, 4000])
async def test_a_full_disk_stops_the_run_and_loses_no_durable_event(tmp_path, room):
    folder = tmp_path / "ledger"
    folder.mkdir()
    log = GroupCommitLog(GroupWriter(folder, 1, open_file=FullDisk(room).open), first_segment=1)
    controller = rollout_kit.make_controller(Ledger(log, read_payload=lambda where: b""), total_steps=10)
    served = []

    async def run():
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        for step in range(10):
            served.append(await controller.next_batch(step, timeout_s=200.0))
            if served[-1] is None:
                served.pop()
                await controller.ended(report_s=0.0)
            await controller.weights.publish(WeightUpdate(version=step + 1, kind="disk", path="v"), timeout_s=200.0)
            await controller.consumed(step, step + 1)

    with raises_code("ledger.not_writable", "No space left on device"):
        await run()
    with pytest.raises(LedgerError):
        await controller.close()
    kept = LedgerState.replay(list(LedgerReader(folder).events()))
    kept.check_integrity()
    assert len(kept.batches) >= len(served)
    for step, record in enumerate(served):
        assert kept.batches[step] == record
    assert audit(folder).is_clean


def test_the_state_machine_refuses_invalid_events():
    state = LedgerState()
    state.apply({"event": "admitted", "id": 0, "attempt": 0, "version": 0})
    accepted = {"event": "accepted", "id": 0, "payload": [1, 0, 9], "min_version": 0, "tokens": 3, "stats": {}}
    accepted |= {
        "trajectories": 1,
        "sessions": 1,
        "finished": 1,
        "longest": 3,
        "reward": 0.0,
        "by_version": [[0, 3, 3]],
    }
    batched = {"event": "batched", "step": 0, "version": 0, "mask_before": 0, "ids": [0], "stats": {}}

    def refuse(event, values, code="broken_rule"):
        before = bytes(state.states), list(state.counts)
        with pytest.raises(LedgerError, match=values) as error:
            state.apply(event)
        assert error.value.code == f"ledger.{code}"
        assert (bytes(state.states), list(state.counts)) == before

    refuse({"event": "admitted", "id": 2, "attempt": 0, "version": 0}, "episode 2 .* 1$")
    refuse({"event": "admitted", "id": 0, "attempt": 2, "version": 0}, "episode 0: attempt 2 .* attempt 0")
    refuse(accepted | {"id": 1}, "episode 1 ")
    refuse(batched, "episode 0 .* running, not waiting")
    refuse({"event": "consumed", "step": 0, "version": 1}, "step 0 ")
    refuse({"event": "vanished"}, "'vanished'", "unknown_event")
    refuse({"event": "started", "seed": 1}, "format 1, .* 2", "old_format")
    state.apply(accepted)
    refuse(batched | {"ids": [0, 0]}, r"episodes \[0\]")
    state.apply(batched)
    refuse(batched | {"step": 1}, "episode 0 .* batched, not waiting")
    refuse({"event": "rejected", "id": 0, "reason": "stale"}, r"episode 0 rejected \(stale\), .* batched, not running")
    state.apply({"event": "consumed", "step": 0, "version": 1})
    refuse({"event": "consumed", "step": 0, "version": 1}, "step 0 ")
    state.check_integrity()


async def test_audit_command(recorded):
    folder, _ = recorded
    command = [sys.executable, "-m", "areal.ledger", "audit", str(folder)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("admitted ")
    assert " = running " in done.stdout
    payload_path(folder, 1).unlink()
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "VIOLATION [payload] " in done.stdout
    command[-1] = str(folder / "nothing")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("areal: error: ")


async def test_conservation_over_a_run_with_rejections_and_failures(tmp_path):
    """30% rejected, 5% failing."""
    outcomes = ["reject"] * 6 + ["fail"] + ["accept"] * 13
    workflow = rollout_kit.ScriptedWorkflow(
        lambda index: rollout_kit.Script(outcome=outcomes[index * 7 % 20], token_s=1e-5)
    )
    ledger = Ledger.open(tmp_path / "ledger")
    await run_steps(
        ledger, num_steps=10, workflow=workflow, num_rows=400, config=rollout_kit.make_config(batch_size=32)
    )
    report = audit(tmp_path / "ledger")
    assert report.is_clean, report.violations
    assert sum(report.counts.values()) == report.num_admitted > 450
    assert report.counts["consumed"] == 320
    assert report.counts["rejected"] / report.num_admitted == pytest.approx(0.30, abs=0.02)
    assert report.counts["failed"] / report.num_admitted == pytest.approx(0.05, abs=0.01)
    assert report.reasons["rejected: workflow"] == report.counts["rejected"]
    assert report.reasons["failed: ValueError"] == report.counts["failed"]


@given(data=st.data())
def test_the_counts_of_an_episode_are_those_of_its_payload(data):
    versions = data.draw(st.lists(st.sampled_from([-1, 0, 3, 4]), min_size=1, max_size=30))
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(versions), max_size=len(versions)))
    trajectory = Trajectory(
        token_ids=[1] * len(versions),
        loss_mask=mask,
        rollout_logprobs=[0.0] * len(versions),
        output_versions=versions,
        reward=0.25,
        finished=data.draw(st.booleans()),
    )
    episode = encode_episode(7, TrajectoryGroup(trajectories=[trajectory, trajectory]))
    assert episode.counts[:3] == (2, 2, 2 * trajectory.finished)
    pairs = list(zip(versions, mask, strict=True)) * 2
    assert episode.counts.by_version == tuple(
        (version, versions.count(version) * 2, pairs.count((version, 1))) for version in sorted(set(versions))
    )
    assert episode.counts.longest == len(versions)


@pytest.mark.parametrize("difference", [0.5, math.inf])
async def test_a_publication_has_the_result_of_the_weight_canary(tmp_path, difference):
    result = CanaryReport(digest="0123456789abcdef", difference=difference, tolerance=0.1, differing=["server-1"])

    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            await super().update_weights(update)
            return result if update.version == 1 else None

    await run_steps(Ledger.open(tmp_path), num_steps=2, fleet=Fleet())
    published = {event["version"]: event for event in LedgerReader(tmp_path).events() if event["event"] == "published"}
    written = dataclasses.asdict(result) | {"difference": None if math.isinf(difference) else difference}
    assert published[1]["canary"] == written
    assert "canary" not in published[2]
    assert audit(tmp_path).is_clean
    assert Ledger.open(tmp_path).state.version == 2
