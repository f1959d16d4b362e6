"""A run whose numbers are not finite ends with its cause; what it published and saved before stays."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal.api.config import PPOActorConfig, PPOCriticConfig
from areal.api.errors import TrainingDiverged
from areal.engine.mesh import TrainerMesh
from areal.trainer.actor import PPOActor
from areal.trainer.progress import updating
from areal.trainer.roles import Critic
from tests.expect import raises_code
from tests.trainer import row_cases as rows

ROOT = Path(__file__).parents[2]
CONFIG = """
experiment_name: diverged
trial_name: run
seed: 5
allocation_mode: fsdp:d2
cluster: {fileroot: FOLDER/runs, n_gpus_per_node: 0}
total_train_epochs: 9
total_train_steps: 2
train_dataset: {path: FOLDER/data/sft.jsonl, type: sft, batch_size: 12}
saver: {freq_steps: 1}
recover: {mode: auto, freq_steps: 1}
model:
  path: FOLDER/data/model
  dtype: float32
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
"""


class Diverging:
    """Adds the error of an engine to a table model."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def optimizer_step(self):
        raise TrainingDiverged("gradient", "table", 0.1)


def test_actor_and_critic_name_themselves_and_the_step(toolbox):
    batch = toolbox.make_batch([[1, 2, 3], [4, 0]], rewards=[1.0, 0.0])
    critic = Critic(Diverging(toolbox.TableEngine(critic=True)), PPOCriticConfig(path="table"))
    actor = PPOActor(Diverging(toolbox.TableEngine()), PPOActorConfig(path="table", kl_ctl=0.0))
    batch = actor.with_advantages(critic.with_values(replace(batch, prox_logprobs=batch.rollout_logprobs)))
    for role, model in (("actor", actor), ("critic", critic)):
        with raises_code("training.not_finite", role, "table", "0.1", 7, 6) as error:
            model.update(batch, step=6)
        assert isinstance(error.value, TrainingDiverged)
        assert (error.value.role, error.value.step, error.value.kind) == (role, 7, "gradient")


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_training_on_rows_ends_too(tmp_path, kind):
    rows.write_models(tmp_path)
    rate = replace(rows.DESCENT, lr=1e36)
    task = rows.make_task(kind, tmp_path, TrainerMesh.open(None), rows.CUTS[0], optimizer=rate)
    role = next(iter(task.engines))
    with raises_code("training.not_finite") as error, updating(role, 0):
        task.update(task.batch_of(rows.rows_of(kind)))
    assert isinstance(error.value, TrainingDiverged)
    assert (error.value.role, error.value.step, error.value.kind) == (role, 1, "weight")


@pytest.mark.slow
def test_two_ranks_end_the_run_and_the_last_checkpoint_stays(tmp_path):
    def launch(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "areal.launcher.local", "--config", str(tmp_path / "c.yaml"), *overrides]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    prepare = ROOT / "examples" / "quickstart" / "prepare.py"
    assert subprocess.run([sys.executable, prepare, tmp_path / "data"], capture_output=True).returncode == 0
    (tmp_path / "c.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    done = launch()
    assert done.returncode == 0, done.stderr
    root = tmp_path / "runs" / "diverged" / "run"
    saved = {path: path.read_bytes() for part in ("recover", "checkpoints") for path in (root / part).rglob("*.*")}
    assert len(saved) > 4

    done = launch("total_train_steps=4", "model.optimizer.lr=1e9")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("areal: error: ")
    assert "[training.not_finite]" in last
    assert all(path.read_bytes() == content for path, content in saved.items())
    assert sorted(path.name for path in (root / "recover").iterdir()) == ["step-000001", "step-000002"]
    starts = [(root / "logs" / f"trainer-{rank}.log").read_text().count("[training.not_finite]") for rank in range(2)]
    assert starts == [1, 1], "a rank did not end by the error, or was started again"

    done = launch("total_train_steps=4")
    assert done.returncode == 0, done.stderr
