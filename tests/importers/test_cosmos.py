"""Keys of cosmos-rl whose meaning depends on others, and its defaults."""

import pytest

from areal.importers.cosmos import from_cosmos
from tests.importers.drafts import fates, values

POLICY, SIZES = "train.train_policy", "policy.parallelism"
GRPO = {"policy.model_name_or_path": "m", f"{POLICY}.dataset.name": "t", f"{POLICY}.type": "grpo"}
SFT = {**GRPO, f"{POLICY}.type": "sft", "train.train_batch_per_replica": 4}


@pytest.mark.parametrize(("mark", "is_supervised"), [("temperature", False), ("use_remote_reward", False), ("x", True)])
def test_a_file_without_a_type_is_grpo_where_it_has_a_key_of_grpo(mark, is_supervised):
    draft = from_cosmos({"policy.model_name_or_path": "m", f"{POLICY}.{mark}": 1})
    assert ("model.path" in draft.options) == is_supervised


def test_every_data_rank_of_supervised_training_has_a_batch():
    draft = from_cosmos(SFT | {f"{SIZES}.dp_shard_size": 2, f"{SIZES}.dp_replicate_size": 3, f"{SIZES}.tp_size": 1})
    assert values(draft, "train_dataset.batch_size", "allocation_mode") == (24, "fsdp:d6")
    assert values(draft, "train_dataset.columns") == ({"conversations": "messages"},)


def test_data_ranks_of_several_replicas_share_the_batch_of_supervised_training():
    draft = from_cosmos(SFT | {f"{SIZES}.dp_shard_size": 4, f"{SIZES}.n_init_replicas": 2, f"{SIZES}.tp_size": 1})
    assert values(draft, "train_dataset.batch_size", "allocation_mode") == (8, "fsdp:d8")


@pytest.mark.parametrize(("ranks", "count"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_a_size_of_an_optimiser_step_counts_answers_of_a_data_rank(ranks, count):
    given = {"train.train_batch_per_replica": 64, f"{POLICY}.batch_size_per_optimize": 8}
    draft = from_cosmos(GRPO | given | {f"{SIZES}.dp_shard_size": ranks})
    assert values(draft, "actor.ppo_n_minibatches") == (count,)


def test_tokens_of_a_mini_batch_are_those_of_all_context_ranks():
    draft = from_cosmos(GRPO | {f"{POLICY}.max_token_len_per_mini_batch": 1000, f"{SIZES}.cp_size": 4})
    assert values(draft, "actor.mb_spec.max_tokens_per_mb") == (4000,)


@pytest.mark.parametrize(
    ("given", "share", "fate"),
    [
        ({}, 0.0, None),
        ({"max_num_steps": 200}, 0.1, None),
        ({"optm_warmup_steps": 20}, None, "missing"),
        ({"optm_warmup_steps": 20, "max_num_steps": 10}, 1.0, "computed"),
        ({"optm_warmup_steps": 0.03}, 0.03, "kept"),
        ({"optm_warmup_epochs": 1, "epoch": 4, "optm_warmup_steps": 20}, 0.25, "dropped"),
        ({"optm_warmup_epochs": 0.1, "epoch": 4}, 0.1, None),
    ],
)
def test_the_warmup_has_20_steps_unless_the_file_says_more(given, share, fate):
    draft = from_cosmos(GRPO | {f"train.{name}": value for name, value in given.items()})
    assert values(draft, "actor.optimizer.warmup_steps_proportion") == (share,)
    note = draft.notes.get("train.optm_warmup_steps")
    assert (None if note is None else note.fate) == fate


@pytest.mark.parametrize(
    ("kind", "ratio", "schedule", "fate"),
    [
        ("cosine", 1.0, "cosine", "dropped"),
        ("linear", 0.0, "constant", "dropped"),
        ("none", 0.5, "constant", "dropped"),
        ("linear", 0.5, "linear", "missing"),
        ("sqrt", 1.0, None, "dropped"),
    ],
)
def test_a_share_of_decay_counts_with_a_decay(kind, ratio, schedule, fate):
    draft = from_cosmos(GRPO | {"train.optm_decay_type": kind, "train.optm_decay_ratio": ratio})
    assert values(draft, "actor.optimizer.lr_scheduler_type") == (schedule,)
    assert fates(draft, "train.optm_decay_ratio") == [fate]


@pytest.mark.parametrize(
    ("name", "decay", "kind"),
    [("AdamW", 0.1, "adam"), ("Adam", 0.0, "adam"), ("AdamW8bit", 0.1, "adam_8bit"), ("Adam", 0.1, None)],
)
def test_adam_whose_weight_decay_is_not_decoupled_is_missing(name, decay, kind):
    draft = from_cosmos(GRPO | {"train.optm_name": name, "train.optm_weight_decay": decay})
    assert values(draft, "actor.optimizer.type") == (kind,)
    assert fates(draft, "train.optm_name") == ["missing" if kind is None else "computed"]


def test_a_norm_of_0_does_not_clip_and_rates_of_parts_are_kept():
    given = {"train.optm_grad_norm_clip": 0.0, "train.optm_lr.global": 1e-6, "train.optm_lr.visual.merger": 1e-5}
    draft = from_cosmos(GRPO | given)
    section = "actor.optimizer"
    expected = (1e9, 1e-6, {r"visual\.merger": 1e-5})
    assert values(draft, f"{section}.gradient_clipping", f"{section}.lr", f"{section}.lr_of") == expected


def test_a_run_of_cosmos_is_not_resumed_unless_it_says_so():
    modes = [values(from_cosmos(GRPO), "recover.mode")]
    modes += [values(from_cosmos(GRPO | {"train.resume": resume}), "recover.mode") for resume in ("False", True)]
    assert modes == [("disabled",), ("disabled",), ("auto",)]
    assert fates(from_cosmos(GRPO | {"train.resume": "outputs/1"}), "train.resume") == ["missing"]


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    [
        ("disaggregated", 4, "vllm:d1+fsdp:d4"),
        ("colocated", 8, "vllm:d4+fsdp:d4"),
        ("colocated_separated", 2, "vllm:d1+fsdp:d1"),
    ],
)
def test_gpus_that_generate_and_train_in_turn_are_divided(mode, ranks, expected):
    sizes = {f"{SIZES}.dp_shard_size": ranks, f"{SIZES}.tp_size": 1, "rollout.parallelism.tp_size": 1}
    draft = from_cosmos(GRPO | sizes | {"mode": mode, "train.train_batch_per_replica": 128})
    assert values(draft, "allocation_mode") == (expected,)
    assert fates(draft, "mode") == ["dropped" if mode == "disaggregated" else "computed"]


def test_stages_of_a_server_and_other_servers_are_missing():
    given = {"rollout.parallelism.pp_size": 2, "rollout.backend": "trtllm", "train.optm_lr": 1e-6}
    draft = from_cosmos(GRPO | given)
    assert fates(draft, *given) == ["missing", "missing", "computed"]
    assert values(draft, "allocation_mode") == ("vllm:d1t2+fsdp:d1t2",)
    assert fates(from_cosmos(GRPO | {"rollout.backend": "vllm_async"}), "rollout.backend") == ["computed"]


def test_a_file_without_a_reward_has_single_choice():
    assert values(from_cosmos(GRPO), "reward_fn") == ("choice",)
    remote = {f"{POLICY}.use_remote_reward": True, f"{POLICY}.remote_reward.scale": 2.0}
    draft = from_cosmos(GRPO | remote)
    assert fates(draft, *remote) == ["missing", "missing"]
    assert fates(from_cosmos(GRPO | dict.fromkeys(remote, False)), *remote) == ["dropped", "dropped"]


def test_a_teacher_replaces_the_rewards():
    own = "distillation"
    given = {f"{own}.enable": True, f"{own}.model_name_or_path": "t", f"{own}.kl_penalty_coef": 0.5}
    given |= {f"{own}.parallelism.tp_size": 4, f"{own}.top_k": 0, f"{own}.jsd_beta": 0.5}
    draft = from_cosmos(GRPO | given | {f"{POLICY}.reward_function": "gsm8k"})
    options = ("teacher.path", "teacher.advantage_coef", "teacher.rl_weight", "reward_fn")
    assert values(draft, *options) == ("t", 0.5, 0.0, "none")
    assert "missing" not in fates(draft, *given)
    divergence = from_cosmos(GRPO | given | {f"{own}.top_k": 64})
    assert fates(divergence, f"{own}.top_k", f"{own}.jsd_beta") == ["missing", "missing"]
    without = from_cosmos(GRPO | given | {f"{own}.enable": False})
    assert set(fates(without, *given)) == {"dropped"}


def test_the_old_policy_of_cosmos_can_be_that_of_the_servers():
    own = f"{POLICY}.use_rollout_logprobs_for_loss"
    assert values(from_cosmos(GRPO | {own: True}), "actor.recompute_logprob") == (False,)
    assert values(from_cosmos(GRPO | {own: False}), "actor.recompute_logprob") == (True,)


def test_corrections_of_the_loss_of_cosmos():
    given = {f"{POLICY}.kl_beta": 0.01, f"{POLICY}.unbiased_kl_estimate": True}
    given |= {f"{POLICY}.off_policy_masking_delta": 0.1}
    draft = from_cosmos(GRPO | given)
    assert values(draft, "actor.kl_loss_coef", "actor.kl_loss_correction") == (0.01, "old")
    assert fates(draft, *given) == ["kept", "computed", "missing"]
    off = from_cosmos(GRPO | {f"{POLICY}.unbiased_kl_estimate": True, f"{POLICY}.off_policy_masking_delta": None})
    assert set(fates(off, f"{POLICY}.unbiased_kl_estimate", f"{POLICY}.off_policy_masking_delta")) == {"dropped"}


@pytest.mark.parametrize(
    ("given", "scale"),
    [({}, 32), ({"mini_batch": 4}, 16), ({"batch_size_per_optimize": 8}, 8), ({"mini_batch": 64}, 2)],
)
def test_a_sum_over_tokens_has_the_scale_of_cosmos(given, scale):
    given = {f"{POLICY}.{name}": value for name, value in given.items()} | {"train.train_batch_per_replica": 32}
    sizes = {f"{SIZES}.n_init_replicas": 2, f"{SIZES}.tp_size": 1}
    draft = from_cosmos(GRPO | given | sizes | {f"{POLICY}.loss_type": "token-sum"})
    assert values(draft, "actor.loss_aggregation", "actor.loss_scale_tokens") == ("token-sum", scale)


def test_a_sum_over_tokens_of_micro_batches_of_any_size_is_missing():
    given = {f"{POLICY}.loss_type": "token-sum", f"{POLICY}.max_token_len_per_mini_batch": 1000}
    draft = from_cosmos(GRPO | given)
    assert values(draft, "actor.loss_aggregation", "actor.loss_scale_tokens") == (None, None)
    assert fates(draft, f"{POLICY}.loss_type") == ["missing"]


def test_bounds_of_advantages_are_those_of_diffusion_models():
    draft = from_cosmos(GRPO | {f"{POLICY}.advantage_low": -1.0, f"{POLICY}.advantage_high": 1.0})
    assert fates(draft, f"{POLICY}.advantage_low", f"{POLICY}.advantage_high") == ["dropped", "dropped"]


def test_uploads_evaluations_and_adapters_of_cosmos():
    given = {"train.ckpt.enable_checkpoint": True, "train.ckpt.upload_hf": True, "train.ckpt.hf_repo_name": "r"}
    given |= {"validation.enable": True, "validation.dataset.name": "v", "validation.freq_in_epoch": 2}
    given |= {
        "validation.val_before_train": True,
        "policy.lora.init_lora_weights": True,
        "policy.freeze_pattern": ["a"],
    }
    draft = from_cosmos(GRPO | given)
    options = ("saver.hub_upload.repo_id", "evaluator.freq_epochs", "evaluator.freq_steps")
    assert values(draft, *options, "evaluator.eval_before_train") == ("r", 2, None, True)
    assert values(draft, "actor.lora.rank", "actor.lora.alpha", "actor.lora.init", "actor.freeze") == (
        8,
        8.0,
        None,
        ["a"],
    )
    assert "missing" not in fates(draft, *given)
    pattern = from_cosmos(GRPO | {"policy.trainable_pattern": ["b"], "policy.lora.init_lora_weights": "pissa"})
    assert fates(pattern, "policy.trainable_pattern", "policy.lora.init_lora_weights") == ["missing", "computed"]


def test_turns_and_budgets_of_cosmos_are_not_lost():
    turns = {"rollout.multi_turn_config.enable": True, "rollout.multi_turn_config.max_assistant_turns": 5}
    assert fates(from_cosmos(GRPO | turns), *turns) == ["missing", "missing"]
    off = turns | {"rollout.multi_turn_config.enable": False}
    assert set(fates(from_cosmos(GRPO | off), *off)) == {"dropped"}
    budget = {f"{POLICY}.train_units_per_data_rank": 8, f"{POLICY}.max_inflight_rollouts": 4}
    assert fates(from_cosmos(GRPO | budget), *budget) == ["missing", "missing"]


@pytest.mark.parametrize(
    ("answers", "group", "replicas", "prompts", "fate"),
    [(128, 16, 1, 8, "computed"), (8, 16, 1, 1, "missing"), (100, 16, 1, 6, "missing"), (8, 16, 2, 1, "computed")],
)
def test_answers_that_are_no_whole_groups_are_missing_with_both_numbers(answers, group, replicas, prompts, fate):
    key = "train.train_batch_per_replica"
    draft = from_cosmos(GRPO | {key: answers, "rollout.n_generation": group, f"{SIZES}.n_init_replicas": replicas})
    assert values(draft, "train_dataset.batch_size") == (prompts,)
    assert fates(draft, key) == [fate]
    if fate == "missing":
        assert {str(answers), str(group), str(prompts * group)} <= set(draft.notes[key].text.replace(":", " ").split())


@pytest.mark.parametrize("is_on", [True, False])
def test_the_held_out_set_has_the_columns_of_training(is_on):
    given = {f"{POLICY}.prompt_column_name": "question", f"{POLICY}.response_column_name": "result"}
    given |= {"validation.enable": is_on, "validation.dataset.name": "v"}
    columns = {"question": "prompt", "result": "answer"}
    found = values(from_cosmos(GRPO | given), "train_dataset.columns", "valid_dataset.columns")
    assert found == (columns, columns if is_on else None)


@pytest.mark.parametrize(
    ("key", "value", "option", "default"),
    [
        (f"{POLICY}.variant", "x", "actor.policy_loss", "ppo"),
        (f"{POLICY}.type", "x", "train_dataset.type", None),
        ("mode", "x", "allocation_mode", "vllm:d1t2+fsdp:d1t2"),
        ("train.logprob_dtype", "float16", "actor.head_dtype", None),
    ],
)
def test_a_value_that_is_not_known_is_missing_and_the_default_is_used(key, value, option, default):
    draft = from_cosmos(GRPO | {key: value})
    assert fates(draft, key) == ["missing"]
    assert values(draft, option) == (default,)


def test_the_upper_clip_ratio_does_not_follow_the_lower_one():
    options = ("actor.eps_clip", "actor.eps_clip_higher")
    assert values(from_cosmos(GRPO | {f"{POLICY}.epsilon_low": 0.1}), *options) == (0.1, 0.2)
    given = {f"{POLICY}.epsilon_low": 0.1, f"{POLICY}.epsilon_high": 0.3}
    assert values(from_cosmos(GRPO | given), *options) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("given", "mode", "top_p"),
    [({}, "greedy", None), ({"temperature": 0.6, "top_k": 50}, "sampled", 0.9)],
)
def test_evaluations_have_their_own_length_and_penalty_and_the_nucleus_of_training(given, mode, top_p):
    keys = {"enable": True, "dataset.name": "v", "max_response_length": 99, "repetition_penalty": 1.1} | given
    sampling = {"rollout.sampling_config.top_p": 0.9, "rollout.sampling_config.repetition_penalty": 1.3}
    draft = from_cosmos(GRPO | sampling | {f"validation.{key}": value for key, value in keys.items()})
    assert values(draft, "evaluator.modes", "eval_gconfig.top_p") == ([mode], top_p)
    assert values(draft, "eval_gconfig.max_new_tokens", "eval_gconfig.repetition_penalty") == (99, 1.1)


@pytest.mark.parametrize(
    ("names", "mode", "has_path", "fate"),
    [
        (["console", "wandb"], "online", False, "computed"),
        (["tensorboard"], None, True, "computed"),
        (["wandb", "other"], "online", False, "missing"),
        ([], None, False, "dropped"),
    ],
)
def test_trackers_are_kept_and_another_one_is_missing(names, mode, has_path, fate):
    draft = from_cosmos(GRPO | {"logging.logger": names})
    path = "${cluster.fileroot}/${experiment_name}/${trial_name}/tensorboard" if has_path else None
    assert values(draft, "stats_logger.wandb.mode", "stats_logger.tensorboard.path") == (mode, path)
    assert fates(draft, "logging.logger") == [fate]
