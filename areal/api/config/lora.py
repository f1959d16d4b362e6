"""Options of LoRA adapters, under the names of peft."""

import re
from dataclasses import dataclass, field

from areal.api.config.fields import Problem, Problems, choice, number, option, section

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters of a frozen base model; peft's LoraConfig."""

    rank: int = number(32, low=1, also="peft: r; AReaL: lora_rank; verl: model.lora_rank")
    """Rank of the adapters."""
    alpha: float = number(16.0, above=0, also="peft: lora_alpha; AReaL: lora_alpha; verl: model.lora_alpha")
    """The product of the adapter is multiplied by alpha / rank."""
    rslora: bool = option(False, also="peft: use_rslora")
    """Scale adapters by alpha / sqrt(rank), not alpha / rank."""
    dropout: float = number(0.0, low=0, below=1, also="peft: lora_dropout")
    """Dropout probability of the adapters' input while training."""
    target_modules: str | list[str] = option(ALL_LINEAR)
    """Modules with adapters: all-linear, a list of names (of the last parts), or a regular expression for the whole."""
    exclude_modules: str | list[str] = section(list[str], also="verl: model.exclude_modules")
    """Modules without adapters among those of target_modules: a list of names, or a regular expression."""
    init: str = choice("default", "default", "gaussian", "pissa", "olora", also="peft: init_lora_weights")
    """Initial adapters: default = uniform A, gaussian = normal A, both with B = 0; pissa, olora = from the weights."""
    modules_to_save: list[str] = field(default_factory=list[str])
    """Names of modules that are trained whole, for example lm_head."""
    path: str = ""
    """Folder of an adapter in the format of peft to continue from; empty = new adapters."""

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def served_rank(self) -> int:
        """Rank of the adapters that servers get: twice the rank where the initial adapters are subtracted."""
        return self.rank * (2 if self.init in ("pissa", "olora") else 1)

    def problems(self) -> Problems:
        targets = self.target_modules
        if not targets:
            yield Problem("target_modules", "names no module: use all-linear", "config.missing_requirement")
        for key, patterns in (("target_modules", targets), ("exclude_modules", self.exclude_modules)):
            if isinstance(patterns, str) and patterns != ALL_LINEAR:
                try:
                    re.compile(patterns)
                except re.error as error:
                    yield key, f"{patterns!r} is no regular expression: {error}"


def is_target(name: str, targets: str | list[str]) -> bool:
    """Whether `targets`, which are not all-linear, choose the module `name`, as in peft."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
