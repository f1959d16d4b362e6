"""What GRPO and supervised training of cosmos-rl share. `role`: the section of the model, actor or model."""

from typing import Any

from areal.api.allocation import ParallelDims
from areal.importers.cosmos_optimizer import take_optimizer
from areal.importers.devices import Trainer
from areal.importers.draft import TENSORBOARD, Draft

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
    "validation.val_before_train": "evaluator.eval_before_train",
    "validation.dataset.name": "valid_dataset.path",
    "validation.dataset.subset": "valid_dataset.name",
    "validation.dataset.revision": "valid_dataset.revision",
}
_OF_MODEL = {
    "train.optm_weight_decay": "optimizer.weight_decay",
    "train.epsilon": "optimizer.eps",
    "train.fsdp_offload": "fsdp.offload_params",
    "policy.model_name_or_path": "path",
    "policy.model_gradient_checkpointing": "gradient_checkpointing",
    "policy.freeze_pattern": "freeze",
    "policy.aux_loss_coeff": "router_aux_loss_coef",
}
_LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
    "use_rslora": "rslora", "modules_to_save": "modules_to_save", "exclude_modules": "exclude_modules",
    "lora_path": "path",
}  # fmt: skip
"""Options of adapters."""
_SIZES = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size", "pp_size", "ep_size")
_OF_SYNC = ("sync_weight_interval", "*_timeout", "timestamp", "p2p_sync_*", "p2r_sync_*", "coalesce_weight_sync")


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
    keys = ("train.fp8.*", "train.fp4.*", "rollout.quantization")
    draft.lack("low precision does not exist here", *keys, off=(False, "none"))


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
    own = [] if unknown else ["logging.logger"]
    for name, option, value in (("wandb", "wandb.mode", "online"), ("tensorboard", "tensorboard.path", TENSORBOARD)):
        if name in names:
            draft.set(f"stats_logger.{option}", value, "cosmos-rl: logging.logger", *own)
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
    """Data ranks of one replica of the policy."""
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
