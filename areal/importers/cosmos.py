"""Configurations of cosmos-rl with a GRPO policy."""

from collections.abc import Mapping
from typing import Any

from areal.importers.draft import Draft, allocation, minibatches

_T = "train.train_policy"
_SAME = {
    "train.epoch": "total_train_epochs",
    "train.max_num_steps": "total_train_steps",
    "train.output_dir": "cluster.fileroot",
    "train.seed": "seed",
    "train.optm_lr": "actor.optimizer.lr",
    "train.optm_weight_decay": "actor.optimizer.weight_decay",
    "train.optm_grad_norm_clip": "actor.optimizer.gradient_clipping",
    "train.epsilon": "actor.optimizer.eps",
    "train.fsdp_offload": "actor.fsdp.offload_params",
    f"{_T}.temperature": "gconfig.temperature",
    f"{_T}.epsilon_low": "actor.eps_clip",
    f"{_T}.epsilon_high": "actor.eps_clip_higher",
    f"{_T}.lower_bound_ratio": "actor.c_clip",
    f"{_T}.mu_iterations": "actor.ppo_epochs",
    f"{_T}.entropy_coeff": "actor.entropy_coef",
    f"{_T}.dataloader_shuffle": "train_dataset.shuffle",
    f"{_T}.allowed_outdated_steps": "rollout.max_head_offpolicyness",
    f"{_T}.use_decoupled_loss": "actor.use_decoupled_loss",
    f"{_T}.max_token_len_per_mini_batch": "actor.mb_spec.max_tokens_per_mb",
    f"{_T}.dataset.name": "train_dataset.path",
    f"{_T}.dataset.subset": "train_dataset.name",
    f"{_T}.min_filter_prefix_tokens": "actor.shared_prefix_min_tokens",
    "rollout.n_generation": "gconfig.n_samples",
    "rollout.max_response_length": "gconfig.max_new_tokens",
    "rollout.sampling_config.temperature": "gconfig.temperature",
    "rollout.sampling_config.top_p": "gconfig.top_p",
    "rollout.sampling_config.repetition_penalty": "gconfig.repetition_penalty",
    "policy.model_name_or_path": "actor.path",
    "policy.model_gradient_checkpointing": "actor.gradient_checkpointing",
    "logging.project_name": "experiment_name",
    "logging.experiment_name": "trial_name",
    "train.ckpt.max_keep": "saver.keep_last",
    "train.ckpt.save_freq": "saver.freq_steps",
    "validation.freq": "evaluator.freq_steps",
    "validation.dataset.name": "valid_dataset.path",
    "validation.dataset.subset": "valid_dataset.name",
}
_LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
    "use_rslora": "rslora", "modules_to_save": "modules_to_save", "exclude_modules": "exclude_modules",
}  # fmt: skip
"""Options of adapters."""
_REWARDS = {"boxed_math": "math", "single_choice": "choice", "format": "format", "gsm8k": "gsm8k"}


def from_cosmos(values: Mapping[str, Any]) -> Draft:
    """The draft of a cosmos-rl file."""
    draft = Draft("cosmos-rl", dict(values))
    draft.set("experiment_name", draft.get("logging.project_name", "cosmos_rl"), "cosmos-rl: logging.project_name")
    draft.set("trial_name", draft.get("logging.experiment_name", "grpo"), "cosmos-rl: logging.experiment_name")
    _switches(draft)
    draft.keep_all(_SAME)
    _batches(draft)
    _loss(draft)
    _devices(draft)
    _rewards(draft)
    _dropped(draft)
    draft.defaults({"gconfig.n_samples": 16, "actor.gradient_checkpointing": True, "actor.optimizer.eps": 1e-6})
    if draft.options["actor.policy_loss"].value == "ppo":
        draft.defaults({"actor.c_clip": 3.0})
    draft.finish()
    return draft


def _switches(draft: Draft) -> None:
    """Keys whose value decides what they become."""
    if draft.get("train.ckpt.enable_checkpoint", False) is False:
        draft.drop("nothing is saved", "train.ckpt.*")
    draft.drop("saver.freq_steps does it", "train.ckpt.enable_checkpoint")
    if not draft.get("validation.enable", draft.get("train.enable_validation", False)):
        draft.drop("there is no evaluation", "validation.*", "train.enable_validation")
    draft.drop("evaluator.freq_steps does it", "validation.enable", "train.enable_validation")
    if draft.get("train.ckpt.max_keep", 5) == -1:
        draft.drop("all are kept", "train.ckpt.max_keep")
    draft.set("rollout.max_head_offpolicyness", draft.get(f"{_T}.allowed_outdated_steps", 4), "cosmos-rl: its default")
    if draft.get(f"{_T}.on_policy", False):
        keys = (f"{_T}.on_policy", f"{_T}.allowed_outdated_steps")
        draft.set("rollout.max_head_offpolicyness", 0, "cosmos-rl: on_policy", *keys)
    draft.drop("allowed_outdated_steps decides", f"{_T}.on_policy")
    if draft.get(f"{_T}.use_decoupled_loss", False):
        draft.keep(f"{_T}.behav_imp_weight_cap", "actor.behav_imp_weight_cap")
    draft.drop("the loss is not decoupled", f"{_T}.behav_imp_weight_cap")
    if draft.whole("rollout.sampling_config.top_k", -1, least=-1) > 0:
        draft.keep("rollout.sampling_config.top_k", "gconfig.top_k")
    draft.drop("all tokens, as here", "*.sampling_config.top_k")


def _batches(draft: Draft) -> None:
    group, replicas = (
        draft.whole("rollout.n_generation", 16),
        draft.whole("policy.parallelism.n_init_replicas", 1),
    )
    answers = draft.whole("train.train_batch_per_replica", 8) * replicas
    prompts = max(1, answers // group)
    why = f"cosmos-rl: train_batch_per_replica x {replicas} replicas = {answers} answers / {group} per prompt"
    draft.set("train_dataset.batch_size", prompts, why, "train.train_batch_per_replica")
    size = draft.whole(f"{_T}.batch_size_per_optimize", 0, least=0)
    count = minibatches(answers // replicas, size) if size else 1
    why = "cosmos-rl: train_batch_per_replica / batch_size_per_optimize"
    draft.set("actor.ppo_n_minibatches", count, why, f"{_T}.batch_size_per_optimize")
    longest = draft.whole("policy.model_max_length", 4096)
    draft.set("gconfig.max_tokens", longest, "cosmos-rl: policy.model_max_length", "policy.model_max_length")
    answer = draft.whole("rollout.max_response_length", 2048)
    draft.set("gconfig.max_new_tokens", answer, "cosmos-rl: rollout.max_response_length")
    micro = draft.whole(f"{_T}.mini_batch", 2)
    if f"{_T}.max_token_len_per_mini_batch" not in draft.notes:
        why = f"cosmos-rl: mini_batch of {micro} sequences of {longest} tokens"
        draft.set("actor.mb_spec.max_tokens_per_mb", micro * longest, why)
    draft.drop("micro-batches are filled by tokens", f"{_T}.mini_batch", f"{_T}.max_token_len_per_mini_batch")
    draft.drop("packed without padding", "train.sequence_packing", f"{_T}.balance_dp_token")
    draft.drop("a server batches the requests that it has", "rollout.batch_size")


def _loss(draft: Draft) -> None:
    variant = str(draft.get(f"{_T}.variant", "grpo"))
    draft.set("actor.policy_loss", "gspo" if variant == "gspo" else "ppo", "cosmos-rl: variant", f"{_T}.variant")
    if variant == "dapo":
        draft.set("rollout.should_accept_fn", "mixed_rewards", "cosmos-rl: variant dapo")
    plain = bool(draft.get(f"{_T}.unbiased_advantage", False))
    name = "dr_grpo" if plain else "grpo"
    draft.set("actor.adv_estimator", name, "cosmos-rl: unbiased_advantage", f"{_T}.unbiased_advantage")
    unbiased = draft.get(f"{_T}.unbiased_loss_max_tokens")
    if unbiased:
        draft.set("actor.loss_aggregation", "seq-mean-token-sum-norm", "cosmos-rl: unbiased_loss_max_tokens")
        draft.keep(f"{_T}.unbiased_loss_max_tokens", "actor.loss_scale_tokens")
        draft.drop("unbiased_loss_max_tokens decides", f"{_T}.loss_type")
    draft.keep(f"{_T}.loss_type", "actor.loss_aggregation")
    beta = draft.get(f"{_T}.kl_beta", 0.0)
    if beta:
        draft.keep(f"{_T}.kl_beta", "actor.kl_loss_coef")
        draft.set("ref.path", draft.get("policy.model_name_or_path"), "cosmos-rl: the initial policy")
        if draft.get(f"{_T}.reference_reset_interval"):
            draft.keep(f"{_T}.reference_reset_interval", "ref_reset_steps")
            draft.keep(f"{_T}.reset_optimizer_with_reference", "ref_reset_optimizer")
    draft.drop("there is no reference", f"{_T}.kl_beta", f"{_T}.reference_reset_*", f"{_T}.reset_optimizer_*")
    draft.set("actor.kl_ctl", 0.0, "cosmos-rl: the KL term is in the loss")
    if draft.get(f"{_T}.positive_nll_coef"):
        draft.keep(f"{_T}.positive_nll_coef", "actor.positive_nll_coef")
    draft.drop("it is switched off", f"{_T}.positive_nll_coef")
    if draft.get(f"{_T}.aipo_rho"):
        draft.set("actor.policy_loss", "aipo", "cosmos-rl: aipo_rho")
        draft.set("actor.aipo.truncation", "objective", "cosmos-rl: its form of AIPO")
        draft.keep(f"{_T}.aipo_rho", "actor.aipo.rho")
    schedule = draft.get("train.optm_decay_type")
    if schedule in (None, "linear", "cosine", "constant", "none"):
        kind = "constant" if schedule in (None, "none") else schedule
        draft.set("actor.optimizer.lr_scheduler_type", kind, "cosmos-rl: optm_decay_type", "train.optm_decay_type")
    warmup = draft.get("train.optm_warmup_steps", 0)
    if isinstance(warmup, float) and warmup <= 1:
        draft.keep("train.optm_warmup_steps", "actor.optimizer.warmup_steps_proportion")
    elif warmup and (total := draft.number("train.max_num_steps", 0)):
        warmup = draft.number("train.optm_warmup_steps", 0)
        why = f"cosmos-rl: optm_warmup_steps {warmup} / max_num_steps {total}"
        option = "actor.optimizer.warmup_steps_proportion"
        draft.set(option, warmup / total, why, "train.optm_warmup_steps")
    draft.lack("give actor.optimizer.warmup_steps_proportion", "train.optm_warmup_steps")
    for number, beta in enumerate(draft.listed("train.optm_betas"), start=1):
        draft.set(f"actor.optimizer.beta{number}", beta, "cosmos-rl: optm_betas", "train.optm_betas")
    ratio = draft.get("train.optm_min_lr_factor")
    if ratio is not None:
        draft.keep("train.optm_min_lr_factor", "actor.optimizer.min_lr_ratio")


def _devices(draft: Draft) -> None:
    def size(role: str, name: str) -> int:
        return max(1, draft.whole(f"{role}.parallelism.{name}", 1, least=-1))

    replicas, tensor = size("rollout", "n_init_replicas"), size("rollout", "tp_size")
    backend = str(draft.get("rollout.backend", "vllm"))
    server = backend if backend in ("vllm", "sglang") else "vllm"
    shards = size("policy", "dp_shard_size") * size("policy", "dp_replicate_size") * size("policy", "n_init_replicas")
    split, context = size("policy", "tp_size"), size("policy", "cp_size")
    gpus, batch = shards * split * context, int(draft.options["train_dataset.batch_size"].value)
    mode = allocation(server, replicas, tensor, gpus, batch, tensor=split, context=context)
    names = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size")
    keys = [f"{role}.parallelism.{name}" for role in ("policy", "rollout") for name in names]
    draft.set(
        "allocation_mode",
        mode,
        "cosmos-rl: parallelism of policy and rollout",
        *keys,
        "rollout.backend",
    )
    draft.lack(
        "choose p with megatron: in allocation_mode, or e with fsdp: (docs/train_engines.md)",
        "*.parallelism.pp_*",
        "*.parallelism.ep_*",
        off=(1, 0),
    )
    flags = {"gpu_memory_utilization": "gpu_memory_utilization" if server == "vllm" else "mem_fraction_static"}
    if server == "vllm":
        flags |= {"enable_chunked_prefill": "enable_chunked_prefill", "enforce_eager": "enforce_eager"}
    draft.server("rollout.", server, flags)
    names = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "n_init_replicas", "tp_method")
    draft.drop("parallel sizes of the model decide", *(f"*.parallelism.{name}" for name in names))


def _rewards(draft: Draft) -> None:
    key = f"{_T}.reward_function"
    values = [name for name in draft.values if name == key or name.startswith(f"{key}.")]
    given: Any = draft.get(key)
    weights = {name.removeprefix(f"{key}."): draft.values[name] for name in values if name != key}
    if isinstance(given, str):
        weights = {given: 1.0}
    elif isinstance(given, list):
        weights = dict.fromkeys(given, 1.0)
    known = {_REWARDS[name]: weight for name, weight in weights.items() if name in _REWARDS}
    used = [name for name in values if name == key or name.removeprefix(f"{key}.") in _REWARDS]
    if len(known) == 1 and len(weights) == 1:
        draft.set("reward_fn", next(iter(known)), "cosmos-rl: reward_function", *used)
    elif known:
        draft.set("reward.fns", known, "cosmos-rl: reward_function with weights", *used)
    else:
        draft.set("reward_fn", "math", "cosmos-rl: its reward function is unknown here: write one (docs/rewards.md)")
    draft.lack("write a reward function (docs/rewards.md)", *values, off=(None,))
    names = [name for name in draft.listed(f"{_T}.filter_reward_metric") if name]
    if names:
        chosen = [_REWARDS.get(str(name), name) for name in names]
        draft.set("reward.filter_on", chosen, "cosmos-rl: filter_reward_metric", f"{_T}.filter_reward_metric")
        draft.set("rollout.should_accept_fn", "mixed_rewards", "cosmos-rl: filter_reward_metric")
    draft.drop("no filter", f"{_T}.filter_reward_metric")
    if draft.get(f"{_T}.overlong_reward.enable_overlong_penalty", False):
        keys = [
            f"{_T}.overlong_reward.{name}" for name in ("enable_overlong_penalty", "buffer_length", "penalty_factor")
        ]
        options = ("overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor")
        for source, option in zip(keys, options, strict=True):
            draft.keep(source, f"actor.{option}")
    else:
        draft.drop("there is no penalty for long answers", f"{_T}.overlong_reward.*")


def _columns(draft: Draft) -> None:
    ours = {f"{_T}.prompt_column_name": "prompt", f"{_T}.response_column_name": "answer"}
    columns = {str(draft.get(key)): name for key, name in ours.items() if draft.get(key) not in (None, "", name)}
    if columns:
        keys = [key for key in ours if str(draft.get(key)) in columns]
        draft.set("train_dataset.columns", columns, "cosmos-rl: prompt_column_name, response_column_name", *keys)
    draft.drop("a column that is read as it is", *ours)
    draft.lack("write valid_dataset.columns", "validation.*_column_name")


def _dropped(draft: Draft) -> None:
    if "wandb" in draft.listed("logging.logger"):
        draft.set("stats_logger.wandb.mode", "online", "cosmos-rl: logging.logger", "logging.logger")
    names = ("logger", "report_mfu", "group_name", "entity")
    draft.drop("metrics.jsonl and the status line always exist", *(f"logging.{name}" for name in names))
    dtype = {"bfloat16": "bfloat16", "float32": "float32"}.get(str(draft.get("train.param_dtype")))
    if dtype:
        draft.set("actor.dtype", dtype, "cosmos-rl: train.param_dtype", "train.param_dtype")
    draft.drop(
        "kept in float32 by the optimiser", "train.master_dtype", "train.fsdp_reduce_dtype", "train.transfer_dtype"
    )
    draft.keep(f"{_T}.dataset.split", "train_dataset.split", convert=_first)
    draft.keep("validation.dataset.split", "valid_dataset.split", convert=_first)
    _columns(draft)
    draft.lack("split the file yourself, and set valid_dataset", "*.dataset.test_size")
    draft.keep(f"{_T}.dataset.revision", "train_dataset.revision")
    draft.keep("validation.dataset.revision", "valid_dataset.revision")
    draft.drop("always GRPO", f"{_T}.type", f"{_T}.rollout_as_token_ids", f"{_T}.max_retry_for_on_policy")
    draft.drop("how cosmos-rl's loader works", f"{_T}.dataloader_*", f"{_T}.enable_dataset_cache")
    draft.drop("requests are never held back by batches", f"{_T}.outdated_rollout_fetch_batch_size")
    draft.drop(
        "weights are published after every step", "train.sync_weight_interval", "train.*_timeout", "train.timestamp"
    )
    draft.lack(
        "low precision does not exist here", "train.fp8.*", "train.fp4.*", "rollout.quantization", off=(False, "none")
    )
    if not draft.get("train.fp8.enable_fp8", False):
        draft.drop("it is switched off", "train.fp8.*")
    if not draft.get("train.fp4.enable_fp4", False):
        draft.drop("it is switched off", "train.fp4.*")
    for name, option in _LORA.items():
        draft.keep(f"policy.lora.{name}", f"actor.lora.{option}")
    draft.lack("this option of adapters does not exist here", "policy.lora.*")
    if draft.get("train.resume") is not None:
        mode = "auto" if draft.get("train.resume") else "disabled"
        draft.set("recover.mode", mode, "cosmos-rl: train.resume", "train.resume")
    draft.drop("chosen by the model and the engine", "train.compile", "train.async_tp_enabled", "train.optm_impl")
    if str(draft.get("train.optm_name", "AdamW")).lower() in ("adam", "adamw"):
        draft.set("actor.optimizer.type", "adam", "cosmos-rl: optm_name", "train.optm_name")
    draft.drop("seeds follow from seed; workers from reward.workers", "rollout.seed", "train.deterministic")
    draft.drop("how cosmos-rl profiles", "profiler.*")
    draft.drop("how processes of cosmos-rl find each other", "redis*", "eth_ips")
    draft.drop("FSDP2 shards each block over all ranks", "train.fsdp_reshard_after_forward")
    draft.drop(
        "checkpoints are exported in Hugging Face format", "train.ckpt.export_safetensors", "train.ckpt.save_mode"
    )
    draft.lack("your own code reads it", "custom.*")
    draft.lack("upload the export yourself", "train.ckpt.upload_*", "train.ckpt.hf_repo_name", "train.ckpt.s3_*")


def _first(value: Any) -> Any:
    """One split; several are written with a plus sign, as `datasets` reads them."""
    return "+".join(value) if isinstance(value, list) else value
