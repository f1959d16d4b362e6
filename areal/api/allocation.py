"""The meaning of an `allocation_mode`: backends, their devices and their parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.allocation_grammar import INFERENCE_BACKENDS, AllocationError, Part, Syntax, read_syntax
from areal.api.errors import ConfigError

__all__ = ["AllocationError", "AllocationMode", "ModelAllocation", "ParallelDims", "check_supported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Parallel sizes of one model. Expert layers distribute ep x etp x edp over the same devices."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor size inside expert layers."""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Data-parallel size of expert layers."""
        return self.world_size // (self.pp * self.etp * self.ep)

    def __str__(self) -> str:
        if self.etp == 1:
            sizes = _written(t=self.tp, p=self.pp, c=self.cp, e=self.ep)
            return f"d{self.dp}{sizes}"
        attention = _written(t=self.tp, p=self.pp, c=self.cp)
        return f"(attn:d{self.dp}{attention}|ffn:d{self.edp}{_written(t=self.etp, p=self.pp, e=self.ep)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAllocation:
    """The devices of one model: `native:d2` is two servers, `fsdp:d4` one trainer of four ranks."""

    backend: str
    parallel: ParallelDims
    name: str = ""
    shares_with: int | None = None
    """Index in `AllocationMode.allocations` of the part whose devices this part shares; None = own devices."""

    @property
    def is_inference(self) -> bool:
        return self.backend in INFERENCE_BACKENDS

    @property
    def num_replicas(self) -> int:
        """Number of servers of an inference part; 1 for a trainer."""
        return self.parallel.dp if self.is_inference else 1

    @property
    def instance_size(self) -> int:
        """Number of devices of one server or of the trainer."""
        return self.parallel.world_size // self.num_replicas

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{name}:{self.parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationMode:
    """All models of a run. `str(mode)` parses back to an equal mode."""

    allocations: tuple[ModelAllocation, ...]
    evaluation: str = ""
    """`cpu` or `eval` when an evaluation process uses the servers, else empty."""

    @staticmethod
    def parse(text: str) -> AllocationMode:
        """Parse an `allocation_mode`. Raises AllocationError with column and hint."""
        syntax = read_syntax(text)
        _check_names(text, syntax)
        allocations: list[ModelAllocation] = []
        for component in syntax.components:
            anchor = len(allocations)
            for index, part in enumerate(component):
                found = _allocation(text, part, shares_with=anchor if index else None)
                size, expected = found.parallel.world_size, allocations[anchor].parallel.world_size if index else 0
                if index and size != expected:
                    problem = f"{found} needs {size} devices but shares {expected}"
                    raise AllocationError(text, part.column, problem, "parts joined by | need equal device counts")
                allocations.append(found)
        return AllocationMode(allocations=tuple(allocations), evaluation=syntax.evaluation)

    def __str__(self) -> str:
        text = ""
        for index, allocation in enumerate(self.allocations):
            joint = "" if index == 0 else "+" if allocation.shares_with is None else "|"
            text += f"{joint}{allocation}"
        return f"{text}+{self.evaluation}" if self.evaluation else text

    @property
    def inference(self) -> ModelAllocation | None:
        """The first inference part."""
        return next((one for one in self.allocations if one.is_inference), None)

    @property
    def train(self) -> list[ModelAllocation]:
        """The trainers, in order."""
        return [one for one in self.allocations if not one.is_inference]

    @property
    def num_train_ranks(self) -> int:
        """Trainer ranks; 0 for an evaluation."""
        return sum(one.parallel.world_size for one in self.train)

    @property
    def world_size(self) -> int:
        """Total number of devices; shared devices count once."""
        return sum(one.parallel.world_size for one in self.allocations if one.shares_with is None)


def check_supported(mode: AllocationMode) -> None:
    """Raise ConfigError unless this version can launch `mode`: servers + a trainer (RL), a trainer alone (SFT), or
    servers + eval (an evaluation without training).

    Trainers are fsdp:dMtKcLeJ or megatron with all sizes.
    Servers are native:dN, sglang:dNtK or vllm:dNtK: N servers, each of K devices.
    """
    for one in mode.allocations:
        _check_part(one)
    shape = [one.is_inference for one in mode.allocations]
    alone = all(one.shares_with is None for one in mode.allocations)
    if not alone or shape not in ([[True]] if mode.evaluation else [[True, False], [False]]):
        raise _unsupported(
            f"{mode} cannot be launched: use native:dN+fsdp:dM, sglang:dNtK+fsdp:dM, vllm:dNtK+fsdp:dM, "
            "without servers fsdp:dM, or to evaluate only native:dN+eval"
        )


def _check_part(one: ModelAllocation) -> None:
    """Raise ConfigError with an alternative unless this version can run the part in these sizes."""
    dims = one.parallel
    if one.backend == "native" and dims != ParallelDims(dp=dims.dp):
        other = f"sglang:d{dims.dp}t{dims.tp * dims.pp}"
        raise _unsupported(f"{one} splits a model, and native servers cannot: use native:d{dims.dp} or {other}")
    if one.is_inference and dims != ParallelDims(dp=dims.dp, tp=dims.tp):
        instead = f"{one.backend}:d{dims.dp}t{dims.tp * dims.pp}"
        raise _unsupported(f"{one} has pipeline stages (p), which do not support weight updates: use {instead}")


def _unsupported(message: str) -> ConfigError:
    return ConfigError(message, code="config.unsupported")


def _written(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)


def _check_names(text: str, syntax: Syntax) -> None:
    parts = [part for component in syntax.components for part in component]
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise AllocationError(text, part.column, f"the name {part.name!r} is used twice", "use different names")
        seen |= {part.name} - {""}
    sharing = [part for component in syntax.components for part in component[1:]]
    bare = [part for part in parts if not part.backend]
    for group, problem in (
        (sharing, "a part that shares devices has no name"),
        (parts if len(syntax.components) > 2 else [], "a name is missing: with three or more parts each needs one"),
        (bare if len(bare) > 1 else [], "two trainers without backend need names"),
    ):
        for part in group:
            if not part.name:
                raise AllocationError(text, part.column, problem, "write for example fsdp[actor]:d4")


def _allocation(text: str, part: Part, shares_with: int | None) -> ModelAllocation:
    """Check the sizes of a part and convert it."""
    sizes, experts = part.sizes, part.expert_sizes
    dims = ParallelDims(
        dp=sizes.get("d", 1),
        tp=sizes.get("t", 1),
        pp=sizes.get("p", 1),
        cp=sizes.get("c", 1),
        ep=(sizes if experts is None else experts).get("e", 1),
        etp=1 if experts is None else experts.get("t", 1),
    )
    needs_megatron = experts is not None or dims.pp > 1 or dims.ep > 1
    backend = part.backend or ("megatron" if needs_megatron else "fsdp")
    if experts is not None:
        _check_experts(text, part, dims, experts)
    if backend == "fsdp" and (dims.pp > 1 or dims.etp > 1):
        hint = f"write megatron:{dims} or leave out p, and t of experts"
        raise AllocationError(text, part.column, "fsdp has no pipeline and does not split an expert", hint)
    if dims.world_size % (dims.pp * dims.etp * dims.ep):
        problem = f"{dims.world_size} devices cannot be split into p{dims.pp} x expert t{dims.etp} x e{dims.ep}"
        chosen = "e" if dims.etp == 1 else "e x t of ffn"
        raise AllocationError(text, part.column, problem, f"choose {chosen} so that it divides d x c x t")
    return ModelAllocation(backend=backend, name=part.name, parallel=dims, shares_with=shares_with)


def _check_experts(text: str, part: Part, dims: ParallelDims, experts: dict[str, int]) -> None:
    """Both halves of an attn/ffn part must cover the same devices; ffn has the p of attn, and what remains as d."""
    pipeline = experts.get("p", dims.pp)
    if pipeline != dims.pp:
        problem = f"attn has p{dims.pp} but ffn has p{pipeline}"
        raise AllocationError(text, part.column, problem, "use the same p in both")
    if (data := experts.get("d")) is None:
        return
    covered = data * dims.ep * dims.etp * pipeline
    if covered != dims.world_size:
        product = f"d{data} x e{dims.ep} x t{dims.etp} x p{pipeline}"
        problem = f"attn covers {dims.world_size} devices but ffn {product} covers {covered}"
        raise AllocationError(text, part.column, problem, "make both products equal, or leave out d of ffn")
