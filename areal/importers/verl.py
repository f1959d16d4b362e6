"""Configurations of verl (ppo_trainer), and `key=value` words of its scripts."""

from typing import Any

from areal.api.errors import ConfigError
from areal.importers.draft import TENSORBOARD, Draft, minibatches
from areal.importers.verl_async import streamed_batch, take_staleness
from areal.importers.verl_correction import take_correction
from areal.importers.verl_loss import take_advantages, take_kl, take_loss
from areal.importers.verl_optimizer import take_optimizer
from areal.importers.verl_rollout import (
    ACTOR,
    MODEL,
    NO_EVALUATION,
    ROLLOUT,
    is_fully_async,
    is_megatron,
    take_sampling,
    take_servers,
    validates,
)
from areal.importers.verl_sections import (
    drop_newest,
    take_adapters,
    take_offload,
    take_rewards,
    take_switches,
    take_teacher,
)

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
    draft = Draft("verl", {_without_plus(key): value for key, value in values.items()})
    if "model.partial_pretrain" in values or any(key.startswith(("engine.", "optim.")) for key in values):
        message = (
            "supervised files of verl (model.partial_pretrain, engine) are not imported: write one (docs/choosing.md)"
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


def _without_plus(key: str) -> str:
    return key.lstrip("+")


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
