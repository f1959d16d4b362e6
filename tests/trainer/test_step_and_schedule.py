"""What the loop tells the roles about the step, and what the roles' engines are built with."""

import sys
from types import SimpleNamespace

import pytest

from areal.api.config import GRPOConfig, OptimizerConfig, PPOActorConfig, PPOCriticConfig
from areal.observe.phase import PhaseClock
from areal.trainer import ppo_loop
from areal.trainer.progress import Progress, TrainingLength
from tests.fake_ranks import FakeRanks

LENGTH = TrainingLength(steps_per_epoch=10, total_steps=10)


@pytest.fixture
def built(monkeypatch):
    """built(config) -> (roles, what each engine was built with, by role)."""
    module = sys.modules[ppo_loop.build_roles.__module__]

    def build(config):
        asked = {}

        def build_fsdp_engine(model, *, role, **others):
            asked[role] = SimpleNamespace(**others)
            return SimpleNamespace(role=role)

        monkeypatch.setattr(module, "TRAIN_ENGINES", {"fsdp": build_fsdp_engine})
        return ppo_loop.build_roles(config, mesh=None, length=LENGTH), asked

    return build


def config_of(*, critic=None, **options):
    optimizer = OptimizerConfig()
    return GRPOConfig(
        experiment_name="a",
        trial_name="b",
        allocation_mode="native:d1+fsdp:d1",
        actor=PPOActorConfig(path="x", optimizer=optimizer, **options),
        critic=None if critic is None else PPOCriticConfig(path="x", optimizer=optimizer, **critic),
    )


def test_the_schedule_counts_every_epoch_and_begins_after_the_critics_head_start(built):
    _, asked = built(config_of(ppo_n_minibatches=4, ppo_epochs=3))
    assert asked["actor"].total_steps == 10 * 4 * 3
    critic = {"ppo_n_minibatches": 2, "ppo_epochs": 5, "warmup_steps": 4}
    _, asked = built(config_of(ppo_n_minibatches=4, ppo_epochs=3, critic=critic))
    assert asked["actor"].total_steps == (10 - 4) * 4 * 3
    assert asked["critic"].total_steps == 10 * 2 * 5
    _, asked = built(config_of(ppo_n_minibatches=4, critic={"warmup_steps": 40}))
    assert asked["actor"].total_steps == 4  # a schedule needs a length, even if it is never begun


def test_a_head_start_as_long_as_the_run_is_told(built, caplog):
    built(config_of(critic={"warmup_steps": 9}))
    assert not caplog.records
    built(config_of(critic={"warmup_steps": 10}))
    assert "critic.warmup_steps=10 of 10 train steps" in caplog.text


def test_the_policys_engine_gives_what_the_bonus_needs(built):
    assert not built(config_of())[1]["actor"].outputs.entropy_grad
    assert built(config_of(entropy_coef=0.1))[1]["actor"].outputs.entropy_grad
    assert built(config_of(entropy_coef=0.1, entropy_clamp=0.25))[1]["actor"].outputs.entropy_clamp == 0.25


def test_the_loop_tells_every_role_its_step_and_filters_before_it_computes(toolbox):
    told = []

    def passing(name, result):
        def call(batch, **options):
            told.append((name, options.get("step")))
            options.get("before_step", lambda: None)()
            return result(batch)

        return call

    def metrics(batch):
        return {}

    def plain(batch):
        return batch

    def pair(batch):
        return batch, {}

    actor = SimpleNamespace(
        with_prox_logprobs=passing("prox", plain),
        with_filters=passing("filters", pair),
        with_correction=passing("correction", pair),
        with_advantages=passing("advantages", plain),
        with_resampling=passing("resampling", pair),
        update=passing("actor", metrics),
        after_update=passing("after update", pair),
    )
    critic = SimpleNamespace(with_values=passing("values", plain), update=passing("critic", metrics))
    roles = SimpleNamespace(actor=actor, critic=critic, reference=None, reward_model=None, teacher=None)
    share = SimpleNamespace(stats={}, table=SimpleNamespace(token_ids=[1, 2]))
    channel = SimpleNamespace(
        publish=lambda version: "", wait_served=lambda: told.append(("served", None)), metrics=dict
    )
    batches = SimpleNamespace(next_batch=lambda step: share, consumed=lambda *facts: None)

    batch = toolbox.random_batch(0, 2)
    spans = []
    clock = PhaseClock(SimpleNamespace(add_span=lambda name, *times: spans.append(name), end_step=lambda: None))
    loop = ppo_loop.PPOLoop(
        roles=roles, batches=batches, channel=channel, ranks=FakeRanks(), after_step=lambda *facts: False,
        progress=Progress(TrainingLength(steps_per_epoch=9, total_steps=9), start_step=7), clock=clock,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, clock.active():
        patch.setattr(ppo_loop, "to_train_batch", lambda inputs: batch)
        loop.run()
    before = ["filters", "prox", "values", "correction", "advantages"]
    update = ["resampling", "actor", "served", "critic", "after update"]
    assert [name for name, _ in told] == [*before, *update] * 2 + ["served"]
    assert [step for name, step in told if name in ("actor", "critic")] == [7, 7, 8, 8]
    # the update has a span before the wait for the servers, and one after it
    waiting = ["update", "wait_servers", "publish_weights", "log_ratio", "update"]
    assert spans[spans.index("update") :][: len(waiting)] == waiting
