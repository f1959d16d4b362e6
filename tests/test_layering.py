"""The house rules that a test can check: allowed imports, what an import loads, sizes, names."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "areal"
MODULES = sorted(PACKAGE.rglob("*.py"))

ALL = {
    "api", "system", "observe", "algorithm", "data", "reward", "inference", "ledger", "rollout", "fleet", "weights",
    "engine", "workflow",
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "areal": set(),  # areal/__init__.py itself
    "api": set(),
    "server_side": set(),  # runs in the environments of foreign servers, where areal is not installed
    "system": {"api"},
    "observe": {"api", "system"},
    "algorithm": {"api"},
    "data": {"api"},
    "reward": {"api", "observe", "system"},
    "weights": {"api", "system", "observe", "server_side"},
    "inference": {"api", "system", "observe", "weights"},
    "ledger": {"api", "system", "data"},
    "rollout": {"api", "system", "observe", "data", "ledger"},
    "fleet": {"api", "system", "observe"},
    "engine": {"api", "system", "observe", "algorithm", "data", "weights"},
    "workflow": {"api", "observe", "data", "reward"},
    "trainer": ALL,
    "launcher": {"api", "system", "observe", "data", "server_side", "fleet"},
    "replay": ALL | {"trainer", "launcher"},
    "cli": ALL | {"trainer", "launcher", "replay"},
    "__main__": {"cli"},
}
"""Package -> packages that it may import besides itself. A package without a row, or a row without a package, fails."""

WITHOUT_TORCH = ("ledger", "rollout", "fleet", "launcher")
"""Packages that never import torch, also not inside a function."""
TORCH_LATER = ("api", "system", "observe", "reward", "cli", *WITHOUT_TORCH)
"""Packages whose import must not load torch."""
OPTIONAL = ("datasets", "matplotlib", "tensorboardX", "wandb", "swanlab", "ray")
"""Dependencies of extras: at most one module imports each of them, and names it when it is missing."""
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "core", "experimental"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
LONG_ON_PURPOSE: dict[str, str] = {"areal/api/error_codes.py": "one table with an entry for each code"}
"""path or path:function -> why it may be longer. At most three."""


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_of(path: Path) -> str:
    """The first-level package a module belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "areal" if parts == ("__init__",) else parts[0]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that `path` imports, anywhere in it: (line, absolute dotted name)."""
    here = [*path.relative_to(ROOT).with_suffix("").parts]
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            case ast.ImportFrom(level=level, module=module):
                base = [*here[:-level], *(module.split(".") if module else [])]
                yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def test_every_import_follows_the_table() -> None:
    broken: list[str] = []
    for path in MODULES:
        package = package_of(path)
        if package not in MAY_IMPORT:
            broken.append(f"{path.relative_to(ROOT)}: package {package!r} is not in the table")
            continue
        for line, name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "areal" and len(parts) > 1 and parts[1] not in MAY_IMPORT[package] | {package}:
                broken.append(f"{path.relative_to(ROOT)}:{line}: {package} may not import {name}")
    assert not broken, "\n".join(broken)
    assert set(MAY_IMPORT) == {package_of(path) for path in MODULES}


def test_some_packages_never_import_torch() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        if package_of(path) in WITHOUT_TORCH
        for line, name in imported_modules(path)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not broken, "\n".join(broken)


def test_importing_the_light_packages_does_not_load_torch() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if package_of(path) in TORCH_LATER and path.stem != "__main__"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr


def test_algorithms_do_not_use_torch_distributed() -> None:
    broken: list[str] = []
    for path in MODULES:
        if package_of(path) != "algorithm":
            continue
        broken += [f"{path.name}:{line}" for line, name in imported_modules(path) if "distributed" in name]
        broken += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Attribute) and node.attr == "distributed"
        ]
    assert not broken, f"torch.distributed in areal/algorithm: {broken}"


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_dependency_is_imported_in_one_module(name: str) -> None:
    users = {path.name for path in MODULES for _, module in imported_modules(path) if module.split(".")[0] == name}
    assert len(users) <= 1, f"{name} is imported by {sorted(users)}"


def test_every_module_has_a_docstring() -> None:
    silent = [str(path.relative_to(ROOT)) for path in MODULES if not ast.get_docstring(parse(path))]
    assert not silent, f"without a docstring: {silent}"


def test_no_global_state_pickle_or_eval() -> None:
    broken: list[str] = []
    for path in MODULES:
        where = path.relative_to(ROOT)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Global):
                broken.append(f"{where}:{node.lineno}: global {', '.join(node.names)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                broken.append(f"{where}:{node.lineno}: {node.func.id}()")
        for line, name in imported_modules(path):
            if name.split(".")[0] in ("pickle", "cloudpickle", "dill"):
                broken.append(f"{where}:{line}: {name}")
    assert not broken, "\n".join(broken)


def test_no_module_has_a_name_without_meaning() -> None:
    broken = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)
    ]
    assert not broken, f"name it by its contents: {broken}"


def test_files_and_functions_stay_small() -> None:
    sources = [*MODULES, *(path for top in ("examples", "benchmark", "tests") for path in (ROOT / top).rglob("*.py"))]
    too_long: list[str] = []
    for path in sources:
        where = str(path.relative_to(ROOT))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES and where not in LONG_ON_PURPOSE:
            too_long.append(f"{where}: {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES and f"{where}:{node.name}" not in LONG_ON_PURPOSE:
                    too_long.append(f"{where}:{node.lineno}: {node.name} has {length} lines")
    assert not too_long, "\n".join(too_long)
    assert len(LONG_ON_PURPOSE) <= 3
