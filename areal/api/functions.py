"""References to functions and classes: how a name in a configuration or an object becomes one, and back.

A reference crosses process borders as text, so that no code is ever pickled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from areal.api.errors import ConfigError, ConfigProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRef:
    """Where a function or class is found: `name` at the top level of an importable module or of a file."""

    name: str
    module: str = ""
    """Importable module; empty = `file`."""
    file: str = ""
    """Absolute path of a Python file; empty = `module`."""

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"


REWARD_FUNCTIONS: dict[str, FunctionRef] = {
    "none": FunctionRef(name="no_reward", module="areal.reward.text"),
    "exact": FunctionRef(name="exact_reward", module="areal.reward.text"),
    "format": FunctionRef(name="format_reward", module="areal.reward.text"),
    "choice": FunctionRef(name="choice_reward", module="areal.reward.choice"),
    "gsm8k": FunctionRef(name="math_reward", module="areal.reward.math_answer"),
    "math": FunctionRef(name="symbolic_math_reward", module="areal.reward.math_symbolic"),
    "code": FunctionRef(name="code_reward", module="areal.reward.code"),
}
WORKFLOWS: dict[str, FunctionRef] = {
    "rlvr": FunctionRef(name="RLVRWorkflow", module="areal.workflow.rlvr"),
    "multi_turn": FunctionRef(name="MultiTurnWorkflow", module="areal.workflow.multi_turn"),
}
ACCEPT_FUNCTIONS: dict[str, FunctionRef] = {
    "mixed_rewards": FunctionRef(name="mixed_rewards", module="areal.workflow.accept"),
}
MAP_FUNCTIONS: dict[str, FunctionRef] = {"gsm8k": FunctionRef(name="gsm8k_row", module="areal.data.dataset")}
"""The tables of registered names are here, so that the launcher checks names without importing the functions."""


def function_ref(function: Callable[..., Any]) -> FunctionRef:
    """The reference of a function or class defined at the top level of a module or script. ConfigError otherwise."""
    name = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if not isinstance(name, str) or not isinstance(module_name, str) or getattr(module, name, None) is not function:
        problem = f"{module_name}.{name or function!r} cannot be found by name from another process"
        message = f"{problem}: define a plain function (def) at the top level of a module"
        raise ConfigError(message, code="config.bad_reference")
    if module_name != "__main__":
        return FunctionRef(name=name, module=module_name)
    file = getattr(module, "__file__", None)
    if not file:
        message = f"{name} was defined in an interactive session: put it into a file that other processes can read"
        raise ConfigError(message, code="config.bad_reference")
    return FunctionRef(name=name, file=str(Path(file).resolve()))


def resolve_function(text: str, registered: Mapping[str, FunctionRef], *, key: str) -> FunctionRef:
    """The registered function of that name, or the one an import path or file path names. `key` is for errors."""
    if text in registered:
        return registered[text]
    if ":" not in text:
        known = f"{_did_you_mean(text, registered)}registered are {', '.join(sorted(registered))}"
        raise _bad_reference(key, text, f"is not known: {known}; give your own as module:function or file.py:function")
    return parse_function_path(text, key=key)


def parse_function_path(text: str, *, key: str) -> FunctionRef:
    """The reference that `module:function` or `path/to/file.py:function` names. Runs no code. `key` is for errors."""
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise _bad_reference(key, text, "is neither a registered name nor module:function nor file.py:function")
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        if not file.is_file():
            raise _bad_reference(key, text, f"cannot be found: there is no file {file}")
        _require_defined(file, name, key, text)
        return FunctionRef(name=name, file=str(file))
    spec = _find_module(where)
    if spec is None:
        hint = f"no module {where} is on the path; a file is given as path/to/file.py:{name}"
        raise _bad_reference(key, text, f"cannot be found: {hint}")
    if spec.origin is not None and spec.origin.endswith(".py"):
        _require_defined(Path(spec.origin), name, key, text)
    return FunctionRef(name=name, module=where)


def _find_module(name: str) -> ModuleSpec | None:
    """The module of that dotted name. importlib.util.find_spec would import its parents."""
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def parse_python(file: Path, *, key: str) -> ast.Module:
    """The syntax tree of a user's file, which is not run. ConfigError about `key` when it cannot be parsed."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise _bad_reference(key, f"{file}{line}", f"is not valid Python ({error.args[0]})") from None
    except OSError as error:
        raise _bad_reference(key, str(file), f"cannot be read ({error.strerror or error})") from None


def _require_defined(file: Path, name: str, key: str, text: str) -> None:
    """ConfigError when `file` is not Python or binds no such name."""
    known: set[str] = set()
    for node in ast.walk(parse_python(file, key=key)):  # also names bound under `if` or `try`; too many is harmless
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
    if not known & {name, "*", "__getattr__"}:
        hint = _did_you_mean(name, known)
        raise _bad_reference(key, text, f"is not defined: {hint}{file} defines no {name}")


def load_function(ref: FunctionRef) -> Callable[..., Any]:
    """Import the function or class of a reference. Exceptions of the module at its import are not caught."""
    module = _load_file(Path(ref.file)) if ref.file else importlib.import_module(ref.module)
    function = module.__dict__.get(ref.name)
    if function is None and hasattr(module, "__getattr__"):
        function = getattr(module, ref.name, None)
    if not callable(function):
        known = [name for name, value in module.__dict__.items() if callable(value) and not name.startswith("_")]
        message = f"{ref.file or ref.module} defines no function {ref.name}: {_did_you_mean(ref.name, known)}"
        raise ConfigError(message.rstrip(": "), code="config.bad_reference")
    return function


def _bad_reference(key: str, text: str, message: str) -> ConfigError:
    problem = ConfigProblem(key, f"{text!r} {message}", "config.bad_reference")
    return ConfigError(str(problem), problems=[problem])


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _load_file(path: Path) -> ModuleType:
    """Run a file once, as a module of another name than `__main__`."""
    name = f"areal_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as a Python file", code="config.bad_reference")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as when it runs as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
