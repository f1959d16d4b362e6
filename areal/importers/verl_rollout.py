"""Sampling, inference servers and devices of verl: the section actor_rollout_ref.rollout and the GPUs."""

from areal.api.allocation import ParallelDims
from areal.importers.devices import Trainer, halves, megatron_trainer, set_devices
from areal.importers.draft import Draft

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_STRATEGY, _MEGATRON = f"{ACTOR}.strategy", f"{ACTOR}.megatron."
NO_EVALUATION = "no evaluation: see data.val_files, trainer.test_freq and val_before_train"
OTHER_ENGINES = ("veomni", "torchtitan", "automodel")
"""Trainers of verl with FSDP2 and its own names of the sizes."""
_VLLM_FLAGS = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "enforce_eager": "enforce_eager",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "dtype": "dtype",
}
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


def _take_evaluation(draft: Draft, own: str) -> None:
    if not validates(draft):
        draft.drop(NO_EVALUATION, f"{own}.*")
        return
    # asynchronous rollouts, the default of newer versions, do not read do_sample; a temperature of 0 is greedy
    may_sample = draft.get(f"{own}.do_sample", False) or draft.get(f"{ROLLOUT}.mode", "async") == "async"
    sampled = bool(may_sample) and draft.number(f"{own}.temperature", 0) > 0
    why = "verl: rollout.val_kwargs.do_sample, temperature"
    draft.set("evaluator.modes", ["sampled" if sampled else "greedy"], why, f"{own}.do_sample")
    if sampled:
        draft.keep(f"{own}.n", "evaluator.n_samples")
        for name in ("temperature", "top_p"):
            draft.keep(f"{own}.{name}", f"eval_gconfig.{name}")
        if draft.whole(f"{own}.top_k", -1, least=-1) > 0:
            draft.keep(f"{own}.top_k", "eval_gconfig.top_k")
        if any(option.startswith("eval_gconfig.") for option in draft.options):
            for name in ("max_new_tokens", "max_tokens"):
                found = draft.options[f"gconfig.{name}"]
                draft.set(f"eval_gconfig.{name}", found.value, found.origin)
    names = ("temperature", "top_p", "top_k", "n")
    draft.drop("all tokens, as here" if sampled else "no effect on greedy evaluation", *(f"{own}.{n}" for n in names))


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
    draft.drop("flags of another server", f"{ROLLOUT}.engine_kwargs.*", *(f"{ROLLOUT}.{name}" for name in _VLLM_FLAGS))
    draft.drop("all models of a trainer are divided like the actor", "*ulysses_sequence_parallel_size")


def is_megatron(draft: Draft) -> bool:
    """Whether Megatron-Core trains: adapters need FSDP here."""
    own = str(draft.get(_STRATEGY, draft.get("model_engine", "")))
    has_sizes = any(key.startswith(_MEGATRON) and key.endswith("parallel_size") for key in draft.values)
    has_adapters = any(draft.whole(f"{MODEL}.{key}", 0, least=0) for key in ("lora_rank", "lora.rank"))
    return (own == "megatron" or (not own and has_sizes)) and not has_adapters


def _trainer(draft: Draft) -> tuple[Trainer, list[str]]:
    """The trainer, and the keys that decide it."""
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
    for own in (f"{ACTOR}.{engine}." for engine in OTHER_ENGINES):
        contexts += [f"{own}{name}_parallel_size" for name in ("ulysses", "context")]
        tensors, experts = [*tensors, f"{own}tensor_parallel_size"], [*experts, f"{own}expert_parallel_size"]
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
