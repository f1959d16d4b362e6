"""A stand-in for a package that exists for GPUs only: every name can be imported, and none can be used.

SGLang imports sgl_kernel at start-up also where it computes on a CPU and does not use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class Absent:
    """What is imported from such a package; using it names what is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is not there: this server runs with areal's stand-ins for packages that need a GPU"
        )


def lookup(package: str) -> Callable[[str], Absent]:
    """The module-level __getattr__ of a package that is absent."""

    def find(name: str) -> Absent:
        if name.startswith("__"):  # whoever looks for such a name can do without it
            raise AttributeError(name)
        return Absent(f"{package}.{name}")

    return find


class _Submodules(MetaPathFinder, Loader):
    """Makes every submodule of one package importable."""

    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names: dict[str, Any] = vars(module)
        names["__getattr__"] = lookup(module.__name__)


def open_submodules(package: str) -> None:
    """From here on every `import package.anything` succeeds."""
    sys.meta_path.append(_Submodules(package))
