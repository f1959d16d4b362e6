"""Sections of verl that are switched on one by one: rewards, the teacher, and what has no counterpart."""

from typing import Any

from areal.importers.draft import Draft
from areal.importers.verl_loss import KL_ESTIMATORS
from areal.importers.verl_rollout import ACTOR, MODEL, OTHER_ENGINES, ROLLOUT

_TEACHER = "distillation"
_NO_CLIP = 1e9
"""The bound of rewards where the source has none: an option here is a finite number."""
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
    given = [key for key in paths if draft.get(key)]
    if len(given) == 1:
        draft.keep(given[0], "teacher.path")
    draft.lack("there is one teacher", *given, off=())
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
    own = f"{MODEL}.lora"
    if draft.whole(f"{MODEL}.lora_rank", 0, least=0) > 0:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            draft.keep(f"{MODEL}.{name}", f"actor.lora.{name.removeprefix('lora_')}")
        draft.keep(f"{MODEL}.lora_adapter_path", "actor.lora.path")
    elif draft.whole(f"{own}.rank", 0, least=0) > 0:
        for name in ("rank", "alpha", "dropout"):
            draft.keep(f"{own}.{name}", f"actor.lora.{name}")
        draft.defaults({"actor.lora.alpha": 32})
        draft.keep(f"{own}.adapter_path", "actor.lora.path")
        why = "names of modules of Megatron-Core: give actor.lora.target_modules"
        draft.lack(why, f"{own}.target_modules", f"{own}.exclude_modules")
        draft.drop("adapters have their defaults", f"{own}.*")
    sections = (f"{MODEL}.lora_*", f"{own}.*", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules")
    draft.drop("there are no adapters", *sections)
    draft.lack("a critic has no adapters", "critic.model.lora_rank", "critic.model.lora.rank")
    draft.drop("a critic has no adapters", "critic.model.lora*", "critic.model.*_modules")


def take_offload(draft: Draft) -> None:
    """Targets of the states of the actor (2026), which replace param_offload and optimizer_offload."""
    is_fsdp = "+fsdp:" in draft.options["allocation_mode"].value
    for engine in ("fsdp_config", "megatron", *OTHER_ENGINES):
        own = f"{ACTOR}.{engine}"
        options = {"param": "fsdp.offload_params", "optimizer": "fsdp.offload_optimizer"}
        options = options if is_fsdp else {"optimizer": "megatron.offload_optimizer"}
        for name, option in options.items():
            if engine in OTHER_ENGINES:
                draft.keep(f"{own}.{name}_offload", f"actor.{option}")
            if draft.get(key := f"{own}.offload.{name}.target") == "cpu":
                draft.set(f"actor.{option}", True, f"verl: {engine}.offload", key)
        draft.lack("states are on the GPU or the CPU: actor.fsdp", f"{own}.offload.*.target", off=("none", None))
    draft.drop("nothing is on a disk", f"{ACTOR}.*.offload.disk.*")
    draft.drop("the reference and the critic have the options of the actor", "*.ref.*.offload.*", "critic.*.offload.*")
    for engine in OTHER_ENGINES:
        draft.lack("one stage, ranks of one kind", f"{ACTOR}.{engine}.*_size", off=(None, 1, -1))
        draft.drop("options of another engine than FSDP2", *(f"{role}.{engine}.*" for role in (ACTOR, "critic")))
        draft.drop("options of another engine than FSDP2", f"actor_rollout_ref.ref.{engine}.*")


def drop_newest(draft: Draft) -> None:
    """Keys of newer versions that need no counterpart, or have none."""
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
    draft.lack("servers have the weights of the trainer", f"{ROLLOUT}.quantization*")
    draft.lack("log-probabilities are those of the sampled distribution", f"{ROLLOUT}.logprobs_mode",
               off=("processed_logprobs", None))  # fmt: skip
    own = ("seed", "full_determinism", "scheduling_policy", "multi_stage_wake_up", "skip_tokenizer_init",
           "use_preprocessed_multimodal_input", "layer_name_map.*", "nnodes", "n_gpus_per_node",
           "cudagraph_capture_sizes", "skip.*")  # fmt: skip
    draft.drop("servers and seed decide it", *(f"{ROLLOUT}.{name}" for name in own))
    draft.keep(f"{MODEL}.tokenizer_path", "tokenizer_path")
    draft.lack("chat_template.path: a file", f"{MODEL}.custom_chat_template")
    draft.lack("the model's folder has its configuration", f"{MODEL}.hf_config_path")
    draft.drop("how verl's trainer works", "trainer.balance_keep_minibatch", "trainer.use_v1", "trainer.esi_*")
    draft.drop("how verl's trainer works", "trainer.del_local_ckpt_after_load", "trainer.max_critic_ckpt_to_keep")
    draft.drop("it is chosen by allocation_mode", "model_engine", f"{ACTOR}.*turbo_config*", "critic.*turbo_config*")
    draft.drop("it is chosen by allocation_mode", "*.ref.*turbo_config*", "actor_rollout_ref.actor.load_weight")
    draft.lack("your own code", "trainer.checkpoint_callback_class")
