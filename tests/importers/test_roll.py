"""Keys of ROLL that depend on a worker, a tracker or the size of a group."""

import pytest

from areal.api.errors import ConfigError
from areal.importers.draft import TENSORBOARD
from areal.importers.roll import DEFAULTS, from_roll
from tests.expect import raises_code
from tests.importers.drafts import fates, values

ROLL = {"pretrain": "m", "adv_estimator": "grpo", "response_length": 64, "rollout_batch_size": 64}
ARGS, STRATEGY, WARMUP = (
    "actor_train.training_args",
    "actor_train.strategy_args",
    "actor.optimizer.warmup_steps_proportion",
)
AGENTS = {"pretrain": "m", "sequence_length": 512, "rollout_batch_size": 8, "train_env_manager.num_env_groups": 8}


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


def of_schedule(**given: object) -> dict[str, object]:
    """8 ranks, 16 updates of a batch of 512 answers, 1000 batches."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "warmup_steps": 20} | given
    batch = {"num_return_sequences_in_group": 8, "max_steps": 1000, "actor_train.device_mapping": list(range(8))}
    return ROLL | batch | {f"{ARGS}.{name}": value for name, value in training.items()}


@pytest.mark.parametrize("strategy", ["deepspeed_train", "fsdp2_train", "megatron_train"])
def test_a_warm_up_counts_optimiser_updates(strategy):
    given = of_schedule() | {f"{STRATEGY}.strategy_name": strategy}
    draft = from_roll(given)
    assert values(draft, "actor.ppo_n_minibatches", WARMUP) == (16, 20 / 16000)
    assert values(from_roll(given | {"ppo_epochs": 2}), WARMUP) == (20 / 32000,)
    assert fates(draft, f"{ARGS}.warmup_steps") == ["computed"]
    model = {f"{STRATEGY}.strategy_config.tensor_model_parallel_size": 4}
    expected = 20 / 4 / 16000 if strategy == "megatron_train" else 20 / 16000  # 2 data ranks
    assert values(from_roll(given | model), WARMUP) == (expected,)


def test_steps_of_a_warm_up_replace_its_ratio_and_a_constant_rate_has_one_in_megatron_only():
    assert values(from_roll(of_schedule(warmup_ratio=0.5)), WARMUP) == (20 / 16000,)
    assert values(from_roll(of_schedule(warmup_ratio=0.5, warmup_steps=0)), WARMUP) == (0.5,)
    constant = of_schedule(lr_scheduler_type="constant")
    assert values(from_roll(constant), WARMUP) == (0.0,)
    assert values(from_roll(constant | {f"{STRATEGY}.strategy_name": "megatron_train"}), WARMUP) == (20 / 16000,)
    named = of_schedule(lr_scheduler_type="constant_with_warmup")
    assert values(from_roll(named), WARMUP, "actor.optimizer.lr_scheduler_type") == (20 / 16000, "constant")


def test_a_critic_has_its_own_batches_and_schedule():
    given = of_schedule() | {"adv_estimator": "gae", "critic_warmup": 500, "critic_epochs": 2}
    given |= {"critic.training_args.per_device_train_batch_size": 4, "critic.device_mapping": [0, 1]}
    given |= {"critic.training_args.warmup_steps": 10}
    draft = from_roll(given)
    options = ("critic.ppo_n_minibatches", "critic.ppo_epochs", "critic.optimizer.warmup_steps_proportion")
    assert values(draft, *options) == (64, 2, 10 / (1000 * 64 * 2))
    assert values(draft, WARMUP) == (20 / 8000,)  # areal schedules the policy over the steps after critic_warmup
    assert fates(draft, "critic.training_args.warmup_steps", "critic_epochs") == ["computed", "kept"]


def test_keys_that_a_file_does_not_have_get_the_defaults_of_roll():
    draft = from_roll({"pretrain": "m", "adv_estimator": "gae", "response_length": 64})
    optimizer = [f"{role}.optimizer.{name}" for role in ("actor", "critic") for name in ("lr", "weight_decay")]
    assert values(draft, *optimizer) == (5e-5, 0.0, 5e-5, 0.0)
    assert values(draft, "actor.optimizer.lr_scheduler_type", "train_dataset.batch_size") == ("linear", 128)
    assert values(draft, "gconfig.temperature", "gconfig.top_p", "gconfig.top_k") == (0.95, 0.7, 50)
    assert values(draft, "saver.freq_steps", "stats_logger.tensorboard.path", "seed") == (50, TENSORBOARD, 42)
    assert values(draft, "actor.mb_spec.max_tokens_per_mb", "actor.ppo_n_minibatches") == (8 * (1024 + 64), 16)
    assert values(draft, "total_train_steps", "recover.mode", "actor.reward_clip") == (500, "disabled", 1e9)
    assert values(draft, "evaluator.freq_steps", "valid_dataset.path") == (None, None)
    assert draft.notes.keys() == {"pretrain", "adv_estimator", "response_length"} == draft.values.keys()


def test_the_origin_of_a_default_names_it_and_a_null_is_a_default():
    key = f"{ARGS}.learning_rate"
    origins = [from_roll(ROLL | given).options["actor.optimizer.lr"].origin for given in ({}, {key: None}, {key: 1e-6})]
    assert origins == [f"ROLL: its default of {key}"] * 2 + [f"ROLL: {key}"]
    null = from_roll(ROLL | {key: None})
    assert (null.values[key], fates(null, key), values(null, "actor.optimizer.lr")) == (None, ["dropped"], (5e-5,))
    size = f"{ARGS}.per_device_train_batch_size"
    assert size in from_roll(ROLL).options["actor.ppo_n_minibatches"].origin
    assert size not in from_roll(ROLL | {size: 8}).options["actor.ppo_n_minibatches"].origin


def test_a_file_with_the_defaults_written_out_is_the_file_without_them():
    for estimator in ("grpo", "gae"):
        given = {"pretrain": "m", "adv_estimator": estimator, "response_length": 64}
        given["validation.data_args.file_name"] = "v"
        short, long = from_roll(given), from_roll(DEFAULTS | given)
        assert {path: one.value for path, one in short.options.items()} == {
            path: one.value for path, one in long.options.items()
        }


@pytest.mark.parametrize("key", ["sft_train.device_mapping", "student_train.device_mapping", "student.device_mapping",
                                 "chosen_key", "ipo"])  # fmt: skip
def test_files_of_other_pipelines_of_roll_are_refused(key):
    with raises_code("config.unsupported", key):
        from_roll(ROLL | {key: "x"})


def test_diffusion_models_of_roll_are_refused():
    key = f"{STRATEGY}.strategy_name"
    with pytest.raises(ConfigError, match=key):
        from_roll(ROLL | {key: "diffusion_deepspeed_train"})


@pytest.mark.parametrize(
    ("given", "estimator", "norm", "fate"),
    [
        ({"adv_estimator": "step_reinforce"}, "gae", None, "computed"),
        ({"adv_estimator": "reinforce", "reward_normalization.method": "identity"}, "gae", None, "computed"),
        ({"adv_estimator": "agentic_reinforce"}, "gae", None, "computed"),
        ({"adv_estimator": "agentic_reinforce", "gamma": 0.9}, "gae", None, "missing"),
        ({"adv_estimator": "gigpo"}, "gae", None, "missing"),
        ({"adv_estimator": "gigpo", "train_env_manager.group_size": 4}, "grpo", None, "missing"),
        (
            {"adv_estimator": "grpo", "reward_normalization.grouping": "batch", "reward_normalization.method": "mean"},
            "gae", {"mean_level": "batch", "std_level": None}, "computed",
        ),
        (
            {"adv_estimator": "grpo", "train_env_manager.group_size": 4, "reward_normalization.method": "mean_std",
             "reward_normalization.grouping": "traj_group_id"},
            "gae", {"mean_level": "group", "std_level": "group"}, "computed",
        ),
    ],
)  # fmt: skip
def test_estimators_of_agentic_files(given, estimator, norm, fate):
    draft = from_roll(AGENTS | given)
    assert values(draft, "actor.adv_estimator", "actor.reward_norm") == (estimator, norm)
    assert values(draft, "actor.gae_lambda") == ((1.0,) if estimator == "gae" else (None,))
    assert fates(draft, "adv_estimator") == [fate]
    assert {draft.notes[key].fate for key in given if key.startswith("reward_norm")} <= {"computed", "dropped"}


def test_a_normalisation_of_agentic_files_without_a_level_here_is_missing():
    keys = {"reward_normalization.grouping": "state", "reward_normalization.method": "mean_std"}
    draft = from_roll(AGENTS | {"adv_estimator": "step_reinforce"} | keys)
    assert (fates(draft, *keys), values(draft, "actor.reward_norm")) == (["missing"] * 2, (None,))


def test_environments_write_the_prompts_and_the_rewards():
    draft = from_roll(AGENTS | {"adv_estimator": "step_reinforce"})
    options = ("train_dataset.max_length", "reward_fn", "gconfig.max_new_tokens", "gconfig.max_tokens")
    assert values(draft, *options) == (None, None, 512, 512)


@pytest.mark.parametrize("steps", [-1, 0])
def test_a_file_without_a_number_of_steps_counts_epochs(steps):
    given = {"max_steps": steps, f"{ARGS}.num_train_epochs": 2.5, f"{ARGS}.warmup_steps": 20}
    draft = from_roll(ROLL | given)
    assert values(draft, "total_train_steps", "total_train_epochs", WARMUP) == (None, 3, 0.0)
    assert fates(draft, *given) == ["computed", "computed", "missing"]


def test_machines_follow_from_the_devices():
    given = {"num_nodes": 2, "num_gpus_per_node": 8, "actor_infer.device_mapping": "list(range(8,16))"}
    two = from_roll(ROLL | given | {"actor_train.device_mapping": "list(range(0,8))"})
    assert (values(two, "cluster.n_nodes"), fates(two, "num_nodes")) == ((2,), ["computed"])
    one = from_roll(ROLL | {"num_nodes": 2})
    assert (values(one, "cluster.n_nodes"), fates(one, "num_nodes")) == ((None,), ["dropped"])


def test_an_evaluation_that_is_off_has_no_dataset_and_one_that_is_on_starts_before_training():
    given = {"validation.data_args.file_name": "v", "validation.generating_args.top_p": 0.9}
    options = ("valid_dataset.path", "evaluator.freq_steps", "evaluator.eval_before_train", "eval_gconfig.top_p")
    for interval in (0, -1):
        off = from_roll(ROLL | given | {"eval_steps": interval})
        assert values(off, *options) == (None,) * 4
        assert set(fates(off, *given, "eval_steps")) == {"dropped"}
    assert values(from_roll(ROLL | given), *options) == ("v", 10, True, 0.9)
    assert fates(from_roll(ROLL | {"eval_steps": 5}), "eval_steps") == ["dropped"]


def test_an_answer_has_the_rest_of_the_sequence_after_the_prompt():
    lengths = {"prompt_length": 100, "sequence_length": 400, "response_length": 64}
    options = (
        "gconfig.max_new_tokens",
        "gconfig.max_tokens",
        "eval_gconfig.max_new_tokens",
        "valid_dataset.max_length",
    )
    own = {"actor_infer.generating_args.max_new_tokens": 32, "validation.data_args.file_name": "v"}
    assert values(from_roll(ROLL | lengths | own), *options) == (300, 400, 300, 100)
    other = {"val_prompt_length": 100, "val_sequence_length": 900}
    assert values(from_roll(ROLL | lengths | own | other), *options) == (300, 400, 800, 100)


def test_modules_decide_about_adapters():
    model = "actor_train.model_args"
    options = ("actor.lora.rank", "actor.lora.alpha", "actor.lora.target_modules", "actor.lora.dropout")
    assert values(from_roll(ROLL | {f"{model}.lora_rank": 8}), *options) == (None,) * 4
    assert values(from_roll(ROLL | {f"{model}.lora_target": "all"}), *options) == (8, 16, "all-linear", None)
    given = {"lora_target": "q|v", "lora_rank": 4, "lora_dropout": 0.1}
    draft = from_roll(ROLL | {f"{model}.{name}": value for name, value in given.items()})
    assert values(draft, *options) == (4, 8, "q|v", 0.1)


def test_a_worker_with_its_own_loss_and_a_teacher_are_missing():
    given = {"actor_train.worker_cls": "my.Worker", "use_opd": True, "teacher.model_args.model_name_or_path": "t"}
    assert fates(from_roll(ROLL | given), *given) == ["missing"] * 3
    known = {"actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "max_ckpt_to_keep": 3}
    draft = from_roll(ROLL | known)
    assert (fates(draft, *known), values(draft, "saver.keep_last")) == (["dropped", "kept"], (3,))


def test_micro_batches_by_tokens_are_kept():
    given = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 4096}
    given = {f"actor_train.{name}": value for name, value in given.items()}
    assert values(from_roll(ROLL | given), "actor.mb_spec.max_tokens_per_mb") == (4096,)
    assert fates(from_roll(ROLL | given), *given) == ["dropped", "kept"]
