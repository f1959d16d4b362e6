from pathlib import Path

import pytest
import torch

from areal.api.config import RecoverConfig
from areal.api.errors import ConfigError, InputError
from areal.trainer.recover import RecoverPoint, RecoverStore


class FakeEngine:
    """Implements what the store calls of TrainEngine."""

    def __init__(self, state: str) -> None:
        self.state = state

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return values

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        assert with_optimizer
        path.mkdir(parents=True)
        (path / "state").write_text(self.state)

    def load(self, path: Path, *, with_optimizer: bool) -> None:
        assert with_optimizer
        self.state = (path / "state").read_text()


def store(folder: Path, mode: str = "auto", num_ranks: int = 1) -> RecoverStore:
    return RecoverStore(folder, RecoverConfig(mode=mode), num_ranks=num_ranks, is_rank0=True)


def point(step: int) -> RecoverPoint:
    return RecoverPoint(step=step, cadence_s={"save": 1.5}, elapsed_s=7.0)


def test_what_was_saved_is_what_is_loaded_for_actor_and_critic(tmp_path):
    engines = {"actor": FakeEngine("a3"), "critic": FakeEngine("c3")}
    store(tmp_path).save(point(3), engines, engines["actor"])
    fresh = {"actor": FakeEngine(""), "critic": FakeEngine("")}
    source = store(tmp_path).start_from(after_failure=False)
    assert source is not None
    assert store(tmp_path).load(source, fresh) == point(3)
    assert (fresh["actor"].state, fresh["critic"].state) == ("a3", "c3")


def test_the_previous_checkpoint_stays_and_older_ones_go(tmp_path):
    engines = {"actor": FakeEngine("a")}
    for step in (1, 2, 3):
        store(tmp_path).save(point(step), engines, engines["actor"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_checkpoint_cut_short_is_never_trusted(tmp_path):
    engines = {"actor": FakeEngine("whole")}
    for step in (1, 2):
        store(tmp_path).save(point(step), engines, engines["actor"])
    (tmp_path / "step-000002" / "actor" / "state").write_text("who")
    newest = store(tmp_path).newest()
    assert newest is not None
    assert newest.name == "step-000001"


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
def test_recover_mode_decides_whether_a_start_goes_on(tmp_path, mode, after_failure, recovers):
    engines = {"actor": FakeEngine("a")}
    store(tmp_path).save(point(1), engines, engines["actor"])
    assert (store(tmp_path, mode).start_from(after_failure=after_failure) is not None) is recovers


def test_resume_with_nothing_to_resume_says_so(tmp_path):
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        store(tmp_path, "resume").start_from(after_failure=False)


def test_another_number_of_ranks_is_refused(tmp_path):
    engines = {"actor": FakeEngine("a")}
    path = store(tmp_path).save(point(1), engines, engines["actor"])
    with pytest.raises(InputError, match="another number of trainer ranks"):
        store(tmp_path, num_ranks=2).load(path, engines)
