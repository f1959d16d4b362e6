"""Configurations of cosmos-rl: GRPO and supervised training."""

import re
from collections.abc import Mapping
from typing import Any

from areal.api.allocation import ParallelDims
from areal.api.config.train import NO_RECIPES
from areal.importers.draft import TENSORBOARD, Draft, Trainer, halves, minibatches, set_devices

# Optimiser and learning-rate schedule of cosmos-rl. `role`: the section of the model, actor or model.

_NO_CLIPPING = 1e9
"""The largest gradient norm where the source does not clip: an option here is a finite number above 0."""
_WARMUP_STEPS = 20  # Steps of the warm-up of cosmos-rl where a file does not say.
_TYPES = {"adam": "adam", "adamw": "adam", "adam8bit": "adam_8bit", "adamw8bit": "adam_8bit"}


def take_optimizer(draft: Draft, role: str) -> None:
    section = f"{role}.optimizer"
    _rates(draft, section)
    _schedule(draft, section)
    _warmup(draft, f"{section}.warmup_steps_proportion")
    for number, beta in enumerate(draft.listed("train.optm_betas"), start=1):
        draft.set(f"{section}.beta{number}", beta, "cosmos-rl: optm_betas", "train.optm_betas")
    clip = "train.optm_grad_norm_clip"
    if draft.number(clip, 1.0, least=-1) > 0:
        draft.keep(clip, f"{section}.gradient_clipping")
    else:
        why = "cosmos-rl: optm_grad_norm_clip is 0, no clipping"
        draft.set(f"{section}.gradient_clipping", _NO_CLIPPING, why, clip)
    name = str(draft.get("train.optm_name", "AdamW")).lower()
    if name.startswith("adamw") or draft.get("train.optm_weight_decay", 0.01) == 0:
        if name in _TYPES:
            draft.set(f"{section}.type", _TYPES[name], "cosmos-rl: optm_name", "train.optm_name")
    elif name in _TYPES:
        draft.lack("weight decay is decoupled here, as in AdamW", "train.optm_name", off=())
    draft.lack(f"choose {section}.type", "train.optm_name", off=())
    draft.defaults({f"{section}.eps": 1e-6})


def _rates(draft: Draft, section: str) -> None:
    """One rate, a list with one per part of the model, or rates by module path, with `global` for the others."""
    rate: Any = draft.get("train.optm_lr")
    rates: list[Any] = rate if isinstance(rate, list) else [rate]
    if rate is not None and len(set(map(str, rates))) == 1:
        draft.set(f"{section}.lr", rates[0], "cosmos-rl: train.optm_lr", "train.optm_lr")
    draft.lack(f"give {section}.lr, and lr_of for parts of the model", "train.optm_lr")
    prefix = "train.optm_lr."
    parts = {key: draft.values[key] for key in draft.values if key.startswith(prefix)}
    draft.keep(f"{prefix}global", f"{section}.lr")
    parts.pop(f"{prefix}global", None)
    if parts:
        of_names = {re.escape(key.removeprefix(prefix)): value for key, value in parts.items()}
        draft.set(f"{section}.lr_of", of_names, "cosmos-rl: optm_lr by module path", *parts)


def _schedule(draft: Draft, section: str) -> None:
    key, ratio = "train.optm_decay_type", draft.get("train.optm_decay_ratio")
    schedule = draft.get(key, "none")
    kind = "constant" if schedule == "none" or ratio == 0 else schedule
    if kind in ("linear", "cosine", "constant"):
        draft.set(f"{section}.lr_scheduler_type", kind, "cosmos-rl: optm_decay_type", key)
    draft.lack("schedules are constant, linear and cosine", key)
    if kind == "constant":
        draft.drop("the rate is constant", "train.optm_decay_ratio", "train.optm_min_lr_factor")
    if ratio in (None, 1.0):
        draft.drop("the schedule lasts until the end", "train.optm_decay_ratio")
    draft.lack("a decay here begins after the warm-up", "train.optm_decay_ratio", off=())
    draft.keep("train.optm_min_lr_factor", f"{section}.min_lr_ratio")


def _warmup(draft: Draft, option: str) -> None:
    epochs, steps, total = "train.optm_warmup_epochs", "train.optm_warmup_steps", draft.number("train.max_num_steps", 0)
    draft.lack("a warm-up begins at 0", "train.optm_warmup_start_factor")
    if draft.get(epochs) is not None:
        share = draft.number(epochs, 0)
        if not isinstance(draft.get(epochs), float) or share > 1:
            share = min(1.0, share / draft.whole("train.epoch", 1))
        draft.set(option, share, "cosmos-rl: optm_warmup_epochs", epochs)
        draft.drop("optm_warmup_epochs decides", steps)
        return
    warmup = draft.get(steps, _WARMUP_STEPS)
    if isinstance(warmup, float) and warmup <= 1:
        draft.keep(steps, option)
    elif total and (number := draft.number(steps, _WARMUP_STEPS)):
        why = f"cosmos-rl: optm_warmup_steps {number} / max_num_steps {total}"
        draft.set(option, min(1.0, number / total), why, steps)
    elif draft.get(steps) is None:
        why = f"cosmos-rl warms up for {_WARMUP_STEPS} steps: give their share, the length of the run is not known"
        draft.set(option, 0.0, why)
    draft.lack(f"give {option}: the length of the run is not known", steps)


# What GRPO and supervised training of cosmos-rl share. `role`: the section of the model, actor or model.

POLICY = "train.train_policy"
_SAME_IN_MODEL = {
    "train.epoch": "total_train_epochs",
    "train.max_num_steps": "total_train_steps",
    "train.output_dir": "cluster.fileroot",
    f"{POLICY}.dataloader_seed": "seed",
    "train.seed": "seed",
    f"{POLICY}.dataset.name": "train_dataset.path",
    f"{POLICY}.dataset.subset": "train_dataset.name",
    f"{POLICY}.dataset.revision": "train_dataset.revision",
    f"{POLICY}.dataloader_shuffle": "train_dataset.shuffle",
    "train.ckpt.max_keep": "saver.keep_last",
    "train.ckpt.save_freq": "saver.freq_steps",
    "validation.freq": "evaluator.freq_steps",
    "train.validation_step": "evaluator.freq_steps",
    "validation.val_before_train": "evaluator.eval_before_train",
    "validation.dataset.name": "valid_dataset.path",
    "validation.dataset.subset": "valid_dataset.name",
    "validation.dataset.revision": "valid_dataset.revision",
}
_OF_MODEL = {
    "train.optm_weight_decay": "optimizer.weight_decay", "train.epsilon": "optimizer.eps",
    "train.fsdp_offload": "fsdp.offload_params", "policy.model_name_or_path": "path",
    "policy.model_gradient_checkpointing": "gradient_checkpointing", "policy.freeze_pattern": "freeze",
    "policy.aux_loss_coeff": "router_aux_loss_coef",
}  # fmt: skip
_LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
    "use_rslora": "rslora", "modules_to_save": "modules_to_save", "exclude_modules": "exclude_modules",
    "lora_path": "path",
}  # fmt: skip
"""Options of adapters."""
_SIZES = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size", "pp_size", "ep_size")
_OF_SYNC = ("sync_weight_interval", "*_timeout", "timestamp", "p2p_sync_*", "p2r_sync_*", "coalesce_weight_sync")


def take_shared(draft: Draft, role: str) -> None:
    project, run = draft.get("logging.project_name", "cosmos_rl"), draft.get("logging.experiment_name", "None")
    name = str(draft.get(f"{POLICY}.type", "grpo")) if run == "None" else run
    draft.set("experiment_name", project, "cosmos-rl: logging.project_name", "logging.project_name")
    draft.set("trial_name", name, "cosmos-rl: logging.experiment_name", "logging.experiment_name")
    _switches(draft)
    draft.keep_all(_SAME_IN_MODEL)
    draft.keep_all({key: f"{role}.{option}" for key, option in _OF_MODEL.items()})
    for key, section in ((POLICY, "train_dataset"), ("validation", "valid_dataset")):
        for split in ("split", "train_split"):
            draft.keep(f"{key}.dataset.{split}", f"{section}.split", convert=_joined)
    take_optimizer(draft, role)
    _adapters(draft, role)
    _precision(draft, role)
    _resume(draft)
    _logging(draft)
    _dropped(draft, role)
    draft.defaults({f"{role}.gradient_checkpointing": True, "total_train_epochs": 1})
    draft.defaults({f"{role}.path": "Qwen/Qwen2.5-VL-7B-Instruct"})


def _switches(draft: Draft) -> None:
    if draft.get("train.ckpt.enable_checkpoint", False) is False:
        draft.drop("the last step is exported, and no other", "train.ckpt.*")
    else:
        draft.defaults({"saver.keep_last": 5})
        if draft.whole("train.ckpt.save_freq_in_epoch", 0, least=-1) > 0:
            draft.keep("train.ckpt.save_freq_in_epoch", "saver.freq_epochs")
            draft.drop("save_freq_in_epoch replaces it", "train.ckpt.save_freq")
        else:
            draft.defaults({"saver.freq_steps": 20})
    draft.drop("the section saver does it", "train.ckpt.enable_checkpoint", "train.ckpt.save_freq_in_epoch")
    if draft.get("train.ckpt.upload_hf", False):
        repo = draft.get("train.ckpt.hf_repo_name", "Comos-Reason1")
        keys = ("train.ckpt.upload_hf", "train.ckpt.hf_repo_name")
        draft.set("saver.hub_upload.repo_id", repo, "cosmos-rl: ckpt.hf_repo_name", *keys)
    draft.drop("there are no uploads to the hub", "train.ckpt.upload_hf", "train.ckpt.hf_repo_name")
    if not draft.get("train.ckpt.upload_s3", False):
        draft.drop("there are no uploads to S3", "train.ckpt.upload_s3", "train.ckpt.s3_*")
    draft.lack("upload the exports yourself", "train.ckpt.upload_s3", "train.ckpt.s3_*")
    names = ("enable_validation", "validation_step", "validation_batch_per_replica")
    if not draft.get("validation.enable", draft.get("train.enable_validation", False)):
        draft.drop("there is no evaluation", "validation.*", *(f"train.{name}" for name in names))
    elif draft.whole("validation.freq_in_epoch", 0, least=-1) > 0:
        draft.keep("validation.freq_in_epoch", "evaluator.freq_epochs")
        draft.drop("freq_in_epoch replaces it", "validation.freq")
    elif draft.get("validation.dataset.name"):
        draft.defaults({"evaluator.freq_steps": 20})
    draft.drop("evaluator does it", "validation.enable", "train.enable_validation", "validation.freq_in_epoch")
    draft.drop("rows are evaluated as there is room", "train.validation_batch_per_replica")
    if draft.get("train.ckpt.max_keep", 5) == -1:
        draft.options.pop("saver.keep_last", None)
        draft.drop("all are kept", "train.ckpt.max_keep")


def _adapters(draft: Draft, role: str) -> None:
    section = "policy.lora."
    for name, option in _LORA.items():
        draft.keep(f"{section}{name}", f"{role}.lora.{option}")
    if any(key.startswith(section) for key in draft.values):
        draft.defaults({f"{role}.lora.rank": 8, f"{role}.lora.alpha": 8.0})
    if (kind := draft.get(f"{section}init_lora_weights", True)) in (True, "gaussian", "pissa", "olora"):
        init = "default" if kind is True else kind
        if init != "default":
            draft.set(f"{role}.lora.init", init, "cosmos-rl: init_lora_weights", f"{section}init_lora_weights")
        draft.drop("adapters begin as zero, as here", f"{section}init_lora_weights")
    draft.lack("adapters begin as default, gaussian, pissa or olora", f"{section}init_lora_weights", off=())
    if len(draft.listed(f"{section}lora_names", ["default"])) == 1:
        draft.drop("there is one adapter", f"{section}lora_names", f"{section}primary_adapter")
    draft.lack("this option of adapters does not exist here", f"{section}*")


def _precision(draft: Draft, role: str) -> None:
    dtype = draft.get("train.param_dtype")
    if dtype in ("bfloat16", "float32"):
        draft.set(f"{role}.dtype", dtype, "cosmos-rl: train.param_dtype", "train.param_dtype")
    draft.lack("data types are bfloat16 and float32", "train.param_dtype")
    if draft.get("train.logprob_dtype", "float32") == "bfloat16":
        draft.set(f"{role}.head_dtype", "compute", "cosmos-rl: train.logprob_dtype", "train.logprob_dtype")
    draft.lack("data types are bfloat16 and float32", "train.logprob_dtype", off=("float32", "bfloat16", None))
    draft.drop("master weights and gradients are float32", "train.master_dtype", "train.fsdp_reduce_dtype")
    draft.drop("servers have their own data type", "train.transfer_dtype")
    for kind in ("fp8", "fp4"):
        if not draft.get(f"train.{kind}.enable_{kind}", False):
            draft.drop("it is switched off", f"train.{kind}.*")
    recipe, scaling = draft.get("train.fp8.quant_recipe", "rowwise"), "train.fp8.fp8_recipe"
    if draft.get("train.fp8.enable_fp8", False) and draft.get(scaling, "dynamic_scaling") == "dynamic_scaling":
        keys = (f"train.fp8.{name}" for name in ("enable_fp8", "fp8_recipe", "quant_recipe"))
        draft.set(f"{role}.fp8.recipe", recipe, "cosmos-rl: train.fp8", *keys)
    draft.lack(NO_RECIPES["delayed"], "train.fp8.*")
    draft.lack(NO_RECIPES["nvfp4"], "train.fp4.*")


def _resume(draft: Draft) -> None:
    resume = draft.get("train.resume", False)
    if isinstance(resume, bool) or str(resume).lower() in ("true", "false"):
        mode = "auto" if str(resume).lower() == "true" else "disabled"
        draft.set("recover.mode", mode, "cosmos-rl: train.resume", "train.resume")
    else:
        draft.set("recover.mode", "disabled", "cosmos-rl: train.resume names another run")
    draft.lack("give the exported weights of that run as the path of the model", "train.resume")


def _logging(draft: Draft) -> None:
    names = draft.listed("logging.logger")
    if unknown := {*map(str, names)} - {"console", "wandb", "tensorboard"}:
        draft.lack(f"there is no tracker {', '.join(sorted(unknown))}", "logging.logger")
    keys = [] if unknown else ["logging.logger"]
    for name, option, value in (("wandb", "wandb.mode", "online"), ("tensorboard", "tensorboard.path", TENSORBOARD)):
        if name in names:
            draft.set(f"stats_logger.{option}", value, "cosmos-rl: logging.logger", *keys)
    draft.keep("logging.group_name", "stats_logger.wandb.group")
    draft.drop("metrics.jsonl and the status line always exist", "logging.*")


def _dropped(draft: Draft, role: str) -> None:
    draft.lack('give train_dataset.split "train[:95%]" and valid_dataset with the rest', "*.dataset.test_size")
    draft.lack("train_dataset.path may be a folder", "*.dataset.local_dir")
    draft.drop("how cosmos-rl's loader works", f"{POLICY}.dataloader_*", f"{POLICY}.enable_dataset_cache")
    draft.drop("how cosmos-rl's loader works", f"{POLICY}.data_dispatch_as_rank_in_mesh", "validation.dataloader_*")
    draft.drop("how cosmos-rl's loader works", "train.local_dataset", "validation.enable_dataset_cache")
    draft.lack("rows have text or images", "train.non_text")
    draft.drop("weights are published after every step", *(f"train.{name}" for name in _OF_SYNC))
    if not draft.get("train.ema_enable", False):
        draft.drop("it is switched off", "train.ema_*")
    draft.lack("averages of weights do not exist here", "train.ema_*", off=())
    offload, has_stages = "train.activation_offload", parallel_size(draft, "policy", "pp_size") > 1
    if draft.get(offload, False) and draft.get("policy.model_gradient_checkpointing", True) and not has_stages:
        draft.set(f"{role}.checkpointing", "offload", "cosmos-rl: activation_offload", offload)
    draft.lack(f"{role}.checkpointing: offload needs gradient_checkpointing and one stage", offload)
    names = ("compile", "async_tp_enabled", "optm_impl", "fa_version", "force_use_hf")
    draft.drop("chosen by the model and the engine", *(f"train.{name}" for name in names), "policy.enable_liger_*")
    draft.drop("seeds follow from seed", "rollout.seed", "train.deterministic")
    draft.drop("how cosmos-rl profiles", "profiler.*")
    draft.drop("how processes of cosmos-rl find each other", "redis*", "eth_ips")
    draft.drop("FSDP2 shards each block over all ranks", "train.fsdp_reshard_after_forward")
    draft.drop(
        "checkpoints are exported in Hugging Face format", "train.ckpt.export_safetensors", "train.ckpt.save_mode"
    )
    draft.drop("recovery checkpoints have their own interval: recover", "train.save_ckpt_at_exit", "train.signal_to_*")
    draft.drop("packed without padding", "train.sequence_packing", f"{POLICY}.balance_dp_token")
    if draft.get(f"{POLICY}.trainer_type") in (None, "grpo", "sft"):
        draft.drop("it is the trainer of the type", f"{POLICY}.trainer_type")
    draft.lack("your own code has this trainer", f"{POLICY}.trainer_type")
    draft.lack("your own code reads it", "custom.*")
    draft.lack("models of images, videos and robots are not trained", "policy.is_diffusers", "vla.*")
    draft.drop("the model is a language model", "policy.diffusers*", "policy.is_diffusers")
    draft.lack(f"write {role}.freeze, the names of the weights that are not trained", "policy.trainable_*", off=(None,))
    draft.lack(f"{role}.path: a folder with this revision", "policy.model_revision", "policy.model_safetensor_path")


def parallel_size(draft: Draft, section: str, name: str) -> int:
    """The size `name` of `section`.parallelism; -1, all GPUs of the launch, counts as 1."""
    default = 2 if name == "tp_size" else 1
    return max(1, draft.whole(f"{section}.parallelism.{name}", default, least=-1))


def data_ranks(draft: Draft) -> int:
    return parallel_size(draft, "policy", "dp_shard_size") * parallel_size(draft, "policy", "dp_replicate_size")


def trainer_of(draft: Draft) -> tuple[Trainer, int, list[str]]:
    """The trainer, the number of its GPUs, and the keys that decide both. With adapters there are no stages."""
    tensor, context, stages, experts, replicas = (
        parallel_size(draft, "policy", name) for name in ("tp_size", "cp_size", "pp_size", "ep_size", "n_init_replicas")
    )
    keys = [f"policy.parallelism.{name}" for name in _SIZES]
    sizes = ParallelDims(tp=tensor, cp=context, pp=stages, ep=experts)
    gpus = data_ranks(draft) * replicas * sizes.world_size
    if draft.get("policy.parallelism.dp_shard_size") == -1:
        keys.remove("policy.parallelism.dp_shard_size")
        draft.lack(
            "multiply d in allocation_mode: -1 is all GPUs of the launch", "policy.parallelism.dp_shard_size", off=()
        )
    if stages > 1 and any(key.startswith("policy.lora.") for key in draft.values):
        sizes, stages = ParallelDims(tp=sizes.tp, cp=sizes.cp, ep=sizes.ep), 1
        keys.remove("policy.parallelism.pp_size")
        draft.lack("adapters have no stages; its GPUs are data ranks", "policy.parallelism.pp_size")
    if experts == 1:
        keys.remove("policy.parallelism.ep_size")
        draft.drop("one group of experts", "policy.parallelism.ep_size")
    engine = ("*.parallelism.pp_micro_batch_size", "*.parallelism.pp_schedule", "*.parallelism.pp_layers_per_stage")
    draft.drop(
        "the engine chooses them", *engine, "*.parallelism.pp_dynamic_shape", "*.cp_rotate_method", "*.tp_method"
    )
    return Trainer(backend="fsdp" if stages == 1 else "megatron", sizes=sizes), gpus, keys


def _joined(value: Any) -> Any:
    """One split; several are written with a plus sign, as `datasets` reads them."""
    return "+".join(value) if isinstance(value, list) else value


# Reward functions and the teacher of cosmos-rl.

_FUNCTIONS = {
    "boxed_math": "math", "direct_math": "math", "single_choice": "choice", "format": "format", "gsm8k": "gsm8k",
}  # fmt: skip
_SCALES = {"direct_math": 2.0}  # direct_math gives 1 or -1, math 1 or 0. The other functions give 1 or 0, as here.
_REMOTE = f"{POLICY}.use_remote_reward"


def take_rewards(draft: Draft) -> None:
    has_teacher = _teacher(draft)
    if has_teacher or draft.get(f"{POLICY}.bypass_reward", False):
        why = "cosmos-rl: bypass_reward, which a teacher switches on"
        draft.set("reward_fn", "none", why, f"{POLICY}.bypass_reward")
        draft.drop("there is no reward", f"{POLICY}.*reward*")
        return
    draft.drop("there is a reward", f"{POLICY}.bypass_reward")
    if not draft.get(_REMOTE, False):
        draft.drop("there is no remote reward", _REMOTE, f"{POLICY}.remote_reward.*")
    draft.lack("write a reward function that calls the service (docs/rewards.md)", _REMOTE, f"{POLICY}.remote_reward.*")
    draft.lack("a reward function gets one answer", f"{POLICY}.group_reward_calculation")
    _functions(draft)
    names = [name for name in draft.listed(f"{POLICY}.filter_reward_metric") if name]
    if names:
        chosen = [_FUNCTIONS.get(str(name), name) for name in names]
        why = "cosmos-rl: filter_reward_metric"
        draft.set("reward.filter_on", chosen, why, f"{POLICY}.filter_reward_metric")
        draft.set("rollout.should_accept_fn", "mixed_rewards", why)
    draft.drop("no filter", f"{POLICY}.filter_reward_metric")


def _functions(draft: Draft) -> None:
    key = f"{POLICY}.reward_function"
    names: Any = draft.get(key)
    values = [name for name in draft.values if name == key or name.startswith(f"{key}.")]
    weights = {name.removeprefix(f"{key}."): draft.values[name] for name in values if name != key}
    if names is not None:
        weights |= dict.fromkeys(map(str, names if isinstance(names, list) else [names]), 1.0)
    _overlong(draft, draft.number(f"{key}.overlong", 1.0) if weights.pop("overlong", None) is not None else 0.0)
    used = [name for name in values if name.removeprefix(f"{key}.") in (*_FUNCTIONS, "overlong")]
    if weights.keys() <= _FUNCTIONS.keys():
        used = values
    known: dict[str, float] = {}
    for name in sorted(weights.keys() & _FUNCTIONS.keys()):
        ours, weight = _FUNCTIONS[name], draft.number(f"{key}.{name}", 1.0) * _SCALES.get(name, 1.0)
        known[ours] = known.get(ours, 0.0) + weight
    scaled = ", twice for direct_math, which gives -1 for wrong answers" if "direct_math" in weights else ""
    if list(known.values()) == [1]:
        draft.set("reward_fn", next(iter(known)), "cosmos-rl: reward_function", *used)
    elif known:
        draft.set("reward.fns", known, f"cosmos-rl: reward_function with weights{scaled}", *used)
    elif not values and not draft.get(_REMOTE, False):
        why = "cosmos-rl: its default single_choice, unless the script that starts it has functions: check it"
        draft.set("reward_fn", "choice", why)
    else:
        draft.set("reward_fn", "math", "cosmos-rl: its reward function is unknown here: write one (docs/rewards.md)")
    draft.lack("write a reward function (docs/rewards.md)", *values, off=(None,))


def _overlong(draft: Draft, weight: float) -> None:
    penalty = f"{POLICY}.overlong_reward"
    if weight:
        why = "cosmos-rl: reward_function has overlong"
        draft.set("actor.overlong_reward_penalty", True, why, f"{penalty}.enable_overlong_penalty")
        draft.keep(f"{penalty}.buffer_length", "actor.overlong_tokens")
        factor = weight * draft.number(f"{penalty}.penalty_factor", 1.0)
        why = "cosmos-rl: penalty_factor x the weight of overlong"
        draft.set("actor.overlong_penalty_factor", factor, why, f"{penalty}.penalty_factor")
        draft.defaults({"actor.overlong_tokens": 4096})
    draft.drop("reward_function has no overlong with a weight: there is no penalty for long answers", f"{penalty}.*")


def _teacher(draft: Draft) -> bool:
    """Whether there is one: the advantage of a token is its log-ratio of teacher and policy."""
    section = "distillation"
    if not draft.get(f"{section}.enable", False):
        draft.drop("there is no teacher", f"{section}.*")
        return False
    draft.keep(f"{section}.model_name_or_path", "teacher.path")
    draft.keep(f"{section}.kl_penalty_coef", "teacher.advantage_coef")
    draft.set("teacher.rl_weight", 0.0, "cosmos-rl: enable, rewards are bypassed", f"{section}.enable")
    if draft.get(f"{section}.param_dtype") in ("bfloat16", "float32"):
        draft.keep(f"{section}.param_dtype", "teacher.dtype")
    draft.lack("teacher: the log-ratio of the sampled tokens alone", f"{section}.top_k")
    draft.lack("the teacher scores answers, not prompts", f"{section}.include_prompt")
    draft.lack("the log-ratio of a token is not summed with later ones", f"{section}.kl_discount_factor")
    if draft.number(f"{section}.top_k", 0) == 0:
        draft.drop("top_k is 0", f"{section}.jsd_beta")
    draft.lack("there is no Jensen-Shannon divergence", f"{section}.jsd_beta", off=())
    draft.lack("data types are bfloat16 and float32", f"{section}.param_dtype")
    draft.drop("the teacher is loaded and divided like the actor", f"{section}.*")
    draft.defaults({"teacher.path": "Qwen/Qwen2.5-VL-7B-Instruct"})
    return True


_T = POLICY
_SAME = {
    f"{_T}.epsilon_low": "actor.eps_clip",
    f"{_T}.epsilon_high": "actor.eps_clip_higher",
    f"{_T}.mu_iterations": "actor.ppo_epochs",
    f"{_T}.entropy_coeff": "actor.entropy_coef",
    f"{_T}.allowed_outdated_steps": "rollout.max_head_offpolicyness",
    f"{_T}.use_decoupled_loss": "actor.use_decoupled_loss",
    f"{_T}.min_filter_prefix_tokens": "actor.shared_prefix_min_tokens",
    "rollout.n_generation": "gconfig.n_samples",
    "rollout.max_response_length": "gconfig.max_new_tokens",
    "rollout.sampling_config.temperature": "gconfig.temperature",
    "rollout.sampling_config.top_p": "gconfig.top_p",
    "rollout.sampling_config.repetition_penalty": "gconfig.repetition_penalty",
}
_MARKS_OF_GRPO = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
"""Keys of train_policy that only GRPO has: cosmos-rl looks for them where `type` is absent."""
_SERVERS = {"vllm": "vllm", "vllm_async": "vllm", "sglang": "sglang"}


def from_cosmos(values: Mapping[str, Any]) -> Draft:
    draft = Draft("cosmos-rl", dict(values))
    if _is_supervised(draft):
        _take_supervised(draft)
    else:
        _take_grpo(draft)
    draft.finish()
    return draft


def _is_supervised(draft: Draft) -> bool:
    has_policy = any(key.startswith(f"{_T}.") for key in draft.values)
    marks = any(f"{_T}.{name}" in draft.values for name in _MARKS_OF_GRPO)
    return draft.get(f"{_T}.type", "sft" if has_policy and not marks else "grpo") == "sft"


def _take_supervised(draft: Draft) -> None:
    take_shared(draft, "model")
    rows, replicas = draft.whole("train.train_batch_per_replica", 8), parallel_size(draft, "policy", "n_init_replicas")
    # its worker for one replica loads this number on every data rank; its worker for several divides it over the ranks
    parts, of = (replicas, "replicas") if replicas > 1 else (data_ranks(draft), "data ranks")
    why = f"cosmos-rl: train_batch_per_replica {rows} is the batch of each of {parts} {of}"
    draft.set("train_dataset.batch_size", rows * parts, why, "train.train_batch_per_replica")
    longest = draft.whole("policy.model_max_length", 4096)
    column = draft.get(f"{_T}.conversation_column_name", "conversations")
    for section in ("train_dataset", "valid_dataset"):
        if f"{section}.path" in draft.options or section == "train_dataset":
            draft.set(f"{section}.type", "sft", "cosmos-rl: type", f"{_T}.type")
            draft.set(f"{section}.max_length", longest, "cosmos-rl: model_max_length", "policy.model_max_length")
            if column != "messages":
                draft.set(f"{section}.columns", {column: "messages"}, "cosmos-rl: conversation_column_name")
    draft.drop("train_dataset.columns has it", f"{_T}.conversation_column_name")
    if not draft.get(f"{_T}.enable_dp_load_balancing", False):
        draft.drop("it is switched off", f"{_T}.enable_dp_load_balancing", f"{_T}.load_balanced_*")
    draft.lack("a batch has a fixed number of rows", f"{_T}.enable_dp_load_balancing", f"{_T}.load_balanced_*", off=())
    draft.lack("add the message to the rows with a map_fn", f"{_T}.system_prompt")
    draft.defaults({"model.optimizer.lr": 1e-6})
    _micro_batches(draft, "model", longest)
    trainer, gpus, keys = trainer_of(draft)
    set_devices(draft, "", (0, 0, gpus), trainer, "cosmos-rl: parallelism of the policy", keys)
    draft.lack("give evaluator.stop_at or other options (docs/evaluation.md)", "validation.*", off=(None,))
    draft.drop("supervised training generates nothing", "rollout.*", "distillation.*", "mode", f"{_T}.type")


def _micro_batches(draft: Draft, role: str, longest: int) -> None:
    option, size = f"{role}.mb_spec.max_tokens_per_mb", draft.whole(f"{_T}.mini_batch", 2)
    key = f"{_T}.max_token_len_per_mini_batch"
    if draft.whole(key, 0, least=-1) > 0:
        context = parallel_size(draft, "policy", "cp_size")
        draft.set(option, draft.whole(key, 1) * context, f"cosmos-rl: its limit x {context} context ranks", key)
    else:
        why = f"cosmos-rl: mini_batch of {size} sequences of {longest} tokens"
        draft.set(option, size * longest, why, f"{_T}.mini_batch")
    draft.drop("micro-batches are filled by tokens", f"{_T}.mini_batch", f"{_T}.max_token_len_per_mini_batch")


def _take_grpo(draft: Draft) -> None:
    take_shared(draft, "actor")
    _staleness(draft)
    draft.keep_all(_SAME)
    if draft.get(f"{_T}.epsilon_low") is not None:
        draft.defaults({"actor.eps_clip_higher": 0.2})
    if draft.whole("rollout.sampling_config.top_k", -1, least=-1) > 0:
        draft.keep("rollout.sampling_config.top_k", "gconfig.top_k")
    draft.drop("all tokens, as here", "rollout.sampling_config.top_k")
    _batches(draft)
    _advantages(draft)
    _loss(draft)
    _devices(draft)
    take_rewards(draft)
    _evaluation(draft)
    _columns(draft)
    _turns(draft)
    same = draft.get("rollout.sampling_config.temperature", 1.0) == draft.get(f"{_T}.temperature", 1.0)
    draft.lack("log-probabilities are those of gconfig.temperature", *([] if same else [f"{_T}.temperature"]), off=())
    draft.drop("it is gconfig.temperature", f"{_T}.temperature")
    if draft.get(f"{_T}.type", "grpo") == "grpo":
        draft.drop("always GRPO", f"{_T}.type")
    draft.lack("training is grpo or sft: grpo is used", f"{_T}.type", off=())
    draft.drop("servers return tokens with log-probabilities", f"{_T}.rollout_as_token_ids", f"{_T}.collect_rollout_*")
    draft.drop("a step waits until its batch is full", f"{_T}.max_retry_for_on_policy")
    draft.drop("rollout.max_head_offpolicyness limits them", *(f"{_T}.{name}" for name in _OF_THROTTLE))
    if draft.get(f"{_T}.train_units_per_data_rank") is None:
        draft.drop("it is switched off", *(f"{_T}.{name}" for name in _OF_BUDGETS))
    draft.lack("a batch has a fixed number of answers", f"{_T}.train_units_*", *(f"{_T}.{n}" for n in _OF_BUDGETS))
    draft.defaults({"gconfig.n_samples": 16})


_OF_THROTTLE = ("outdated_rollout_fetch_batch_size", "no_outdated_rollout", "max_inflight_steps", "uncentralized_*")
_OF_BUDGETS = (
    "train_units_key", "max_inflight_rollouts", "collection_no_progress_*", "dispatch_incomplete_*",
)  # fmt: skip


def _staleness(draft: Draft) -> None:
    draft.set("rollout.max_head_offpolicyness", draft.get(f"{_T}.allowed_outdated_steps", 4), "cosmos-rl: its default")
    if draft.get(f"{_T}.on_policy", False):
        keys = (f"{_T}.on_policy", f"{_T}.allowed_outdated_steps")
        draft.set("rollout.max_head_offpolicyness", 0, "cosmos-rl: on_policy", *keys)
    draft.drop("allowed_outdated_steps decides", f"{_T}.on_policy")
    if draft.get(f"{_T}.use_decoupled_loss", False):
        draft.keep(f"{_T}.behav_imp_weight_cap", "actor.behav_imp_weight_cap")
    elif draft.get(key := f"{_T}.use_rollout_logprobs_for_loss", False):
        draft.set("actor.recompute_logprob", False, "cosmos-rl: use_rollout_logprobs_for_loss", key)
    else:
        draft.set("actor.recompute_logprob", True, "cosmos-rl: the old policy is the trainer's without decoupled loss")
    draft.drop("the loss is not decoupled", f"{_T}.behav_imp_weight_cap")
    draft.drop("the old policy is the trainer's", f"{_T}.use_rollout_logprobs_for_loss")


def _batches(draft: Draft) -> None:
    group, replicas = (draft.whole("rollout.n_generation", 16), draft.whole("policy.parallelism.n_init_replicas", 1))
    answers = draft.whole("train.train_batch_per_replica", 8) * replicas
    prompts, key = max(1, answers // group), "train.train_batch_per_replica"
    why = f"cosmos-rl: train_batch_per_replica x {replicas} replicas = {answers} answers / {group} per prompt"
    if answers % group:
        lost = f"{answers} answers of a step are no whole groups of {group}: here a step has {prompts * group}"
        draft.lack(lost, key, off=(None,))
        draft.set("train_dataset.batch_size", prompts, f"{why}; {lost}")
    else:
        draft.set("train_dataset.batch_size", prompts, why, key)
    size = draft.whole(f"{_T}.batch_size_per_optimize", 0, least=0)
    of_rank = max(1, answers // replicas // data_ranks(draft))
    count = minibatches(of_rank, size) if size else 1
    why = f"cosmos-rl: {of_rank} answers of a data rank / batch_size_per_optimize"
    draft.set("actor.ppo_n_minibatches", count, why, f"{_T}.batch_size_per_optimize")
    if draft.get(f"{_T}.loss_type") == "token-sum":
        _sum_of_tokens(draft, min(size or of_rank, of_rank), data_ranks(draft) * replicas)
    longest = draft.whole("policy.model_max_length", 4096)
    draft.set("gconfig.max_tokens", longest, "cosmos-rl: policy.model_max_length", "policy.model_max_length")
    draft.defaults({"gconfig.max_new_tokens": draft.whole("rollout.max_response_length", 2048)})
    _micro_batches(draft, "actor", longest)
    draft.drop("a server batches the requests that it has", "rollout.batch_size")


def _sum_of_tokens(draft: Draft, answers: int, ranks: int) -> None:
    """`answers` are those of a data rank in an optimiser step.

    The loss of a micro-batch is a sum. It counts by the share of its answers in the step, and ranks are averaged, so
    the loss of the step is the sum over all its tokens x mini_batch / all its answers.
    """
    if draft.whole(f"{_T}.max_token_len_per_mini_batch", 0, least=-1) > 0:
        draft.lack("the size of each micro-batch scales its sum: give actor.loss_scale_tokens", f"{_T}.loss_type")
        return
    rows = min(draft.whole(f"{_T}.mini_batch", 2), answers)
    why = f"cosmos-rl: token-sum / {answers * ranks} answers x mini_batch {rows}"
    draft.set("actor.loss_scale_tokens", max(1, round(answers * ranks / rows)), why, f"{_T}.mini_batch")


def _advantages(draft: Draft) -> None:
    draft.drop("only its trainers of diffusion models read it", f"{_T}.advantage_low", f"{_T}.advantage_high")
    draft.lack("actor.adv_estimator: custom (docs/algorithms.md)", f"{_T}.algo", off=("grpo",))
    key = f"{_T}.unbiased_advantage"
    if draft.get("distillation.enable", False):
        draft.set("actor.adv_estimator", "gae", "cosmos-rl: a teacher, no rewards, so no groups", key)
        return
    if draft.get(key, False):
        draft.set("actor.adv_estimator", "dr_grpo", "cosmos-rl: unbiased_advantage", key)
        return
    norm = {"mean_level": "group", "std_level": "group", "std_unbiased": False, "eps": 1e-6}
    draft.set("actor.adv_estimator", "gae", "cosmos-rl: GRPO, written with reward_norm: it divides by n, not n - 1")
    draft.set("actor.reward_norm", norm, "cosmos-rl: unbiased_advantage is false", key)


def _loss(draft: Draft) -> None:
    variant, is_gspo = f"{_T}.variant", draft.get(f"{_T}.variant") == "gspo"
    if draft.get(variant, "grpo") not in ("grpo", "dapo", "gspo"):
        draft.lack("choose actor.policy_loss (docs/algorithms.md)", variant, off=())
    keys = [variant] if variant not in draft.notes else []
    draft.set("actor.policy_loss", "gspo" if is_gspo else "ppo", "cosmos-rl: variant", *keys)
    if is_gspo:
        for option, value in (("advantage", "token"), ("max_log_ratio", 10.0)):
            draft.set(f"actor.sequence_level.{option}", value, "cosmos-rl: its form of GSPO", variant)
    if draft.get(variant) == "dapo":
        draft.set("rollout.should_accept_fn", "mixed_rewards", "cosmos-rl: variant dapo")
    if draft.get(f"{_T}.aipo_rho"):
        draft.set("actor.policy_loss", "aipo", "cosmos-rl: aipo_rho")
        draft.set("actor.policy_loss.truncation", "objective", "cosmos-rl: its form of AIPO")
        draft.keep(f"{_T}.aipo_rho", "actor.policy_loss.rho")
        if is_gspo:
            draft.set("actor.importance_sampling_level", "sequence", "cosmos-rl: variant gspo", variant)
    elif not is_gspo:
        draft.keep(f"{_T}.lower_bound_ratio", "actor.c_clip")
        draft.defaults({"actor.c_clip": 3.0})
    draft.drop("this loss has no bound of negative advantages", f"{_T}.lower_bound_ratio")
    if draft.get(f"{_T}.loss_type") == "seq-mean-token-mean" and draft.get(f"{_T}.unbiased_loss_max_tokens"):
        draft.set("actor.loss_aggregation", "seq-mean-token-sum-norm", "cosmos-rl: unbiased_loss_max_tokens")
        draft.keep(f"{_T}.unbiased_loss_max_tokens", "actor.loss_scale_tokens")
        draft.drop("unbiased_loss_max_tokens decides", f"{_T}.loss_type")
    draft.drop("cosmos-rl reads it with loss_type seq-mean-token-mean only", f"{_T}.unbiased_loss_max_tokens")
    draft.keep(f"{_T}.loss_type", "actor.loss_aggregation")
    if draft.get(f"{_T}.kl_beta", 0.0):
        draft.keep(f"{_T}.kl_beta", "actor.kl_loss_coef")
        if draft.get(corrected := f"{_T}.unbiased_kl_estimate", False):
            draft.set("actor.kl_loss_correction", "old", "cosmos-rl: unbiased_kl_estimate", corrected)
        draft.set("ref.path", draft.get("policy.model_name_or_path"), "cosmos-rl: the initial policy")
        if draft.get(f"{_T}.reference_reset_interval"):
            draft.keep(f"{_T}.reference_reset_interval", "ref_reset_steps")
            draft.keep(f"{_T}.reset_optimizer_with_reference", "ref_reset_optimizer")
    draft.drop("there is no reference, or it is not reset", f"{_T}.reference_reset_*", f"{_T}.reset_optimizer_*")
    draft.drop("the KL has no such term", f"{_T}.kl_beta", f"{_T}.unbiased_kl_estimate")
    masks = "actor.rollout_correction.rules mask answers by the mismatch alone, whatever their advantage"
    draft.lack(masks, f"{_T}.off_policy_masking_delta", off=(None,))
    draft.set("actor.kl_ctl", 0.0, "cosmos-rl: the KL term is in the loss")
    if draft.get(f"{_T}.positive_nll_coef"):
        draft.keep(f"{_T}.positive_nll_coef", "actor.positive_nll_coef")
    draft.drop("it is switched off", f"{_T}.positive_nll_coef")


def _devices(draft: Draft) -> None:
    trainer, gpus, keys = trainer_of(draft)
    backend = str(draft.get("rollout.backend", "vllm"))
    server = _SERVERS.get(backend, "vllm")
    names = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size")
    keys += [*(f"rollout.parallelism.{name}" for name in names)]
    keys += ["rollout.backend"] if backend in _SERVERS else []
    parts = (parallel_size(draft, "rollout", "n_init_replicas"), parallel_size(draft, "rollout", "tp_size"), gpus)
    why = "cosmos-rl: parallelism of policy and rollout"
    if str(draft.get("mode", "disaggregated")).startswith("colocated"):
        why = f"cosmos-rl uses {gpus} GPUs in turn; here about half generate while the others train"
        parts = halves(gpus, parts[1], trainer)
        keys += ["mode"]
    set_devices(draft, server, parts, trainer, why, keys)
    if draft.get("mode", "disaggregated") == "disaggregated":
        draft.drop("servers and trainers have separate GPUs, as here", "mode")
    draft.lack("servers and trainers have separate GPUs: choose allocation_mode", "mode", off=())
    draft.lack(f"{backend} is not supported: the servers are vLLM", "rollout.backend", off=())
    draft.lack("a server has tensor ranks only", "rollout.parallelism.*", off=(1, 0, -1))
    flags = {"gpu_memory_utilization": "gpu_memory_utilization" if server == "vllm" else "mem_fraction_static"}
    if server == "vllm":
        flags |= {"enable_chunked_prefill": "enable_chunked_prefill", "enforce_eager": "enforce_eager"}
        flags |= {"quantization": "quantization"} if draft.get("rollout.quantization") in ("fp8", "mxfp4") else {}
    draft.server("rollout.", server, flags)
    draft.lack("vLLM quantizes to fp8 or mxfp4: vllm.quantization", "rollout.quantization", off=("none", None))


def _turns(draft: Draft) -> None:
    """Conversations of several turns, and how cosmos-rl generates."""
    turns = "rollout.multi_turn_config"
    draft.lack("write a workflow (docs/workflows.md) or workflow: agent", f"{turns}.enable")
    if draft.get(f"{turns}.enable", False):
        draft.lack("an option of your workflow or agent", f"{turns}.*", off=(None,))
    draft.drop("a conversation has one turn", f"{turns}.*")
    names = ("mode", "async_*", "r2r_*", "prefetch_*", "broadcast_all_params", "n_generation_*", "completion_admission")
    draft.drop("generation is always asynchronous", *(f"rollout.{name}" for name in names))
    draft.drop("servers choose their kernels", "rollout.vllm_use_flashinfer", "rollout.sampling_config.use_flashinfer")
    draft.drop("an answer has all of its tokens, those of a stop string too", "rollout.include_stop_str_in_output")


def _evaluation(draft: Draft) -> None:
    """Evaluations of cosmos-rl are greedy unless they have a temperature and a top_k, which is 1 by default."""
    section = "validation"
    if "valid_dataset.path" not in draft.options:
        draft.lack("set valid_dataset", f"{section}.*", off=(None,))
        return
    top_k = draft.whole(f"{section}.top_k", 1, least=-1)
    if draft.number(f"{section}.temperature", 0) and top_k != 1:
        draft.set("evaluator.modes", ["sampled"], "cosmos-rl: validation.temperature is above 0, top_k is not 1")
        for name in ("temperature", "top_p"):
            draft.keep(f"{section}.{name}", f"eval_gconfig.{name}")
        if "gconfig.top_p" in draft.options and "eval_gconfig.top_p" not in draft.options:
            draft.set("eval_gconfig.top_p", draft.options["gconfig.top_p"].value, "cosmos-rl: top_p of training")
        if top_k > 1:
            draft.keep(f"{section}.top_k", "eval_gconfig.top_k")
        draft.drop("all tokens, as here", f"{section}.top_k")
        draft.keep(f"{section}.n_generation", "evaluator.n_samples")
    else:
        why = "cosmos-rl: validation.temperature is 0, or top_k is 1"
        draft.set("evaluator.modes", ["greedy"], why, f"{section}.temperature")
        draft.drop("evaluations are greedy", *(f"{section}.{name}" for name in ("top_p", "top_k", "n_generation")))
    draft.keep(f"{section}.repetition_penalty", "eval_gconfig.repetition_penalty")
    key, length = f"{section}.max_response_length", int(draft.options["gconfig.max_new_tokens"].value)
    has_own = any(option.startswith("eval_gconfig.") for option in draft.options) or draft.get(key) is not None
    if has_own or "gconfig.repetition_penalty" in draft.options:
        draft.set("eval_gconfig.max_new_tokens", draft.whole(key, length), "cosmos-rl: max_response_length", key)
        longest = draft.options["gconfig.max_tokens"]
        draft.set("eval_gconfig.max_tokens", longest.value, longest.origin)
    draft.drop("that of training", key)
    draft.drop("answers are evaluated as servers have room", f"{section}.batch_size")
    if draft.get(f"{section}.reward_function") in (None, draft.get(f"{_T}.reward_function")):
        draft.drop("that of training", f"{section}.reward_function")
    draft.lack("evaluations have the reward function of training", f"{section}.reward_function*")


def _columns(draft: Draft) -> None:
    ours = {f"{_T}.prompt_column_name": "prompt", f"{_T}.response_column_name": "answer"}
    columns = {str(draft.get(key)): name for key, name in ours.items() if draft.get(key) not in (None, "", name)}
    if columns:
        keys = [key for key in ours if str(draft.get(key)) in columns]
        for section in ("train_dataset", "valid_dataset"):
            if f"{section}.path" in draft.options or section == "train_dataset":
                why = "cosmos-rl: prompt_column_name, response_column_name"
                draft.set(f"{section}.columns", columns, why, *keys)
    draft.drop("a column that is read as it is", *ours)
    draft.lack("write valid_dataset.columns", "validation.*_column_name")
