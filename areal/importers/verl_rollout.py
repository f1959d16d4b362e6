"""Sampling and inference servers of verl: the section actor_rollout_ref.rollout, and the division of the GPUs."""

from areal.importers.draft import Draft, split_gpus

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
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
    own = f"{ROLLOUT}.val_kwargs"
    if draft.get("data.val_files"):
        sampled = bool(draft.get(f"{own}.do_sample", False))
        mode = "sampled" if sampled else "greedy"
        draft.set("evaluator.modes", [mode], "verl: rollout.val_kwargs.do_sample", f"{own}.do_sample")
        if sampled:
            draft.keep(f"{own}.n", "evaluator.n_samples")
            for name in ("temperature", "top_p"):
                draft.keep(f"{own}.{name}", f"eval_gconfig.{name}")
            if draft.whole(f"{own}.top_k", -1, least=-1) > 0:
                draft.keep(f"{own}.top_k", "eval_gconfig.top_k")
            if any(option.startswith("eval_gconfig.") for option in draft.options):
                for name in ("max_new_tokens", "max_tokens"):
                    found = draft.options.get(f"gconfig.{name}")
                    if found:
                        draft.set(f"eval_gconfig.{name}", found.value, found.origin)
    names = ("temperature", "top_p", "top_k", "n", "do_sample") if draft.get("data.val_files") else ("*",)
    draft.drop("no effect on greedy evaluation, or none at all", *(f"{own}.{name}" for name in names))
    draft.drop(
        "set by data.max_prompt_length and data.max_response_length",
        f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length",
    )
    draft.lack("write a workflow (docs/workflows.md) or workflow: agent", f"{ROLLOUT}.multi_turn.enable")
    if draft.get(f"{ROLLOUT}.multi_turn.enable", False):
        draft.lack("an option of your workflow or agent", f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*", off=(None,))
    if draft.get(f"{ROLLOUT}.multi_turn.enable", False) is False:
        draft.drop("there are no tools", f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*")


def take_servers(draft: Draft) -> None:
    backend = "sglang" if draft.get(f"{ROLLOUT}.name") == "sglang" else "vllm"
    total = draft.whole("trainer.nnodes", 1) * draft.whole("trainer.n_gpus_per_node", 8)
    size = draft.whole(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    batch = int(draft.options["train_dataset.batch_size"].value)
    keys = (f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size")
    why = f"verl uses all {total} GPUs in turn; here about half generate while the others train"
    context = max(1, draft.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
    mode = split_gpus(total, size, batch, backend, context=context)
    draft.set("allocation_mode", mode, why, *keys, f"{ACTOR}.strategy", f"{ACTOR}.ulysses_sequence_parallel_size")
    draft.server(f"{ROLLOUT}.", backend, _VLLM_FLAGS if backend == "vllm" else _SGLANG_FLAGS)
    draft.server(f"{ROLLOUT}.engine_kwargs.{backend}.", backend)
    draft.drop("flags of another server", f"{ROLLOUT}.engine_kwargs.*", *(f"{ROLLOUT}.{name}" for name in _VLLM_FLAGS))
    draft.drop("all models of a trainer are divided like the actor", "*ulysses_sequence_parallel_size")
