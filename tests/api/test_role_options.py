"""Options of advantages and of the frozen roles: contradictions are refused, options without effect are listed."""

from functools import partial

import pytest

from areal.api.config.schema import options_without_effect
from areal.api.errors import ConfigError

TEACHER, CRITIC = "teacher={path: /models/big, rl_weight: 0}", "critic={path: /models/tiny, optimizer: {lr: 1e-4}}"
SERVERS = "teacher.servers=[{server_addrs: ['h:1']}, {server_addrs: ['h:2'], sources: [math]}]"
JUDGE = "reward_model={path: /models/judge}"
CUT = ["actor.mask_truncated=true", "actor.mask_no_eos_with_zero=true"]
ARENA = ["workflow=textarena", "reward_fn=", "workflow_args.args={opponent: {steps: 4}}", "actor.lora={rank: 4}"]
OVERLONG = ["actor.overlong_reward_penalty=true", "actor.overlong_penalty_factor=1"]


@pytest.fixture
def load(load):
    return partial(
        load,
        "gconfig={n_samples: 4, max_new_tokens: 64}",
        "actor.kl_ctl=0",
        "ref={path: /models/tiny}",
        "reward_fn=exact",
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [TEACHER],
        [SERVERS, "teacher.top_k=8", "teacher.loss_coef=1"],
        ["teacher={path: /models/tiny, dtype: float32, average_decay: 0.9}"],
        [TEACHER, "ref=null"],  # without a reference there is no penalty
        [TEACHER, "actor.kl_loss_coef=0.1", "actor.positive_nll_coef=0.1", "actor.dynamic_sampling=true"],
        ["teacher={path: /models/big, rl_weight: 0.1}", CRITIC, "actor.kl_ctl=0.1", "actor.adv_norm={}"],
        [JUDGE, "reward_fn=", "actor.adv_estimator=grpo"],
        [JUDGE, "rollout.should_accept_fn=mixed_rewards"],
        [*OVERLONG, "actor.overlong_tokens=64"],
        ["actor.adv_norm={mean_level: group, std_level: group}"],
        ["actor.adv_norm={mean_level: group, std_level: group}", "gconfig.n_samples=1", CRITIC],
        ["actor.kl_ctl=0.1", "ref.logprob_kernel=liger"],
        [*CUT, CRITIC],
        ARENA,
        [*CUT, "actor.adv_norm={}"],
        [*CUT, "actor.adv_estimator=reinforce_plus_plus"],
    ],
)
def test_these_load(load, overrides):
    load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "code"),
    [
        ([*ARENA, "actor.lora=null"], "workflow_args.args.opponent", "config.missing_requirement"),
        ([*ARENA, "actor.adapter_update_mode=merged"], "workflow_args.args.opponent", "config.missing_requirement"),
        ([*ARENA, "actor.weight_update_mode=http"], "workflow_args.args.opponent", "config.missing_requirement"),
        (["teacher.servers=[{sources: [math]}]"], "teacher.servers[0].server_addrs", "config.missing_requirement"),
        (["teacher.servers=[{server_addrs: ['h:1']}, {server_addrs: ['h:2']}]"], "teacher.servers", "config.conflict"),
        ([SERVERS, "teacher.dtype=float32"], "teacher.dtype", "config.conflict"),
        ([SERVERS, "teacher.top_k=8"], "teacher.top_k", "config.conflict"),
        ([SERVERS, "gconfig.temperature=0.5"], "teacher.servers", "config.conflict"),
        (["teacher={path: /models/tiny, average_decay: 0.9}"], "teacher.dtype", "config.conflict"),
        (["teacher={path: /models/big, dtype: float32, average_decay: 0.9}"], "teacher.path", "config.conflict"),
        ([JUDGE, "actor.adv_estimator=remax"], "actor.adv_estimator", "config.conflict"),
        (
            [JUDGE, "reward_fn=", "rollout.should_accept_fn=mixed_rewards"],
            "rollout.should_accept_fn",
            "config.conflict",
        ),
        ([*OVERLONG, "actor.overlong_tokens=65"], "actor.overlong_tokens", "config.conflict"),
        (OVERLONG, "actor.overlong_tokens", "config.missing_requirement"),
        (["actor.adv_norm.mean_level=group", "gconfig.n_samples=1"], "actor.adv_norm", "config.conflict"),
        ([CRITIC, "actor.adv_estimator=grpo"], "critic", "config.conflict"),
        (
            ["actor.kl_ctl=0.1", "actor.kl_estimator=full", "actor.kl_top_k=8", "ref.logprob_kernel=liger"],
            "ref.logprob_kernel",
            "config.conflict",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(load, overrides, path, code):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert [(problem.path, problem.code) for problem in error.value.problems] == [(path, code)]


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ([TEACHER, CRITIC], ["critic"]),
        ([TEACHER, "actor.adv_estimator=grpo"], ["actor.adv_estimator"]),
        ([TEACHER, "actor.adv_norm={}"], ["actor.adv_norm"]),
        ([TEACHER, "actor.reward_bias=1"], ["actor.reward_bias"]),
        (["actor.adv_estimator=grpo", "actor.reward_norm={}", "actor.gae_lambda=0.9"],
         ["actor.reward_norm", "actor.gae_lambda"]),
        (["actor.gae_length_alpha=0.05", "actor.gae_lambda=0.9"], ["actor.gae_lambda"]),
        (["actor.overlong_tokens=8"], ["actor.overlong_tokens"]),
        (["actor.overlong_penalty_factor=8"], ["actor.overlong_penalty_factor"]),
        ([*CUT, "actor.adv_estimator=grpo"], ["actor.mask_no_eos_with_zero"]),
        ([*CUT, CRITIC], []),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_listed_by_name(load, overrides, paths):
    config = load(*overrides)
    # the file has kl_ctl=0, so its reference is not used
    assert [item.path for item in options_without_effect(config) if item.path != "ref"] == paths


def test_a_penalty_in_the_reward_needs_the_advantages_of_rewards(load):
    assert "actor.kl_ctl" in [item.path for item in options_without_effect(load(TEACHER, "actor.kl_ctl=0.2"))]
