"""Options of the loss assembly: contradictions are refused, options without effect are listed, both by name."""

from functools import partial

import pytest

from areal.api.config.load import read
from areal.api.config.policy_losses import AGGREGATIONS, AssemblyOptions
from areal.api.config.schema import options_without_effect
from areal.api.errors import ConfigError


@pytest.fixture
def load(load):
    return partial(
        load, "gconfig={n_samples: 4, max_new_tokens: 64}", "critic={path: /models/tiny, optimizer: {lr: 1e-4}}"
    )


def test_the_defaults_are_areals():
    options = AssemblyOptions()
    assert (options.ppo_n_minibatches, options.ppo_epochs, options.loss_aggregation) == (4, 1, "token-mean")
    assert not options.has_entropy_bonus
    assert not list(options.assembly_problems())


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.loss_aggregation=seq-mean-token-sum-norm", "actor.loss_scale_tokens=64"],
        ["actor.loss_aggregation=token-sum"],
        ["critic.loss_aggregation=token-sum", "critic.loss_scale_tokens=64"],
        ["actor.entropy_coef=0.01", "actor.entropy_clamp=0.2"],
        ["actor.entropy_coef=0.001", "actor.adaptive_entropy={entropy_low: 0.1, entropy_high: 0.5}"],
        ["actor.target_kl=0.05"],
        ["actor.target_kl=0.05", "actor.ppo_n_minibatches=1", "actor.ppo_epochs=2"],
        ["actor.dynamic_sampling=true", "actor.mask_truncated=true", "actor.shared_prefix_min_tokens=63"],
        ["critic.eps_clip=null", "critic.huber_delta=10", "critic.ppo_epochs=2", "critic.warmup_steps=5"],
        ["critic.warmup_steps=5", "total_train_steps=6"],
    ],
)
def test_these_load(load, overrides):
    load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "code"),
    [
        (["actor.loss_aggregation=seq-mean-token-sum-norm"], "actor.loss_scale_tokens", "config.missing_requirement"),
        (["critic.loss_aggregation=seq-mean-token-sum-norm"], "critic.loss_scale_tokens", "config.missing_requirement"),
        (["actor.loss_aggregation=mean"], "actor.loss_aggregation", "config.not_a_choice"),
        (["actor.entropy_coef=0.01", "actor.entropy_clamp=1.0"], "actor.entropy_clamp", "config.out_of_range"),
        (["actor.adaptive_entropy={coef_low: 0.001}"], "actor.entropy_coef", "config.conflict"),
        (["actor.entropy_coef=1", "actor.adaptive_entropy={}"], "actor.entropy_coef", "config.conflict"),
        (
            ["actor.entropy_coef=0.001", "actor.adaptive_entropy={entropy_low: 2}"],
            "actor.adaptive_entropy.entropy_low",
            "config.conflict",
        ),
        (["actor.dynamic_sampling=true", "gconfig.n_samples=1"], "actor.dynamic_sampling", "config.conflict"),
        (["critic.warmup_steps=6", "total_train_steps=6"], "critic.warmup_steps", "config.conflict"),
    ],
)
def test_these_are_refused_by_name(load, overrides, path, code):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [(path, code)]


def test_bounds_of_the_entropy_coefficient_are_in_order(load):
    with pytest.raises(ConfigError) as caught:
        load("actor.adaptive_entropy={coef_low: 1}")
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"actor.entropy_coef", "actor.adaptive_entropy.coef_low"}


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["actor.loss_scale_tokens=64"], "actor.loss_scale_tokens"),
        (["critic.loss_scale_tokens=64"], "critic.loss_scale_tokens"),
        (["actor.entropy_clamp=0.2"], "actor.entropy_clamp"),
        (["actor.target_kl=0.1", "actor.ppo_n_minibatches=1"], "actor.target_kl"),
        (["actor.shared_prefix_min_tokens=2", "gconfig.n_samples=1"], "actor.shared_prefix_min_tokens"),
        (["actor.shared_prefix_min_tokens=64"], "actor.shared_prefix_min_tokens"),
    ],
)
def test_these_are_listed_by_name(load, overrides, path):
    config = load(*overrides)
    assert [item.path for item in options_without_effect(config)] == [path]


def test_every_aggregation_can_be_configured():
    for name in AGGREGATIONS:
        scale = {"loss_scale_tokens": 8} if name.endswith("norm") else {}
        reading = read(AssemblyOptions, {"loss_aggregation": name, **scale})
        assert not reading.problems
        assert not list(reading.config.assembly_problems())
