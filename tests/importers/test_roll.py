"""Keys of ROLL that depend on a worker, a tracker or the size of a group."""

import pytest

from areal.importers.roll import from_roll
from tests.importers.drafts import fates, values

ROLL = {"pretrain": "m", "adv_estimator": "grpo", "response_length": 64, "rollout_batch_size": 64}


def test_the_worker_of_a_reward_of_roll_decides_whatever_the_name_of_its_domain():
    given = {"rewards.geometry.worker_cls": "roll.rewards.MathRuleRewardWorker", "rewards.geometry.tag_included": ["g"]}
    given |= {"rewards.boxes.worker_cls": "roll.rewards.DetectionRewardWorker", "rewards.boxes.tag_included": ["b"]}
    draft = from_roll(ROLL | given)
    assert values(draft, "reward.by_source.g", "reward.by_source.b") == ({"math": 1.0}, None)
    assert fates(draft, *given) == ["dropped", "dropped", "missing", "missing"]


@pytest.mark.parametrize(("group", "clip", "fate"), [(8, 10.0, "dropped"), (8, 2.0, "missing"), (8, 0.2, "missing")])
def test_a_bound_of_advantages_of_roll_counts_where_it_can_be_reached(group, clip, fate):
    given = {"num_return_sequences_in_group": group, "advantage_clip": clip}
    assert fates(from_roll(ROLL | given), "advantage_clip") == [fate]
    assert fates(from_roll(ROLL | given | {"adv_estimator": "reinforce"}), "advantage_clip") == ["missing"]


def test_the_loss_of_the_worker_and_the_project_of_the_tracker_count():
    draft = from_roll(ROLL | {"actor_train.pg_variant": "topr", "pg_variant": "ppo", "tracker_kwargs.project": "p"})
    assert values(draft, "actor.policy_loss", "experiment_name") == ("topr", "p")
    assert fates(draft, "actor_train.pg_variant", "pg_variant", "tracker_kwargs.project") == ["computed"] * 3


@pytest.mark.parametrize(("domains", "fate"), [({"a": 1.0}, "dropped"), ({"a": 0.5, "b": 0.5}, "missing")])
def test_one_domain_needs_no_weights(domains, fate):
    given = {f"actor_train.data_args.domain_interleave_probs.{name}": share for name, share in domains.items()}
    assert set(fates(from_roll(ROLL | given), *given)) == {fate}


def test_options_of_agents_and_of_parts_of_a_model_are_named():
    given = {"agent_config_common.run_cmd": "r", "max_tokens_per_step": 64, "reward_normalization.method": "mean"}
    given |= {"actor_train.model_args.freeze_module_prefix": "vision_model", "difficulty_low_threshold": 0.1}
    given |= {"difficulty_mask": True}
    assert set(fates(from_roll(ROLL | given), *given)) == {"missing"}
    off = {"difficulty_low_threshold": 0.1, "difficulty_mask": False, "rpc_timeout": 60, "val_batch_size": 4}
    off |= {"reference.model_args.freeze_module_prefix": "vision_model", "rollout_dump_dir": "d"}
    assert set(fates(from_roll(ROLL | off), *off)) == {"dropped"}
