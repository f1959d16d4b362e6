"""Where actor.logprob_kernel=liger cannot be honoured the config says so before anything starts."""

from functools import partial

import pytest

from areal.api.errors import ConfigError


@pytest.fixture
def load(load):
    return partial(load, "actor.logprob_kernel=liger")


def test_liger_is_taken_where_only_log_probabilities_are_needed(load):
    config = load("ref={path: /models/tiny, logprob_kernel: liger}")
    assert config.actor.logprob_kernel == config.ref.logprob_kernel == "liger"


@pytest.mark.parametrize(
    "overrides",
    [
        ["gconfig.temperature=0.7", "actor.temperature=0.7"],
        ["actor.entropy_coef=0.01"],
        ["ref={path: x}", "actor.kl_estimator=full", "actor.kl_top_k=8"],
        ["ref={path: x}", "actor.kl_loss_coef=0.1", "actor.kl_loss_estimator=full", "actor.kl_top_k=8"],
        ["actor.logprob_kernel=cuda"],
    ],
)
def test_what_liger_cannot_give_is_refused(load, overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert [problem.path for problem in caught.value.problems] == ["actor.logprob_kernel"]


def test_a_critic_has_no_log_probabilities(load):
    critic = "critic={path: /models/tiny, optimizer: {lr: 1e-4}, logprob_kernel: liger}"
    with pytest.raises(ConfigError) as caught:
        load("actor.adv_estimator=gae", critic)
    assert [problem.path for problem in caught.value.problems] == ["critic.logprob_kernel"]
