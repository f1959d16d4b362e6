"""Owns references to users' functions and classes: how a name in a configuration or an object becomes one, and back.

A reference crosses process borders as text, so that no code is ever pickled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from areal.api.errors import ConfigError, ConfigProblem


def _bad_reference(message: str, key: str = "") -> ConfigError:
    code = "config.bad_reference"
    return ConfigError(message, code=code, problems=[ConfigProblem(key, message, code)] if key else ())


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


def function_ref(function: Callable[..., Any]) -> FunctionRef:
    """The reference of a function or class defined at the top level of a module or script. ConfigError otherwise."""
    name = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module_name, str):
        raise _bad_reference(
            f"{function!r} cannot be found by name from another process: define a plain function (def) at the top "
            "level of a module, and give that"
        )
    module = sys.modules.get(module_name)
    if "." in name or "<" in name or getattr(module, name, None) is not function:
        raise _bad_reference(
            f"{module_name}.{name} cannot be found by name from another process (a lambda, method, nested or "
            "wrapped function): define a plain function (def) at the top level of a module, and give that"
        )
    if module_name != "__main__":
        return FunctionRef(name=name, module=module_name)
    file = getattr(module, "__file__", None)
    if not file:
        raise _bad_reference(
            f"{name} was defined in an interactive session: put it into a file, other processes read it"
        )
    return FunctionRef(name=name, file=str(Path(file).resolve()))


def parse_function_path(text: str, *, key: str) -> FunctionRef:
    """The reference that `module:function` or `path/to/file.py:function` stands for. `key` is named in errors."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise _bad_reference(f"{key}={text!r} is neither a registered name nor module:function nor file.py:function")
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        if not file.is_file():
            raise _bad_reference(f"{key}={text!r}: there is no file {file}")
        _require_defined(file, name, f"{key}={text!r}")
        return FunctionRef(name=name, file=str(file))
    try:
        found = importlib.util.find_spec(where) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise _bad_reference(
            f"{key}={text!r}: no module {where} on the path; a file is given as path/to/file.py:{name}"
        )
    return FunctionRef(name=name, module=where)


def parse_python(file: Path, *, given: str) -> ast.Module:
    """The syntax tree of a user's file, which is not run. ConfigError, starting with `given`, when it has none."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise _bad_reference(f"{given}: {file}{line} is not valid Python ({error.args[0]})") from None
    except OSError as error:
        raise _bad_reference(f"{given}: cannot read {file} ({error.strerror or error})") from None


def _require_defined(file: Path, name: str, given: str) -> None:
    """ConfigError when `file` is no Python or binds no such name. Reads it without running it."""
    tree = parse_python(file, given=given)
    known: set[str] = set()
    for node in ast.walk(tree):  # also names bound under an `if` or `try`; too many is harmless
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
    if name not in known and "*" not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _bad_reference(f"{given}: {file} defines no {name}{hint}")


def resolve_function(text: str, registered: Mapping[str, FunctionRef], *, key: str) -> FunctionRef:
    """The registered function of that name, or the one an import path or file path stands for."""
    if text in registered:
        return registered[text]
    if not text or ":" not in text:
        near = get_close_matches(text, registered, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise _bad_reference(
            f"{key}={text!r} is not known: {hint}registered are {', '.join(sorted(registered))}; "
            "your own is given as module:function or file.py:function"
        )
    return parse_function_path(text, key=key)


def load_function(ref: FunctionRef) -> Callable[..., Any]:
    """Import what a reference stands for. Whatever the module raises at import passes through."""
    module = _load_file(Path(ref.file)) if ref.file else importlib.import_module(ref.module)
    function = module.__dict__.get(ref.name)
    if not callable(function):
        known = [name for name, value in module.__dict__.items() if callable(value) and not name.startswith("_")]
        near = get_close_matches(ref.name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _bad_reference(f"{ref.file or ref.module} defines no function {ref.name}{hint}")
    return function


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module of its own name, once: `if __name__ == "__main__"` in it does not hold."""
    name = f"areal_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _bad_reference(f"{path} cannot be loaded as a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, as when it is run as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
