"""Configurations of verl (ppo_trainer), and `key=value` words of its scripts."""

import math
from typing import Any

from areal.api.errors import ConfigError
from areal.importers.draft import TENSORBOARD, Draft, minibatches
from areal.importers.verl_algorithm import (
    ACTOR,
    KL_ESTIMATORS,
    MODEL,
    NO_EVALUATION,
    OTHER_ENGINES,
    ROLLOUT,
    is_fully_async,
    is_megatron,
    server_gpus,
    take_advantages,
    take_correction,
    take_kl,
    take_loss,
    take_optimizer,
    take_sampling,
    take_servers,
    validates,
)

# Sections of verl that are switched on one by one: rewards, the teacher, and what has no counterpart.

_TEACHER = "distillation"
_NO_CLIP = 1e9  # The bound of rewards where the source has none: an option here is a finite number.
_SWITCHES = {
    "qat": "weights are not quantised", "mtp": "there is no prediction of several tokens",
    "tiled_mlp": "an MLP is computed at once: actor.mb_spec", "disaggregation": "a server does prefill and decoding",
    "prometheus": "metrics are in metrics.jsonl and on the controller's page /metrics",
    "profiler": "perf_tracer.profile_steps", "skip.rollout": "areal replay trains on recorded answers",
}  # fmt: skip
"""Sections with a key enable or enabled -> why they are missing where it is on."""


def legacy(draft: Draft, old: str, new: str) -> tuple[Any, tuple[str, str]]:
    """The value of a key that was moved, and both names. verl takes the old one unless it is null."""
    return draft.get(old, draft.get(new)), (old, new)


def take_switches(draft: Draft) -> None:
    draft.drop("a class of verl's configuration", "_target_", "*._target_")
    for name, why in _SWITCHES.items():
        for key in [key for key in draft.values if f".{key}".endswith((f".{name}.enable", f".{name}.enabled"))]:
            section = key.rpartition(".")[0]
            if not draft.get(key, False):
                draft.drop("it is switched off", f"{section}.*")
            draft.lack(why, key)
            draft.lack(why, f"{section}.*", off=(None,))
        draft.drop("it is switched off", f"{name}.*", f"*.{name}.*")
    draft.drop("it is switched off", "skip.*", f"{ROLLOUT}.skip_rollout", f"{ROLLOUT}.skip_dump_dir")
    if draft.get(f"{ROLLOUT}.trace.backend") is None:
        draft.drop("it is switched off", f"{ROLLOUT}.trace.*")
    draft.lack("session_tracer and perf_tracer record runs", f"{ROLLOUT}.trace.*", off=(None,))
    draft.drop("how verl moves data and weights", "transfer_queue.*", f"{ROLLOUT}.checkpoint_engine.*")
    draft.drop("how verl moves data and weights", "actor_rollout_ref.nccl_timeout", "actor_rollout_ref.checkpoint_*")


def take_rewards(draft: Draft) -> None:
    path, path_keys = legacy(draft, "custom_reward_function.path", "reward.custom_reward_function.path")
    name, name_keys = legacy(draft, "custom_reward_function.name", "reward.custom_reward_function.name")
    enabled, switch_keys = legacy(draft, "reward_model.enable", "reward.reward_model.enable")
    if path:
        why = "verl: custom_reward_function; here it is f(prompt, completion, prompt_ids, completion_ids, **row)"
        draft.set("reward_fn", f"{path}:{name or 'compute_score'}", why, *path_keys, *name_keys)
    elif not enabled:
        files = str(draft.get("data.train_files", ""))
        why = "verl chooses by the column data_source: check it; reward.by_source does the same"
        draft.set("reward_fn", "gsm8k" if "gsm8k" in files else "math", why)
    if (path or enabled) and draft.options["actor.adv_estimator"].value != "gdpo":
        draft.set("actor.reward_clip", _NO_CLIP, "verl does not clip rewards")
    if not path:
        draft.drop("there is no custom reward function", "custom_reward_function.*", "reward.custom_reward_function.*")
    draft.lack("write a reward function with these values", "*custom_reward_function.*", "reward.compute_score_kwargs*")
    _overlong(draft)
    if path and draft.get("reward.reward_model.enable", False):
        why = "the reward function calls this model: serve it yourself"
        draft.lack(why, "reward.reward_model.enable", "reward.reward_model.model_path")
        draft.drop("a model that you serve", "reward.reward_model.*")
    elif enabled:
        for key in ("reward_model.model.path", "reward.reward_model.model_path"):
            draft.keep(key, "reward_model.path")
        draft.keep("reward_model.model.input_tokenizer", "reward_model.tokenizer_path")
        draft.drop("reward_model.path does it", *switch_keys)
        draft.drop("the trainer computes its scores", "reward.reward_model.*", "reward_model.rollout.*")
    else:
        sections = ("reward_model.model.*", "reward_model.rollout.*", "reward.reward_model.*")
        draft.drop("there is no reward model", *sections, *switch_keys)
    manager, manager_keys = legacy(draft, "reward_model.reward_manager", "reward.reward_manager.name")
    if manager in (None, "naive", "dapo", "batch", "prime", "gdpo", "rate_limited"):
        draft.drop("rewards run in reward.workers processes", *manager_keys)
    draft.lack("write a reward function (docs/rewards.md)", *manager_keys, "*reward_manager.module.path")
    workers = ("reward_manager.*", "reward.reward_manager.*", "reward.num_workers", "reward_model.num_workers")
    draft.drop("rewards run in reward.workers processes", *workers, "reward_model.launch_*")
    draft.lack("reward.sandbox runs code of answers (docs/rewards.md)", "*sandbox_fusion.url")
    draft.drop("rewards run in reward.workers processes", "*sandbox_fusion.*")
    draft.drop("a copy of the length limit", "*reward_kwargs.max_resp_len", "reward_model.max_length")


def _overlong(draft: Draft) -> None:
    ends = ("overlong_buffer.enable", "overlong_buffer_cfg.enable")
    enabled = next((key for key in draft.values if key.endswith(ends) and draft.values[key]), "")
    if enabled:
        prefix = enabled.removesuffix("enable")
        draft.keep(enabled, "actor.overlong_reward_penalty")
        draft.keep(f"{prefix}len", "actor.overlong_tokens")
        draft.keep(f"{prefix}penalty_factor", "actor.overlong_penalty_factor")
        draft.drop("a metric, always recorded", f"{prefix}log")
    else:
        draft.drop("there is no penalty for long answers", "*overlong_buffer*")
    draft.drop("the same keys in another place", *(f"*{end}" for end in ends))


def take_teacher(draft: Draft) -> None:
    """One teacher: the log-ratio of teacher and policy in the advantages, or their KL as a term of the loss."""
    if not draft.get(f"{_TEACHER}.enabled", False):
        draft.drop("there is no teacher", f"{_TEACHER}.*")
        return
    paths = [key for key in draft.values if key.startswith(f"{_TEACHER}.") and key.endswith(".model_path")]
    teachers = [key for key in paths if draft.get(key)]
    if len(teachers) == 1:
        draft.keep(teachers[0], "teacher.path")
    draft.lack("there is one teacher", *teachers, off=())
    loss = f"{_TEACHER}.distillation_loss"
    keys = (f"{loss}.use_task_rewards", f"{loss}.use_policy_loss")
    with_rewards = all(draft.get(key, True) for key in keys)
    draft.set("teacher.rl_weight", 1.0 if with_rewards else 0.0, "verl: use_task_rewards", *keys, f"{_TEACHER}.enabled")
    if not with_rewards and "critic.path" not in draft.options:
        why = "no rewards, so no groups: verl's use_task_rewards is false"
        draft.set("actor.adv_estimator", "gae", why, "algorithm.adv_estimator")
    coefficient = draft.number(f"{loss}.distillation_loss_coef", 1.0) if with_rewards else 1.0
    mode, in_advantage = str(draft.get(f"{loss}.loss_mode", "k3")), draft.get(f"{loss}.use_policy_gradient", False)
    names = (f"{loss}.distillation_loss_coef", f"{loss}.use_policy_gradient")
    if in_advantage and mode in ("k1", "kl"):
        draft.set("teacher.advantage_coef", coefficient, "verl: distillation_loss_coef", *names, f"{loss}.loss_mode")
    elif mode in KL_ESTIMATORS and not in_advantage:
        draft.set("teacher.advantage_coef", 0.0, "verl: use_policy_gradient is false")
        draft.set("teacher.loss_coef", coefficient, "verl: distillation_loss_coef", *names)
        draft.set("teacher.loss_estimator", KL_ESTIMATORS[mode], "verl: loss_mode", f"{loss}.loss_mode")
    draft.lack("a teacher has the log-ratio in advantages, or k1, k2, k3 in the loss", f"{loss}.loss_mode", off=())
    draft.lack("the distance of a token has no bound", f"{loss}.loss_max_clamp", f"{loss}.log_prob_min_clamp")
    draft.drop("the trainer computes the teacher's log-probabilities", f"{_TEACHER}.*")


def take_adapters(draft: Draft) -> None:
    section = f"{MODEL}.lora"
    if draft.whole(f"{MODEL}.lora_rank", 0, least=0) > 0:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            draft.keep(f"{MODEL}.{name}", f"actor.lora.{name.removeprefix('lora_')}")
        draft.keep(f"{MODEL}.lora_adapter_path", "actor.lora.path")
    elif draft.whole(f"{section}.rank", 0, least=0) > 0:
        for name in ("rank", "alpha", "dropout"):
            draft.keep(f"{section}.{name}", f"actor.lora.{name}")
        draft.defaults({"actor.lora.alpha": 32})
        draft.keep(f"{section}.adapter_path", "actor.lora.path")
        why = "names of modules of Megatron-Core: give actor.lora.target_modules"
        draft.lack(why, f"{section}.target_modules", f"{section}.exclude_modules")
        draft.drop("adapters have their defaults", f"{section}.*")
    sections = (f"{MODEL}.lora_*", f"{section}.*", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules")
    draft.drop("there are no adapters", *sections)
    draft.lack("a critic has no adapters", "critic.model.lora_rank", "critic.model.lora.rank")
    draft.drop("a critic has no adapters", "critic.model.lora*", "critic.model.*_modules")


def take_offload(draft: Draft) -> None:
    """Targets of the states of the actor (2026), which replace param_offload and optimizer_offload."""
    is_fsdp = "+fsdp:" in draft.options["allocation_mode"].value
    for engine in ("fsdp_config", "megatron", *OTHER_ENGINES):
        section = f"{ACTOR}.{engine}"
        options = {"param": "fsdp.offload_params", "optimizer": "fsdp.offload_optimizer"}
        options = options if is_fsdp else {"optimizer": "megatron.offload_optimizer"}
        for name, option in options.items():
            if engine in OTHER_ENGINES:
                draft.keep(f"{section}.{name}_offload", f"actor.{option}")
            if draft.get(key := f"{section}.offload.{name}.target") == "cpu":
                draft.set(f"actor.{option}", True, f"verl: {engine}.offload", key)
        draft.lack("states are on the GPU or the CPU: actor.fsdp", f"{section}.offload.*.target", off=("none", None))
    draft.drop("nothing is on a disk", f"{ACTOR}.*.offload.disk.*")
    draft.drop("the reference and the critic have the options of the actor", "*.ref.*.offload.*", "critic.*.offload.*")
    for engine in OTHER_ENGINES:
        draft.lack("one stage, ranks of one kind", f"{ACTOR}.{engine}.*_size", off=(None, 1, -1))
        draft.drop("options of another engine than FSDP2", *(f"{role}.{engine}.*" for role in (ACTOR, "critic")))
        draft.drop("options of another engine than FSDP2", f"actor_rollout_ref.ref.{engine}.*")


def drop_newest(draft: Draft) -> None:
    draft.lack("the dataset has images, no sound", "data.audio_key", off=("audios", None, ""))
    draft.lack("the model's processor has its options", "data.mm_processor_kwargs*")
    draft.lack("workflow: agent, whose program has the tools", "data.function_tool_path")
    draft.drop("no variables of the template", "data.apply_chat_template_kwargs")
    draft.drop("gconfig.n_samples", "*.rollout_n")
    draft.drop("of the loader of mini-batches", "critic.shuffle", "critic.data_loader_seed")
    draft.drop(
        "entropies are computed with the log-probabilities", "*.entropy_from_logits_*", "*.entropy_checkpointing"
    )
    draft.drop("a recovery checkpoint has everything", "*.checkpoint.strict")
    draft.lack("it changes the model's configuration", "critic.model.override_config*")
    names = ("use_fused_kernels", "fused_kernel_options.*", "pad_to_length*", "use_prefix_grouper", "use_no_sync_*")
    draft.drop("chosen by the engine", *(f"*.{name}" for name in names))
    draft.drop("a metric", "*.calculate_sum_pi_squared", f"{ROLLOUT}.moe_load_balance_metrics_interval")
    if draft.get(f"{ROLLOUT}.enable_rollout_routing_replay", False):
        key = f"{ROLLOUT}.enable_rollout_routing_replay"
        draft.set("actor.router_replay", True, "verl: enable_rollout_routing_replay", key)
    draft.drop("actor.router_replay is off", f"{ROLLOUT}.enable_rollout_routing_replay", "*.ref.router_replay.*")
    draft.lack("a group waits for all of its answers", f"{ROLLOUT}.over_sample_rate")
    draft.lack("log-probabilities are those of the sampled distribution", f"{ROLLOUT}.logprobs_mode",
               off=("processed_logprobs", None))  # fmt: skip
    unused = ("seed", "full_determinism", "scheduling_policy", "multi_stage_wake_up", "skip_tokenizer_init",
           "use_preprocessed_multimodal_input", "layer_name_map.*", "nnodes", "n_gpus_per_node",
           "cudagraph_capture_sizes", "skip.*")  # fmt: skip
    draft.drop("servers and seed decide it", *(f"{ROLLOUT}.{name}" for name in unused))
    draft.keep(f"{MODEL}.tokenizer_path", "tokenizer_path")
    draft.lack("chat_template.path: a file", f"{MODEL}.custom_chat_template")
    draft.lack("the model's folder has its configuration", f"{MODEL}.hf_config_path")
    draft.drop("how verl's trainer works", "trainer.balance_keep_minibatch", "trainer.use_v1", "trainer.esi_*")
    draft.drop("how verl's trainer works", "trainer.del_local_ckpt_after_load", "trainer.max_critic_ckpt_to_keep")
    draft.drop("it is chosen by allocation_mode", "model_engine", f"{ACTOR}.*turbo_config*", "critic.*turbo_config*")
    draft.drop("it is chosen by allocation_mode", "*.ref.*turbo_config*", "actor_rollout_ref.actor.load_weight")
    draft.lack("your own code", "trainer.checkpoint_callback_class")


# The asynchronous trainers of verl: trainer.v1, fully_async_policy and one_step_off_policy.

_ASYNC, _V1 = "async_training", "trainer.v1"


def streamed_batch(draft: Draft, size: int) -> tuple[int, int]:
    """Prompts between two updates of the servers, and their mini-batches of `size` prompts. Takes the keys of both."""
    fetched = draft.whole(f"{_ASYNC}.require_batches", 1)
    count = fetched * draft.whole(f"{_ASYNC}.trigger_parameter_sync_step", 4)
    why = f"verl: ppo_mini_batch_size {size} x {count} between two updates of the servers"
    keys = (f"{_ASYNC}.require_batches", f"{_ASYNC}.trigger_parameter_sync_step")
    draft.set("train_dataset.batch_size", size * count, why, *keys)
    draft.drop("async_training counts batches", "data.train_batch_size", "data.gen_batch_size")
    if steps := draft.whole("rollout.total_rollout_steps", 0, least=0):
        total = max(1, steps // (size * count))
        draft.set("total_train_steps", total, f"verl: total_rollout_steps {steps} / {size * count} prompts of a step",
                  "rollout.total_rollout_steps")  # fmt: skip
    return size * count, count


def take_staleness(draft: Draft) -> None:
    """rollout.max_head_offpolicyness, and whose log-probabilities are those of the old policy."""
    mode = str(draft.get(f"{_V1}.trainer_mode", "sync"))
    if is_fully_async(draft):
        share = draft.number(f"{_ASYNC}.staleness_threshold", 0.1)
        why = "verl: async_training.staleness_threshold, rounded up"
        draft.set("rollout.max_head_offpolicyness", math.ceil(share), why, f"{_ASYNC}.staleness_threshold")
        draft.keep("rollout.test_freq", "evaluator.freq_steps")
    elif mode in ("colocate_async", "separate_async"):
        key = f"{_V1}.{mode}.num_warmup_batches"
        ahead, why = draft.whole(key, 1, least=0), f"verl: {mode} has this many batches ahead"
        draft.set("rollout.max_head_offpolicyness", ahead, why, key, f"{_V1}.trainer_mode")
    elif server_gpus(draft):
        draft.set("rollout.max_head_offpolicyness", 1, "verl: servers with their own GPUs are one step ahead")
    else:
        why = "verl trains on answers of the current policy; 2 is faster"
        draft.set("rollout.max_head_offpolicyness", 0, why)
    if mode != "sync":  # the known ones are computed
        draft.lack("choose rollout.max_head_offpolicyness: the mode is not known", f"{_V1}.trainer_mode", off=())
    draft.drop("rollout.max_head_offpolicyness limits the age of answers", f"{_V1}.sampler.max_off_policy_*")
    if draft.get(f"{_V1}.sampler.custom_sampler.path") is None:
        draft.drop("there is no such sampler", f"{_V1}.sampler.*")
    draft.lack("the oldest answers are trained first", f"{_V1}.sampler.*")
    draft.lack("GPUs of the trainer do not generate", f"{_V1}.separate_async.*enable_switch")
    draft.drop("a step publishes its weights", f"{_V1}.separate_async.parameter_sync_step")
    draft.drop("options of another mode, or of a switch that is off", f"{_V1}.*")
    draft.drop("answers that an update interrupts are continued: rollout.weight_update", f"{_ASYNC}.partial_rollout")
    draft.drop("how verl's trainer evaluates and sends weights", f"{_ASYNC}.*")
    names = ("use_rollout_log_probs", "max_concurrent_samples_per_replica")
    draft.drop("limits of servers, and rollout_correction", f"{ACTOR}.{names[0]}", f"rollout.{names[1]}")
    draft.keep("rollout.total_epochs", "total_train_epochs")
    draft.drop("gconfig.n_samples", "rollout.n")


_A, _R, _M = ACTOR, ROLLOUT, MODEL
_WRAP = "wrap_policy.transformer_layer_cls_to_wrap"
_SAME = {
    "data.train_files": "train_dataset.path",
    "data.shuffle": "train_dataset.shuffle",
    "data.train_batch_size": "train_dataset.batch_size",
    "data.seed": "seed",
    "data.tokenizer": "tokenizer_path",
    "data.val_files": "valid_dataset.path",
    "data.reward_fn_key": "reward.source_key",
    f"{_M}.path": "actor.path",
    f"{_M}.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    f"{_A}.grad_clip": "actor.optimizer.gradient_clipping",
    f"{_A}.clip_ratio": "actor.eps_clip",
    f"{_A}.clip_ratio_low": "actor.eps_clip",
    f"{_A}.clip_ratio_high": "actor.eps_clip_higher",
    f"{_A}.clip_ratio_c": "actor.c_clip",
    f"{_A}.entropy_coeff": "actor.entropy_coef",
    f"{_A}.loss_agg_mode": "actor.loss_aggregation",
    f"{_A}.ppo_epochs": "actor.ppo_epochs",
    f"{_A}.fsdp_config.param_offload": "actor.fsdp.offload_params",
    f"{_A}.fsdp_config.optimizer_offload": "actor.fsdp.offload_optimizer",
    f"{_A}.fsdp_config.reshard_after_forward": "actor.fsdp.reshard_after_forward",
    f"{_A}.fsdp_config.{_WRAP}": f"actor.fsdp.{_WRAP}",
    f"{_R}.n": "gconfig.n_samples",
    f"{_R}.temperature": "gconfig.temperature",
    f"{_R}.top_p": "gconfig.top_p",
    f"{_R}.ignore_eos": "gconfig.ignore_eos",
    "algorithm.gamma": "actor.discount",
    "algorithm.lam": "actor.gae_lambda",
    "trainer.project_name": "experiment_name",
    "trainer.experiment_name": "trial_name",
    "trainer.nnodes": "cluster.n_nodes",
    "trainer.n_gpus_per_node": "cluster.n_gpus_per_node",
    "trainer.total_epochs": "total_train_epochs",
    "trainer.total_training_steps": "total_train_steps",
    "trainer.val_before_train": "evaluator.eval_before_train",
    "trainer.default_local_dir": "cluster.fileroot",
    "trainer.max_actor_ckpt_to_keep": "saver.keep_last",
}
_RECOVER = {"auto": "auto", "disable": "disabled", "resume_path": "resume"}
_OF_FSDP = (
    "wrap_policy.*", "reshard_after_forward", "offload_policy", "model_dtype", "dtype",
    "use_orig_params", "mixed_precision", "mixed_precision.*_dtype", "forward_only", "seed", "full_determinism",
)  # fmt: skip
_OF_REFERENCE = ("strategy", "log_prob_*", "use_torch_compile", "entropy_*", "rollout_n", "ulysses_sequence_*")


def from_verl(values: dict[str, Any]) -> Draft:
    """The draft of a verl file, with the defaults of its trainer where they differ from ours."""
    draft = Draft("verl", {key.lstrip("+"): value for key, value in values.items()})
    if "model.partial_pretrain" in values or any(key.startswith(("engine.", "optim.")) for key in values):
        message = (
            "supervised files of verl (model.partial_pretrain, engine) are not imported: write one (docs/algorithms.md)"
        )
        raise ConfigError(message, code="config.unsupported")
    take_switches(draft)
    if not validates(draft):
        draft.drop(NO_EVALUATION, "data.val_*", "trainer.val_before_train", "trainer.test_freq")
    _data(draft)
    draft.keep_all(_SAME)
    if draft.get(f"{_A}.clip_ratio_low") is not None:
        draft.defaults({"actor.eps_clip_higher": 0.2})
    _batches(draft)
    take_optimizer(draft, "actor", f"{_A}.optim.", is_megatron=is_megatron(draft))
    take_advantages(draft)
    take_kl(draft)
    take_loss(draft)
    take_correction(draft)
    take_staleness(draft)
    take_rewards(draft)
    take_teacher(draft)
    take_sampling(draft)
    take_servers(draft)
    take_offload(draft)
    _saving(draft)
    _defaults(draft)
    _trackers(draft)
    _dropped(draft)
    _model(draft)
    drop_newest(draft)
    draft.finish()
    return draft


def _data(draft: Draft) -> None:
    prompt, answer = draft.whole("data.max_prompt_length", 512), draft.whole("data.max_response_length", 512)
    draft.keep("data.max_prompt_length", "train_dataset.max_length")
    draft.keep("data.max_response_length", "gconfig.max_new_tokens")
    draft.defaults({"train_dataset.max_length": prompt, "gconfig.max_new_tokens": answer})
    draft.set("gconfig.max_tokens", prompt + answer, "verl: data.max_prompt_length + data.max_response_length")
    is_filtered = bool(draft.get("data.filter_overlong_prompts", False))
    how = "drop" if is_filtered else "error"
    keys = ["data.filter_overlong_prompts"]
    keys += ["data.truncation"] if is_filtered or draft.get("data.truncation", "error") == "error" else []
    why = "verl: filter_overlong_prompts; cut prompts do not exist here"
    draft.set("train_dataset.truncation", how, why, *keys)
    if validates(draft):
        draft.set("valid_dataset.max_length", prompt, "verl: data.max_prompt_length")
        draft.set("valid_dataset.truncation", how, why)
    columns = {str(draft.get("data.prompt_key", "prompt")): "messages", "reward_model.ground_truth": "answer"}
    why = "verl: data.prompt_key has messages, and reward_model.ground_truth the answer"
    draft.set("train_dataset.columns", columns, why, "data.prompt_key")
    if validates(draft):
        draft.set("valid_dataset.columns", columns, why)
    for name, section in (("train", "train_dataset"), ("val", "valid_dataset")):
        if draft.get(f"data.{name}_max_samples", -1) != -1:
            draft.keep(f"data.{name}_max_samples", f"{section}.max_rows")
    draft.drop("all rows", "data.*_max_samples")
    if "valid_dataset.max_rows" in draft.options:
        draft.keep("data.validation_shuffle", "valid_dataset.shuffle")
    draft.drop("a mean over all rows does not depend on their order", "data.validation_shuffle")
    for key in [key for key in draft.values if key.startswith("data.apply_chat_template_kwargs.")]:
        draft.keep(key, f"chat_template.args.{key.removeprefix('data.apply_chat_template_kwargs.')}")
    draft.keep("data.cache_dir", "train_dataset.cache_dir")
    draft.lack("cut prompts do not exist here; long ones are dropped or end the run", "data.truncation")
    draft.lack("write train_dataset.map_fn, which converts rows", "data.custom_cls.*")
    draft.lack("code of a model or tokenizer is not run", "*trust_remote_code")
    draft.keep("data.image_key", "vision.image_key")
    draft.keep(f"{_R}.limit_images", "vision.max_images")
    draft.lack("there is no video", "data.video_key", off=("videos", None, ""))
    draft.drop("answers are evaluated as servers have room", "data.val_batch_size")
    names = ("return_*", "filter_overlong_prompts_workers", "dataloader_num_workers")
    draft.drop("how verl's loader works", *(f"data.{name}" for name in (*names, "need_tools_kwargs", "use_shm")))
    draft.drop("the model's processor has it", "data.image_patch_size")
    draft.lack("train_dataset.columns names the columns of supervised rows", "data.response_key", "data.messages_key")
    draft.lack("train_dataset.curriculum, train_dataset.weights", "data.sampler.*")
    draft.lack("a function in train_dataset.path makes rows", "data.datagen.*")
    draft.lack("workflow: agent, whose program has the tools", "data.tool_config_path")


def _batches(draft: Draft) -> None:
    tokens, size = draft.options["gconfig.max_tokens"].value, draft.whole(f"{_A}.ppo_mini_batch_size", 256)
    if is_fully_async(draft):
        batch, count = streamed_batch(draft, size)
        why = f"verl: {batch} prompts of a step / ppo_mini_batch_size {size}"
    else:
        batch = draft.whole("data.train_batch_size", 1024)
        count = minibatches(batch, size)
        draft.set("train_dataset.batch_size", batch, "verl: data.train_batch_size, prompts")
        why = f"verl: data.train_batch_size {batch} / ppo_mini_batch_size {size}, both in prompts"
    draft.set("actor.ppo_n_minibatches", count, why, f"{_A}.ppo_mini_batch_size")
    if draft.get(f"{_A}.use_dynamic_bsz", False) and draft.get(f"{_A}.ppo_max_token_len_per_gpu"):
        context = max(1, draft.whole(f"{_A}.ulysses_sequence_parallel_size", 1))
        limit, why = draft.whole(f"{_A}.ppo_max_token_len_per_gpu", 1), f"verl: its limit x {context} context ranks"
        draft.set("actor.mb_spec.max_tokens_per_mb", limit * context, why, f"{_A}.ppo_max_token_len_per_gpu")
        draft.drop("micro-batches are always filled by tokens", f"{_A}.use_dynamic_bsz")
    elif micro := draft.whole(f"{_A}.ppo_micro_batch_size_per_gpu", 0, least=0):
        why = f"verl: {micro} sequences of at most {tokens} tokens"
        keys = (f"{_A}.ppo_micro_batch_size_per_gpu", f"{_A}.use_dynamic_bsz")
        draft.set("actor.mb_spec.max_tokens_per_mb", micro * tokens, why, *keys)
    draft.drop(
        "sequences are packed and micro-batches filled by tokens: actor.mb_spec",
        *("*micro_batch_size*", "*use_dynamic_bsz", "*max_token_len_per_gpu", "*use_remove_padding"),
        "trainer.balance_batch",
    )


def _saving(draft: Draft) -> None:
    for key, option in (("save_freq", "saver.freq_steps"), ("test_freq", "evaluator.freq_steps")):
        if option not in draft.options and draft.whole(f"trainer.{key}", -1, least=-1) > 0:
            draft.keep(f"trainer.{key}", option)
    draft.drop("the last step is exported, and no other", "trainer.save_freq")
    why = "rollout.test_freq decides" if is_fully_async(draft) else "the last step is evaluated, and none before it"
    draft.drop(why, "trainer.test_freq")
    key, mode = "trainer.resume_mode", str(draft.get("trainer.resume_mode", "auto"))
    known = [key] if mode in _RECOVER else []
    draft.set("recover.mode", _RECOVER.get(mode, "auto"), "verl: trainer.resume_mode", *known)
    draft.lack("modes are auto, disable and resume_path", key, off=(None,))


def _defaults(draft: Draft) -> None:
    draft.defaults({"total_train_epochs": 30, "actor.gradient_checkpointing": True})
    draft.defaults({"experiment_name": "verl_examples", "trial_name": "gsm8k"})
    if "critic.path" in draft.options:
        draft.defaults({"critic.gradient_checkpointing": True})
    if validates(draft):
        draft.defaults({"evaluator.eval_before_train": True})


def _trackers(draft: Draft) -> None:
    names = draft.listed("trainer.logger", ["console", "wandb"])
    if "wandb" in names:
        draft.set("stats_logger.wandb.mode", "online", "verl: trainer.logger", "trainer.logger")
    if "swanlab" in names:
        draft.set("stats_logger.swanlab.mode", "cloud", "verl: trainer.logger", "trainer.logger")
    if "tensorboard" in names:
        draft.set("stats_logger.tensorboard.path", TENSORBOARD, "verl: trainer.logger", "trainer.logger")
    if "mlflow" in names:
        why = "verl: trainer.logger; a local file. To use a server, set mode: online and tracking_uri"
        draft.set("stats_logger.mlflow.mode", "local", why, "trainer.logger")
    if "trackio" in names:
        draft.set("stats_logger.trackio.mode", "local", "verl: trainer.logger", "trainer.logger")
    if set(names) <= {"console", "wandb", "swanlab", "tensorboard", "mlflow", "trackio"}:
        draft.drop("metrics.jsonl and the status line always exist", "trainer.logger")
    draft.lack("this tracker does not exist here", "trainer.logger")
    draft.drop(
        "samples are written to samples/ and to the trackers", "trainer.log_val_generations", "trainer.*_data_dir"
    )


def _dropped(draft: Draft) -> None:
    ref, has_ref = "actor_rollout_ref.ref", "ref.path" in draft.options
    draft.drop(
        "servers and trainers have separate devices", "actor_rollout_ref.hybrid_engine", f"{_R}.free_cache_engine"
    )
    draft.drop("servers load the policy, then get its weights", f"{_R}.load_format", f"{_R}.layered_summon")
    draft.drop("log-probabilities of the servers are always recorded", f"{_R}.calculate_log_probs")
    draft.drop("generation is always asynchronous", f"{_R}.mode", f"{_R}.disable_log_stats", f"{_R}.log_prob_*")
    draft.keep("actor_rollout_ref.ref.fsdp_config.param_offload", *(["ref.fsdp.offload_params"] if has_ref else []))
    draft.lack("with megatron weights stay on the GPU", f"{_A}.megatron.param_offload")
    draft.drop("a frozen model, or one with the options of the actor", "*.optimizer_offload", "*.param_offload")
    if draft.get(f"{_A}.fsdp_config.offload_policy", False):
        draft.set("actor.fsdp.offload_params", True, "verl: offload_policy", f"{_A}.fsdp_config.offload_policy")
    prefetch = f"{_A}.fsdp_config.forward_prefetch"
    if draft.get(prefetch, False):
        draft.set("actor.fsdp.prefetch_blocks", 1, "verl: actor.fsdp_config.forward_prefetch", prefetch)
    draft.drop("torch's own order, as here", "*.fsdp_config.forward_prefetch")
    if draft.get(f"{_A}.router_replay.mode") == "R3":
        draft.set("actor.router_replay", True, "verl: router_replay.mode=R3", f"{_A}.router_replay.mode")
    if draft.get(f"{_A}.router_replay.mode", "disabled") == "disabled":
        draft.drop("it is switched off", f"{_A}.router_replay.*")
    draft.drop("the reference has the options of the actor", *(f"{ref}.{name}" for name in _OF_REFERENCE))
    if not has_ref:
        draft.drop("there is no reference", f"{ref}.*")
    names = ("save_contents", "load_contents", "contents", "async_save")
    draft.drop(
        "a recovery checkpoint has everything, an export is in Hugging Face format",
        *(f"*.checkpoint.{name}" for name in names),
    )
    draft.lack("gradients stay on the GPU: offload parameters or the optimiser state", "*.grad_offload")
    draft.drop("FSDP2 shards each block over all ranks", *(f"*.fsdp_config.{name}" for name in _OF_FSDP), "*.strategy")
    draft.drop("all models of a trainer have the engine of the actor", "critic.fsdp.*")
    draft.drop("chosen by the engine: actor.compile", "*.use_torch_compile")
    draft.drop("of the loader of mini-batches", f"{_A}.data_loader_seed", f"{_A}.shuffle")
    draft.drop("paths of checkpoints and of Ray", "trainer.default_hdfs_dir", "ray_*")
    draft.lack("actor.path: a folder of exported weights", "trainer.resume_from_path")
    draft.lack("areal eval evaluates without training (docs/evaluation.md)", "trainer.val_only")
    draft.drop("how verl's trainer works", "trainer.device", "trainer.use_legacy_*", "global_profiler.*")
    draft.drop("time limits are launcher.ready_timeout_s and rollout.setup_timeout", "trainer.ray_wait_register_*")
    if draft.get("trainer.critic_warmup", 0) == 0:
        draft.drop("no warm-up of the critic", "trainer.critic_warmup")
    draft.keep("trainer.critic_warmup", "critic.warmup_steps")


def _model(draft: Draft) -> None:
    take_adapters(draft)
    draft.drop("models are read in the format of Hugging Face", "*.use_mbridge", "*.use_dist_checkpointing")
    draft.drop("it follows from the tensor size", f"{_A}.megatron.sequence_parallel")
    draft.drop("all models of a trainer have the engine of the actor", "*.ref.megatron.*", "critic.megatron.*")
    if draft.get(f"{_A}.megatron.router_replay.mode") == "R3":
        key = f"{_A}.megatron.router_replay.mode"
        draft.set("actor.router_replay", True, "verl: router_replay.mode=R3", key)
    if draft.get(f"{_A}.megatron.router_replay.mode", "disabled") in ("disabled", "R3"):
        draft.drop("it is switched off, or actor.router_replay", f"{_A}.megatron.router_replay.*")
    names = ("dtype", "seed", "forward_only", "use_mbridge", "vanilla_mbridge", "dist_checkpointing_*", "dist*_optim_*")
    draft.drop("as here, or of verl's checkpoints", *(f"{_A}.megatron.{name}" for name in names))
    draft.drop("sequences are packed without padding", f"{_A}.megatron.pad_*", f"{_A}.megatron.max_seqlen_per_*")
    if any(option.startswith("actor.lora.") for option in draft.options):
        draft.lack("adapters are trained by FSDP", "*megatron*")
    draft.lack("choose options of actor.megatron (docs/train_engines.md)", "*megatron*")
    if draft.get(f"{_A}.freeze_vision_tower", False):
        draft.set("actor.freeze", ["visual"], "verl: actor.freeze_vision_tower", f"{_A}.freeze_vision_tower")
    draft.drop("all weights are trained", f"{_A}.freeze_vision_tower")
    draft.drop("options of Hydra itself", "hydra.*")
    names = ("entropy_from_logits_with_chunking", "entropy_checkpointing", "calculate_entropy")
    draft.drop("entropies are computed with the log-probabilities", *(f"{_A}.{name}" for name in names))
    draft.lack("it changes the model's configuration", f"{_M}.override_config*", f"{_M}.external_lib")
    offload, is_fsdp = f"{_M}.enable_activation_offload", "+fsdp:" in draft.options["allocation_mode"].value
    if draft.get(offload, False) and draft.options["actor.gradient_checkpointing"].value and is_fsdp:
        draft.set("actor.checkpointing", "offload", "verl: enable_activation_offload", offload)
    draft.lack("actor.checkpointing: offload needs gradient_checkpointing and fsdp", offload)
    draft.drop("activations of a critic are recomputed", "critic.model.enable_activation_offload")
    draft.drop("other kernels of the layers, with equal results (actor.logprob_kernel)", "*.model.use_liger")
    draft.drop("how verl reads the files of a model", "*.model.use_shm")
