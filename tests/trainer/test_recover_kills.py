"""A process killed between any two file-system operations of a save, a disk that gets full in it: what is left is
enough to go on."""

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal.api.config import OptimizerConfig, RecoverConfig, SaverConfig, TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.system.durable import damage_of
from areal.trainer.after_step import Saver
from areal.trainer.progress import TrainingLength
from areal.trainer.recover import RecoverPoint, RecoverStore
from tests.expect import raises_code
from tests.fake_ranks import FakeRanks

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
"""What the interpreter reports before it asks the operating system (`sys.addaudithook`), besides files
opened to write."""
LENGTH = TrainingLength(steps_per_epoch=9, total_steps=9)


class Killed(BaseException):
    """No `except Exception` and no clean-up holds it up."""


class Killer:
    """Lets so many operations through, then none: clean-up code of a killed process does not run either."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.num_done = 0
        self._thread = threading.get_ident()

    def hook(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
        is_other = threading.get_ident() != self._thread  # what an earlier test left running
        if self.left is None or is_other or not (writes or event in CHANGES):
            return
        if self.left == 0:
            raise Killed
        self.left -= 1
        self.num_done += 1

    @contextlib.contextmanager
    def after(self, num_operations: int) -> Iterator[None]:
        self.left, self.num_done = num_operations, 0
        try:
            with contextlib.suppress(Killed):
                yield
        finally:
            self.left = None

    def kill_at_each_operation(self, prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
        """Yields after each kill; `prepare` makes the situation before and returns what is to be killed."""
        action = prepare()
        with self.after(10**9):
            action()
        total = self.num_done
        for count in range(total):
            action = prepare()
            with self.after(count):
                action()
            assert self.num_done == count
            yield count


@pytest.fixture(scope="module")
def killer() -> Killer:
    killer = Killer()
    sys.addaudithook(killer.hook)  # it stays, and lets everything through
    return killer


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    config = TrainEngineConfig(path=str(folder), dtype="float32", optimizer=OptimizerConfig())
    return build_fsdp_engine(config, role="actor", total_steps=9, mesh=TrainerMesh.open(None), seed=0)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A killed process loses nothing that it wrote; only a machine does."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def store_of(folder: Path, engine) -> RecoverStore:
    return RecoverStore(folder, RecoverConfig(mode="auto", freq_steps=1), {"actor": engine}, FakeRanks())


def point(step: int) -> RecoverPoint:
    return RecoverPoint(step=step, cadence_s={}, elapsed_s=float(step), goal_reached={})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damaged", [None, 3])
def test_a_recovery_save_killed_at_any_moment_leaves_an_intact_checkpoint(killer, engine, tmp_path, damaged):
    """`damaged`: the checkpoint that the new one takes the place of, of a future that is no more."""
    before, folder = tmp_path / "before", tmp_path / "recover"
    store = store_of(before, engine)
    for step in (1, 2, 3)[: 2 if damaged is None else 3]:
        store.save(point(step))
    if damaged is not None:
        (before / f"step-{damaged:06d}" / "state.json").write_bytes(b"{}")

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        running = store_of(folder, engine)
        assert running.start_from(after_failure=True) == folder / "step-000002"
        return lambda: running.save(point(3))

    result = set()
    for _ in killer.kill_at_each_operation(prepare):
        assert damage_of(folder / "step-000002") == ""
        if damaged is None:
            assert not any(damage_of(path) for path in folder.glob("step-*"))
        again = store_of(folder, engine)
        source = again.start_from(after_failure=True)
        assert source is not None
        result.add(source.name)
        assert again.load(source).step == int(source.name[-6:])
        again.save(point(4))
        assert names(folder) == sorted({source.name, "step-000004"})
    assert result == {"step-000002", "step-000003"}


def test_an_export_killed_at_any_moment_shows_no_half_folder(killer, engine, tmp_path):
    """The export of step 2 is made a second time, as after a recovery, and pushes out that of step 1."""
    before, folder = tmp_path / "before", tmp_path / "checkpoints"
    for step in (0, 1):
        Saver(before, {"actor": engine}, FakeRanks(), SaverConfig(keep_last=2)).save(step + 1, {})

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        saver = Saver(folder, {"actor": engine}, FakeRanks(), SaverConfig(keep_last=1))
        return lambda: saver.save(2, {})

    for _ in killer.kill_at_each_operation(prepare):
        shown = [path for path in (folder / "actor").iterdir() if path.name.startswith("step-")]
        assert not any(damage_of(path) for path in shown)
        again = Saver(folder, {"actor": engine}, FakeRanks(), SaverConfig(keep_last=1))
        assert "step-000002" in names(folder / "actor")  # one killed between its two renames comes back
        assert all(name.startswith("step-") for name in names(folder / "actor"))
        again.save(2, {})
        assert names(folder / "actor") == ["step-000002"]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_a_save_in_one_line_and_leaves_the_earlier_checkpoints(engine, small_disk):
    folder, filler = small_disk / "recover", small_disk / "filler"
    store = store_of(folder, engine)
    for step in (1, 2):
        store.save(point(step))
    free = shutil.disk_usage(small_disk).free
    for room in range(0, 40, 8):  # from nothing up to almost enough: another operation fails each time
        filler.write_bytes(b"x" * max(free - room * 1024, 0))
        with raises_code("checkpoint.not_written", "step 3", "No space left", "step-000001, step-000002"):
            store.save(point(3))
        assert names(folder) == ["step-000001", "step-000002"]
    filler.write_bytes(b"x" * free)
    with raises_code("checkpoint.not_written", "No space left"):
        Saver(small_disk / "checkpoints", {"actor": engine}, FakeRanks(), SaverConfig(keep_last=1)).save(1, {})
    assert not list(small_disk.glob("checkpoints/actor/*"))
    filler.unlink()
    store.save(point(3))
    assert names(folder) == ["step-000002", "step-000003"]
