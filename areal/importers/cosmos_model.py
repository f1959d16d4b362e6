"""What GRPO and supervised training of cosmos-rl share. `role`: the section of the model, actor or model."""

from typing import Any

from areal.api.allocation import ParallelDims
from areal.importers.devices import Trainer
from areal.importers.draft import Draft

POLICY = "train.train_policy"
_SAME = {
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
    "validation.dataset.name": "valid_dataset.path",
    "validation.dataset.subset": "valid_dataset.name",
    "validation.dataset.revision": "valid_dataset.revision",
}
_OF_MODEL = {
    "train.optm_weight_decay": "optimizer.weight_decay",
    "train.optm_grad_norm_clip": "optimizer.gradient_clipping",
    "train.optm_min_lr_factor": "optimizer.min_lr_ratio",
    "train.epsilon": "optimizer.eps",
    "train.fsdp_offload": "fsdp.offload_params",
    f"{POLICY}.max_token_len_per_mini_batch": "mb_spec.max_tokens_per_mb",
    "policy.model_name_or_path": "path",
    "policy.model_gradient_checkpointing": "gradient_checkpointing",
}
_LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
    "use_rslora": "rslora", "modules_to_save": "modules_to_save", "exclude_modules": "exclude_modules",
}  # fmt: skip
"""Options of adapters."""
_SIZES = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size", "pp_size", "ep_size")


def take_shared(draft: Draft, role: str) -> None:
    """Everything but batches, losses, servers and devices."""
    project, run = draft.get("logging.project_name", "cosmos_rl"), draft.get("logging.experiment_name", "None")
    name = str(draft.get(f"{POLICY}.type", "grpo")) if run == "None" else run
    draft.set("experiment_name", project, "cosmos-rl: logging.project_name", "logging.project_name")
    draft.set("trial_name", name, "cosmos-rl: logging.experiment_name", "logging.experiment_name")
    _switches(draft)
    draft.keep_all(_SAME)
    draft.keep_all({key: f"{role}.{option}" for key, option in _OF_MODEL.items()})
    for key, section in ((POLICY, "train_dataset"), ("validation", "valid_dataset")):
        for split in ("split", "train_split"):
            draft.keep(f"{key}.dataset.{split}", f"{section}.split", convert=_joined)
    _optimizer(draft, role)
    _logging(draft)
    _dropped(draft, role)
    draft.defaults({f"{role}.gradient_checkpointing": True, f"{role}.optimizer.eps": 1e-6})


def _switches(draft: Draft) -> None:
    if draft.get("train.ckpt.enable_checkpoint", False) is False:
        draft.drop("nothing is saved", "train.ckpt.*")
    else:
        draft.defaults({"saver.keep_last": 5})
        if draft.whole("train.ckpt.save_freq_in_epoch", 0, least=-1) > 0:
            draft.keep("train.ckpt.save_freq_in_epoch", "saver.freq_epochs")
            draft.drop("save_freq_in_epoch replaces it", "train.ckpt.save_freq")
        else:
            draft.defaults({"saver.freq_steps": 20})
    draft.drop("the section saver does it", "train.ckpt.enable_checkpoint", "train.ckpt.save_freq_in_epoch")
    if not draft.get("validation.enable", draft.get("train.enable_validation", False)):
        draft.drop("there is no evaluation", "validation.*", "train.enable_validation", "train.validation_step")
    elif draft.get("validation.dataset.name"):
        draft.defaults({"evaluator.freq_steps": 20})
    draft.drop("evaluator.freq_steps does it", "validation.enable", "train.enable_validation")
    if draft.get("train.ckpt.max_keep", 5) == -1:
        draft.options.pop("saver.keep_last", None)
        draft.drop("all are kept", "train.ckpt.max_keep")


def _optimizer(draft: Draft, role: str) -> None:
    rate = draft.get("train.optm_lr")
    rates: list[Any] = rate if isinstance(rate, list) else [rate]
    if rate is not None and len(set(map(str, rates))) == 1:
        draft.set(f"{role}.optimizer.lr", rates[0], "cosmos-rl: train.optm_lr", "train.optm_lr")
    draft.lack(f"give {role}.optimizer.lr, and lr_of for parts of the model", "train.optm_lr")
    schedule = draft.get("train.optm_decay_type")
    if schedule in (None, "linear", "cosine", "constant", "none"):
        kind = "constant" if schedule in (None, "none") else schedule
        draft.set(f"{role}.optimizer.lr_scheduler_type", kind, "cosmos-rl: optm_decay_type", "train.optm_decay_type")
    draft.lack("schedules are constant, linear and cosine", "train.optm_decay_type")
    if draft.get("train.optm_decay_ratio") in (None, 1.0):
        draft.drop("the schedule lasts until the end", "train.optm_decay_ratio")
    draft.lack("the schedule lasts until the end", "train.optm_decay_ratio")
    warmup, option = draft.get("train.optm_warmup_steps", 0), f"{role}.optimizer.warmup_steps_proportion"
    if isinstance(warmup, float) and warmup <= 1:
        draft.keep("train.optm_warmup_steps", option)
    elif warmup and (total := draft.number("train.max_num_steps", 0)):
        warmup = draft.number("train.optm_warmup_steps", 0)
        why = f"cosmos-rl: optm_warmup_steps {warmup} / max_num_steps {total}"
        draft.set(option, warmup / total, why, "train.optm_warmup_steps")
    draft.lack(f"give {option}: the length of the run is not known", "train.optm_warmup_steps")
    for number, beta in enumerate(draft.listed("train.optm_betas"), start=1):
        draft.set(f"{role}.optimizer.beta{number}", beta, "cosmos-rl: optm_betas", "train.optm_betas")
    if str(draft.get("train.optm_name", "AdamW")).lower() in ("adam", "adamw"):
        draft.set(f"{role}.optimizer.type", "adam", "cosmos-rl: optm_name", "train.optm_name")


def _logging(draft: Draft) -> None:
    if "wandb" in draft.listed("logging.logger"):
        draft.set("stats_logger.wandb.mode", "online", "cosmos-rl: logging.logger", "logging.logger")
    names = ("logger", "report_mfu", "group_name", "entity")
    draft.drop("metrics.jsonl and the status line always exist", *(f"logging.{name}" for name in names))


def _dropped(draft: Draft, role: str) -> None:
    dtype = {"bfloat16": "bfloat16", "float32": "float32"}.get(str(draft.get("train.param_dtype")))
    if dtype:
        draft.set(f"{role}.dtype", dtype, "cosmos-rl: train.param_dtype", "train.param_dtype")
    draft.drop(
        "kept in float32 by the optimiser", "train.master_dtype", "train.fsdp_reduce_dtype", "train.transfer_dtype"
    )
    draft.lack('give train_dataset.split "train[:95%]" and valid_dataset with the rest', "*.dataset.test_size")
    draft.lack("train_dataset.path may be a folder", "*.dataset.local_dir")
    draft.drop("how cosmos-rl's loader works", f"{POLICY}.dataloader_*", f"{POLICY}.enable_dataset_cache")
    draft.drop(
        "weights are published after every step", "train.sync_weight_interval", "train.*_timeout", "train.timestamp"
    )
    for kind in ("fp8", "fp4"):
        if not draft.get(f"train.{kind}.enable_{kind}", False):
            draft.drop("it is switched off", f"train.{kind}.*")
    draft.lack(
        "low precision does not exist here", "train.fp8.*", "train.fp4.*", "rollout.quantization", off=(False, "none")
    )
    for name, option in _LORA.items():
        draft.keep(f"policy.lora.{name}", f"{role}.lora.{option}")
    draft.lack("this option of adapters does not exist here", "policy.lora.*")
    if draft.get("train.resume") is not None:
        mode = "auto" if draft.get("train.resume") else "disabled"
        draft.set("recover.mode", mode, "cosmos-rl: train.resume", "train.resume")
    draft.drop("chosen by the model and the engine", "train.compile", "train.async_tp_enabled", "train.optm_impl")
    draft.drop("seeds follow from seed; workers from reward.workers", "rollout.seed", "train.deterministic")
    draft.drop("how cosmos-rl profiles", "profiler.*")
    draft.drop("how processes of cosmos-rl find each other", "redis*", "eth_ips")
    draft.drop("FSDP2 shards each block over all ranks", "train.fsdp_reshard_after_forward")
    draft.drop(
        "checkpoints are exported in Hugging Face format", "train.ckpt.export_safetensors", "train.ckpt.save_mode"
    )
    draft.drop("packed without padding", "train.sequence_packing", f"{POLICY}.balance_dp_token")
    draft.lack("your own code reads it", "custom.*")
    draft.lack("upload the export yourself", "train.ckpt.upload_*", "train.ckpt.hf_repo_name", "train.ckpt.s3_*")


def trainer_of(draft: Draft) -> tuple[Trainer, int, list[str]]:
    """The trainer, the number of its GPUs, and the keys that decide both. With adapters there are no stages."""

    def size(name: str) -> int:
        return max(1, draft.whole(f"policy.parallelism.{name}", 1, least=-1))

    stages, keys = size("pp_size"), [f"policy.parallelism.{name}" for name in _SIZES]
    sizes = ParallelDims(tp=size("tp_size"), cp=size("cp_size"), pp=stages, ep=size("ep_size"))
    gpus = size("dp_shard_size") * size("dp_replicate_size") * size("n_init_replicas") * sizes.world_size
    if draft.get("policy.parallelism.dp_shard_size") == -1:
        keys.remove("policy.parallelism.dp_shard_size")
        draft.lack(
            "multiply d in allocation_mode: -1 is all GPUs of the launch", "policy.parallelism.dp_shard_size", off=()
        )
    if stages > 1 and draft.get("policy.lora.r"):
        sizes, stages = ParallelDims(tp=sizes.tp, cp=sizes.cp, ep=sizes.ep), 1
        keys.remove("policy.parallelism.pp_size")
        draft.lack("adapters have no stages; its GPUs are data ranks", "policy.parallelism.pp_size")
    draft.drop("the engine chooses them", "*.parallelism.pp_*", "*.parallelism.cp_rotate_method", "*.tp_method")
    return Trainer(backend="fsdp" if stages == 1 else "megatron", sizes=sizes), gpus, keys


def _joined(value: Any) -> Any:
    """One split; several are written with a plus sign, as `datasets` reads them."""
    return "+".join(value) if isinstance(value, list) else value
