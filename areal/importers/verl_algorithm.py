"""Sampling, inference servers and devices of verl: the section actor_rollout_ref.rollout and the GPUs."""

import re
from typing import Any

from areal.api.allocation import ParallelDims
from areal.importers.draft import Draft, Trainer, halves, megatron_trainer, minibatches, set_devices

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_STRATEGY, _MEGATRON = f"{ACTOR}.strategy", f"{ACTOR}.megatron."
NO_EVALUATION = "no evaluation: see data.val_files, trainer.test_freq and val_before_train"
OTHER_ENGINES = ("veomni", "torchtitan", "automodel")  # Trainers of verl with FSDP2 and its own names of the sizes.
_VLLM_FLAGS = {
    "gpu_memory_utilization": "gpu_memory_utilization", "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens", "max_model_len": "max_model_len",
    "enforce_eager": "enforce_eager", "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching", "dtype": "dtype",
}  # fmt: skip
_SGLANG_FLAGS = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_model_len": "context_length",
    "dtype": "dtype",
}


def take_sampling(draft: Draft) -> None:
    if draft.whole(f"{ROLLOUT}.top_k", -1, least=-1) > 0:
        draft.keep(f"{ROLLOUT}.top_k", "gconfig.top_k")
    draft.drop("all tokens, as here", f"{ROLLOUT}.top_k")
    if draft.get(f"{ROLLOUT}.do_sample", True) is False:
        draft.set("gconfig.greedy", True, "verl: rollout.do_sample=false", f"{ROLLOUT}.do_sample")
    draft.drop("answers are sampled", f"{ROLLOUT}.do_sample")
    _take_evaluation(draft, f"{ROLLOUT}.val_kwargs")
    draft.drop(
        "set by data.max_prompt_length and data.max_response_length",
        f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length",
    )
    draft.lack("write a workflow (docs/workflows.md) or workflow: agent", f"{ROLLOUT}.multi_turn.enable")
    if draft.get(f"{ROLLOUT}.multi_turn.enable", False):
        draft.lack("an option of your workflow or agent", f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*", off=(None,))
    draft.drop("there are no tools", f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*")


def _take_evaluation(draft: Draft, section: str) -> None:
    if not validates(draft):
        draft.drop(NO_EVALUATION, f"{section}.*")
        return
    # asynchronous rollouts, the default of newer versions, do not read do_sample; a temperature of 0 is greedy
    may_sample = draft.get(f"{section}.do_sample", False) or draft.get(f"{ROLLOUT}.mode", "async") == "async"
    sampled = bool(may_sample) and draft.number(f"{section}.temperature", 0) > 0
    why = "verl: rollout.val_kwargs.do_sample, temperature"
    draft.set("evaluator.modes", ["sampled" if sampled else "greedy"], why, f"{section}.do_sample")
    if sampled:
        draft.keep(f"{section}.n", "evaluator.n_samples")
        for name in ("temperature", "top_p"):
            draft.keep(f"{section}.{name}", f"eval_gconfig.{name}")
        if draft.whole(f"{section}.top_k", -1, least=-1) > 0:
            draft.keep(f"{section}.top_k", "eval_gconfig.top_k")
        if any(option.startswith("eval_gconfig.") for option in draft.options):
            for name in ("max_new_tokens", "max_tokens"):
                followed = draft.options[f"gconfig.{name}"]
                draft.set(f"eval_gconfig.{name}", followed.value, followed.origin)
    names = ("temperature", "top_p", "top_k", "n")
    draft.drop(
        "all tokens, as here" if sampled else "no effect on greedy evaluation", *(f"{section}.{n}" for n in names)
    )


def take_servers(draft: Draft) -> None:
    name = str(draft.get(f"{ROLLOUT}.name", "vllm"))
    backend = "sglang" if name.startswith("sglang") else "vllm"
    if not name.startswith((backend, "???")):
        draft.lack("servers are vLLM or SGLang: vLLM is used", f"{ROLLOUT}.name", off=())
    nodes, per_node = draft.whole("trainer.nnodes", 1), draft.whole("trainer.n_gpus_per_node", 8)
    total = nodes * per_node
    size = draft.whole(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    names = ("name", "tensor_model_parallel_size")
    gpus = f"trainer.nnodes x trainer.n_gpus_per_node = {total} GPUs"
    why = f"verl uses all {gpus} in turn; here about half generate while the others train"
    if draft.get(_STRATEGY, "fsdp") not in ("fsdp", "fsdp2", "megatron", *OTHER_ENGINES):
        draft.lack("trainers are fsdp and megatron: fsdp is used", _STRATEGY, off=())
    trainer, keys = _trainer(draft)
    keys += [f"{ROLLOUT}.{name}" for name in names]
    parts = halves(total, size, trainer)
    if alone := server_gpus(draft):
        size = min(size, alone)
        parts, why = (alone // size, size, total), f"verl: {alone} GPUs generate, {total} train"
        keys += [f"{section}.{name}" for section in ("rollout", ROLLOUT) for name in ("nnodes", "n_gpus_per_node")]
    ranks = set_devices(draft, backend, parts, trainer, why, keys, nodes=nodes, per_node=per_node)
    shard = f"{ACTOR}.fsdp_config.fsdp_size"
    if draft.whole(shard, -1, least=-1) > 0 and not ranks.dp * ranks.cp % draft.whole(shard, 1):
        draft.keep(shard, "actor.fsdp.shard_size")
    draft.lack(f"it does not divide the {ranks.dp * ranks.cp} ranks of the trainer: actor.fsdp.shard_size", shard)
    draft.drop("the reference has the options of the actor", "*.fsdp_size")
    draft.lack("a server has tensor ranks only", f"{ROLLOUT}.*parallel_size", off=(None, 1))
    draft.server(f"{ROLLOUT}.", backend, _VLLM_FLAGS if backend == "vllm" else _SGLANG_FLAGS)
    draft.server(f"{ROLLOUT}.engine_kwargs.{backend}.", backend)
    if backend == "vllm" and draft.get(f"{ROLLOUT}.quantization") == "fp8":
        why = "verl: quantization=fp8, in blocks of 128 x 128"
        draft.set("vllm.quantization", "fp8_per_block", why, f"{ROLLOUT}.quantization")
    draft.lack("vLLM servers quantize to fp8: vllm.quantization", f"{ROLLOUT}.quantization*")
    draft.drop("flags of another server", f"{ROLLOUT}.engine_kwargs.*", *(f"{ROLLOUT}.{name}" for name in _VLLM_FLAGS))
    draft.drop("all models of a trainer are divided like the actor", "*ulysses_sequence_parallel_size")


def is_megatron(draft: Draft) -> bool:
    """Whether Megatron-Core trains: adapters need FSDP here."""
    engine_name = str(draft.get(_STRATEGY, draft.get("model_engine", "")))
    has_sizes = any(key.startswith(_MEGATRON) and key.endswith("parallel_size") for key in draft.values)
    has_adapters = any(draft.whole(f"{MODEL}.{key}", 0, least=0) for key in ("lora_rank", "lora.rank"))
    return (engine_name == "megatron" or (not engine_name and has_sizes)) and not has_adapters


def _trainer(draft: Draft) -> tuple[Trainer, list[str]]:
    if is_megatron(draft):
        trainer = megatron_trainer(draft, _MEGATRON, f"{_MEGATRON}override_transformer_config.")
        keys = [
            _STRATEGY,
            *(key for key in draft.values if key.startswith(_MEGATRON) and key.endswith("parallel_size")),
        ]
        draft.keep(f"{_MEGATRON}optimizer_offload", "actor.megatron.offload_optimizer")
        return trainer, keys
    keys = [f"{ACTOR}.{name}ulysses_sequence_parallel_size" for name in ("", "fsdp_config.")]
    contexts, tensors, experts = list(keys), [], []
    for prefix in (f"{ACTOR}.{engine}." for engine in OTHER_ENGINES):
        contexts += [f"{prefix}{name}_parallel_size" for name in ("ulysses", "context")]
        tensors, experts = [*tensors, f"{prefix}tensor_parallel_size"], [*experts, f"{prefix}expert_parallel_size"]
    context, tensor, expert = (max(draft.whole(key, 1) for key in names) for names in (contexts, tensors, experts))
    sizes = ParallelDims(cp=context, tp=tensor, ep=expert)
    return Trainer(sizes=sizes), [_STRATEGY, *contexts, *tensors, *experts]


def validates(draft: Draft) -> bool:
    """Whether there is a held-out set, and a step that evaluates it. Without test_freq verl's last step does not."""
    at_steps = draft.whole("trainer.test_freq", -1, least=-1) > 0 or is_fully_async(draft)
    return bool(draft.get("data.val_files")) and (at_steps or bool(draft.get("trainer.val_before_train", True)))


def is_fully_async(draft: Draft) -> bool:
    """Whether batches are counted by async_training: data.train_batch_size has no effect."""
    return any(key.startswith("async_training.") for key in draft.values)


def server_gpus(draft: Draft) -> int:
    """GPUs that only generate: of the section rollout, or of actor_rollout_ref.rollout. 0 = those of the trainer."""
    for section in ("rollout", ROLLOUT):
        if nodes := draft.whole(f"{section}.nnodes", 0, least=0):
            per_node = draft.whole("trainer.n_gpus_per_node", 8)
            return nodes * draft.whole(f"{section}.n_gpus_per_node", per_node)
    return draft.whole("rollout.n_gpus_per_node", 8) if is_fully_async(draft) else 0


# Optimiser and learning-rate schedule of verl. `role`: actor or critic; `prefix`: its section there, with a dot.

_TYPES = {"adam": "adam", "adamw": "adam", "_adamw": "adam", "adam8bit": "adam_8bit", "adamw8bit": "adam_8bit"}
_OFFLOAD = "override_optimizer_config.optimizer_cpu_offload"
_OF_MEGATRON = {"use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"}


def take_optimizer(draft: Draft, role: str, prefix: str, *, is_megatron: bool) -> None:
    section = f"{role}.optimizer"
    for name in ("weight_decay", "min_lr_ratio", "lr"):
        draft.keep(f"{prefix}{name}", f"{section}.{name}")
    draft.keep(f"{prefix}clip_grad", f"{section}.gradient_clipping")
    for number, beta in enumerate(draft.listed(f"{prefix}betas"), start=1):
        draft.set(f"{section}.beta{number}", beta, f"verl: {prefix}betas", f"{prefix}betas")
    _schedule(draft, section, prefix)
    _warmup(draft, section, prefix)
    _kind(draft, role, prefix, is_megatron)


def _kind(draft: Draft, role: str, prefix: str, is_megatron: bool) -> None:
    name = str(draft.get(f"{prefix}optimizer", "AdamW"))
    is_coupled = name == "Adam" and not is_megatron and draft.get(f"{prefix}weight_decay", 0.01) != 0
    if name.lower() in _TYPES and not is_coupled:
        draft.set(f"{role}.optimizer.type", _TYPES[name.lower()], f"verl: {prefix}optimizer", f"{prefix}optimizer")
    draft.lack("weight decay is decoupled here: choose optimizer.type", f"{prefix}optimizer", off=(None,))
    draft.drop("optimizer.type chooses the implementation", f"{prefix}optimizer_impl")
    if is_megatron and draft.get(f"{prefix}{_OFFLOAD}", False):
        draft.set(f"{role}.megatron.offload_optimizer", True, "verl: optimizer_cpu_offload", f"{prefix}{_OFFLOAD}")
        of_offload = (f"{prefix}override_optimizer_config.{name}" for name in sorted(_OF_MEGATRON))
        draft.drop("all of the optimiser state is offloaded", *of_offload)
    draft.drop("as megatron.fp8_recipe", f"{prefix}override_optimizer_config.fp8_recipe")
    draft.lack("choose options of optimizer", f"{prefix}override_optimizer_config*")
    draft.drop("a recovery checkpoint has the schedule", f"{prefix}use_checkpoint_opt_param_scheduler")
    draft.drop("steps count from the first, as here", f"{prefix}zero_indexed_step")
    draft.lack("a warm-up begins at 0", f"{prefix}lr_warmup_init")
    draft.lack("weight decay is constant", f"{prefix}weight_decay_incr_style", off=("constant", None))


def _schedule(draft: Draft, section: str, prefix: str) -> None:
    keys = [f"{prefix}{name}" for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")]
    style: Any = next((draft.get(key) for key in keys if draft.get(key)), "constant")
    if style in ("constant", "linear", "cosine"):
        draft.set(f"{section}.lr_scheduler_type", style, f"verl: {prefix}warmup_style", *keys)
    draft.lack("schedules are constant, linear and cosine", *keys)
    if style == "constant":
        draft.drop("the rate is constant", f"{prefix}lr_decay_steps")
    draft.lack("a decay lasts until the end of the run", f"{prefix}lr_decay_steps", off=(None,))
    draft.drop("schedules are constant, linear and cosine", f"{prefix}lr_wsd_*")
    if (lowest := draft.number(f"{prefix}min_lr", 0)) and (peak := draft.number(f"{prefix}lr", 1e-6)):
        why = f"verl: {prefix}min_lr / {prefix}lr"
        draft.set(f"{section}.min_lr_ratio", lowest / peak, why, f"{prefix}min_lr")
    draft.drop("the schedule ends at 0", f"{prefix}min_lr")
    if draft.get(f"{prefix}num_cycles", 0.5) == 0.5:
        draft.drop("half a cosine, as here", f"{prefix}num_cycles")
    draft.drop("verl's trainer replaces it", f"{prefix}total_training_steps")


def _warmup(draft: Draft, section: str, prefix: str) -> None:
    option, key = f"{section}.warmup_steps_proportion", f"{prefix}lr_warmup_steps"
    steps, total = draft.number(key, -1, least=-1), draft.number("trainer.total_training_steps", 0)
    share = draft.get(f"{key}_ratio", 0.0)
    if steps > 0 and total:
        why = f"verl: lr_warmup_steps {steps} / total_training_steps {total}"
        draft.set(option, min(1.0, steps / total), why, key)
    else:
        draft.set(option, share, f"verl: {key}_ratio", f"{key}_ratio")
    draft.lack(f"give {option}: the length of the run is not known", key)
    draft.drop("replaced by lr_warmup_steps", f"{key}_ratio")


# Advantages, policy loss, KL terms and off-policy corrections of verl.

_CRITIC = {
    "critic.model.path": "critic.path",
    "critic.grad_clip": "critic.optimizer.gradient_clipping",
    "critic.cliprange_value": "critic.eps_clip",
    "critic.ppo_epochs": "critic.ppo_epochs",
    "critic.loss_agg_mode": "critic.loss_aggregation",
    "critic.model.enable_gradient_checkpointing": "critic.gradient_checkpointing",
}
_FOLLOWS_ACTOR = ("ppo_epochs", "loss_aggregation")
"""Options of the critic that are those of the actor unless a key sets them."""
_ESTIMATORS = {
    "grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb_tir",
} | dict.fromkeys(
    ("gae", "grpo", "remax", "rloo", "opo", "gpg", "gdpo", "grpo_passk", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline")
)  # fmt: skip
"""Name in verl -> ours; None = the same."""
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES = {
    "vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
_MEAN_OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over sequences, whatever loss_agg_mode is."""
_OF_LOSSES = {
    "clip_cov": {"clip_cov_ratio": "ratio", "clip_cov_lb": "low", "clip_cov_ub": "high"},
    "kl_cov": {"kl_cov_ratio": "ratio", "ppo_kl_coef": "coef"},
}


def take_advantages(draft: Draft) -> None:
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name, divides = str(draft.get(key, "gae")), draft.get(by_std, True) is not False
    why = "verl: algorithm.adv_estimator, norm_adv_by_std_in_grpo"
    if name in _ESTIMATORS:
        ours = _ESTIMATORS[name] or name
        draft.set("actor.adv_estimator", "dr_grpo" if ours == "grpo" and not divides else ours, why, key, by_std)
        if ours == "grpo_passk":
            draft.set("actor.adv_estimator.std", divides, why, by_std)
    else:
        draft.set("actor.adv_estimator", "grpo", f"{name} of verl has no counterpart")
        draft.lack("another estimator, or actor.adv_estimator: custom (docs/algorithms.md)", key, off=())
    if name == "gae":
        _take_critic(draft)
    else:
        draft.drop("there is no critic", "critic.*", "trainer.critic_warmup")
    draft.lack("actor.adv_estimator.weights has names of reward functions", "algorithm.gdpo_*")
    if draft.get("algorithm.use_pf_ppo", False):
        draft.keep("algorithm.pf_ppo.reweight_method", "actor.pf_ppo.method")
        draft.keep("algorithm.pf_ppo.weight_pow", "actor.pf_ppo.power")
        draft.defaults({"actor.pf_ppo.method": "pow"})
        draft.drop("actor.pf_ppo does it", "algorithm.use_pf_ppo")
    draft.drop("answers are not resampled", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*")
    if draft.get("algorithm.filter_groups.enable", False):
        why = "verl: algorithm.filter_groups"
        draft.set("rollout.should_accept_fn", "mixed_rewards", why, "algorithm.filter_groups.enable")
    draft.drop("rejected groups are replaced while the run lasts", "algorithm.filter_groups.*", "data.gen_batch_size")


def _take_critic(draft: Draft) -> None:
    draft.set("critic.path", draft.get("critic.model.path", draft.get(f"{MODEL}.path")), "verl: critic.model.path")
    draft.keep_all(_CRITIC)
    take_optimizer(draft, "critic", "critic.optim.", is_megatron=is_megatron(draft))
    draft.drop("adv_estimator: gae has a critic", "critic.enable")
    size = draft.whole("critic.ppo_mini_batch_size", draft.whole(f"{ACTOR}.ppo_mini_batch_size", 256))
    count = minibatches(draft.options["train_dataset.batch_size"].value, size)
    draft.set("critic.ppo_n_minibatches", count, "verl: critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    for name in _FOLLOWS_ACTOR:
        if f"actor.{name}" in draft.options:
            draft.defaults({f"critic.{name}": draft.options[f"actor.{name}"].value})
    draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": "batch"}, "verl whitens the advantages of GAE")


def take_kl(draft: Draft) -> None:
    in_loss, in_reward = bool(draft.get(f"{ACTOR}.use_kl_loss")), bool(draft.get("algorithm.use_kl_in_reward"))
    if in_loss:
        draft.keep(f"{ACTOR}.kl_loss_coef", "actor.kl_loss_coef")
        draft.defaults({"actor.kl_loss_coef": 0.001})
        _take_estimator(draft, f"{ACTOR}.kl_loss_type", "low_var_kl", "actor.kl_loss_estimator")
    coefficient = draft.get("algorithm.kl_ctrl.kl_coef", 0.001) if in_reward else 0.0
    why = "verl: algorithm.kl_ctrl.kl_coef" if in_reward else "verl: use_kl_in_reward is false"
    draft.set("actor.kl_ctl", coefficient, why, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
    if in_reward:
        _take_estimator(draft, "algorithm.kl_penalty", "kl", "actor.kl_estimator")
        draft.keep("algorithm.kl_ctrl.type", "actor.kl_control.type")
        if draft.get("algorithm.kl_ctrl.type") == "adaptive":
            draft.keep("algorithm.kl_ctrl.target_kl", "actor.kl_control.target")
            draft.keep("algorithm.kl_ctrl.horizon", "actor.kl_control.horizon")
            draft.defaults({"actor.kl_control.target": 0.1})
    if in_loss or in_reward:
        why = "verl: the reference is the initial policy"
        draft.set("ref.path", draft.get(f"{MODEL}.path"), why, f"{ACTOR}.use_kl_loss")
    off = [*([] if in_loss else [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_*"])]
    draft.drop("this KL term is off", *off, *([] if in_reward else ["algorithm.kl_*"]))
    draft.drop("of an adaptive coefficient", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")


def _take_estimator(draft: Draft, key: str, default: str, option: str) -> None:
    estimator = str(draft.get(key, default))
    plain = estimator.removesuffix("+") if option == "actor.kl_loss_estimator" else estimator
    if plain in KL_ESTIMATORS:
        draft.set(option, KL_ESTIMATORS[plain] + estimator[len(plain) :], f"verl: {key.rpartition('.')[2]}", key)
    draft.lack(f"give {option}; full needs actor.kl_top_k", key, off=())


def take_loss(draft: Draft) -> None:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(draft.get(key, "vanilla")).replace("-", "_")
    draft.set("actor.policy_loss", _LOSSES.get(mode, "ppo"), "verl: policy_loss.loss_mode")
    if mode in _LOSSES:
        draft.set("actor.policy_loss", _LOSSES[mode], "verl: policy_loss.loss_mode", key)
    draft.lack("choose actor.policy_loss (docs/algorithms.md)", key)
    for name, option in _OF_LOSSES.get(mode, {}).items():
        draft.keep(f"{ACTOR}.policy_loss.{name}", f"actor.policy_loss.{option}")
    for name in ("tau_pos", "tau_neg"):
        for section in (ACTOR, f"{ACTOR}.policy_loss"):
            if mode == "sapo":
                draft.keep(f"{section}.{name}", f"actor.policy_loss.{name}")
            draft.drop("options of other policy losses", f"{section}.{name}")
    names = {name for options in _OF_LOSSES.values() for name in options}
    draft.drop("options of other policy losses", *(f"{ACTOR}.policy_loss.{name}" for name in sorted(names)))
    if mode not in _LOSSES:
        draft.lack("an option of a loss that does not exist here", f"{ACTOR}.policy_loss.*", off=(None,))
    draft.drop("options of other policy losses", f"{ACTOR}.policy_loss.*")
    if mode == "gspo":
        for option, value in (("advantage", "token"), ("gradient", "own"), ("max_log_ratio", 10.0)):
            draft.set(f"actor.sequence_level.{option}", value, "verl's form of GSPO")
    if mode == "dppo_kl":
        draft.set("actor.policy_loss.divergence", "kl", "verl: policy_loss.loss_mode", key)
    if mode in _MEAN_OF_SEQUENCES:
        why = f"verl averages {mode} over sequences"
        draft.set("actor.loss_aggregation", "seq-mean-token-mean", why, f"{ACTOR}.loss_agg_mode")
    if draft.options["actor.policy_loss"].value == "ppo":
        draft.defaults({"actor.c_clip": 3.0})
    elif draft.options.pop("actor.c_clip", None) is not None:
        draft.notes.pop(f"{ACTOR}.clip_ratio_c")
        draft.drop(f"{mode} has no bound of negative advantages", f"{ACTOR}.clip_ratio_c")
    if draft.get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        length = draft.whole(f"{ACTOR}.loss_scale_factor", draft.whole("data.max_response_length", 512))
        why = "verl: loss_scale_factor, else data.max_response_length"
        draft.set("actor.loss_scale_tokens", length, why, f"{ACTOR}.loss_scale_factor")
    draft.drop("only seq-mean-token-sum-norm reads it", f"{ACTOR}.loss_scale_factor")


# Corrections of the difference between servers and trainer: keys of verl 0.6, and from 0.7 a section.

_OURS, _SECTION = "actor.rollout_correction", "algorithm.rollout_correction"
_NUMBER = r"\d*\.?\d+(?:e[-+]?\d+)?"
_UNITS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def take_correction(draft: Draft) -> None:
    bypass = bool(draft.get(f"{_SECTION}.bypass_mode", is_fully_async(draft)))
    if bypass and draft.get(f"{_SECTION}.loss_type", "ppo_clip") == "ppo_clip":
        why = "verl: bypass_mode, the old policy is the servers'"
        draft.set("actor.recompute_logprob", False, why, f"{_SECTION}.bypass_mode")
        draft.drop("the ratio of the loss is the weight", f"{_SECTION}.rollout_is*")
    else:
        draft.set("actor.recompute_logprob", True, "verl recomputes the log-probabilities of the old policy")
        _take_weights_of_06(draft)
        if not bypass:
            _take_weights(draft)
    _take_rules(draft, bypass)
    why = "actor.rollout_correction has rules and weights of the policy in training (docs/algorithms.md)"
    draft.lack(why, *(f"{_SECTION}.{name}" for name in ("rollout_rs", "rollout_is", "bypass_mode")))
    if any(note.fate == "missing" for key, note in draft.notes.items() if key.startswith(_SECTION)):
        draft.lack("see rollout_is, rollout_rs and bypass_mode", f"{_SECTION}.*", off=(None,))
    draft.drop("nothing is corrected by it", f"{_SECTION}.*", "algorithm.rollout_is*")


def _take_weights_of_06(draft: Draft) -> None:
    if draft.get("algorithm.rollout_is_threshold"):
        draft.keep("algorithm.rollout_is", f"{_OURS}.apply_weights")
        draft.defaults({f"{_OURS}.apply_weights": False})
        draft.keep("algorithm.rollout_is_level", f"{_OURS}.level")
        draft.keep("algorithm.rollout_is_mode", f"{_OURS}.mode")
        draft.keep("algorithm.rollout_is_threshold", f"{_OURS}.upper")
        draft.keep("algorithm.rollout_is_threshold_lower", f"{_OURS}.lower")
        draft.keep("algorithm.rollout_is_veto_threshold", f"{_OURS}.veto_threshold")
        draft.set(f"{_OURS}.renormalize", True, "verl leaves masked tokens out of the denominator")


def _take_weights(draft: Draft) -> None:
    key = f"{_SECTION}.rollout_is_threshold"
    if draft.get(f"{_SECTION}.rollout_is") not in ("token", "sequence"):
        return
    draft.keep(f"{_SECTION}.rollout_is", f"{_OURS}.level")
    bounds = _bounds(draft.get(key, 2.0))
    if len(bounds) == 2:
        draft.set(f"{_OURS}.mode", "mask", "verl: weights outside of rollout_is_threshold are 0", key)
        draft.set(f"{_OURS}.lower", bounds[0], "verl: rollout_is_threshold", key)
        draft.set(f"{_OURS}.upper", bounds[1], "verl: rollout_is_threshold", key)
    else:
        draft.keep(key, f"{_OURS}.upper")
        draft.defaults({f"{_OURS}.upper": 2.0})
    draft.keep(f"{_SECTION}.rollout_is_batch_normalize", f"{_OURS}.batch_normalize")
    if draft.get(f"{_SECTION}.rollout_is_batch_normalize"):
        draft.set(f"{_OURS}.normalize_by", "units", "verl's mean of weights")
    draft.keep(f"{_SECTION}.rollout_token_veto_threshold", f"{_OURS}.veto_threshold")


def _take_rules(draft: Draft, bypass: bool) -> None:
    """rollout_rs: names like seq_mean_k1, each with a bound or the bounds of a ratio."""
    key, limits = f"{_SECTION}.rollout_rs", f"{_SECTION}.rollout_rs_threshold"
    names = [name.strip() for name in str(draft.get(key, "")).split(",") if name.strip()]
    texts = [text.strip() for text in str(draft.get(limits, "")).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    rules = [rule for name, text in zip(names, texts, strict=False) if (rule := _rule(name, _bounds(text)))]
    is_weighted = f"{_OURS}.level" in draft.options
    if not names or len(rules) != len(names) or (is_weighted and draft.get(f"{_SECTION}.rollout_is") is None):
        return
    draft.set(f"{_OURS}.rules", rules, "verl: rollout_rs, rollout_rs_threshold", key, limits)
    if bypass:
        draft.set(f"{_OURS}.numerator", "training", "verl: bypass_mode has the policy in training")
    elif f"{_OURS}.mode" not in draft.options:
        draft.set(f"{_OURS}.renormalize", True, "verl leaves masked tokens out of the denominator")
    if not is_weighted:
        draft.set(f"{_OURS}.apply_weights", False, "verl: rollout_is has no weights")


def _rule(name: str, bounds: list[float]) -> dict[str, Any] | None:
    """k1 is a bound of the ratio, k2 and k3 are bounds of an estimate of the KL."""
    unit, _, metric = name.rpartition("_")
    if unit not in _UNITS or metric not in ("k1", "k2", "k3") or not bounds:
        return None
    rule: dict[str, Any] = {"metric": "ratio" if metric == "k1" else metric, "level": _UNITS[unit], "upper": bounds[-1]}
    if metric == "k1":
        rule["lower"] = bounds[0] if len(bounds) == 2 else 1 / bounds[0]
    return rule


def _bounds(value: Any) -> list[float]:
    """One number, or the two of `lower_upper`; none for other texts."""
    text = str(value)
    match = re.fullmatch(rf"({_NUMBER})(?:_({_NUMBER}))?", text)
    return [] if match is None else [float(bound) for bound in match.groups() if bound is not None and float(bound) > 0]
