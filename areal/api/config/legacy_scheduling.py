"""Options of `launcher` that are equal to AReaL's `scheduling_spec`, and its `scheduling_strategy`. Pure rules."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from areal.api.errors import ConfigProblem

SLURM = ("partition", "time_limit", "srun_additional_args", "additional_bash_cmds", "container_type", "mount")
NODES = ("nodelist", "exclude")
SBATCH = ("begin", "deadline")
ROLES = ("actor", "critic", "ref", "teacher", "model", "rollout")
"""Targets of a strategy."""
SCHEDULER = (
    "type", "endpoint", "deploy_mode", "functioncall_service_domain", "reward_functioncall_config", "reward_model_path",
    "reward_model_service_url",
)  # fmt: skip
"""Keys of `scheduler`."""
WITHOUT_OPTION = {
    "gpu": "`allocation_mode` decides the GPUs of a process",
    "port_count": "processes choose free ports",
    "task_type": "an engine runs in the process of its rank",
    "cmd": "areal starts its own processes",
    "ray_placement_strategy": "each process has an actor with its own resources",
}
"""Keys of a spec that have no effect -> why."""


def launcher_options(spec: Mapping[str, Any], *, is_server: bool) -> dict[str, Any]:
    """The options of `launcher` by dotted path, of one spec; unset values are left out."""
    role = "inference_server" if is_server else "trainer"
    variables = cast("dict[str, Any]", spec.get("env_vars") or {})
    found: dict[str, Any] = {
        f"{role}_cpus_per_gpu": spec.get("cpu"),
        f"{role}_mem_per_gpu": int(spec.get("mem") or 0) * 1024,
        f"{role}_env_vars": ",".join(
            f"{name}={str(value).replace(',', chr(92) + ',')}" for name, value in variables.items()
        ),
        f"slurm.{role}_image": spec.get("image"),
        **{name: spec.get(name) for name in NODES},
        "slurm.sbatch_additional_args": shlex.join(f"--{name}={spec[name]}" for name in SBATCH if spec.get(name)),
        **{f"slurm.{name}": spec.get(name) for name in SLURM},
    }
    return {path: value for path, value in found.items() if value not in (None, "", 0, [])}


def spec_problems(path: str, value: Any) -> Iterator[ConfigProblem]:
    """What is wrong with a `scheduling_spec`: a list of one or two mappings with known keys."""
    specs = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(specs) <= 2 or not all(isinstance(spec, dict) for spec in specs):
        yield ConfigProblem(path, "is not a list of one or two mappings", "config.wrong_type")
        return
    known = {"cpu", "mem", "env_vars", "image", *NODES, *SLURM, *SBATCH, *WITHOUT_OPTION}
    for key in {str(key) for spec in specs for key in spec} - known:
        yield ConfigProblem(f"{path}.{key}", "unknown key", "config.unknown_key")
    for spec in cast("list[dict[str, Any]]", specs):
        for key in ("cpu", "mem"):
            number = spec.get(key)
            if number is not None and (type(number) is not int or number < 0):
                yield ConfigProblem(f"{path}.{key}", f"{number!r} is no integer of at least 0", "config.wrong_type")
        if not isinstance(spec.get("env_vars") or {}, dict):
            yield ConfigProblem(f"{path}.env_vars", "is not a mapping", "config.wrong_type")


def strategy_problems(path: str, value: Any) -> list[ConfigProblem]:
    """What is wrong with a `scheduling_strategy`, or why it cannot be followed."""
    if value is None:
        return []
    if problems := unknown_keys(path, value, ("type", "target", "fork")):
        return problems
    given = cast("dict[str, Any]", value)
    kind, target = given.get("type"), given.get("target")
    if kind not in (None, "separation", "colocation"):
        return [ConfigProblem(path, f"has the type {kind!r}: use separation or colocation", "config.unsupported")]
    if target not in (None, "", *ROLES):
        return [ConfigProblem(f"{path}.target", f"{target!r} is none of {', '.join(ROLES)}", "config.not_a_choice")]
    if kind == "colocation" and (path.startswith("rollout.") or target == "rollout"):
        text = "shares GPUs between servers and trainers: allocation_mode gives each its own; use type: separation"
        return [ConfigProblem(path, text, "config.unsupported")]
    return []


def unknown_keys(path: str, value: Any, known: Collection[str]) -> list[ConfigProblem]:
    """The keys of a section that are not `known`, or that `value` is no section."""
    if not isinstance(value, dict):
        return [ConfigProblem(path, "is not a section", "config.wrong_type")]
    keys = sorted(str(key) for key in cast("dict[Any, Any]", value))
    return [ConfigProblem(f"{path}.{key}", "unknown key", "config.unknown_key") for key in keys if key not in known]
