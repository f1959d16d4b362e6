"""Configurations of ROLL's RLVR pipeline."""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from areal.api.allocation import ParallelDims
from areal.api.errors import ConfigError
from areal.importers.devices import Trainer, halves, megatron_trainer, set_devices
from areal.importers.draft import Draft
from areal.importers.roll_loss import has_critic, take_advantages, take_loss, take_variant

_SAME = {
    "exp_name": "trial_name",
    "seed": "seed",
    "max_steps": "total_train_steps",
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
    "lambd": "actor.gae_lambda",
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "actor_train.training_args.learning_rate": "actor.optimizer.lr",
    "actor_train.training_args.weight_decay": "actor.optimizer.weight_decay",
    "actor_train.training_args.warmup_ratio": "actor.optimizer.warmup_steps_proportion",
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
_TRAIN = "actor_train.strategy_args.strategy_config"
_MAX_GPUS = 100_000
"""Entries of one range that are counted."""
_SERVERS = {"vllm": "vllm", "sglang": "sglang"}


def from_roll(values: Mapping[str, Any]) -> Draft:
    """The draft of a ROLL file."""
    draft = Draft("ROLL", dict(values))
    project = draft.get("logger_project", draft.get("tracker_kwargs.project", "roll"))
    draft.set("experiment_name", project, "ROLL: the name of its project", "tracker_kwargs.project")
    _sampling(draft)
    if draft.get("use_pg_clip_range", False):
        draft.drop("pg_clip_low and pg_clip_high are used", "use_pg_clip_range", "pg_clip")
    else:
        draft.drop("pg_clip is used", "use_pg_clip_range", "pg_clip_low", "pg_clip_high")
    draft.keep_all(_SAME)
    _batches(draft)
    take_loss(draft)
    take_variant(draft)
    take_advantages(draft)
    _devices(draft)
    _rewards(draft)
    _dropped(draft)
    draft.finish()
    return draft


def _sampling(draft: Draft) -> None:
    prompt = draft.whole("prompt_length", 1024)
    own = "actor_infer.generating_args.max_new_tokens"
    answer = draft.whole("response_length" if draft.get("response_length") is not None else own, 1024)
    longest, why = prompt + answer, "ROLL: prompt_length + response_length"
    if draft.get("sequence_length"):
        longest, why = draft.whole("sequence_length", longest), "ROLL: sequence_length"
    else:
        draft.defaults({"train_dataset.max_length": prompt})
    draft.set("gconfig.max_tokens", longest, why, "sequence_length")
    draft.keep("response_length", "gconfig.max_new_tokens")
    draft.set("gconfig.max_new_tokens", answer, "ROLL: response_length, else max_new_tokens", own)
    if draft.whole("actor_infer.generating_args.top_k", -1, least=-1) > 0:
        draft.keep("actor_infer.generating_args.top_k", "gconfig.top_k")
    draft.drop("set by num_return_sequences_in_group", "actor_infer.generating_args.num_return_sequences")
    if "validation.data_args.file_name" in draft.values:
        for name in ("temperature", "top_p"):
            draft.keep(f"validation.generating_args.{name}", f"eval_gconfig.{name}")
        if draft.whole("validation.generating_args.top_k", -1, least=-1) > 0:
            draft.keep("validation.generating_args.top_k", "eval_gconfig.top_k")
        if any(option.startswith("eval_gconfig.") for option in draft.options):
            draft.set("eval_gconfig.max_new_tokens", answer, "ROLL: response_length")
            draft.set("eval_gconfig.max_tokens", longest, why)
        draft.drop("the limit of training counts", "validation.generating_args.max_new_tokens")
    else:
        draft.drop("there is no held-out set", "validation.*")
    roles = ("actor_infer", "validation")
    draft.drop("all tokens, or one beam, as here", *(f"{role}.generating_args.top_k" for role in roles))
    beams = [f"{role}.generating_args.num_beams" for role in roles]
    draft.lack("there is no beam search", *beams, off=(1,))
    stops = "actor_infer.generating_args.stop_strings"
    if draft.get(stops):
        draft.set("gconfig.stop", draft.listed(stops), "ROLL: stop_strings", stops)


def _batches(draft: Draft) -> None:
    ratio, option = draft.number("async_generation_ratio", 0), "rollout.max_head_offpolicyness"
    draft.set(option, ceil(ratio), "ROLL: async_generation_ratio, rounded up", "async_generation_ratio")
    if "train_env_manager.group_size" in draft.values:  # whose rollout_batch_size counts trajectories
        group = draft.whole("train_env_manager.group_size", 1)
        prompts = max(1, draft.whole("rollout_batch_size", 64) // group)
        draft.set("train_dataset.batch_size", prompts, "ROLL: trajectories / group_size", "rollout_batch_size")
        draft.keep("train_env_manager.group_size", "gconfig.n_samples")
    else:
        prompts, group = draft.whole("rollout_batch_size", 64), draft.whole("num_return_sequences_in_group", 1)
        draft.keep("rollout_batch_size", "train_dataset.batch_size")
        draft.keep("num_return_sequences_in_group", "gconfig.n_samples")
        draft.defaults({"train_dataset.batch_size": prompts})
    args = "actor_train.training_args"
    micro, steps = (
        draft.whole(f"{args}.per_device_train_batch_size", 1),
        draft.whole(f"{args}.gradient_accumulation_steps", 1),
    )
    sizes = _trainer(draft).sizes
    ranks = len(_devices_of(draft, "actor_train")) // sizes.world_size or 1
    size = micro * steps * ranks
    count = max(1, prompts * group // size)
    why = f"ROLL: {prompts} x {group} answers / global batch of {size}"
    draft.set("actor.ppo_n_minibatches", count, why, f"{args}.gradient_accumulation_steps")
    tokens = micro * draft.options["gconfig.max_tokens"].value
    why = f"ROLL: {micro} sequences of {draft.options['gconfig.max_tokens'].value} tokens"
    draft.set("actor.mb_spec.max_tokens_per_mb", tokens, why, f"{args}.per_device_train_batch_size")
    total, warmup = draft.number("max_steps", 0), draft.number(f"{args}.warmup_steps", -1, least=-1)
    if total and warmup >= 0:
        option = "actor.optimizer.warmup_steps_proportion"
        draft.set(option, warmup / total, f"ROLL: warmup_steps {warmup} / max_steps {total}", f"{args}.warmup_steps")
    for role, section in (("actor_train", "actor"), ("critic", "critic")):
        key = f"{role}.training_args.lr_scheduler_type"
        if draft.get(key) in ("constant", "linear", "cosine") and (role == "actor_train" or has_critic(draft)):
            draft.keep(key, f"{section}.optimizer.lr_scheduler_type")
    draft.lack("schedules are constant, linear and cosine", "actor_train.training_args.lr_scheduler_type")
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


def _trainer(draft: Draft) -> Trainer:
    if draft.get("actor_train.strategy_args.strategy_name") == "megatron_train" and not _has_adapters(draft):
        return megatron_trainer(draft, f"{_TRAIN}.")
    ulysses = max(1, draft.whole("actor_train.model_args.ulysses_size", 1))
    return Trainer(sizes=ParallelDims(cp=ulysses))


def _has_adapters(draft: Draft) -> bool:
    return draft.whole("actor_train.model_args.lora_rank", 0, least=0) > 0


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
    else:
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


def _listed(value: Any) -> Any:
    """Names of modules as a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _dropped(draft: Draft) -> None:
    if str(draft.get("actor_train.data_args.template", "native")) in ("native", "qwen2_5", "qwen3", "qwen2-vl"):
        draft.drop("the chat template of the tokenizer", "*.data_args.template")
    draft.lack("the chat template of the tokenizer is used", "*.data_args.template")
    for key, option in (("save_steps", "saver.freq_steps"), ("eval_steps", "evaluator.freq_steps")):
        if draft.whole(key, 0, least=-1) > 0:
            draft.keep(key, option)
    draft.drop("never", "save_steps", "eval_steps")
    draft.lack("write workflow: agent, or a workflow, and a dataset of its tasks (docs/agents.md)",
               "train_env_manager.*", "val_env_manager.*", "custom_envs.*", "env_manager_cls", "max_actions_per_traj",
               "agent_config*", "max_tokens_per_step", "parse_tool_call_*", "skip_mock_*", "reward_normalization.*",
               "batch_adjust_mode", "step_reward_gamma",
               off=(None,))  # fmt: skip
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
    draft.drop("the loss is that of pg_variant", "actor_train.worker_cls")
    draft.keep("actor_train.data_args.cache_dir", "train_dataset.cache_dir")
    draft.drop("how ROLL's loader works", "*.data_args.preprocessing_num_workers", "*.data_args.dataset_dir",
               "*.data_args.overwrite_cache")  # fmt: skip
    tracker = draft.get("track_with", "none")
    if tracker in ("wandb", "tensorboard", "swanlab"):
        value = {"wandb": ("wandb.mode", "online"), "swanlab": ("swanlab.mode", "cloud")}.get(
            str(tracker), ("tensorboard.path", "tensorboard")
        )
        draft.set(f"stats_logger.{value[0]}", value[1], "ROLL: track_with", "track_with")
    draft.drop("names and keys of a tracker are in its own variables", "tracker_kwargs.*", "track_with", "logging_*")
    if isinstance(resume := draft.get("resume_from_checkpoint"), bool):
        why = "ROLL: resume_from_checkpoint"
        draft.set("recover.mode", "auto" if resume else "disabled", why, "resume_from_checkpoint")
    draft.lack("actor.path: the folder of exported weights", "resume_from_checkpoint")
    draft.drop("checkpoints are in the run's folder, exports in Hugging Face format", "checkpoint_config.*")
    draft.drop("options of Hydra itself", "hydra.*")
    if _has_adapters(draft):
        for name, option in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_target", "target_modules")):
            draft.keep(f"actor_train.model_args.{name}", f"actor.lora.{option}", convert=_listed)
    draft.drop("there are no adapters, or those of actor_train", "*.model_args.lora_*", "lora_*")
    names = ("device_map", "attn_implementation", "dtype", "model_type", "disable_gradient_checkpointing", "flash_attn")
    draft.drop("models have the attention and dtype of their role", *(f"*.model_args.{name}" for name in names))
    draft.drop("the environment of processes is in launcher", "model_name", "*system_envs.*")
    draft.drop("rejected groups are replaced while the run lasts", "is_use_additional_prompts", "max_running_requests")
    draft.drop("the sizes of a queue follow from the staleness", "is_num_return_sequences_expand", "generate_opt_level")
    draft.drop("epochs follow from max_steps", "actor_train.training_args.num_train_epochs")
    draft.lack("the length of the run is not known: warmup_steps_proportion", "*.training_args.warmup_steps")
    draft.drop("eval_steps decides", "validation.eval_steps")
