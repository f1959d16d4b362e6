"""Runs Megatron-Core on the CPU: its modules are compiled from sources whose references to CUDA name the CPU.

Torch itself is not changed.
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

_STAND_IN = "_areal_cpu_device"
_RULES = (
    (re.compile(r"(['\"])torch\.cuda\.(\w+Tensor)"), r"\1torch.\2"),  # names of tensor types
    (re.compile(r"(?<!import )(?<!from )(?<![\w.])torch\.cuda\b"), _STAND_IN),
    (re.compile(r"(['\"])cuda(:\d+)?\1"), r'"cpu"'),
    (re.compile(r"\.cuda\(\)"), ".cpu()"),
    (re.compile(r"torch\.distributed\.all_gather\(output_tensor_list"), f"{_STAND_IN}.all_gather(output_tensor_list"),
    (re.compile(r"torch\.distributed\.reduce_scatter\(output,"), f"{_STAND_IN}.reduce_scatter(output,"),
    (re.compile(r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:"), "if torch.is_tensor(tensor):"),  # of sizes
    (re.compile(r"^from torch\.cuda import .*$", re.MULTILINE), f"_lazy_call = {_STAND_IN}.call"),
)


class _CpuDevice:
    """What Megatron-Core calls of torch.cuda; everything else is torch's own."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def is_available(self) -> bool:
        return False

    def synchronize(self, *unused: object) -> None:
        """There is nothing to wait for."""

    empty_cache = synchronize

    def call(self, action: Any) -> None:
        action()

    def get_rng_state(self, *unused: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *unused: object) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    @property
    def random(self) -> "_CpuDevice":
        return self

    def Stream(self, *unused: object, **also: object) -> "_CpuStream":
        return _STREAM

    Event = current_stream = Stream

    def all_gather(self, parts: list[torch.Tensor], ours: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Parts may have different numbers of rows, which gloo does not support."""
        for rank, part in enumerate(parts):
            sent = ours.contiguous() if rank == group.rank() else torch.empty_like(part)
            dist.broadcast(sent, group_src=rank, group=group)
            part.copy_(sent)

    def reduce_scatter(self, ours: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Reduce and scatter with the restrictions of `all_gather`."""
        for rank, part in enumerate(parts):
            total = part.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            if rank == group.rank():
                ours.copy_(total)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuStream:
    """A stream or an event: work on the CPU is done when the call returns."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    wait_event = wait = wait_stream

    def record_event(self, *unused: object) -> "_CpuStream":
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""

    record = record_event


_STREAM = _CpuStream()


class _CpuLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return compile(rewritten(self.get_source(fullname) or ""), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_STAND_IN] = _CpuDevice()
        if module.__name__ == "megatron.core.tensor_parallel.random":
            _exec_random(self, module)
            return
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.__dict__["disable_jit_fuser"]()  # compilation takes minutes and saves nothing here


class _CpuFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CpuLoader(fullname, spec.loader.path)
        return spec


def _exec_random(loader: SourceFileLoader, module: ModuleType) -> None:
    """The random states of the CPU in place of those of a GPU."""
    SourceFileLoader.exec_module(loader, module)
    module.__dict__["_get_cuda_rng_state"] = lambda *unused, **also: torch.get_rng_state()
    module.__dict__["_set_cuda_rng_state"] = lambda state, *unused, **also: torch.set_rng_state(state)


def rewritten(source: str) -> str:
    """The source of a module of Megatron-Core for the CPU."""
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    return source


def enable_cpu_mode() -> None:
    """Let this process import Megatron-Core for the CPU."""
    sys.meta_path.insert(0, _CpuFinder())
