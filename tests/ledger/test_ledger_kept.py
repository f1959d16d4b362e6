"""The answers of the newest rejected and failed episodes stay readable, and nothing else depends on them."""

import math

import pytest

from areal.ledger.audit import audit
from areal.ledger.event_files import recover_folder
from areal.ledger.kept import FOLDER, kept_names
from areal.ledger.ledger import Ledger
from areal.ledger.show import Samples
from tests.rollout import rollout_kit

LIMIT = 3
OUTCOMES = ["accept", "reject", "fail"]


async def run(folder, *, limit=LIMIT, steps=2, accept=None):
    """Every third row is accepted; the others are rejected by the workflow or fail, unless `accept` filters."""
    workflow = rollout_kit.ScriptedWorkflow(
        lambda index: rollout_kit.Script(outcome="accept" if accept else OUTCOMES[index % 3], token_s=1e-5)
    )
    ledger = Ledger.open(folder, keep_rejected=limit)
    controller = rollout_kit.make_controller(ledger, total_steps=10, workflow=workflow, accept=accept)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(steps))
    await controller.close()


def readable(folder):
    """Rejected and failed episodes with their trajectories, the newest first."""
    samples = Samples.read(folder)
    return [(record, samples.trajectories(record)) for record in samples.not_trained("")]


async def test_the_newest_keep_what_they_generated(tmp_path):
    await run(tmp_path)
    result = [(record, answers) for record, answers in readable(tmp_path) if answers]
    assert len(result) == LIMIT
    for record, (answer,) in result:
        assert record.state in ("rejected", "failed")
        assert answer.token_ids == [record.row, 0, 1]
        assert math.isnan(answer.reward)
        assert list(answer.versions) == [-1, 0, 0] or min(answer.versions[1:]) >= 0
        assert list(answer.logprobs) == [0.0, -0.5, -0.5]
    assert len(kept_names(tmp_path)) == LIMIT
    assert audit(tmp_path).is_clean


async def test_a_group_that_the_filter_rejects_keeps_its_rewards(tmp_path):
    await run(tmp_path, accept=lambda group: group.trajectories[0].reward % 2 == 0)
    result = [(record, answers) for record, answers in readable(tmp_path) if answers]
    assert len(result) == LIMIT
    assert all(record.reason == "filter" and answers[0].reward == record.row for record, answers in result)
    assert all(record.row % 2 for record, _ in result)


async def test_none_are_kept_with_a_limit_of_zero(tmp_path):
    await run(tmp_path, limit=0)
    assert not (tmp_path / FOLDER).exists()
    assert not any(answers for _, answers in readable(tmp_path))


async def test_a_payload_without_its_event_is_harmless(forge, tmp_path):
    forge.started()
    forge.attached(0, 0)
    forge.admitted(0, 1)
    forge.accepted(0)
    payload = forge.payloads
    forge.write()
    kept = forge.folder / FOLDER / "000001-0.bin"
    kept.parent.mkdir()
    kept.write_bytes(payload)  # the controller died before the event of this verdict was written
    before = recover_folder(forge.folder).state
    assert list(before.running) == [1]
    report = audit(forge.folder)
    assert report.is_clean
    assert any("1 of 1 kept payloads" in note for note in report.notes)
    samples = Samples.read(forge.folder)
    assert samples.trajectories(samples.episode(1)) == []
    forge.started()
    forge.admitted(1, attempt=1)
    forge.rejected(1)
    forge.write()
    samples = Samples.read(forge.folder)
    assert samples.trajectories(samples.episode(1)) == [], "the file is of the attempt before"


async def test_a_damaged_payload_is_a_note_and_not_shown(tmp_path):
    await run(tmp_path)
    for path in kept_names(tmp_path).values():
        path.write_bytes(path.read_bytes()[:-1])
    report = audit(tmp_path)
    assert report.is_clean
    assert any("damaged" in note for note in report.notes)
    assert not any(answers for _, answers in readable(tmp_path))


async def test_the_limit_holds_over_restarts_of_the_controller(tmp_path):
    await run(tmp_path)
    first = set(kept_names(tmp_path))
    ledger = Ledger.open(tmp_path, keep_rejected=LIMIT)
    payload = next(iter(kept_names(tmp_path).values())).read_bytes()
    ledger.start(lambda error: pytest.fail(str(error)))
    episode_id = ledger.admit(version=ledger.state.version)
    ledger.fail(episode_id, "ValueError: no", kind="ValueError", payload=payload)
    await ledger.durable()
    await ledger.close()
    result = set(kept_names(tmp_path))
    assert len(result) == LIMIT
    assert result - first == {(episode_id, 0)}
