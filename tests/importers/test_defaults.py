"""Defaults of the other systems that differ from ours, and options whose meaning depends on another key."""

import json

import pytest

from areal.importers.cosmos import from_cosmos
from areal.importers.draft import Draft
from areal.importers.roll import from_roll
from areal.importers.script import report_json, report_lines, yaml_text
from areal.importers.verl import from_verl

VERL = {"actor_rollout_ref.model.path": "m", "data.train_files": "t", "algorithm.adv_estimator": "grpo"}
COSMOS = {"policy.model_name_or_path": "m", "train.train_policy.dataset.name": "t", "train.train_policy.type": "grpo"}
ROLL = {"pretrain": "m", "adv_estimator": "grpo", "response_length": 64}


def values(draft: Draft, *options: str) -> tuple[object, ...]:
    return tuple(draft.options[option].value if option in draft.options else "ours" for option in options)


def test_a_kl_loss_of_verl_without_a_coefficient_is_not_off():
    on = from_verl({**VERL, "actor_rollout_ref.actor.use_kl_loss": True})
    assert values(on, "actor.kl_loss_coef", "ref.path") == (0.001, "m")
    given = from_verl(
        {**VERL, "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.5}
    )
    assert values(given, "actor.kl_loss_coef") == (0.5,)
    assert values(from_verl(VERL), "actor.kl_loss_coef", "ref.path") == ("ours", "ours")


def test_verl_limits_negative_advantages_and_recomputes_activations():
    assert values(from_verl(VERL), "actor.c_clip", "actor.gradient_checkpointing", "total_train_epochs") == (
        3.0,
        True,
        30,
    )
    other = from_verl({**VERL, "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"})
    assert values(other, "actor.c_clip") == ("ours",)
    gae = from_verl({**VERL, "algorithm.adv_estimator": "gae"})
    assert values(gae, "critic.gradient_checkpointing") == (True,)


def test_gradient_offload_of_verl_is_missing_only_when_it_is_on():
    key = "actor_rollout_ref.actor.fsdp_config.grad_offload"
    assert [from_verl({**VERL, key: value}).notes[key].fate for value in (False, True)] == ["dropped", "missing"]


def test_defaults_of_cosmos():
    options = ("actor.c_clip", "gconfig.n_samples", "actor.gradient_checkpointing", "actor.optimizer.eps")
    assert values(from_cosmos(COSMOS), *options) == (3.0, 16, True, 1e-6)
    given = {**COSMOS, "train.train_policy.lower_bound_ratio": 2.0, "policy.model_gradient_checkpointing": False}
    assert values(from_cosmos(given), *options[:3]) == (2.0, 16, False)


def test_the_dual_clip_of_roll_is_off_by_default_and_follows_pg_clip():
    assert values(from_roll(ROLL), "actor.c_clip", "actor.loss_aggregation") == ("ours", "seq-mean-token-mean")
    assert values(from_roll({**ROLL, "dual_clip_loss": True}), "actor.c_clip") == (pytest.approx(1.4),)
    wide = from_roll({**ROLL, "dual_clip_loss": True, "pg_clip": 0.5})
    assert values(wide, "actor.c_clip", "actor.eps_clip") == (2.0, 0.5)


@pytest.mark.parametrize(("is_range", "expected"), [(True, (0.1, 0.3)), (False, (0.2, "ours"))])
def test_the_clip_range_of_roll_needs_its_switch(is_range, expected):
    given = {"pg_clip": 0.2, "pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": is_range}
    draft = from_roll({**ROLL, **given})
    assert values(draft, "actor.eps_clip", "actor.eps_clip_higher") == expected
    unused = {key for key in given if draft.notes[key].fate == "dropped"} - {"use_pg_clip_range"}
    assert unused == ({"pg_clip"} if is_range else {"pg_clip_low", "pg_clip_high"})


def test_reward_pretrain_of_roll_is_the_critic_and_never_the_reference():
    paths = {**ROLL, "adv_estimator": "gae", "reward_pretrain": "c", "use_kl_loss": True}
    assert values(from_roll(paths), "critic.path", "ref.path", "actor.gae_lambda") == ("c", "m", 0.95)
    assert values(from_roll(paths), "critic.eps_clip") == (None,)
    without = from_roll({**paths, "adv_estimator": "grpo"})
    assert values(without, "critic.path", "ref.path") == ("ours", "m")
    assert without.notes["reward_pretrain"].fate == "dropped"


@pytest.mark.parametrize(("ratio", "staleness"), [(0, 0), (0.5, 1), (1, 1), (1.5, 2)])
def test_the_asynchronous_ratio_of_roll_is_rounded_up(ratio, staleness):
    draft = from_roll({**ROLL, "async_generation_ratio": ratio})
    assert values(draft, "rollout.max_head_offpolicyness") == (staleness,)


def test_the_sampling_of_rolls_validation_is_kept():
    args = {"validation.generating_args.top_k": 50, "validation.generating_args.top_p": 0.9}
    draft = from_roll({**ROLL, "validation.data_args.file_name": ["v"], **args})
    assert values(draft, "eval_gconfig.top_k", "eval_gconfig.top_p") == (50, 0.9)
    assert from_roll({**ROLL, **args}).notes["validation.generating_args.top_k"].fate == "dropped"


def test_a_key_of_a_tracker_is_in_no_output():
    draft = from_roll({**ROLL, "tracker_kwargs.api_key": "0123456789", "made_up.password": "abcdefgh"})
    texts = [*report_lines(draft), json.dumps(report_json(draft), default=str), yaml_text(draft, "r.yaml")]
    assert draft.notes["made_up.password"].fate == "missing"
    assert not [text for text in texts if "0123456789" in text or "abcdefgh" in text]
