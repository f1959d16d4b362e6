import json
import logging
import random
import threading
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.api.config import RecoverConfig
from areal.trainer.recover import ActorState, RecoverPoint, RecoverStore
from tests.expect import raises_code
from tests.fake_ranks import FakeRanks


@dataclass(frozen=True)
class FakeState:
    """Implements StagedState; writes when it may."""

    name: str
    state: str
    may_write: threading.Event

    def write(self, folder: Path) -> dict[str, int]:
        assert self.may_write.wait(100)
        (folder / self.name).write_text(self.state)
        return {self.name: zlib.crc32(self.state.encode())}


class FakeEngine:
    """Implements what the store calls of TrainEngine; ranks are threads."""

    def __init__(self, state: str, rank: int = 0) -> None:
        self.state = state
        self.rank = rank
        self.num_copied = 0
        self.may_write = threading.Event()
        self.may_write.set()

    def stage(self, *, copies: bool) -> FakeState:
        self.num_copied += copies
        return FakeState(f"state-{self.rank}", self.state, self.may_write)

    def load(self, path: Path) -> None:
        self.state = (path / f"state-{self.rank}").read_text()


@pytest.fixture
def make_engine():
    """An engine that is alone."""
    return lambda state="a": FakeEngine(state)


@pytest.fixture
def make_store(make_engine):
    """A store for one rank, with the engine it saves when none is given."""

    def make(folder: Path, mode: str = "auto", engines=None) -> RecoverStore:
        return RecoverStore(
            folder, RecoverConfig(mode=mode, freq_steps=1), engines or {"actor": make_engine()}, FakeRanks()
        )

    return make


def point(step: int) -> RecoverPoint:
    return RecoverPoint(step=step, cadence_s={"save": 1.5}, elapsed_s=7.0, goal_reached={})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    """Other content of the same size."""
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def test_what_was_saved_is_what_is_loaded_for_actor_and_critic(make_store, make_engine, tmp_path):
    make_store(tmp_path, engines={"actor": make_engine("a3"), "critic": make_engine("c3")}).save(point(3))
    fresh = {"actor": make_engine(""), "critic": make_engine("")}
    store = make_store(tmp_path, engines=fresh)
    source = store.start_from(after_failure=False)
    assert source is not None
    assert store.load(source) == point(3)
    assert (fresh["actor"].state, fresh["critic"].state) == ("a3", "c3")


def test_coefficients_that_adapt_are_loaded_to_the_bit(make_store, tmp_path):
    coefficients = {"kl_ctl": 0.1 * 1.0000000000000002**7 / 3, "entropy_coef": 5e-324}
    saved = replace(point(1), actor=ActorState(coefficients=coefficients))
    assert make_store(tmp_path).load(make_store(tmp_path).save(saved)) == saved


def draws() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    return [*numbers, torch.randn(3).sum().item()]


def test_every_global_random_generator_continues(make_store, tmp_path):
    store = make_store(tmp_path)
    random.gauss(0, 1)  # keeps a second number for the next call
    np.random.randn()
    path = store.save(point(1))
    expected = draws()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    store.load(path)
    assert draws() == expected


def test_each_rank_has_its_own_random_numbers_and_proves_its_part(toolbox, tmp_path, monkeypatch):
    group = toolbox.RankGroup(2)
    engines = [FakeEngine(f"a{rank}", rank) for rank in range(2)]
    asked = []

    def damage_of(folder, *, part, parts):
        asked.append((folder.relative_to(tmp_path).parts[0], part, parts))
        return ""

    monkeypatch.setattr("areal.trainer.recover.damage_of", damage_of)
    monkeypatch.setattr("areal.trainer.recover.damage_of", damage_of)

    def rank_run(rank):
        store = RecoverStore(
            tmp_path, RecoverConfig(mode="auto", freq_steps=1), {"actor": engines[rank]}, FakeRanks(rank, group)
        )
        store.save(point(1))
        return store.start_from(after_failure=False)

    assert group.run(rank_run) == [tmp_path / "step-000001"] * 2
    assert names(tmp_path / "step-000001" / "rng") == ["rank-00000.json", "rank-00001.json"]
    assert sorted(asked) == [("next", 0, 2), ("next", 1, 2), ("step-000001", 0, 2), ("step-000001", 1, 2)]


def test_each_attempt_is_written_in_a_folder_with_a_new_name(make_store, tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("areal.trainer.recover.damage_of", lambda folder, **part: folders.append(folder) or "")
    store = make_store(tmp_path)
    for _ in range(2):
        store.save(point(1))
    assert len(set(folders)) == 2
    assert names(tmp_path) == ["step-000001"]


def test_the_previous_checkpoint_stays_and_older_ones_go(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (1, 2, 3):
        store.save(point(step))
    assert names(tmp_path) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("damage", ["cut short", "another content", "no marker"])
def test_a_damaged_checkpoint_is_passed_over_with_one_line(make_store, tmp_path, caplog, monkeypatch, damage):
    store = make_store(tmp_path)
    for step in (1, 2):
        store.save(point(step))
    broken = tmp_path / "step-000002"
    match damage:
        case "cut short":
            (broken / "actor" / "state-0").write_text("")
        case "another content":
            flip(broken / "actor" / "state-0")
        case _:
            (broken / "COMPLETE").unlink()
    (tmp_path / "next").mkdir()
    monkeypatch.setattr(logging.getLogger("areal"), "propagate", True)
    with caplog.at_level(logging.WARNING, "areal"):
        assert make_store(tmp_path).start_from(after_failure=False) == tmp_path / "step-000001"
    assert [str(broken) in record.getMessage() for record in caplog.records] == [True]
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_rank_that_finds_damage_makes_all_ranks_pass_over(toolbox, tmp_path):
    group = toolbox.RankGroup(2)
    engines = [FakeEngine(f"a{rank}", rank) for rank in range(2)]
    config = RecoverConfig(mode="auto", freq_steps=1)
    stores = [RecoverStore(tmp_path, config, {"actor": engines[rank]}, FakeRanks(rank, group)) for rank in range(2)]
    for step in (1, 2):
        group.run(lambda rank, step=step: stores[rank].save(point(step)))
    flip(tmp_path / "step-000002" / "actor" / "state-1")
    assert group.run(lambda rank: stores[rank].start_from(after_failure=False)) == [tmp_path / "step-000001"] * 2


def test_a_recovered_run_keeps_what_it_came_from_and_removes_the_damaged_one(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (2, 4):
        store.save(point(step))
    flip(tmp_path / "step-000004" / "state.json")
    again = make_store(tmp_path)
    assert again.start_from(after_failure=True) == tmp_path / "step-000002"
    again.save(point(3))
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_steps_are_ordered_as_numbers(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (999_999, 1_000_000):
        store.save(point(step))
    assert store.start_from(after_failure=False) == tmp_path / "step-1000000"


@pytest.mark.parametrize(
    ("mode", "after_failure", "recovers"),
    [
        ("disabled", True, False),
        ("auto", False, True),
        ("fault", False, False),
        ("fault", True, True),
        ("resume", False, True),
    ],
)
def test_recover_mode_decides_whether_a_start_recovers(make_store, tmp_path, mode, after_failure, recovers):
    make_store(tmp_path).save(point(1))
    assert (make_store(tmp_path, mode).start_from(after_failure=after_failure) is not None) is recovers


def test_resume_with_nothing_to_resume_says_so(make_store, tmp_path):
    with raises_code("checkpoint.missing", tmp_path):
        make_store(tmp_path, "resume").start_from(after_failure=False)


def test_with_damaged_checkpoints_only_resume_fails_and_auto_starts_from_the_beginning(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (1, 2):
        store.save(point(step))
        flip(tmp_path / f"step-00000{step}" / "actor" / "state-0")
    assert make_store(tmp_path, "auto").start_from(after_failure=False) is None
    with raises_code("checkpoint.missing", "step-000002, step-000001"):
        make_store(tmp_path, "resume").start_from(after_failure=False)


def test_what_does_not_fit_is_refused_in_one_line(make_store, make_engine, toolbox, tmp_path):
    path = make_store(tmp_path).save(point(1))
    two_models = make_store(tmp_path, engines={"actor": make_engine(), "critic": make_engine()})
    with raises_code("checkpoint.other_run", "['actor'], not ['actor', 'critic']"):
        two_models.load(path)
    two_ranks = RecoverStore(tmp_path, RecoverConfig(), {"actor": FakeEngine("a")}, FakeRanks(0, toolbox.RankGroup(2)))
    assert two_ranks.load(path).step == 1  # engines read the parts that any number of ranks wrote
    state = json.loads((path / "state.json").read_bytes())
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    with raises_code("checkpoint.other_run", "1, not 3"):
        make_store(tmp_path).load(path)
    (path / "state.json").write_text(json.dumps({"step": 3, "num_ranks": 1}))
    with raises_code("checkpoint.other_run", "None, not 3"):
        make_store(tmp_path).load(path)


def test_a_checkpoint_that_reads_back_differently_never_counts(make_store, make_engine, tmp_path, monkeypatch):
    store = make_store(tmp_path)
    store.save(point(1))
    store.save(point(2))
    monkeypatch.setattr("areal.trainer.recover.damage_of", lambda folder, **part: "x differs")
    with raises_code("checkpoint.not_written", "step 3", "x differs", "step-000002"):
        store.save(point(3))
    assert names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_rest(toolbox, tmp_path, monkeypatch, bad_rank):
    group = toolbox.RankGroup(2)
    engines = [FakeEngine(f"a{rank}", rank) for rank in range(2)]
    config = RecoverConfig(mode="auto", freq_steps=1)
    stores = [RecoverStore(tmp_path, config, {"actor": engines[rank]}, FakeRanks(rank, group)) for rank in range(2)]
    group.run(lambda rank: stores[rank].save(point(1)))
    write_bytes = Path.write_bytes

    def full(path, data):
        if path.name == f"rank-{bad_rank:05d}.json":
            write_bytes(path, data[:10])
            raise OSError(28, "No space left on device", str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)

    def rank_run(rank):
        with raises_code("checkpoint.not_written", "step 2", "step-000001") as caught:
            stores[rank].save(point(2))
        return str(caught.value)

    messages = group.run(rank_run)
    assert "No space left on device" in messages[bad_rank]
    assert "another trainer rank" in messages[1 - bad_rank]
    assert names(tmp_path) == ["step-000001"]


def test_a_checkpoint_ahead_of_the_ledger_is_set_aside(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (2, 4):
        store.save(point(step))
    newest = make_store(tmp_path).start_from(after_failure=True, newest_step=lambda: 3)
    assert newest == tmp_path / "step-000002"
    assert names(tmp_path) == ["ahead-of-ledger-step-000004", "step-000002"]
    assert make_store(tmp_path).start_from(after_failure=True, newest_step=lambda: 9) == newest


@pytest.mark.parametrize("newest_step", [4, 5, None])
def test_a_checkpoint_that_the_ledger_knows_is_used(make_store, tmp_path, newest_step):
    for step in (2, 4):
        make_store(tmp_path).save(point(step))
    result = make_store(tmp_path).start_from(after_failure=True, newest_step=lambda: newest_step)
    assert result == tmp_path / "step-000004"


def test_with_checkpoints_ahead_of_the_ledger_only_nothing_is_changed(make_store, tmp_path):
    store = make_store(tmp_path)
    for step in (2, 4):
        store.save(point(step))
    with raises_code("checkpoint.ahead_of_ledger", "step-000002, step-000004"):
        make_store(tmp_path).start_from(after_failure=True, newest_step=lambda: 1)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_without_a_checkpoint_the_ledger_is_not_read(make_store, tmp_path):
    assert make_store(tmp_path).start_from(after_failure=False, newest_step=lambda: 1 // 0) is None


def test_training_goes_on_while_a_thread_writes_and_what_was_copied_is_saved(make_engine, tmp_path):
    engine, reported = make_engine("first"), []
    store = RecoverStore(
        tmp_path, RecoverConfig(), {"actor": engine}, FakeRanks(), committed=lambda step, path: reported.append(step)
    )
    engine.may_write.clear()
    path = store.save(point(1), waits=False)
    engine.state = "trained on"
    assert (store.is_writing, path.exists(), reported, engine.num_copied) == (True, False, [], 1)
    engine.may_write.set()
    store.finish()
    assert (store.is_writing, reported) == (False, [1])
    assert store.load(path) == point(1)
    assert engine.state == "first"
    store.close()


def test_a_save_waits_for_the_unfinished_one_and_says_for_what(make_engine, tmp_path, caplog, monkeypatch):
    engine, waiting = make_engine(), threading.Event()
    store = RecoverStore(tmp_path, RecoverConfig(), {"actor": engine}, FakeRanks())
    monkeypatch.setattr("areal.trainer.recover._PATIENCE_S", 0.01)
    monkeypatch.setattr(logging.getLogger("areal"), "propagate", True)

    class Watch(logging.Handler):
        def emit(self, record):
            if record.args == (1,):
                waiting.set()
                engine.may_write.set()

    engine.may_write.clear()
    store.save(point(1), waits=False)
    watch = Watch()
    logging.getLogger("areal.trainer").addHandler(watch)
    with caplog.at_level(logging.INFO, "areal"):
        store.save(point(2))
    logging.getLogger("areal.trainer").removeHandler(watch)
    assert waiting.is_set()
    assert names(tmp_path) == ["step-000001", "step-000002"]
    store.close()


def test_a_failed_write_is_an_error_at_the_next_call_on_all_ranks(toolbox, tmp_path):
    group = toolbox.RankGroup(2)
    engines = [FakeEngine(f"a{rank}", rank) for rank in range(2)]
    reported: list[int] = []

    class Full(FakeState):
        def write(self, folder: Path) -> dict[str, int]:
            raise OSError(28, "No space left on device")

    def rank_run(rank):
        store = RecoverStore(
            tmp_path,
            RecoverConfig(),
            {"actor": engines[rank]},
            FakeRanks(rank, group),
            committed=lambda step, path: reported.append(step),
        )
        store.save(point(1), waits=False)
        store.finish()
        if rank == 1:
            engines[rank].stage = lambda copies: Full("x", "x", engines[rank].may_write)
        store.save(point(2), waits=False)
        with raises_code("checkpoint.not_written", "step 2", "step-000001"):
            store.save(point(3), waits=False)
        store.close()

    group.run(rank_run)
    assert reported == [1]
    assert names(tmp_path) == ["step-000001"]
