"""Where actor.logprob_kernel=liger cannot be honoured the config says so before anything starts."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, PPOConfig, load_config
from areal.api.errors import ConfigError

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: native:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}, logprob_kernel: liger}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def test_liger_is_taken_where_only_log_probabilities_are_needed(path):
    config = load_config(["--config", str(path), "ref={path: /models/tiny, logprob_kernel: liger}"], GRPOConfig)
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
def test_what_liger_cannot_give_is_refused(path, overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(path), *overrides], GRPOConfig)
    assert [problem.path for problem in caught.value.problems] == ["actor.logprob_kernel"]


def test_a_critic_has_no_log_probabilities(path):
    critic = "critic={path: /models/tiny, optimizer: {lr: 1e-4}, logprob_kernel: liger}"
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(path), "actor.adv_estimator=gae", critic], PPOConfig)
    assert [problem.path for problem in caught.value.problems] == ["critic.logprob_kernel"]
