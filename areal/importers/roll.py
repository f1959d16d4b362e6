"""Configurations of ROLL's RLVR pipeline."""

import re
from collections.abc import Mapping
from math import ceil, prod
from typing import Any

from areal.api.allocation import ParallelDims
from areal.api.config.lora import ALL_LINEAR
from areal.api.errors import ConfigError
from areal.importers.devices import Trainer, halves, megatron_trainer, set_devices
from areal.importers.draft import TENSORBOARD, Draft
from areal.importers.roll_defaults import is_agentic, name_defaults, with_defaults
from areal.importers.roll_loss import has_critic, take_advantages, take_loss, take_variant
from areal.importers.roll_optimizer import take_minibatches, take_optimizer
from areal.importers.roll_sampling import take_sampling

_SAME = {
    "exp_name": "trial_name",
    "seed": "seed",
    "output_dir": "cluster.fileroot",
    "num_gpus_per_node": "cluster.n_gpus_per_node",
    "prompt_length": "train_dataset.max_length",
    "pretrain": "actor.path",
    "ppo_epochs": "actor.ppo_epochs",
    "pg_clip": "actor.eps_clip",
    "pg_clip_low": "actor.eps_clip",
    "pg_clip_high": "actor.eps_clip_higher",
    "reward_clip": "actor.reward_clip",
    "entropy_loss_coef": "actor.entropy_coef",
    "loss_agg_mode": "actor.loss_aggregation",
    "gamma": "actor.discount",
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "actor_train.data_args.file_name": "train_dataset.path",
    "validation.data_args.file_name": "valid_dataset.path",
    "validation.generating_args.num_return_sequences": "evaluator.n_samples",
    "actor_infer.generating_args.temperature": "gconfig.temperature",
    "actor_infer.generating_args.top_p": "gconfig.top_p",
    "actor_infer.generating_args.repetition_penalty": "gconfig.repetition_penalty",
}
_OF_REWARDS = (
    "worker_cls", "tag_included", "world_size", "reward_type", "use_local", "name", "infer_batch_size",
    "data_args.template", "model_args.*", "strategy_args.*",
)  # fmt: skip
_COLUMNS = {"prompt": "prompt", "messages": "messages", "response": "answer"}
_REWARDS = {"math_rule": "math", "code_sandbox": "code"}
_WORKERS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}
"""Class of a reward worker -> reward function: a domain may have any name."""
_OTHERS = {
    "sft_train.": "supervised training",
    "chosen_key.": "DPO",
    "ipo.": "DPO",
    "student.": "distillation",
    "student_train.": "on-policy distillation",
}
"""Start of a key -> the pipeline that has it."""
_TRAIN = "actor_train.strategy_args.strategy_config"
_MAX_GPUS = 100_000
"""Entries of one range that are counted."""
_SERVERS = {"vllm": "vllm", "sglang": "sglang"}

_TRACKERS = {
    "wandb": ("wandb.mode", "online"),
    "swanlab": ("swanlab.mode", "cloud"),
    "tensorboard": ("tensorboard.path", TENSORBOARD),
}
"""Value of track_with -> option of stats_logger, and its value."""


def from_roll(values: Mapping[str, Any]) -> Draft:
    """The draft of a ROLL file, with ROLL's defaults where they differ from ours."""
    _refuse_others(values)
    draft = Draft("ROLL", with_defaults(values))
    project = draft.get("logger_project", draft.get("tracker_kwargs.project", "roll"))
    draft.set("experiment_name", project, "ROLL: the name of its project", "tracker_kwargs.project")
    take_sampling(draft)
    if draft.get("use_pg_clip_range", False):
        draft.drop("pg_clip_low and pg_clip_high are used", "use_pg_clip_range", "pg_clip")
    else:
        draft.drop("pg_clip is used", "use_pg_clip_range", "pg_clip_low", "pg_clip_high")
    draft.keep_all(_SAME)
    _length(draft)
    _batches(draft)
    take_loss(draft)
    take_variant(draft)
    take_advantages(draft)
    _devices(draft)
    _rewards(draft)
    _agents(draft)
    _dropped(draft)
    draft.finish()
    name_defaults(draft, values)
    return draft


def _refuse_others(values: Mapping[str, Any]) -> None:
    """Refuse the files of pipelines that are no reinforcement learning of a language model."""
    for start, kind in _OTHERS.items():
        key = next((key for key in values if f"{key}.".startswith(start)), None)
        if key is not None:
            message = f"ROLL files of {kind} ({key}) are not imported: write one (docs/choosing.md)"
            raise ConfigError(message, code="config.unsupported")
    strategy = "actor_train.strategy_args.strategy_name"
    if str(values.get(strategy)).startswith("diffusion"):
        raise ConfigError(f"ROLL files of diffusion models ({strategy}) are not imported", code="config.unsupported")


def _length(draft: Draft) -> None:
    epochs = "actor_train.training_args.num_train_epochs"
    if draft.whole("max_steps", 500, least=-1) > 0:
        draft.keep("max_steps", "total_train_steps")
        draft.drop("epochs follow from max_steps", epochs)
    else:
        why = "ROLL: num_train_epochs, as max_steps sets no number of steps"
        draft.set("total_train_epochs", max(1, ceil(draft.number(epochs, 1))), why, "max_steps", epochs)


def _batches(draft: Draft) -> None:
    ratio, option = draft.number("async_generation_ratio", 0), "rollout.max_head_offpolicyness"
    draft.set(option, ceil(ratio), "ROLL: async_generation_ratio, rounded up", "async_generation_ratio")
    if is_agentic(draft.values):  # rollout_batch_size counts trajectories
        group = draft.whole("train_env_manager.group_size", 1)
        prompts = max(1, draft.whole("rollout_batch_size", 128) // group)
        draft.set("train_dataset.batch_size", prompts, "ROLL: trajectories / group_size", "rollout_batch_size")
        draft.keep("train_env_manager.group_size", "gconfig.n_samples")
    else:
        prompts, group = draft.whole("rollout_batch_size", 128), draft.whole("num_return_sequences_in_group", 1)
        draft.keep("rollout_batch_size", "train_dataset.batch_size")
        draft.keep("num_return_sequences_in_group", "gconfig.n_samples")
    answers, steps = prompts * group, max(0, draft.whole("max_steps", 500, least=-1))
    ranks = _ranks(draft, "actor_train")
    count = take_minibatches(draft, "actor_train", "actor", answers=answers, ranks=ranks)
    trained = max(1, steps - draft.whole("critic_warmup", 0, least=0)) if steps and has_critic(draft) else steps
    updates = trained * count * draft.whole("ppo_epochs", 1)
    take_optimizer(draft, "actor_train", "actor", updates=updates)
    if has_critic(draft):
        of_critic = _ranks(draft, "critic") if draft.get("critic.device_mapping") is not None else ranks
        count = take_minibatches(draft, "critic", "critic", answers=answers, ranks=of_critic)
        draft.keep("critic_epochs", "critic.ppo_epochs")
        take_optimizer(draft, "critic", "critic", updates=steps * count * draft.whole("critic_epochs", 1))
    key, longest = "actor_train.max_tokens_per_microbatch_in_train", draft.options["gconfig.max_tokens"].value
    if draft.get("actor_train.use_dynamic_batching_in_train", False) and draft.get(key):
        draft.keep(key, "actor.mb_spec.max_tokens_per_mb")
    else:
        key = "actor_train.training_args.per_device_train_batch_size"
        why = f"ROLL: {(micro := draft.whole(key, 8))} sequences of {longest} tokens"
        draft.set("actor.mb_spec.max_tokens_per_mb", micro * longest, why, key)
    packing = ("use_sequence_packing", "use_remove_padding", "sequence_packing_args.*", "use_dynamic_batching_in_*",
               "max_tokens_per_microbatch_in_*", "sequence_length_round_in_*")  # fmt: skip
    draft.drop("micro-batches are filled by tokens, without padding", *(f"*.{name}" for name in packing))
    draft.drop("micro-batches are filled by tokens", "*.infer_batch_size", "*per_device_train_batch_size")
    draft.drop("gradients are accumulated over a mini-batch", "*.gradient_accumulation_steps")


def _devices_of(draft: Draft, role: str) -> set[int]:
    """The GPUs of `list(range(0,16))`, or of a list."""
    given = draft.get(f"{role}.device_mapping", [0])
    if isinstance(given, list):
        return {int(place) for place in given if isinstance(place, int)} or {0}
    ranges = [(int(first or 0), int(end)) for first, end in re.findall(r"range\((?:(\d+),)?\s*(\d+)\)", str(given))]
    found = {place for first, end in ranges for place in range(first, min(end, first + _MAX_GPUS))}
    if re.fullmatch(r"\[[\d,\s]+\]", str(given)):
        found = set(map(int, re.findall(r"\d+", str(given))))
    if not found:
        message = (
            f"{role}.device_mapping: {given!r} is no list of GPUs: give {role}.device_mapping=[0,1,...] after the file"
        )
        raise ConfigError(message, code="config.wrong_type")
    return found


def _ranks(draft: Draft, role: str) -> int:
    """Data ranks of a trained role."""
    prefix = f"{role}.strategy_args.strategy_config."
    if draft.get(f"{role}.strategy_args.strategy_name") == "megatron_train":
        sizes = [
            f"{prefix}{name}_size" for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        ]
    else:
        sizes = [f"{role}.model_args.ulysses_size"]
    return max(1, len(_devices_of(draft, role)) // prod(draft.whole(size, 1) for size in sizes))


def _trainer(draft: Draft) -> Trainer:
    if draft.get("actor_train.strategy_args.strategy_name") == "megatron_train" and not _has_adapters(draft):
        return megatron_trainer(draft, f"{_TRAIN}.")
    ulysses = max(1, draft.whole("actor_train.model_args.ulysses_size", 1))
    return Trainer(sizes=ParallelDims(cp=ulysses))


def _has_adapters(draft: Draft) -> bool:
    """ROLL trains adapters if they have modules; a rank alone has no effect."""
    return bool(draft.get("actor_train.model_args.lora_target"))


def _devices(draft: Draft) -> None:
    strategy = str(draft.get("actor_infer.strategy_args.strategy_name", "vllm"))
    server, config = _SERVERS.get(strategy, "native"), "actor_infer.strategy_args.strategy_config"
    size = draft.whole(f"{config}.tensor_parallel_size", draft.whole("actor_infer.num_gpus_per_worker", 1))
    trained, served = _devices_of(draft, "actor_train"), _devices_of(draft, "actor_infer")
    trainer, is_shared = _trainer(draft), bool(trained & served)
    parts = max(1, len(served) // size), size, len(trained)
    if is_shared:
        parts = halves(len(trained | served), size, trainer)
    shared = "shared by both roles, here about half for each" if is_shared else "as in the file"
    keys = [f"{role}.device_mapping" for role in ("actor_train", "actor_infer")]
    keys += ["actor_infer.num_gpus_per_worker", "actor_infer.strategy_args.strategy_name"]
    keys += ["actor_train.strategy_args.strategy_name"]
    keys += [f"{config}.tensor_parallel_size", "actor_train.model_args.ulysses_size"]
    if trainer.backend == "megatron":
        keys += [key for key in draft.values if key.startswith(f"{_TRAIN}.") and key.endswith("parallel_size")]
    per_node = draft.whole("num_gpus_per_node", 8)
    set_devices(draft, server, parts, trainer, f"ROLL: device_mapping, {shared}", keys, per_node=per_node)
    draft.drop("one machine has the GPUs of device_mapping, from which ROLL computes it too", "num_nodes")
    draft.drop("the servers load the policy, then get its weights", f"{config}.load_format")
    if server != "native":
        draft.server(f"{config}.", server)
    draft.drop("all models of a trainer are divided like the actor", "*.ulysses_size")
    draft.keep(f"{_TRAIN}.offload_policy", "actor.fsdp.offload_params")
    draft.keep(f"{_TRAIN}.reshard_after_forward", "actor.fsdp.reshard_after_forward")
    draft.drop("FSDP2 shards each block", f"{_TRAIN}.fsdp_size", f"{_TRAIN}.*_dtype")
    sizes = [f"{_TRAIN}.{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert", "virtual_pipeline")]
    draft.lack(
        "choose sizes for megatron: or fsdp: in allocation_mode (docs/train_engines.md)",
        *sizes,
        f"{_TRAIN}.context_parallel_size",
        off=(1,),
    )
    draft.drop("it follows from the tensor size", f"{_TRAIN}.sequence_parallel")
    draft.drop("the data type is that of model_args", f"{_TRAIN}.bf16")
    draft.lack("choose options of actor.megatron, or leave them out", f"{_TRAIN}.*")
    draft.drop(
        "placement of other roles",
        *("*.device_mapping", "*.num_gpus_per_worker", "*.strategy_args.strategy_name", "*.world_size"),
        *("reference.strategy_args.*", "critic.strategy_args.*", "rewards.*.strategy_args.*"),
    )


def _rewards(draft: Draft) -> None:
    """ROLL chooses the reward function of a row by its column `tag`."""
    names = sorted({key.split(".")[1] for key in draft.values if key.startswith("rewards.")})
    workers = {name: str(draft.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2] for name in names}
    functions = {name: _WORKERS.get(workers[name]) or _REWARDS.get(name) for name in names}
    known = {name: function for name, function in functions.items() if function is not None}
    tags = {name: [str(tag) for tag in draft.listed(f"rewards.{name}.tag_included")] for name in known}
    if len(names) == 1 and known:
        draft.set("reward_fn", known[names[0]], f"ROLL: rewards.{names[0]}")
    elif any(tags.values()):
        for name, function in known.items():
            for tag in tags[name]:
                draft.set(f"reward.by_source.{tag}", {function: 1.0}, f"ROLL: rewards.{name}.tag_included")
        draft.set("reward.source_key", "tag", "ROLL: its column of sources")
    elif names or not is_agentic(draft.values):  # the environments of an agentic file reward
        function = next(iter(known.values()), "math")
        draft.set("reward_fn", function, f"ROLL: rewards {', '.join(names)}: check it (docs/rewards.md)")
    for name in names:
        if name in known and (tags[name] or "reward.source_key" not in draft.options):
            keys = [f"rewards.{name}.{key}" for key in _OF_REWARDS]
            draft.drop(f"the reward function {known[name]}", *keys)
        draft.lack("write a reward function (docs/rewards.md)", f"rewards.{name}.*", off=(None,))


def _columns(draft: Draft, role: str, section: str) -> None:
    """Names of columns. A row of the rule for mathematics has its answer in `ground_truth`."""
    keys = [f"{role}.data_args.{name}" for name in _COLUMNS]
    names = {key: draft.get(key) for key in keys if isinstance(draft.get(key), str)}
    columns = {str(name): _COLUMNS[key.rpartition(".")[2]] for key, name in names.items()}
    columns = {name: ours for name, ours in columns.items() if name not in ("", ours)}
    if any(key.startswith("rewards.math_rule.") for key in draft.values) and "answer" not in columns.values():
        columns["ground_truth"] = "answer"
    if columns:
        own = (key for key in keys if names.get(key) in columns)
        draft.set(f"{section}.columns", columns, f"ROLL: {role}.data_args", *own)
    draft.drop("a column that is read as it is", *keys)


def _adapters(draft: Draft) -> None:
    args = "actor_train.model_args"
    for name in ("rank", "alpha", "dropout"):
        draft.keep(f"{args}.lora_{name}", f"actor.lora.{name}")
    draft.keep(f"{args}.lora_target", "actor.lora.target_modules", convert=_modules)
    rank = draft.whole(f"{args}.lora_rank", 8)
    draft.defaults({"actor.lora.rank": rank, "actor.lora.alpha": 2 * rank})


def _modules(value: Any) -> Any:
    """Modules of adapters: all, names with commas, or a regular expression."""
    if not isinstance(value, str) or any(sign in value for sign in "*$|("):
        return value
    return ALL_LINEAR if value == "all" else [name.strip() for name in value.split(",")]


def _agents(draft: Draft) -> None:
    draft.lack("write workflow: agent, or a workflow, and a dataset of its tasks (docs/agents.md)",
               "train_env_manager.*", "val_env_manager.*", "custom_envs.*", "env_manager_cls", "max_actions_per_traj",
               "agent_config*", "max_tokens_per_step", "parse_tool_call_*", "skip_mock_*", "reward_normalization.*",
               "batch_adjust_mode", "step_reward_gamma",
               off=(None,))  # fmt: skip
    draft.lack("add a section teacher (docs/algorithms.md)", "use_opd", "opd_*", "teacher.*", off=(None, False))


def _dropped(draft: Draft) -> None:
    template = draft.get("global_template", draft.get("actor_train.data_args.template", "native"))
    if template in ("native", "qwen2_5", "qwen3", "qwen2-vl"):
        draft.drop("the chat template of the tokenizer", "*.data_args.template", "global_template")
    draft.lack("the chat template of the tokenizer is used", "*.data_args.template", "global_template")
    if draft.whole("save_steps", 0, least=-1) > 0:
        draft.keep("save_steps", "saver.freq_steps")
    draft.drop("no interval: only the last step is exported", "save_steps")
    if draft.whole("max_ckpt_to_keep", 0, least=0) > 0:
        draft.keep("max_ckpt_to_keep", "saver.keep_last")
    draft.drop("all exports are kept", "max_ckpt_to_keep")
    _columns(draft, "actor_train", "train_dataset")
    if "valid_dataset.path" in draft.options:
        _columns(draft, "validation", "valid_dataset")
    draft.drop("the columns of actor_train and validation count", *(f"*.data_args.{name}" for name in _COLUMNS))
    if sum(".domain_interleave_probs." in key for key in draft.values) == 1:
        draft.drop("all rows are of this domain", "*.domain_interleave_probs.*", "*.interleave_probs")
    weights = ("*.domain_interleave_probs.*", "*.interleave_probs")
    draft.lack("weights: one path and one weight for each dataset", *weights, off=(None,))
    draft.lack("write actor.freeze, names of weights (needs fsdp)", "actor_train.model_args.freeze_module_prefix")
    draft.drop("a frozen model, or one with the weights of the actor", "*.model_args.freeze_module_prefix")
    draft.drop("an answer has all of its tokens, those of a stop string too", "*.include_stop_str_in_output")
    draft.drop("answers are written to samples/, calls have the limits of launcher", "rollout_dump_dir", "rpc_timeout")
    draft.drop("answers are evaluated as servers have room", "val_batch_size")
    if str(draft.get("actor_train.worker_cls")).rpartition(".")[2] in ("ActorWorker", "ActorPGWorker"):
        draft.drop("the loss is that of pg_variant", "actor_train.worker_cls")
    draft.lack("choose actor.policy_loss (docs/algorithms.md)", "actor_train.worker_cls")
    draft.keep("actor_train.data_args.cache_dir", "train_dataset.cache_dir")
    draft.drop("how ROLL's loader works", "*.data_args.preprocessing_num_workers", "*.data_args.dataset_dir",
               "*.data_args.overwrite_cache")  # fmt: skip
    tracker = str(draft.get("track_with", "none"))
    if tracker in _TRACKERS:
        option, value = _TRACKERS[tracker]
        draft.set(f"stats_logger.{option}", value, "ROLL: track_with", "track_with")
    elif tracker not in ("none", "None", "stdout"):
        draft.lack("there is no such tracker here (docs/reading_metrics.md)", "track_with")
    draft.drop("names and keys of a tracker are in its own variables", "tracker_kwargs.*", "track_with", "logging_*")
    if isinstance(resume := draft.get("resume_from_checkpoint"), bool):
        why = "ROLL: resume_from_checkpoint"
        draft.set("recover.mode", "auto" if resume else "disabled", why, "resume_from_checkpoint")
    draft.lack("actor.path: the folder of exported weights", "resume_from_checkpoint")
    draft.drop("checkpoints are in the run's folder, exports in Hugging Face format", "checkpoint_config.*")
    draft.drop("options of Hydra itself", "hydra.*")
    if _has_adapters(draft):
        _adapters(draft)
    draft.drop("there are no adapters, or those of actor_train", "*.model_args.lora_*", "lora_*")
    names = ("device_map", "attn_implementation", "dtype", "model_type", "disable_gradient_checkpointing", "flash_attn")
    draft.drop("models have the attention and dtype of their role", *(f"*.model_args.{name}" for name in names))
    draft.drop("the environment of processes is in launcher", "model_name", "*system_envs.*")
    draft.drop("rejected groups are replaced while the run lasts", "is_use_additional_prompts", "max_running_requests")
    draft.drop("the sizes of a queue follow from the staleness", "is_num_return_sequences_expand", "generate_opt_level")
    draft.drop("eval_steps decides", "validation.eval_steps")
    draft.drop("the data type is that of model_args", "*.training_args.bf16")
    draft.drop("max_steps of the run counts", "*.training_args.max_steps")
    draft.drop("servers get the weights over their own channel", "model_update_buffer_size_mb", "transfer_backend.*")
    draft.drop("the loss needs them or not", "enable_reference", "*enable_old_logprobs_recompute")
