"""Configurations of AReaL, v0.5 and 1.x: most keys are options here, others have rules in `api.config.legacy_rules`."""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from areal.api.config.experiment import PPOConfig
from areal.api.config.kinds import kind_of
from areal.api.config.legacy_rules import LegacyRule, legacy_rule, moved_to
from areal.api.config.load import read
from areal.api.config.lora import LoRAConfig
from areal.api.config.schema import find_field
from areal.importers.areal_one import take_new_keys, with_old_sections
from areal.importers.draft import UNKNOWN, Draft, Note, flat

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
    """The draft of an AReaL file without interpolations."""
    source = flat(tree)
    tree = with_old_sections(dict(tree))
    kind = kind_of(tree, allow_unknown=True)
    draft = Draft("AReaL", flat(tree))
    take_new_keys(draft)
    old = _without(tree, draft.notes)
    reading = read(kind, old, allow_unknown_top_level=True)
    problems = {problem.path: problem.message for problem in reading.problems}
    found = flat(asdict(reading.config)) if reading.config is not None else {}
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
        elif rule.action in ("move", "rejection_sampling", "backend"):
            section = key.rpartition(".")[0]
            path = {"backend": "allocation_mode", "rejection_sampling": "actor.rollout_correction"}.get(
                rule.action, f"{section}.{rule.path}" if section else rule.path
            )
            for name in [name for name in found if f"{name}.".startswith(f"{path}.")]:
                draft.set(name, found[name], f"AReaL: {key}", key)
            draft.drop("no effect with its value", key)
        elif rule.action == "copy":
            draft.drop(f"a copy of {rule.path}", key)
        else:
            draft.drop(_WITHOUT_EFFECT.get(rule.action) or rule.why or "no effect here", key)
    _take_rest(draft, kind, found)
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


def _take_rest(draft: Draft, kind: type[Any], found: Mapping[str, Any]) -> None:
    """The options that keys of other names decide: adapters, switches of offloading, resources.

    `found`: the configuration of the source, which the result must equal.
    """
    config = read(kind, _tree({path: option.value for path, option in draft.options.items()})).config
    mine = flat(asdict(config)) if config is not None else found
    kept = {key for key, note in draft.notes.items() if note.fate == "kept"}
    open_to_change = found.keys() - (draft.options.keys() - kept)
    for path in [path for path in found if path in open_to_change and mine.get(path) != found[path]]:
        keys = [key for key in draft.values if _decides(kind, key, path)]
        section, _, name = path.rpartition(".")
        is_named = name == "rank" or any(_LORA.get(key.rpartition(".")[2]) == name for key in keys)
        if section.endswith(".lora") and not is_named and found[path] == getattr(LoRAConfig(), name):
            continue
        draft.set(path, found[path], f"AReaL: {', '.join(keys) or 'other keys'}", *keys)


def _decides(kind: type[Any], key: str, path: str) -> bool:
    """Whether the rule of the key may change the option at `path`."""
    rule, section = _rule(kind, key), key.rpartition(".")[0]
    match rule.action if rule is not None else "":
        case "lora":
            own = _LORA.get(key.rpartition(".")[2], "")
            return path == f"{section}.lora.{own}" if own else path.startswith(f"{section}.lora.")
        case "scheduling" | "scheduler":
            return path.startswith("launcher.")
        case "turn_on":
            return rule is not None and path in (moved_to(key, rule.path), moved_to(key, rule.with_megatron))
        case _:
            return False


def _tree(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings from dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in options.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def _take_script(draft: Draft) -> None:
    """What the scripts of examples choose by the name of the dataset."""
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
    """How AReaL reads and rewards the dataset."""
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
    """Whether the key is an option, or an entry of one that is a mapping."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        spec = find_field(kind, ".".join(parts[:end]))
        if spec is not None:
            return end == len(parts) or not spec.is_section
    return False


def _rule(kind: type[Any], key: str) -> LegacyRule | None:
    """The rule for the key, or for the section that contains it."""
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        section = ".".join(parts[: end - 1])
        spec = find_field(kind, section) if section else None
        owner = spec.hint if spec is not None and spec.is_section else None if section else kind
        if owner is not None and (rule := legacy_rule(owner, parts[end - 1], section)) is not None:
            return rule
    return None
