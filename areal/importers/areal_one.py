"""Keys of AReaL 1.x that v0.5 does not have: what each becomes here. `areal.importers.own` does the rest."""

from typing import Any

from areal.importers.draft import Draft

_KEEP = {
    "rollout.return_routed_experts": "actor.router_replay",
    "dynamic_bs": "rollout.dynamic_bs",
    "beta": "dpo.beta",
    "loss_type": "dpo.loss_type",
    "actor.beta": "dpo.beta",
    "actor.loss_type": "dpo.loss_type",
    "teacher.rl_loss_weight": "teacher.rl_weight",
}
_AGENT = {
    "turn_discount": "agent.turn_discount",
    "set_reward_finish_timeout": "agent.reward_window_s",
    "subproc_max_workers": "agent.workers",
    "session_timeout_seconds": "agent.max_seconds",
    "engine_max_tokens": "gconfig.max_tokens",
}
_MODELS = ("actor", "critic", "ref", "teacher", "model")
_DROPPED = {
    "of AReaL's second controller and its services": (
        "*._version", "*.admin_api_key", "*.poll_interval", "rollout.model", "rollout.agent.log_level",
        "MODEL.log_level",
        "MODEL.request_timeout", "MODEL.setup_timeout", "*_dataset.scheduling_spec*", "*_dataset.setup_timeout",
    ),
    "weights are read by the ranks that hold them": ("MODEL.fsdp.memory_efficient_load",),
    "sequences are packed, first those with most tokens": ("MODEL.mb_spec.packing_algorithm",),
    "rows are read once, before the first step": ("*_dataset.num_dataset_workers",),
    "options of another train engine": ("MODEL.archon.*",),
    "a snapshot has the newest 100,000 events": ("memory_profiler.max_entries",),
    "`recover.async_save` covers every engine": ("saver.mode",),
    "areal sets it where it is needed": ("sglang.enable_return_routed_experts",),
    "answers are token ids": ("*gconfig.skip_special_tokens",),
    "roles that share ranks share a process": ("*.scheduling_strategy.fork",),
    "models are read and written in the format of Hugging Face": (
        "MODEL.megatron.bridge_type", "MODEL.megatron.use_mbridge_save",
    ),
    "evaluations use the training workflow": ("eval_workflow",),
    "fsdp.prefetch_blocks chooses the layers that are fetched ahead": ("MODEL.fsdp.optim_step_prefetch_layers",),
}  # fmt: skip
_LACKED = {
    "beam search gives no log-probabilities of a policy": ("*gconfig.use_beam_search",),
    "there are no kernels of the hub": ("MODEL.use_kernels",),
    "a prompt is computed once for its answers on the CPU only (actor.shared_prompts)": ("MODEL.enable_tree_training",),
    "every rank computes all images": ("MODEL.fsdp.shard_vision_across_sp",),
    "a recovery checkpoint has everything": ("recover.no_save_optim", "recover.no_load_optim"),
    "there is no FP8": ("MODEL.megatron.fp8_config*",),
    "megatron.moe_token_dispatcher_type=flex uses DeepEP": ("MODEL.megatron.moe_enable_deepep",),
    "servers outside a run are rollout.server_addrs": ("rollout.api_url", "rollout.provider_api_key"),
    "give train_dataset.map_fn": ("*_dataset.dataset_kwargs*",),
}
_OFF = (None, False, 0, -1, "", [], {})
_POLICIES = ("round_robin", "least_loaded", "prefix_affinity")
_MODES = {"on": "auto", "off": "disabled", True: "auto", False: "disabled"}


def with_old_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree of 1.x whose supervised model and kind of rows have the names of v0.5."""
    data = tree.get("train_dataset")
    kind = data.get("type") if isinstance(data, dict) else ""
    has_rollouts = "gconfig" in tree or "rollout" in tree
    if kind == "dpo":
        tree = tree | {
            name: tree[name] | {"type": "rw"} for name in ("train_dataset", "valid_dataset") if tree.get(name)
        }
    if kind in ("sft", "rw") and not has_rollouts and "actor" in tree and "model" not in tree:
        tree = {"model" if name == "actor" else name: value for name, value in tree.items()}
    return tree


def take_new_keys(draft: Draft) -> None:
    """Classify the keys of 1.x. What remains without a note has the meaning of v0.5."""
    for key, option in _KEEP.items():
        is_off = draft.values.get(key) in (None, False, 0)
        if key in draft.values and is_off:
            draft.drop("it is switched off", key)
        draft.keep(key, option)
    _agent(draft)
    _teacher(draft)
    _profile(draft)
    for role in _MODELS:
        key = f"{role}.fsdp.per_layer_optim_step"
        if draft.values.get(key):
            draft.set(f"{role}.fsdp.offload_optimizer", True, f"AReaL: {key}", key)
        draft.drop("it is switched off", key)
    _rollout(draft)
    mode = draft.values.get("recover.mode")
    if mode is None:
        draft.set("recover.mode", "disabled", "AReaL's default; auto is the one here", "recover.mode")
    elif mode in ("on", "off") or isinstance(mode, bool):
        draft.set("recover.mode", _MODES[mode], "AReaL: recover.mode", "recover.mode")
    for why, patterns in _DROPPED.items():
        draft.drop(why, *_of_models(patterns))
    for why, patterns in _LACKED.items():
        draft.lack(why, *_of_models(patterns), off=_OFF)


def _of_models(patterns: tuple[str, ...]) -> list[str]:
    return [one.replace("MODEL", role) for one in patterns for role in (_MODELS if "MODEL" in one else ("",))]


def _agent(draft: Draft) -> None:
    """The section rollout.agent, or rollout.openai of files between v0.5 and 1.0, whose workflow is the agent."""
    older = any(key.startswith("rollout.openai.") for key in draft.values)
    prefix, source = ("rollout.openai", "workflow") if older else ("rollout.agent", "rollout.agent.agent_cls_path")
    if run := draft.values.get(source):
        draft.set("workflow", "agent", f"AReaL: {source}")
        why = f"AReaL: {source}; here it is a function or a class with run (docs/agents.md)"
        module, _, name = str(run).rpartition(".")
        draft.set("workflow_args.agent", f"{module}:{name}", why, source)
    style = draft.values.get(f"{prefix}.export_style")
    if style in ("individual", "concat"):
        cut = "per_turn" if style == "individual" else "concat"
        draft.set("agent.cut", cut, f"AReaL: {prefix}.export_style", f"{prefix}.export_style")
    draft.lack("agent.cut is per_turn or concat", f"{prefix}.export_style", off=(None,))
    mode = draft.values.get(f"{prefix}.mode")
    if mode in ("inline", "subproc"):
        draft.set("agent.inline", mode == "inline", f"AReaL: {prefix}.mode", f"{prefix}.mode")
    for name, option in _AGENT.items():
        key = f"{prefix}.{name}"
        if draft.values.get(key) == 0:
            draft.drop("it is switched off", key)
        draft.keep(key, option)
    draft.lack("write workflow: agent and use its sessions (docs/agents.md)", f"{prefix}.mode")
    draft.drop("agents run in agent.workers processes", f"{prefix}.scheduling_spec*")
    parsers = (f"{prefix}.{name}" for name in ("tool_call_parser", "reasoning_parser", "chat_template_type"))
    draft.drop("the parser follows from the chat template: agent.tool_parser", *parsers)


def _teacher(draft: Draft) -> None:
    if not any(key.startswith("teacher.") for key in draft.values):
        return
    weight, scale = draft.get("teacher.distill_loss_weight", 0.005), draft.get("teacher.rl_loss_weight", 1.0)
    key = "teacher.distill_loss_weight"
    if scale == 0:
        draft.set("teacher.rl_weight", 0.0, "AReaL: teacher.rl_loss_weight", "teacher.rl_loss_weight")
        draft.set("teacher.advantage_coef", 1.0, "AReaL: a policy gradient of the reverse KL without an RL loss", key)
    else:
        draft.set("teacher.advantage_coef", 0.0, "AReaL: the teacher is a term of the loss", key)
        draft.set("teacher.loss_coef", weight, f"AReaL: {key}", key)


def _profile(draft: Draft) -> None:
    """Steps of profiles, which AReaL counts from 0."""
    names = ("perf_tracer.profile_steps", "memory_profiler.profile_steps")
    keys = [key for key in names if draft.values.get(key)]
    if keys:
        steps = sorted({step + 1 for key in keys for step in draft.listed(key) if isinstance(step, int)})
        draft.set("perf_tracer.profile_steps", steps, f"AReaL: {', '.join(keys)}, which count from 0", *keys)


def _rollout(draft: Draft) -> None:
    policy = draft.values.get("rollout.routing_strategy")
    if policy in _POLICIES:
        draft.keep("rollout.routing_strategy", "rollout.schedule_policy")
    draft.lack("rollout.schedule_policy has three policies", "rollout.routing_strategy")
    for old, new in (("chunked_prefill", "enable_chunked_prefill"), ("prefix_caching", "enable_prefix_caching")):
        key = f"vllm.no_enable_{old}"
        if isinstance(value := draft.values.get(key), bool):
            draft.set(f"vllm.{new}", not value, f"AReaL: {key}", key)
