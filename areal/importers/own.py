"""Configurations of AReaL, v0.5 and 1.x: most keys are options here, others have rules in `api.config.legacy_rules`."""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from areal.api.config.experiment import PPOConfig, kind_of
from areal.api.config.legacy import LegacyRule, legacy_rule, moved_to
from areal.api.config.load import read
from areal.api.config.schema import find_field
from areal.api.config.train import LoRAConfig
from areal.importers.draft import UNKNOWN, Draft, Note, flat, nested

# Keys of AReaL 1.x that v0.5 does not have: what each becomes here. `areal.importers.own` does the rest.

_KEEP = {
    "rollout.return_routed_experts": "actor.router_replay", "dynamic_bs": "rollout.dynamic_bs", "beta": "dpo.beta",
    "loss_type": "dpo.loss_type", "actor.beta": "dpo.beta", "actor.loss_type": "dpo.loss_type",
    "teacher.rl_loss_weight": "teacher.rl_weight",
}  # fmt: skip
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
    "every rank computes all images": ("MODEL.fsdp.shard_vision_across_sp",),
    "a recovery checkpoint has everything": ("recover.no_save_optim", "recover.no_load_optim"),
    "of the FP8 of Megatron-Core there are megatron.fp8, fp8_recipe and ddp.fp8_param_gather": (
        "MODEL.megatron.fp8_config*",
    ),
    "megatron.moe_token_dispatcher_type=flex uses DeepEP": ("MODEL.megatron.moe_enable_deepep",),
    "servers outside a run are rollout.server_addrs": ("rollout.api_url", "rollout.provider_api_key"),
    "give train_dataset.map_fn": ("*_dataset.dataset_kwargs*",),
}
_FP8_DEFAULTS = {
    "amax_history_len": 1, "amax_compute_algo": "most_recent", "wgrad": True, "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1, "direct_convert": True,
}  # fmt: skip
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
    _aent(draft)
    _profile(draft)
    for role in _MODELS:
        key = f"{role}.fsdp.per_layer_optim_step"
        if draft.values.get(key):
            draft.set(f"{role}.fsdp.offload_optimizer", True, f"AReaL: {key}", key)
        draft.drop("it is switched off", key)
        _fp8(draft, role)
        key = f"{role}.enable_tree_training"
        if key in draft.values:
            kind = "tree" if draft.values[key] else "auto"
            draft.set(f"{role}.shared_prefixes", kind, f"AReaL: {key}", key)
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
    return [
        pattern.replace("MODEL", role) for pattern in patterns for role in (_MODELS if "MODEL" in pattern else ("",))
    ]


def _fp8(draft: Draft, role: str) -> None:
    """FP8 of Megatron-Core, a section with defaults of its own, and of Archon."""
    section, option = f"{role}.megatron.fp8_config", f"{role}.megatron"
    if any(key.startswith(f"{section}.") for key in draft.values):
        for name, option_of_areal in (("mode", "fp8"), ("recipe", "fp8_recipe"), ("param", "ddp.fp8_param_gather")):
            draft.keep(f"{section}.{name}", f"{option}.{option_of_areal}")
        draft.defaults({f"{option}.fp8": "e4m3"})
        same = [f"{section}.{name}" for name, value in _FP8_DEFAULTS.items() if draft.get(f"{section}.{name}") == value]
        draft.drop("as here, or without effect alone", *same)
    if draft.get(f"{role}.archon.fp8_config.mode", "disabled") != "disabled":
        draft.lack(f"scales are of rows or tensors, not of blocks: {role}.fp8", f"{role}.archon.fp8_config.*", off=())


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


_AENT = {
    "entropy_high": ("entropy_high", 0.5), "entropy_low": ("entropy_low", 0.1), "coeff_lr": ("coef_lr", 1e-3),
    "coeff_box_high": ("coef_high", 1e-2), "coeff_box_low": ("coef_low", 1e-5),
}  # fmt: skip
"""Keys of actor.aent -> the option of actor.adaptive_entropy, and the recipe's default."""


def _aent(draft: Draft) -> None:
    """The section of the recipe AEnt: a bonus on the clamped entropy, whose coefficient may follow the entropy."""
    keys = [key for key in draft.values if key == "actor.aent" or key.startswith("actor.aent.")]
    if all(draft.values[key] is None for key in keys) and keys in ([], ["actor.aent"]):
        draft.drop("no such section", "actor.aent")
        return
    for name, option, default in (("entropy_coeff", "entropy_coef", 1e-3), ("entropy_clamp", "entropy_clamp", 0.2)):
        key = f"actor.aent.{name}"
        draft.set(f"actor.{option}", draft.get(key, default), f"AReaL: {key}", key)
    if draft.get("actor.aent.adaptive_coeff", False):
        for name, (option, default) in _AENT.items():
            key = f"actor.aent.{name}"
            draft.set(f"actor.adaptive_entropy.{option}", draft.get(key, default), f"AReaL: {key}", key)
        key, steps = "actor.aent.warmup_steps", draft.number("actor.aent.warmup_steps", 0)
        why = f"AReaL: {key}; it first changes the coefficient one step later"
        draft.set("actor.adaptive_entropy.warmup_steps", int(steps) + 1, why, key)
    draft.drop("decides whether actor.adaptive_entropy is set", "actor.aent.adaptive_coeff")
    draft.drop("no effect without adaptive_coeff", *(f"actor.aent.{name}" for name in (*_AENT, "warmup_steps")))
    draft.drop("an empty section: its defaults", "actor.aent")


def _profile(draft: Draft) -> None:
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


FOREIGN = ("sglang", "vllm")
_LORA = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
"""Keys of AReaL -> options of the section lora. use_lora decides the whole section."""
_WITHOUT_EFFECT = {
    "scheduling": "the resources are the defaults of launcher; the command is AReaL's",
    "lora": "actor.lora is the section of adapters",
}
"""Action of a rule -> why its key sets no option."""
_VISION_PIXELS = {
    "clevr_count_70k": {"rl": 336 * 336, "sft": 336 * 336},
    "geometry3k": {"rl": 448 * 448, "sft": 512 * 512},
    "virl39k": {"rl": 320 * 320, "sft": 320 * 320},
}
"""Limits that AReaL's scripts have, by a part of the name of the dataset and the kind of its rows."""


def from_areal(tree: Mapping[str, Any]) -> Draft:
    source = flat(tree)
    tree = with_old_sections(dict(tree))
    kind = kind_of(tree, allow_unknown=True)
    draft = Draft("AReaL", flat(tree))
    take_new_keys(draft)
    old = _without(tree, draft.notes)
    reading = read(kind, old, allow_unknown_top_level=True)
    problems = {problem.path: problem.message for problem in reading.problems}
    options = flat(asdict(reading.config)) if reading.config is not None else {}
    if isinstance(reading.config, PPOConfig) and reading.config.server_backend in FOREIGN:
        draft.set("server_defaults", "areal", "AReaL gives these flags to servers where a file has none")
    if "total_train_epochs" not in tree and tree.get("total_train_steps") is not None:
        draft.set("total_train_epochs", 1, "AReaL's default; here more steps repeat the dataset without it")
    for key, value in flat(old).items():
        wrong = next((text for path, text in problems.items() if f"{key}.".startswith(f"{path}.")), "")
        rule = None if _is_option(kind, key) else _rule(kind, key)
        if rule is None and not wrong and _is_option(kind, key):
            draft.set(key, value, "AReaL")
            draft.keep(key, key)
        elif wrong or rule is None:
            draft.lack(wrong or f"{UNKNOWN}: it is of a script, or of another version", key, off=())
        elif rule.action in ("move", "rejection_sampling", "backend", "sapo"):
            section = key.rpartition(".")[0]
            path = {
                "backend": "allocation_mode",
                "rejection_sampling": "actor.rollout_correction",
                "sapo": "actor.policy_loss",
            }.get(rule.action, f"{section}.{rule.path}" if section else rule.path)
            for name in [name for name in options if f"{name}.".startswith(f"{path}.")]:
                draft.set(name, options[name], f"AReaL: {key}", key)
            draft.drop("no effect with its value", key)
        elif rule.action == "copy":
            draft.drop(f"a copy of {rule.path}", key)
        else:
            draft.drop(_WITHOUT_EFFECT.get(rule.action) or rule.why or "no effect here", key)
    _take_rest(draft, kind, options)
    _take_script(draft)
    if issubclass(kind, PPOConfig):
        _lack_reward(draft)
    draft.finish()
    _restore_names(draft, source)
    return draft


def _lack_reward(draft: Draft) -> None:
    """AReaL's script passes its reward function to the workflow: a file does not name it."""
    chosen = ("reward_fn", "workflow", "reward.", "reward_model.")
    if not any(option.startswith(chosen) for option in draft.options):
        draft.values["reward_fn"] = None
        draft.notes["reward_fn"] = Note("missing", "AReaL's script has the reward function: name it (docs/rewards.md)")


def _restore_names(draft: Draft, source: Mapping[str, Any]) -> None:
    """Give the keys of a supervised file the names of the source again, where the section actor was read as model."""
    if not any(key.startswith("model.") for key in draft.values.keys() - source.keys()):
        return

    def named(key: str) -> str:
        return f"actor.{key.removeprefix('model.')}" if key.startswith("model.") else key

    draft.values = {named(key): source.get(named(key), value) for key, value in draft.values.items()}
    draft.notes = {named(key): note for key, note in draft.notes.items()}
    for path, option in draft.options.items():
        origin = re.sub(r"(?<=[ ,])model\.", "actor.", option.origin)
        draft.options[path] = replace(option, origin=origin, keys=tuple(map(named, option.keys)))


def _take_rest(draft: Draft, kind: type[Any], options: Mapping[str, Any]) -> None:
    """The options that keys of other names decide: adapters, switches of offloading, resources.

    `found`: the configuration of the source, which the result must equal.
    """
    config = read(kind, nested({path: option.value for path, option in draft.options.items()})).config
    mine = flat(asdict(config)) if config is not None else options
    kept = {key for key, note in draft.notes.items() if note.fate == "kept"}
    open_to_change = options.keys() - (draft.options.keys() - kept)
    for path in [path for path in options if path in open_to_change and mine.get(path) != options[path]]:
        keys = [key for key in draft.values if _decides(kind, key, path)]
        section, _, name = path.rpartition(".")
        is_named = name == "rank" or any(_LORA.get(key.rpartition(".")[2]) == name for key in keys)
        if section.endswith(".lora") and not is_named and options[path] == getattr(LoRAConfig(), name):
            continue
        draft.set(path, options[path], f"AReaL: {', '.join(keys) or 'other keys'}", *keys)


def _decides(kind: type[Any], key: str, path: str) -> bool:
    rule, section = _rule(kind, key), key.rpartition(".")[0]
    match rule.action if rule is not None else "":
        case "lora":
            option_name = _LORA.get(key.rpartition(".")[2], "")
            return path == f"{section}.lora.{option_name}" if option_name else path.startswith(f"{section}.lora.")
        case "scheduling" | "scheduler":
            return path.startswith("launcher.")
        case "turn_on":
            return rule is not None and path in (moved_to(key, rule.path), moved_to(key, rule.with_megatron))
        case _:
            return False


def _take_script(draft: Draft) -> None:
    path = str(draft.values.get("train_dataset.path", "")).lower().replace("-", "_")
    kind = str(draft.values.get("train_dataset.type", "rl"))
    if "gsm8k" in path and kind == "rl":
        _take_gsm8k(draft)
    for name, pixels in _VISION_PIXELS.items():
        if name not in path or kind not in pixels:
            continue
        why = f"AReaL: its script for {name}"
        draft.set("vision.max_pixels", pixels[kind], why)
        for part in ("train_dataset", "valid_dataset"):
            if f"{part}.path" in draft.options:
                draft.set(f"{part}.map_fn", name, why)
        for option, value in (("workflow", "vision_rlvr"), ("reward_fn", name)) if kind == "rl" else ():
            if option not in draft.options:
                draft.set(option, value, why)


def _take_gsm8k(draft: Draft) -> None:
    why = "AReaL: its loader and script for gsm8k"
    for part in ("train_dataset", "valid_dataset"):
        path = str(draft.values.get(f"{part}.path", ""))
        if path == "openai/gsm8k":
            draft.set(f"{part}.name", "main", why)
        if "gsm8k" in path:
            draft.set(f"{part}.map_fn", "gsm8k", why)
    if not draft.options.keys() & {"reward_fn", "workflow"}:  # an agent makes its own rewards
        draft.set("reward_fn", "gsm8k", why)


def _without(tree: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The tree without the values at the dotted `keys`, and without mappings that become empty."""
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            value = _without(cast("dict[str, Any]", value), keys, f"{prefix}{name}.") or None
            if value is None:
                continue
        elif f"{prefix}{name}" in keys:
            continue
        rest[name] = value
    return rest


def _is_option(kind: type[Any], key: str) -> bool:
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        spec = find_field(kind, ".".join(parts[:end]))
        if spec is not None:
            return end == len(parts) or not spec.is_section
    return False


def _rule(kind: type[Any], key: str) -> LegacyRule | None:
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        section = ".".join(parts[: end - 1])
        spec = find_field(kind, section) if section else None
        owner = spec.hint if spec is not None and spec.is_section else None if section else kind
        if owner is not None and (rule := legacy_rule(owner, parts[end - 1], section)) is not None:
            return rule
    return None
