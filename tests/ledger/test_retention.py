"""Payload segments that nothing needs are deleted; the ledger says so, and a crash meanwhile changes nothing."""

import json
import shutil
from dataclasses import replace

import pytest

from areal.api.config import InferenceEngineConfig
from areal.api.data import TURNS, TrajectoryGroup
from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.data.image_files import ImageFiles
from areal.ledger import event_files, ledger
from areal.ledger import ledger as event_log
from areal.ledger.audit import audit
from areal.ledger.event_files import PayloadReader, payload_path, segment_numbers
from areal.ledger.kept import KeptPayloads
from areal.ledger.ledger import Ledger, Retention, delete_segments
from areal.ledger.payload import encode_episode
from areal.ledger.show import show_episode
from areal.ledger.state import LedgerState
from tests.expect import raises_code
from tests.rollout import rollout_kit

NUM_STEPS = 6
IMAGE_NAMES = ("pruned", "waiting", "rejected", "session", "unused")


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """About one train batch in each."""
    for module in (event_log, event_files):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 400)


async def train(folder, keep, *, steps=range(NUM_STEPS), commits=range(1, NUM_STEPS + 1)):
    """A run with a recovery checkpoint after each step of `commits`."""
    opened = Ledger.open(folder, keep_payloads=keep)
    controller = rollout_kit.make_controller(opened, total_steps=NUM_STEPS + 4)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=steps.start, version=steps.start)
    for step in steps:
        await rollout_kit.train(controller, range(step, step + 1))
        if step + 1 in commits:
            await controller.committed(step + 1, f"recover/step-{step + 1}")
    await controller.close()
    return opened.state


def readable_steps(folder, state):
    """The steps all of whose payloads are there."""
    with PayloadReader(folder) as reader:
        return [
            step
            for step, batch in state.batches.items()
            if all(is_there(reader, payload) for payload in batch.payloads)
        ]


def is_there(reader, where):
    try:
        return bool(reader.read(where))
    except LedgerError as error:
        if error.code != "ledger.pruned":
            raise
        return False


async def test_everything_stays_by_default(tmp_path):
    state = await train(tmp_path, "all")
    assert readable_steps(tmp_path, state) == list(range(NUM_STEPS))
    assert not state.pruned_segments


async def test_recover_keeps_what_the_second_newest_checkpoint_needs(tmp_path):
    state = await train(tmp_path, "recover")
    kept = readable_steps(tmp_path, state)
    assert NUM_STEPS - 1 in kept
    assert len(kept) < NUM_STEPS
    assert state.pruned_segments
    report = audit(tmp_path)
    assert report.is_clean
    assert any("pruned" in note for note in report.notes)


async def test_a_number_keeps_so_many_steps_as_well(tmp_path):
    state = await train(tmp_path, "4")
    assert {2, 3, 4, 5} <= set(readable_steps(tmp_path, state)) < set(range(NUM_STEPS))


async def test_nothing_is_pruned_with_one_checkpoint(tmp_path):
    state = await train(tmp_path, "recover", commits=[NUM_STEPS])
    assert readable_steps(tmp_path, state) == list(range(NUM_STEPS))


async def test_a_run_continues_on_a_pruned_ledger(tmp_path):
    before = await train(tmp_path, "recover")
    last = max(segment_numbers(tmp_path))
    after = await train(tmp_path, "recover", steps=range(NUM_STEPS - 1, NUM_STEPS + 2), commits=[7, 8])
    assert before.pruned_segments < after.pruned_segments
    assert after.last_segment >= last  # the first run may have generated all episodes that the second one trains on
    assert readable_steps(tmp_path, after)[-1] == NUM_STEPS + 1
    assert audit(tmp_path).is_clean


@pytest.fixture
async def images(forge):
    """Images of a pruned, a waiting, a rejected and no episode, and one that a recorded session has, by name."""
    files = ImageFiles(forge.folder.parent / "images")
    refs = {name: ImageRef(files.put(name.encode()), (1, 2, 2)) for name in IMAGE_NAMES}

    def answer(name):
        (first,) = forge._short_answer(0, 0).trajectories
        return TrajectoryGroup(trajectories=[replace(first, images=(refs[name],))])

    for number, name in ((0, "pruned"), (4, "waiting")):
        forge.answers[number] = answer(name)
    forge.answers[3] = TrajectoryGroup(
        trajectories=[replace(*forge._short_answer(3, 0).trajectories, session=0, columns={TURNS: [-1, 0]})],
        record=json.dumps({"sessions": [{"messages": [{"content": [{"sha256": refs["session"].sha256}]}]}]}),
    )
    forge.started()
    forge.attached(0, 0)
    forge.admitted(0, 1, 2, 3, 4, 5)
    forge.accepted(0, 1, payload=(2, 0, 5))
    forge.accepted(2, 3, 4)
    forge.rejected(5)
    forge.batched(0, 0, 1)
    forge.trained(0)
    forge.batched(1, 2, 3)
    forge.trained(1)
    forge.committed(2)
    forge.events.append({"event": "pruned", "segments": [2], "first_step": 1, "at": 1.0})
    forge.write()
    kept = KeptPayloads(forge.folder, 5)
    kept.write([(5, 0, encode_episode(5, answer("rejected")).payload)])
    return files, refs


@pytest.mark.parametrize(("keep", "deleted"), [("all", []), ("recover", ["pruned", "unused"])])
async def test_images_without_a_payload_are_deleted(forge, images, keep, deleted):
    files, refs = images
    opened = Ledger.open(forge.folder, keep_payloads=keep)
    assert opened.prune_images(files) == len(deleted)
    assert opened.prune_images(files) == 0
    await opened.close()
    assert [name for name in IMAGE_NAMES if not files.path(refs[name].sha256).exists()] == deleted
    assert audit(forge.folder).is_clean


async def test_all_images_stay_where_a_payload_is_damaged(forge, images):
    files, refs = images
    opened = Ledger.open(forge.folder, keep_payloads="recover")
    data = bytearray(payload_path(forge.folder, 1).read_bytes())
    data[-1] ^= 1
    payload_path(forge.folder, 1).write_bytes(data)
    with raises_code("ledger.bad_payload"):
        opened.prune_images(files)
    await opened.close()
    assert all(files.path(ref.sha256).exists() for ref in refs.values())


@pytest.mark.parametrize("num_deleted", [0, 1, None])
async def test_a_kill_during_the_deletion_changes_nothing(tmp_path, monkeypatch, num_deleted):
    """`num_deleted` files are deleted when the process is killed."""
    killed = tmp_path / "killed"

    def delete(folder, segments):
        result = sorted(segments)[:num_deleted]
        delete_segments(folder, result)
        if segments and not killed.exists():
            shutil.copytree(folder, killed)
        delete_segments(folder, segments)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "delete_segments", delete)
        await train(tmp_path / "run", "recover")
    assert audit(killed).is_clean
    again = Ledger.open(killed, keep_payloads="recover")
    await again.close()
    assert again.state.pruned_segments
    assert not again.state.pruned_segments & set(segment_numbers(killed))
    assert audit(killed).is_clean


async def test_a_segment_that_is_missing_and_was_not_pruned_is_a_violation(tmp_path):
    state = await train(tmp_path, "recover")
    segment = state.batches[NUM_STEPS - 1].payloads[0][0]
    payload_path(tmp_path, segment).unlink()
    assert "payload" in {violation.rule for violation in audit(tmp_path).violations}
    with PayloadReader(tmp_path) as reader, pytest.raises(LedgerError) as error:
        reader.read((segment, 0, 1))
    assert error.value.code == "ledger.bad_payload"


async def test_show_has_one_line_for_a_pruned_episode(tmp_path):
    state = await train(tmp_path, "recover")
    pruned = next(
        episode_id
        for episode_id, where in zip(state.batches[0].episode_ids, state.batches[0].payloads, strict=True)
        if where[0] in state.pruned_segments
    )
    lines = show_episode(tmp_path, pruned)
    assert sum("pruned" in line for line in lines) == 1


async def test_the_state_refuses_to_prune_what_a_batch_needs(tmp_path):
    state = await train(tmp_path, "all")
    segment = state.batches[NUM_STEPS - 1].payloads[0][0]
    with raises_code("ledger.broken_rule"):
        state.apply({"event": "pruned", "segments": [segment], "first_step": NUM_STEPS - 1, "at": 1.0})


def test_the_second_newest_checkpoint_of_a_trainer_that_went_back():
    state = LedgerState(trained_steps=25, committed_step=25, committed_steps={10, 20, 30, 25})
    assert Retention.parse("recover").first_kept_step(state) == 20
    assert Retention.parse("12").first_kept_step(state) == 13
    assert Retention.parse("all").first_kept_step(state) == 0


@pytest.mark.parametrize(
    ("value", "is_valid"), [("all", True), ("recover", True), ("5", True), ("0", False), ("x", False)]
)
def test_the_option_takes_three_forms(value, is_valid):
    assert (not list(InferenceEngineConfig(keep_payloads=value).problems())) == is_valid
