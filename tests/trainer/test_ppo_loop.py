"""A trainer rank from its start to its end, between a fake controller and a table model: who is told what, when."""

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from areal.api.config import (
    EvaluatorConfig,
    GRPOConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
)
from areal.api.config.launcher import ClusterSpecConfig
from areal.api.errors import InputError
from areal.engine.mesh import TrainerMesh
from areal.rollout.client import WeightsNeeded
from areal.system.run_paths import RunPaths
from areal.trainer import ppo_loop
from areal.trainer.actor import PPOActor
from areal.trainer.progress import TrainingLength
from areal.trainer.roles import PPORoles
from areal.weights.weight_files import checksum_of
from tests.expect import raises_code
from tests.fake_ranks import FakeRanks
from tests.process_context import a_context
from tests.shares import make_share

LENGTH = TrainingLength(steps_per_epoch=4, total_steps=3)


def share_of(step):
    dice = random.Random(step)
    return make_share(
        step=step,
        version=step,
        token_ids=np.array([dice.randrange(6) for _ in range(8)], np.int32),
        lengths=np.array([4, 4], np.int32),
        loss_mask=np.array([0, 1, 1, 1] * 2, np.uint8),
        rollout_logprobs=np.array([0, -1.5, -1.5, -1.5] * 2, np.float32),
        output_versions=np.array([-1, 0, 0, 0] * 2, np.int32),
        rewards=np.array([1.0, 0.0], np.float32),
        group_index=np.array([0, 0], np.int32),
        finished=np.array([1, 1], np.uint8),
    )


@dataclass
class Controller:
    """A client and a weight channel in one: everything the rank says, in order."""

    told: list = field(default_factory=list)
    lost_before: list = field(default_factory=list)
    """What is answered with WeightsNeeded, once each."""
    rewards: dict = field(default_factory=dict)
    engine: object = None
    sent: int | None = None
    """The version that is not waited for yet."""

    def _answer(self, question):
        if question in self.lost_before:
            self.lost_before.remove(question)
            raise WeightsNeeded("no server holds the version")
        self.told.append(question)

    def attach(self, *, rank, world_size, dp_rank, dp_size, step, version):
        self.told.append(("attach", step, version))

    def probe_tokens(self, version):
        return None

    def next_batch(self, step):
        self._answer(("batch", step))
        return share_of(step)

    def consumed(self, step, version, weights_checksum="", ess=None):
        self.told.append(("consumed", step, weights_checksum, ess))

    def evaluate(self, step, mode):
        self._answer(("evaluate", step))
        return {"reward": self.rewards.get(step, 0.0)}

    def committed(self, step, path):
        self.told.append(("committed", step))

    def newest_step(self):
        return None

    def finish(self, steps):
        self.told.append(("finish", steps))

    def publish(self, version):
        self.told.append(("publish", version))
        self.sent = version
        return checksum_of(self.engine, FakeRanks())

    def wait_served(self):
        if self.sent is not None:
            self.told.append(("served", self.sent, checksum_of(self.engine, FakeRanks())))
        self.sent = None

    def metrics(self):
        return {}

    def close(self):
        return None

    @property
    def names(self):
        return [said[:2] for said in self.told if said[0] not in ("consumed", "served")]


class Mesh(FakeRanks):
    def close(self):
        return None


@pytest.fixture
def start(toolbox, monkeypatch, tmp_path):
    """Run a rank: start(controller, run_id=..., **options of the configuration) -> its engine."""

    class Engine(toolbox.TableEngine):
        def named_weights(self, *, stored=False):
            yield "table", self.table.detach()

        def save(self, path, *, with_optimizer):
            path.mkdir(parents=True)
            self.write(path)

        def stage(self, *, copies):
            return self

        def write(self, folder):
            np.save(folder / "table.npy", self.table.detach().numpy())
            return {}

        def load(self, path):
            with torch.no_grad():
                self.table.copy_(torch.from_numpy(np.load(path / "table.npy")))

    def run(controller, *, run_id=0, recover=False, length=LENGTH, has_valid=False, **options):
        engine = Engine()
        config = config_of(tmp_path, **options)
        roles = PPORoles(
            actor=PPOActor(engine, config.actor),
            reference=None,
            critic=None,
            reward_model=None,
            teacher=None,
            trained={"actor": engine},
            frozen={},
        )
        controller.engine = engine
        monkeypatch.setattr(ppo_loop, "build_roles", lambda *_: roles)
        monkeypatch.setattr(ppo_loop, "build_weight_channel", lambda *_: controller)
        monkeypatch.setattr(ppo_loop.RolloutClient, "from_registry", lambda *_, **__: controller)
        monkeypatch.setattr(TrainerMesh, "open", lambda *_, **__: Mesh())
        context = a_context(run_id=run_id, run_dir=str(RunPaths.of(config).root), recover=recover)
        RunPaths.of(config).root.mkdir(parents=True, exist_ok=True)
        ppo_loop.train_policy(config, context, length, has_valid=has_valid)
        return engine

    return run


def config_of(folder, *, evaluator=None, recover=None, **actor):
    options = {"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1, "optimizer": OptimizerConfig()} | actor
    return GRPOConfig(
        experiment_name="test",
        allocation_mode="native:d1+fsdp:d1",
        trial_name="run",
        cluster=ClusterSpecConfig(fileroot=str(folder)),
        train_dataset=TrainDatasetConfig(path="none", batch_size=2),
        evaluator=evaluator or EvaluatorConfig(),
        stats_logger=StatsLoggerConfig(
            samples_freq_steps=None, causes_freq_steps=None
        ),  # "table" has no tokenizer, also not on the hub
        recover=recover or RecoverConfig(mode="auto", freq_steps=2),
        actor=PPOActorConfig(**options),
    )


def steps(*numbers):
    return [said for step in numbers for said in (("batch", step), ("publish", step + 1))]


def test_a_fresh_rank_attaches_to_servers_that_loaded_what_it_did(start, tmp_path):
    controller = Controller()
    engine = start(controller, length=TrainingLength(steps_per_epoch=4, total_steps=1))
    assert controller.names == [("attach", 0), *steps(0), ("committed", 1), ("finish", 1)]
    recorded = json.loads(RunPaths(tmp_path / "test" / "run").initial_weights.read_text())
    assert recorded == {"actor": checksum_of(type(engine)(), FakeRanks())}


def test_each_step_is_reported_with_the_checksum_of_its_weights(start):
    controller = Controller()
    engine = start(controller)
    checksums = [said[2] for said in controller.told if said[0] == "consumed"]
    assert [said[1] for said in controller.told if said[0] == "consumed"] == [0, 1, 2]
    assert len(set(checksums)) == 3
    assert checksums[-1] == checksum_of(engine, FakeRanks())


@pytest.mark.parametrize("has_ratios", [True, False])
def test_each_step_is_reported_with_the_effective_sample_size_of_its_batch(start, tmp_path, has_ratios):
    controller = Controller()
    start(controller, use_decoupled_loss=has_ratios)
    lines = RunPaths(tmp_path / "test" / "run").metrics.read_text().splitlines()
    logged = [json.loads(line).get("batch/mismatch/ess_token") for line in lines]
    result = [said[3] for said in controller.told if said[0] == "consumed"]
    assert result == logged
    assert [value is not None and 0 < value < 1 for value in result] == [has_ratios] * 3


def test_the_next_batch_is_requested_while_the_servers_install_the_weights_which_do_not_change_before(start):
    controller = Controller()
    start(controller, has_valid=True, evaluator=EvaluatorConfig(freq_steps=2, modes=["greedy"]))
    order = [said[:2] for said in controller.told if said[0] in ("batch", "publish", "consumed", "served", "evaluate")]
    assert order == [
        ("batch", 0), ("publish", 1), ("consumed", 0), ("batch", 1), ("served", 1),
        ("publish", 2), ("consumed", 1), ("served", 2), ("evaluate", 2), ("batch", 2),
        ("publish", 3), ("consumed", 2), ("served", 3), ("evaluate", 3),
    ]  # fmt: skip
    sent = {said[1] + 1: said[2] for said in controller.told if said[0] == "consumed"}
    assert sent == {said[1]: said[2] for said in controller.told if said[0] == "served"}


@pytest.mark.parametrize("options", [{"run_id": 1}, {"init_from_scratch": True}])
def test_a_rank_that_cannot_rely_on_what_the_servers_hold_publishes_before_it_attaches(start, options):
    controller = Controller()
    start(controller, **options)
    assert controller.names[:3] == [("publish", 0), ("attach", 0), ("batch", 0)]


def test_a_recovered_rank_brings_the_servers_back_to_its_version(start, tmp_path):
    before, controller = Controller(), Controller()
    start(before)
    recorded = RunPaths(tmp_path / "test" / "run").initial_weights.read_bytes()
    longer = TrainingLength(steps_per_epoch=4, total_steps=4)
    start(controller, recover=True, length=longer)
    assert controller.names[:3] == [("publish", 3), ("attach", 3), ("batch", 3)]
    assert RunPaths(tmp_path / "test" / "run").initial_weights.read_bytes() == recorded


def test_a_complete_run_is_not_trained_again_whatever_the_servers_hold(start):
    start(Controller())
    controller = Controller()
    start(controller, recover=True, run_id=1)
    assert controller.told == [("finish", 3)]


def test_a_run_that_reached_its_goal_is_not_trained_again(start):
    goal = EvaluatorConfig(freq_steps=1, modes=["greedy"], stop_at={"greedy": 0.5})
    first, controller = Controller(rewards={2: 0.9}), Controller()
    start(first, has_valid=True, evaluator=goal)
    assert ("batch", 2) not in first.told
    start(controller, has_valid=True, evaluator=goal, recover=True)
    assert controller.told == [("finish", 2)]


def test_a_version_that_the_servers_lost_is_published_again_before_a_batch_and_in_an_evaluation(start):
    lost = [("batch", 1), ("evaluate", 2)]
    controller = Controller(lost_before=list(lost))
    start(controller, has_valid=True, evaluator=EvaluatorConfig(freq_steps=1, modes=["greedy"]))
    names = controller.names
    assert names[names.index(("batch", 1)) - 1] == ("publish", 1)
    assert names.count(("publish", 1)) == 2
    assert names[names.index(("evaluate", 2)) - 1] == ("publish", 2)
    assert names.count(("publish", 2)) == 2
    assert names.count(("evaluate", 2)) == 1
    assert controller.lost_before == []


def test_a_refused_batch_names_the_command_that_leaves_it_out(start, monkeypatch):
    def refused(actor, batch):
        raise InputError("the train batch contains token id 99", code="data.token_id")

    monkeypatch.setattr(PPOActor, "with_filters", refused)
    controller = Controller()
    with raises_code("data.token_id", "token id 99", "batch 0", "python -m areal.ledger skip RUN"):
        start(controller)
    assert not [said for said in controller.told if said[0] == "consumed"]
