"""A recorded run, from its files: its decisions repeat, and its service times are found again."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from areal.api.config import save_config
from areal.api.config.rollout import TargetStaleness
from areal.ledger.ledger import GroupCommitLog, GroupWriter
from areal.planner import simulation
from areal.planner.measured import answers_of, decode_times, read_episodes
from areal.planner.simulation import RecordingLog, Setting, simulate
from areal.system.run_paths import RunPaths
from benchmark.planner_identity import repeated
from tests.planner.test_simulation import STEP_S, setting


def recorded(item: Setting, folder: Path, monkeypatch) -> RunPaths:
    """Simulates a run with a ledger on disk, as that of a real run."""
    paths = RunPaths(folder)
    paths.ledger.mkdir()
    save_config(item.config, paths.config)

    class FileLog(RecordingLog):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            self.files = GroupCommitLog(GroupWriter(paths.ledger, 1), first_segment=1)

        def start(self, on_failure) -> None:
            self.files.start(on_failure)

        def append(self, event) -> None:
            super().append(event)
            self.files.append(event)

        def append_payload(self, data):
            return self.files.append_payload(data)

        async def durable(self) -> None:
            await self.files.durable()

        async def close(self) -> None:
            await self.files.close()

    monkeypatch.setattr(simulation, "RecordingLog", FileLog)
    simulate(item)
    return paths


@pytest.mark.parametrize(("staleness", "target"), [(0, {}), (1, {}), (3, {}), (3, {"mean": 1.3}), (3, {"ess": 0.9})])
def test_recorded_ends_repeat_the_decisions_of_a_run(tmp_path, monkeypatch, staleness, target):
    subject = setting(staleness, servers=2, target_staleness=TargetStaleness(**target))
    actor = replace(subject.config.actor, use_decoupled_loss="ess" in target)
    subject = replace(
        subject, config=replace(subject.config, actor=actor), ess_of=lambda value: math.exp(-0.05 * value)
    )
    paths = recorded(subject, tmp_path, monkeypatch)
    run, result = repeated(paths.root)
    assert len(run.batches) == len(run.published) == 12
    assert len(run.admitted) >= 12 * 8
    assert result == run


def test_service_times_are_found_in_the_files_of_a_run(tmp_path, monkeypatch):
    subject = setting(1, steps=20, weight_update="keep_cache")
    paths = recorded(subject, tmp_path, monkeypatch)
    episodes, lost, update_s = read_episodes(paths)
    assert (lost, update_s) == ({}, 0.0)
    assert {each.prompt for each in episodes} == {16}
    step_s, sequence_s, context_s = decode_times(answers_of(episodes))
    # The time of a step does not depend on the sequences: all of it is the step's.
    assert step_s + 10 * sequence_s + 500 * context_s == pytest.approx(STEP_S, rel=0.05)
