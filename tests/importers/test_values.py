"""Values of translated options: sizes, losses, lengths, devices, evaluations."""

import pytest

from areal.api.errors import ConfigError
from areal.importers.cosmos import from_cosmos
from areal.importers.draft import Draft
from areal.importers.roll import from_roll
from areal.importers.verl import from_verl
from tests.importers.drafts import fates, values

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STRATEGY = f"{ACTOR}.strategy"
MEGATRON = f"{ACTOR}.megatron"
VERL = {"actor_rollout_ref.model.path": "m", "data.train_files": "t", "algorithm.adv_estimator": "grpo"}
VERL |= {"data.train_batch_size": 64, "data.val_files": "v"}
ROLL = {"pretrain": "m", "adv_estimator": "grpo", "response_length": 64, "rollout_batch_size": 64}
COSMOS = {"policy.model_name_or_path": "m", "train.train_policy.dataset.name": "t", "train.train_batch_per_replica": 64}
COSMOS |= {"train.train_policy.type": "grpo"}
POLICY, LOSS = "train.train_policy", f"{ACTOR}.policy_loss.loss_mode"


def test_lengths_of_verl_that_a_file_does_not_set():
    options = ("train_dataset.max_length", "gconfig.max_new_tokens", "gconfig.max_tokens", "valid_dataset.truncation")
    assert values(from_verl(VERL), *options) == (512, 512, 1024, "error")
    given = {"data.max_prompt_length": 8, "data.max_response_length": 16, "data.filter_overlong_prompts": True}
    assert values(from_verl(VERL | given), *options) == (8, 16, 24, "drop")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"clip_ratio_low": 0.1}, (0.1, 0.2)),
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, (0.1, 0.3)),
        ({"clip_ratio": 0.1}, (0.1, None)),
    ],
)
def test_the_upper_clip_ratio_of_verl_does_not_follow_the_lower_one(given, expected):
    draft = from_verl(VERL | {f"{ACTOR}.{name}": value for name, value in given.items()})
    assert values(draft, "actor.eps_clip", "actor.eps_clip_higher") == expected


@pytest.mark.parametrize(
    ("mode", "loss", "aggregation", "c_clip"),
    [
        ("vanilla", "ppo", "token-mean", 10.0),
        ("gspo", "gspo", "seq-mean-token-mean", None),
        ("geo_mean", "gmpo", "seq-mean-token-mean", None),
        ("sapo", "sapo", "seq-mean-token-mean", None),
        ("clip-cov", "clip_cov", "token-mean", None),
        ("dppo_kl", "dppo", "token-mean", None),
    ],
)
def test_losses_of_verl_have_their_form(mode, loss, aggregation, c_clip):
    given = {LOSS: mode, f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.clip_ratio_c": 10.0}
    draft = from_verl(VERL | given)
    assert values(draft, "actor.policy_loss", "actor.loss_aggregation", "actor.c_clip") == (loss, aggregation, c_clip)
    form = values(draft, *(f"actor.sequence_level.{name}" for name in ("advantage", "gradient", "max_log_ratio")))
    assert form == (("token", "own", 10.0) if mode == "gspo" else (None, None, None))
    assert values(draft, "actor.dppo.divergence") == ("kl" if mode == "dppo_kl" else None,)


def test_names_of_verl_without_a_counterpart_are_missing_and_a_default_is_used():
    given = {LOSS: "mine", "algorithm.adv_estimator": "mine", f"{ACTOR}.optim.lr_scheduler_type": "wsd"}
    given |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"}
    draft = from_verl(VERL | given)
    assert values(draft, "actor.policy_loss", "actor.adv_estimator", "actor.c_clip") == ("ppo", "grpo", 3.0)
    assert fates(draft, *(key for key in given if key != f"{ACTOR}.use_kl_loss")) == ["missing"] * 4


@pytest.mark.parametrize(
    ("given", "mode", "nodes"),
    [
        ({}, "vllm:d2t2+fsdp:d4", None),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 8}, "vllm:d1t4+fsdp:d4", None),
        ({"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.tensor_model_parallel_size": 1}, "vllm:d1+fsdp:d1", 2),
        ({f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.pipeline_model_parallel_size": 2},
         "vllm:d2t2+megatron:d1t2p2", None),
        ({f"{MEGATRON}.tensor_model_parallel_size": 8}, "vllm:d1t2+megatron:d1t8", 2),
        ({STRATEGY: "megatron", f"{MEGATRON}.expert_model_parallel_size": 4}, "vllm:d2t2+megatron:d4e4", None),
        ({STRATEGY: "megatron", f"{MEGATRON}.expert_model_parallel_size": 8}, "vllm:d1t2+megatron:d8e8", 2),
        ({STRATEGY: "megatron", f"{MEGATRON}.expert_model_parallel_size": 8, "trainer.nnodes": 3,
          f"{ROLLOUT}.tensor_model_parallel_size": 4}, "vllm:d4t4+megatron:d8e8", 3),
        ({STRATEGY: "fsdp", f"{MEGATRON}.tensor_model_parallel_size": 2}, "vllm:d2t2+fsdp:d4", None),
        ({f"{MEGATRON}.tensor_model_parallel_size": 2, "actor_rollout_ref.model.lora_rank": 8},
         "vllm:d2t2+fsdp:d4", None),
    ],
)  # fmt: skip
def test_devices_of_verl_are_enough_for_both_halves(given, mode, nodes):
    assert values(from_verl(VERL | given), "allocation_mode", "cluster.n_nodes") == (mode, nodes)


def test_a_size_of_experts_that_does_not_fit_is_missing():
    key = f"{MEGATRON}.expert_model_parallel_size"
    draft = from_verl(VERL | {STRATEGY: "megatron", key: 3})
    assert values(draft, "allocation_mode") == ("vllm:d2t2+megatron:d4",)
    assert fates(draft, key) == ["missing"]


def test_options_of_megatron_are_kept_and_offloaded_weights_are_missing():
    given = {f"{MEGATRON}.{name}": True for name in ("optimizer_offload", "param_offload", "use_mbridge")}
    given |= {
        f"{MEGATRON}.override_transformer_config.recompute_granularity": "selective",
        STRATEGY: "megatron",
    }
    draft = from_verl(VERL | given)
    options = ("actor.megatron.offload_optimizer", "actor.megatron.recompute_granularity")
    assert values(draft, *options) == (True, "selective")
    assert fates(draft, f"{MEGATRON}.param_offload", f"{MEGATRON}.use_mbridge") == ["missing", "dropped"]


@pytest.mark.parametrize(("size", "fate"), [(2, "kept"), (3, "missing"), (-1, "dropped")])
def test_groups_of_shards_must_divide_the_ranks(size, fate):
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    draft = from_verl(VERL | {key: size})
    assert fates(draft, key) == [fate]
    assert values(draft, "actor.fsdp.shard_size") == (size if fate == "kept" else None,)


def test_tokens_of_a_micro_batch_are_those_of_all_context_ranks():
    given = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000}
    draft = from_verl(VERL | given | {f"{ACTOR}.ulysses_sequence_parallel_size": 4})
    assert values(draft, "actor.mb_spec.max_tokens_per_mb") == (4000,)


def test_corrections_of_verl():
    ours = [f"actor.rollout_correction.{name}" for name in ("level", "upper", "apply_weights", "veto_threshold")]
    old = {"rollout_is_threshold": 3.0, "rollout_is_level": "sequence", "rollout_is_veto_threshold": 1e-4}
    draft = from_verl(VERL | {f"algorithm.{key}": value for key, value in old.items()})
    assert values(draft, *ours) == ("sequence", 3.0, False, 1e-4)
    without = from_verl(VERL | {"algorithm.rollout_is_level": "token"})
    assert values(without, *ours) == (None,) * 4
    section = "algorithm.rollout_correction"
    draft = from_verl(VERL | {f"{section}.rollout_is": "token", f"{section}.rollout_rs": "token_k1"})
    assert values(draft, *ours[:2]) == ("token", 2.0)
    assert fates(draft, f"{section}.rollout_rs") == ["missing"]


def test_a_critic_of_verl_follows_the_actor_and_a_reward_model_needs_no_function():
    given = {"algorithm.adv_estimator": "gae", f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.loss_agg_mode": "token-mean"}
    given |= {"reward_model.enable": True, "reward_model.model.path": "r", "algorithm.use_kl_in_reward": True}
    draft = from_verl(VERL | given | {"algorithm.kl_ctrl.type": "adaptive"})
    assert values(draft, "critic.ppo_epochs", "critic.loss_aggregation") == (2, "token-mean")
    assert values(draft, "reward_model.path", "reward_fn", "actor.kl_control.target") == ("r", None, 0.1)


def test_switches_of_verl_that_change_a_run_are_not_dropped():
    given = {f"{ACTOR}.fsdp_config.offload_policy": True, f"{ACTOR}.fsdp_config.forward_prefetch": True}
    given |= {"actor_rollout_ref.model.enable_activation_offload": True, f"{ACTOR}.freeze_vision_tower": True}
    given |= {f"{ACTOR}.router_replay.mode": "R3", "trainer.val_only": True, "trainer.resume_from_path": "p"}
    draft = from_verl(VERL | given)
    options = ("actor.fsdp.offload_params", "actor.fsdp.prefetch_blocks", "actor.checkpointing", "actor.router_replay")
    assert values(draft, *options, "actor.freeze") == (True, 1, "offload", True, ["visual"])
    lost = {key for key in given if draft.notes[key].fate == "missing"}
    assert lost == {"trainer.val_only", "trainer.resume_from_path"}


@pytest.mark.parametrize("key", ["model.partial_pretrain", "engine.strategy", "optim.lr"])
def test_supervised_training_of_verl_is_refused(key):
    with pytest.raises(ConfigError) as caught:
        from_verl({key: "m", "data.train_files": "t"})
    assert caught.value.code == "config.unsupported"


@pytest.mark.parametrize(
    ("trained", "served", "mode"),
    [
        ("list(range(0,16))", "list(range(0,12))", "vllm:d8+fsdp:d8"),
        ("list(range(0,4))", "list(range(4,8))", "vllm:d4+fsdp:d4"),
        ([0, 1], [0, 1, 2, 3], "vllm:d2+fsdp:d2"),
        ("[0, 1]", "list(range(2))", "vllm:d1+fsdp:d1"),
        ("list(range(0,8)) + list(range(16,24))", "list(range(8,16))", "vllm:d8+fsdp:d16"),
    ],
)
def test_gpus_of_roll_that_two_roles_have_are_divided(trained, served, mode):
    draft = from_roll(ROLL | {"actor_train.device_mapping": trained, "actor_infer.device_mapping": served})
    assert values(draft, "allocation_mode") == (mode,)


def domains(**tags: list[str]) -> Draft:
    return from_roll(ROLL | {f"rewards.{name}.tag_included": given for name, given in tags.items()})


def test_rewards_of_roll_are_chosen_by_their_tags():
    options = ("reward_fn", "reward.source_key")
    one = domains(math_rule=["aime"])
    assert values(one, *options) == ("math", None)
    both = domains(math_rule=["aime", "gsm"], code_sandbox=["code"], llm_judge=["other"])
    assert values(both, *options) == (None, "tag")
    sources = values(both, *(f"reward.by_source.{tag}" for tag in ("aime", "gsm", "code", "other")))
    assert sources == ({"math": 1.0}, {"math": 1.0}, {"code": 1.0}, None)
    assert fates(both, "rewards.code_sandbox.tag_included", "rewards.llm_judge.tag_included") == ["dropped", "missing"]


@pytest.mark.parametrize(
    ("given", "norm"),
    [
        ({"reward_norm": "group"}, {"mean_level": "group", "std_level": "group"}),
        ({"norm_mean_type": "group", "norm_std_type": None}, {"mean_level": "group", "std_level": None}),
        ({"norm_mean_type": "running", "norm_std_type": "batch"}, {"mean_level": None, "std_level": "batch"}),
        ({"reward_norm": "group", "reward_shift": True}, {"mean_level": "group", "std_level": None}),
        ({"reward_norm": "batch", "reward_scale": True}, {"mean_level": "batch", "std_level": "batch"}),
        ({"reward_norm": "running", "reward_shift": False}, None),
        ({}, None),
    ],
)
def test_norms_of_rewards_of_roll(given, norm):
    draft = from_roll(ROLL | {"adv_estimator": "reinforce"} | given)
    assert values(draft, "actor.reward_norm") == (norm,)
    lost = {key for key in given if draft.notes[key].fate == "missing"}
    assert lost == {key for key in given if given[key] == "running"}


def test_shifts_and_scales_of_rewards_of_roll():
    shifted = from_roll(ROLL | {"reward_shift": True, "reward_scale": True})
    assert values(shifted, "actor.adv_estimator") == ("dr_grpo",)
    assert fates(shifted, "reward_shift", "reward_scale") == ["computed", "dropped"]
    for norm, fate in (("group", "dropped"), ("running", "missing")):
        draft = from_roll(ROLL | {"adv_estimator": "reinforce", "reward_norm": norm, "reward_scale": True})
        assert fates(draft, "reward_scale") == [fate]


def test_a_length_of_roll_that_is_null_is_that_of_the_servers():
    draft = from_roll(ROLL | {"response_length": None, "actor_infer.generating_args.max_new_tokens": 4096})
    assert values(draft, "gconfig.max_new_tokens", "gconfig.max_tokens") == (4096, 5120)


def test_columns_of_roll():
    given = {"actor_train.data_args.prompt": "instruction", "validation.data_args.messages": "talk"}
    given |= {"validation.data_args.file_name": "v", "rewards.math_rule.tag_included": ["aime"]}
    draft = from_roll(ROLL | given)
    assert values(draft, "train_dataset.columns", "valid_dataset.columns") == (
        {"instruction": "prompt", "ground_truth": "answer"},
        {"talk": "messages", "ground_truth": "answer"},
    )
    other = from_roll(ROLL | {"actor_train.data_args.messages": "messages", "actor_train.data_args.response": "r"})
    assert values(other, "train_dataset.columns") == ({"r": "answer"},)
    assert fates(other, "actor_train.data_args.messages") == ["dropped"]


def test_losses_of_roll():
    options = ("actor.policy_loss", "actor.topr.ratio", "actor.topr.negative_weight", "actor.rollout_correction.upper")
    given = {"pg_variant": "topr", "topr_negative_weight": 0.5, "use_rollout_importance_sampling_ratio": True}
    assert values(from_roll(ROLL | given), *options) == ("topr", "token", 0.5, 1.2)
    other = from_roll(ROLL | given | {"pg_variant": "tis", "use_rollout_importance_sampling_ratio": False})
    assert values(other, *options) == (None,) * 4
    assert fates(other, "pg_variant", "topr_negative_weight") == ["missing", "dropped"]


def test_a_schedule_that_does_not_exist_here_is_missing():
    key = "actor_train.training_args.lr_scheduler_type"
    assert fates(from_roll(ROLL | {key: "cosine_with_min_lr"}), key) == ["missing"]
    assert fates(from_roll(ROLL | {key: "cosine"}), key) == ["kept"]


def test_switches_of_roll():
    given = {"add_token_level_kl": True, "target_kl": 0.2, "kl_horizon": 100, "max_len_mask": True, "eval_steps": 0}
    given["kl_penalty"] = "mse"
    given |= {"actor_infer.strategy_args.strategy_config.load_format": "dummy", "length_loss_weight": False}
    given |= {"actor_infer.generating_args.stop_strings": ["x"], "whiten_advantages": True}
    draft = from_roll(ROLL | given)
    options = ("actor.kl_control.type", "actor.kl_control.target", "actor.kl_control.horizon", "actor.mask_truncated")
    assert values(draft, *options, "actor.kl_estimator") == ("adaptive", 0.2, 100, True, "k2")
    assert values(draft, "evaluator.freq_steps", "vllm.load_format", "gconfig.stop") == (None, None, ["x"])
    assert fates(draft, "length_loss_weight", "eval_steps", "whiten_advantages") == ["dropped", "dropped", "missing"]


def test_an_agentic_file_of_roll_counts_trajectories():
    given = {"rollout_batch_size": 64, "train_env_manager.group_size": 8, "adv_estimator": "gigpo"}
    given |= {"sequence_length": 4096, "actor_infer.generating_args.max_new_tokens": 128}
    draft = from_roll({"pretrain": "m", **given})
    options = ("train_dataset.batch_size", "gconfig.n_samples", "gconfig.max_tokens", "gconfig.max_new_tokens")
    assert values(draft, *options, "actor.adv_estimator") == (8, 8, 4096, 128, "grpo")
    assert fates(draft, "adv_estimator") == ["missing"]


def test_grpo_of_cosmos_divides_by_the_population_deviation():
    draft = from_cosmos(COSMOS)
    norm = {"mean_level": "group", "std_level": "group", "std_unbiased": False, "eps": 1e-6}
    assert values(draft, "actor.adv_estimator", "actor.reward_norm") == ("gae", norm)
    assert values(draft, "actor.recompute_logprob") == (True,)
    plain = from_cosmos(COSMOS | {f"{POLICY}.unbiased_advantage": True, f"{POLICY}.use_decoupled_loss": True})
    assert values(plain, "actor.adv_estimator", "actor.reward_norm") == ("dr_grpo", None)
    assert values(plain, "actor.recompute_logprob") == (None,)


def test_a_constant_divisor_of_cosmos_counts_for_one_aggregation():
    key, options = f"{POLICY}.unbiased_loss_max_tokens", ("actor.loss_aggregation", "actor.loss_scale_tokens")
    without = from_cosmos(COSMOS | {key: 100})
    assert (values(without, *options), fates(without, key)) == ((None, None), ["dropped"])
    draft = from_cosmos(COSMOS | {key: 100, f"{POLICY}.loss_type": "seq-mean-token-mean"})
    assert values(draft, *options) == ("seq-mean-token-sum-norm", 100)


@pytest.mark.parametrize(("epochs", "expected"), [(2, (None, 2)), (0, (7, None))])
def test_an_interval_in_epochs_of_cosmos_replaces_that_in_steps(epochs, expected):
    given = {"enable_checkpoint": True, "save_freq": 7, "save_freq_in_epoch": epochs}
    draft = from_cosmos(COSMOS | {f"train.ckpt.{name}": value for name, value in given.items()})
    assert values(draft, "saver.freq_steps", "saver.freq_epochs") == expected


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_penalty_of_cosmos_is_on_where_the_list_of_rewards_has_it(is_listed):
    key = f"{POLICY}.overlong_reward.enable_overlong_penalty"
    names = ["direct_math", "overlong"] if is_listed else ["direct_math"]
    draft = from_cosmos(COSMOS | {f"{POLICY}.reward_function": names, key: True})
    expected = (True, 4096) if is_listed else (None, None)
    assert values(draft, "actor.overlong_reward_penalty", "actor.overlong_tokens") == expected
    assert values(draft, "reward_fn", "reward.fns") == (None, {"math": 2.0})
    assert fates(draft, f"{POLICY}.reward_function") == ["computed"]


@pytest.mark.parametrize(
    ("weights", "function", "functions", "factor"),
    [
        ({"boxed_math": 1.0, "overlong": 0.5}, "math", None, 1.0),
        ({"boxed_math": 2.0}, None, {"math": 2.0}, None),
        ({"boxed_math": 1.0, "direct_math": 0.5, "overlong": 0}, None, {"math": 2.0}, None),
    ],
)
def test_weights_of_rewards_of_cosmos(weights, function, functions, factor):
    given = {f"{POLICY}.reward_function.{name}": weight for name, weight in weights.items()}
    draft = from_cosmos(COSMOS | given | {f"{POLICY}.overlong_reward.penalty_factor": 2.0})
    assert values(draft, "reward_fn", "reward.fns") == (function, functions)
    assert values(draft, "actor.overlong_penalty_factor") == (factor,)
    assert fates(draft, *given) == ["computed"] * len(given)


def test_evaluations_of_cosmos_are_greedy_without_a_temperature_and_more_than_one_token():
    given = COSMOS | {"validation.enable": True, "validation.dataset.name": "v"}
    options = ("evaluator.modes", "evaluator.n_samples", "eval_gconfig.temperature", "eval_gconfig.max_new_tokens")
    assert values(from_cosmos(given), *options) == (["greedy"], None, None, None)
    sampled = given | {"validation.temperature": 0.6, "validation.n_generation": 4}
    for greedy in (sampled, sampled | {"validation.top_k": 1}):
        draft = from_cosmos(greedy)
        assert values(draft, *options) == (["greedy"], None, None, None)
        assert "missing" not in fates(draft, *(key for key in greedy if key.startswith("validation.")))
    for top_k, fate, kept in ((-1, "dropped", None), (50, "kept", 50)):
        draft = from_cosmos(sampled | {"validation.top_k": top_k})
        assert values(draft, *options, "eval_gconfig.top_k") == (["sampled"], 4, 0.6, 2048, kept)
        assert fates(draft, "validation.top_k") == [fate]


def test_a_training_temperature_of_cosmos_is_not_lost():
    key, sampling = f"{POLICY}.temperature", {"rollout.sampling_config.temperature": 0.9}
    assert fates(from_cosmos(COSMOS | sampling | {key: 0.8}), key) == ["missing"]
    assert fates(from_cosmos(COSMOS | sampling | {key: 0.9}), key) == ["dropped"]


@pytest.mark.parametrize(
    ("given", "mode", "nodes"),
    [
        ({"tp_size": 2, "dp_shard_size": 4}, "vllm:d1t4+fsdp:d4t2", 2),
        ({"pp_size": 2, "tp_size": 2}, "vllm:d1t4+megatron:d1t2p2", None),
        ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 1}, "vllm:d1t4+megatron:d2p2", None),
    ],
)
def test_devices_of_cosmos(given, mode, nodes):
    sizes = {f"policy.parallelism.{name}": size for name, size in given.items()} | {"rollout.parallelism.tp_size": 4}
    assert values(from_cosmos(COSMOS | sizes), "allocation_mode", "cluster.n_nodes") == (mode, nodes)


def test_expert_and_data_ranks_of_cosmos_that_are_lost_are_reported():
    key = "policy.parallelism.ep_size"
    draft = from_cosmos(COSMOS | {key: 3, "policy.parallelism.dp_shard_size": 8, "policy.parallelism.tp_size": 1})
    assert values(draft, "allocation_mode") == ("vllm:d1t2+fsdp:d4",)
    assert "4 of 8 data ranks" in draft.options["allocation_mode"].origin
    assert fates(draft, key) == ["missing"]


def test_supervised_training_of_cosmos():
    given = {f"{POLICY}.type": "sft", "policy.parallelism.dp_shard_size": -1, "train.optm_lr": [2e-6, 2e-6]}
    draft = from_cosmos(COSMOS | given)
    options = ("allocation_mode", "train_dataset.type", "train_dataset.max_length", "model.optimizer.lr")
    assert values(draft, *options) == ("fsdp:d1t2", "sft", 4096, 2e-6)
    assert not [option for option in draft.options if option.startswith(("actor.", "gconfig.", "rollout."))]
    assert fates(draft, "policy.parallelism.dp_shard_size") == ["missing"]
