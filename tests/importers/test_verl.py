"""Keys that newer versions of verl moved or added, and its asynchronous trainers."""

import pytest

from areal.importers.verl import from_verl
from tests.importers.drafts import fates, values

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VERL = {f"{MODEL}.path": "m", "data.train_files": "t", "algorithm.adv_estimator": "grpo", "data.train_batch_size": 64}
CORRECTION = "algorithm.rollout_correction"


OLD_AND_NEW = [
    ("custom_reward_function.path", "reward.custom_reward_function.path", "f.py", "reward_fn", "f.py:compute_score"),
    ("reward_model.model.path", "reward.reward_model.model_path", "r", "reward_model.path", "r"),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        "reward.reward_kwargs.overlong_buffer_cfg.enable",
        True,
        "actor.overlong_reward_penalty",
        True,
    ),
]


@pytest.mark.parametrize(("old", "new", "given", "option", "expected"), OLD_AND_NEW)
def test_keys_of_rewards_that_were_moved_mean_the_same(old, new, given, option, expected):
    switch = {"reward_model.enable": True} if option == "reward_model.path" else {}
    moved = {f"reward.{key}": value for key, value in switch.items()}
    assert values(from_verl(VERL | switch | {old: given}), option) == (expected,)
    assert values(from_verl(VERL | moved | {new: given, old: None}), option) == (expected,)
    both = from_verl(VERL | moved | switch | {new: None, old: given})
    assert values(both, option) == (expected,)
    assert "missing" not in fates(both, new, old)


def test_a_model_that_the_reward_function_calls_is_missing():
    given = {"reward.custom_reward_function.path": "f.py", "reward.reward_model.enable": True}
    given["reward.reward_model.model_path"] = "judge"
    draft = from_verl(VERL | given)
    assert values(draft, "reward_fn", "reward_model.path") == ("f.py:compute_score", None)
    assert fates(draft, *given) == ["computed", "missing", "missing"]


def test_values_of_a_reward_function_are_missing_with_the_function_only():
    key = "custom_reward_function.reward_kwargs.x"
    with_function = from_verl(VERL | {key: 1, "custom_reward_function.path": "f.py"})
    assert (fates(with_function, key), fates(from_verl(VERL | {key: 1}), key)) == (["missing"], ["dropped"])


@pytest.mark.parametrize("section", [f"{ACTOR}.qat", f"{MODEL}.mtp", f"{ROLLOUT}.prometheus", "critic.profiler"])
def test_sections_that_are_off_are_dropped_and_missing_when_they_are_on(section):
    given = {f"{section}.enable": False, f"{section}.mode": "x", f"{section}._target_": "verl.X"}
    assert set(fates(from_verl(VERL | given), *given)) == {"dropped"}
    on = fates(from_verl(VERL | given | {f"{section}.enable": True}), *given)
    assert on[:2] == ["missing", "missing"] or (section.startswith("critic") and set(on) == {"dropped"})


def test_a_fully_asynchronous_run_counts_mini_batches_and_has_gpus_of_its_own():
    given = {"data.train_batch_size": 0, "data.gen_batch_size": 1, f"{ACTOR}.ppo_mini_batch_size": 32}
    given |= {"async_training.require_batches": 2, "async_training.trigger_parameter_sync_step": 4}
    given |= {"async_training.staleness_threshold": 0.5, "async_training.partial_rollout": True}
    given |= {"rollout.nnodes": 2, "rollout.n_gpus_per_node": 8, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
    given |= {"rollout.total_rollout_steps": 2560, "rollout.test_freq": 3, f"{ROLLOUT}.tensor_model_parallel_size": 4}
    draft = from_verl(VERL | given)
    options = ("train_dataset.batch_size", "actor.ppo_n_minibatches", "rollout.max_head_offpolicyness")
    assert values(draft, *options) == (256, 8, 1)
    assert values(draft, "total_train_steps", "evaluator.freq_steps") == (10, 3)
    assert values(draft, "allocation_mode", "cluster.n_nodes") == ("vllm:d4t4+fsdp:d8", 3)
    assert values(draft, "actor.recompute_logprob") == (False,)
    assert "missing" not in fates(draft, *given)


@pytest.mark.parametrize(
    ("given", "staleness", "devices"),
    [
        ({}, 0, "vllm:d2t2+fsdp:d4"),
        ({"trainer.v1.trainer_mode": "sync", f"{ROLLOUT}.nnodes": 0}, 0, "vllm:d2t2+fsdp:d4"),
        ({"trainer.v1.trainer_mode": "colocate_async"}, 1, "vllm:d2t2+fsdp:d4"),
        (
            {
                "trainer.v1.trainer_mode": "separate_async",
                "trainer.v1.separate_async.num_warmup_batches": 2,
                f"{ROLLOUT}.nnodes": 1,
            },
            2,
            "vllm:d4t2+fsdp:d8",
        ),
        ({"rollout.nnodes": 1, "rollout.n_gpus_per_node": 2}, 1, "vllm:d1t2+fsdp:d8"),
    ],
)
def test_the_age_of_answers_follows_the_mode_of_the_trainer(given, staleness, devices):
    draft = from_verl(VERL | given)
    assert values(draft, "rollout.max_head_offpolicyness", "allocation_mode") == (staleness, devices)
    assert "missing" not in fates(draft, *given)


def test_rules_of_verl_are_bounds_of_ratios_and_of_estimates_of_the_kl():
    given = {f"{CORRECTION}.rollout_rs": "seq_mean_k1, seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "2.0,2.5"}
    rules = [
        {"metric": "ratio", "level": "sequence_mean", "upper": 2.0, "lower": 0.5},
        {"metric": "k2", "level": "sequence_max", "upper": 2.5},
    ]
    section = "actor.rollout_correction"
    options = (f"{section}.rules", f"{section}.apply_weights", f"{section}.renormalize", f"{section}.numerator")
    draft = from_verl(VERL | given)
    assert values(draft, *options) == (rules, False, True, None)
    assert fates(draft, *given) == ["computed", "computed"]
    weighted = from_verl(VERL | given | {f"{CORRECTION}.rollout_is": "token"})
    assert values(weighted, *options) == (rules, None, True, None)
    bypass = from_verl(VERL | given | {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"})
    assert values(bypass, *options, "actor.recompute_logprob") == (rules, False, None, "training", False)


@pytest.mark.parametrize("names", ["token_k4", "group_k1", "token_k1,seq_sum_k2", "seq_mean_k1"])
def test_rules_without_a_counterpart_or_a_bound_are_missing(names):
    bounds = {"token_k1,seq_sum_k2": "0.5_2,1,1", "seq_mean_k1": "x"}.get(names, "0.5_2")
    given = {f"{CORRECTION}.rollout_rs": names, f"{CORRECTION}.rollout_rs_threshold": bounds}
    draft = from_verl(VERL | given)
    is_known = names == "token_k1,seq_sum_k2"  # a third bound has no rule
    assert (fates(draft, f"{CORRECTION}.rollout_rs") == ["missing"]) != is_known


def test_weights_outside_of_two_thresholds_are_0():
    given = {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"}
    section = "actor.rollout_correction"
    draft = from_verl(VERL | given)
    assert values(draft, *(f"{section}.{name}" for name in ("mode", "lower", "upper"))) == ("mask", 0.5, 5.0)


def test_a_policy_gradient_without_clipping_is_missing():
    given = {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"}
    draft = from_verl(VERL | given | {f"{CORRECTION}.rollout_is": "token"})
    assert fates(draft, *given) == ["missing", "missing"]


def test_a_teacher_of_verl():
    own, loss = "distillation.teacher_models.teacher_model", "distillation.distillation_loss"
    given = {"distillation.enabled": True, f"{own}.model_path": "t", f"{loss}.distillation_loss_coef": 0.5}
    options = ["teacher.path", *(f"teacher.{name}" for name in ("advantage_coef", "loss_coef", "rl_weight"))]
    in_loss = from_verl(VERL | given)
    assert values(in_loss, *options, "teacher.loss_estimator") == ("t", 0.0, 0.5, 1.0, "k3")
    alone = {f"{loss}.use_policy_gradient": True, f"{loss}.loss_mode": "k1", f"{loss}.use_task_rewards": False}
    in_advantage = from_verl(VERL | given | alone)
    assert values(in_advantage, *options, "actor.adv_estimator") == ("t", 1.0, None, 0.0, "gae")
    second = f"{own}2.model_path"
    draft = from_verl(VERL | given | {second: "u", f"{loss}.loss_mode": "forward_kl_topk", f"{loss}.topk": 64})
    assert fates(draft, f"{own}.model_path", second, f"{loss}.loss_mode") == ["missing"] * 3
    off = from_verl(VERL | given | {"distillation.enabled": False})
    assert values(off, "teacher.path") == (None,)


@pytest.mark.parametrize(
    ("optimizer", "decay", "kind"),
    [("AdamW", 0.1, "adam"), ("AdamW8bit", 0.1, "adam_8bit"), ("Adam", 0.1, None), ("Lion", 0.1, None)],
)
def test_optimisers_of_verl(optimizer, decay, kind):
    given = {f"{ACTOR}.optim.optimizer": optimizer, f"{ACTOR}.optim.weight_decay": decay}
    draft = from_verl(VERL | given)
    assert values(draft, "actor.optimizer.type") == (kind,)
    assert fates(draft, f"{ACTOR}.optim.optimizer") == ["missing" if kind is None else "computed"]


def test_the_optimiser_of_the_critic_has_its_own_options():
    given = {"algorithm.adv_estimator": "gae", "critic.optim.betas": [0.8, 0.9], "critic.optim.clip_grad": 0.5}
    given |= {"critic.optim.lr_scheduler_type": "cosine", "critic.optim.lr_warmup_steps": 10}
    draft = from_verl(VERL | given | {"trainer.total_training_steps": 100})
    section = "critic.optimizer"
    names = ("beta1", "beta2", "gradient_clipping", "lr_scheduler_type", "warmup_steps_proportion")
    assert values(draft, *(f"{section}.{name}" for name in names)) == (0.8, 0.9, 0.5, "cosine", 0.1)


def test_adapters_of_megatron_are_those_of_fsdp():
    given = {f"{MODEL}.lora.rank": 16, f"{MODEL}.lora.adapter_path": "a", "model_engine": "megatron"}
    given |= {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{MODEL}.lora.target_modules": ["linear_qkv"]}
    draft = from_verl(VERL | given)
    adapters = [f"actor.lora.{name}" for name in ("rank", "alpha", "path")]
    assert values(draft, *adapters, "allocation_mode") == (16, 32, "a", "vllm:d2t2+fsdp:d4")
    assert fates(draft, *given) == ["kept", "kept", "dropped", "missing", "missing"]


def test_the_engine_of_models_can_be_chosen_by_one_key():
    assert values(from_verl(VERL | {"model_engine": "megatron"}), "allocation_mode") == ("vllm:d2t2+megatron:d4",)
    key = f"{ACTOR}.optim.override_optimizer_config"
    given = {f"{key}.optimizer_cpu_offload": True, f"{key}.optimizer_offload_fraction": 1.0}
    draft = from_verl(VERL | given | {"model_engine": "megatron"})
    assert values(draft, "actor.megatron.offload_optimizer") == (True,)
    assert fates(draft, *given) == ["computed", "dropped"]
    assert fates(from_verl(VERL | given), *given) == ["missing", "missing"]


def test_options_of_a_loss_that_does_not_exist_here_are_missing():
    given = {f"{ACTOR}.policy_loss.loss_mode": "cppo", f"{ACTOR}.policy_loss.cppo.cppo_w_min": 0.8}
    assert fates(from_verl(VERL | given), *given) == ["missing", "missing"]
    key = f"{ACTOR}.policy_loss.dro_beta"
    assert fates(from_verl(VERL | {key: 0.1}), key) == ["dropped"]


@pytest.mark.parametrize(
    ("engine", "sizes", "devices"),
    [
        ("veomni", {"ulysses_parallel_size": 2, "expert_parallel_size": 4}, "vllm:d2t2+fsdp:d2c2e4"),
        ("torchtitan", {"tensor_parallel_size": 2, "context_parallel_size": 2}, "vllm:d2t2+fsdp:d1t2c2"),
    ],
)
def test_other_engines_of_verl_are_fsdp(engine, sizes, devices):
    given = {f"{ACTOR}.{engine}.{name}": size for name, size in sizes.items()} | {"model_engine": engine}
    given |= {f"{ACTOR}.{engine}.param_offload": True, f"{ACTOR}.{engine}.fsdp_size": -1}
    stages = f"{ACTOR}.{engine}.pipeline_parallel_size"
    draft = from_verl(VERL | given | {stages: 2})
    assert values(draft, "allocation_mode", "actor.fsdp.offload_params") == (devices, True)
    assert fates(draft, stages) == ["missing"]
    assert "missing" not in fates(draft, *given)


@pytest.mark.parametrize(
    ("engine", "option"),
    [("fsdp_config", "actor.fsdp.offload_optimizer"), ("megatron", "actor.megatron.offload_optimizer")],
)
def test_targets_of_states_replace_switches(engine, option):
    own = f"{ACTOR}.{engine}.offload"
    given = {f"{own}.optimizer.target": "cpu", f"{own}.param.target": "none", f"{own}.disk.chunk_size_mb": 64}
    strategy = {f"{ACTOR}.strategy": "megatron" if engine == "megatron" else "fsdp"}
    draft = from_verl(VERL | strategy | given)
    assert values(draft, option) == (True,)
    assert fates(draft, *given) == ["computed", "dropped", "dropped"]
    disk = from_verl(VERL | strategy | {f"{own}.optimizer.target": "disk"})
    assert (values(disk, option), fates(disk, f"{own}.optimizer.target")) == ((None,), ["missing"])


@pytest.mark.parametrize(
    ("given", "path", "fate"),
    [
        ({"trainer.test_freq": -1, "trainer.val_before_train": False}, None, "dropped"),
        ({"trainer.val_before_train": False}, None, None),
        ({"trainer.test_freq": -1}, "v", "dropped"),
        ({"trainer.test_freq": 5, "trainer.val_before_train": False}, "v", "kept"),
        ({"async_training.require_batches": 1, "trainer.val_before_train": False}, "v", None),
    ],
)
def test_a_held_out_set_that_verl_never_evaluates_is_left_out(given, path, fate):
    sampling = {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 1.0}
    draft = from_verl(VERL | {"data.val_files": "v"} | sampling | given)
    assert values(draft, "valid_dataset.path", "evaluator.modes") == (path, path and ["sampled"])
    assert "missing" not in fates(draft, *given)
    assert ("evaluator.eval_before_train" in draft.options) == (path is not None)
    note = draft.notes.get("trainer.test_freq")
    assert (None if note is None else note.fate) == fate


def test_the_interval_of_a_fully_asynchronous_run_is_that_of_its_servers():
    given = {"async_training.require_batches": 1, "rollout.test_freq": 3, "trainer.test_freq": 7}
    draft = from_verl(VERL | {"data.val_files": "v"} | given)
    assert values(draft, "evaluator.freq_steps") == (3,)
    assert fates(draft, *given) == ["computed", "kept", "dropped"]


@pytest.mark.parametrize(
    ("key", "value", "option", "default"),
    [
        ("trainer.resume_mode", "x", "recover.mode", "auto"),
        ("trainer.v1.trainer_mode", "x", "rollout.max_head_offpolicyness", 0),
        (f"{ROLLOUT}.name", "trtllm", "allocation_mode", "vllm:d2t2+fsdp:d4"),
        (f"{ACTOR}.strategy", "deepspeed", "allocation_mode", "vllm:d2t2+fsdp:d4"),
    ],
)
def test_a_value_that_is_not_known_is_missing_and_the_default_is_used(key, value, option, default):
    draft = from_verl(VERL | {key: value})
    assert fates(draft, key) == ["missing"]
    assert values(draft, option) == (default,)


@pytest.mark.parametrize("name", ["vllm", "sglang", "sglang_async", "???"])
def test_names_of_servers_in_older_scripts_are_known(name):
    assert fates(from_verl(VERL | {f"{ROLLOUT}.name": name}), f"{ROLLOUT}.name") == ["computed"]


def test_tensorboard_of_a_run_is_in_its_folder():
    draft = from_verl(VERL | {"trainer.logger": ["tensorboard"]})
    expected = "${cluster.fileroot}/${experiment_name}/${trial_name}/tensorboard"
    assert values(draft, "stats_logger.tensorboard.path") == (expected,)


def test_mlflow_needs_no_server():
    draft = from_verl(VERL | {"trainer.logger": ["mlflow"]})
    assert values(draft, "stats_logger.mlflow.mode") == ("local",)


def test_the_size_of_batches_of_held_out_rows_is_dropped():
    draft = from_verl(VERL | {"data.val_batch_size": 64})
    assert fates(draft, "data.val_batch_size") == ["dropped"]


def test_a_key_names_every_option_that_it_decides():
    draft = from_verl(VERL | {f"{ACTOR}.optim.betas": [0.8, 0.9]})
    text = draft.notes[f"{ACTOR}.optim.betas"].text
    assert text == "actor.optimizer.beta1=0.8, actor.optimizer.beta2=0.9"


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "greedy"),
        ({"val_kwargs.do_sample": True}, "greedy"),
        ({"val_kwargs.do_sample": True, "val_kwargs.temperature": 0.6}, "sampled"),
        ({"val_kwargs.temperature": 0.6}, "sampled"),
        ({"val_kwargs.temperature": 0.6, "mode": "sync"}, "greedy"),
    ],
)
def test_evaluations_are_sampled_above_a_temperature_of_0(given, mode):
    draft = from_verl(VERL | {"data.val_files": "v"} | {f"{ROLLOUT}.{key}": value for key, value in given.items()})
    sampled = mode == "sampled"
    assert values(draft, "evaluator.modes", "eval_gconfig.temperature") == ([mode], 0.6 if sampled else None)


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({}, None),
        ({"custom_reward_function.path": "f.py"}, 1e9),
        ({"reward_model.enable": True, "reward_model.model.path": "r"}, 1e9),
        ({"custom_reward_function.path": "f.py", "algorithm.adv_estimator": "gdpo"}, None),
    ],
)
def test_rewards_of_unknown_size_are_not_clipped(given, bound):
    assert values(from_verl(VERL | given), "actor.reward_clip") == (bound,)
