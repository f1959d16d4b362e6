"""The house rules that a test can check: allowed imports, what an import loads, sizes, names."""

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "areal"
MODULES = sorted(PACKAGE.rglob("*.py"))

ALL = {
    "api", "system", "observe", "algorithm", "data", "reward", "inference", "ledger", "rollout", "fleet", "weights",
    "engine", "agent", "workflow", "environments", "models",
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "areal": {
        "api",
        "data",
        "serve",
        "trainer",
        "workflow",
    },  # areal/__init__.py itself, which imports them at the first use
    "api": set(),
    "server_side": set(),  # runs in the environments of foreign servers, where areal is not installed
    "system": {"api"},
    "observe": {"api", "system", "data"},
    "models": {"api", "system"},
    "algorithm": {"api"},
    "data": {"api", "system", "models"},
    "reward": {"api", "observe", "system"},
    "weights": {"api", "system", "observe", "models", "server_side"},
    "inference": {"api", "system", "observe", "models", "data", "weights"},
    "ledger": {"api", "system", "data"},
    "rollout": {"api", "system", "observe", "data", "ledger"},
    "fleet": {"api", "system", "observe", "models", "data"},
    "engine": {"api", "system", "observe", "models", "algorithm", "data", "weights"},
    "agent": {"api", "system", "observe", "data"},
    "workflow": {"api", "observe", "data", "reward", "agent"},
    "environments": {"api", "system", "observe", "data", "agent", "workflow"},
    "trainer": ALL,
    "launcher": {"api", "system", "observe", "models", "data", "server_side", "fleet"},
    "evaluate": ALL | {"trainer", "launcher"},
    "serve": ALL | {"trainer", "launcher", "evaluate"},
    "replay": ALL | {"trainer", "launcher"},
    "planner": {
        "api",
        "system",
        "observe",
        "models",
        "data",
        "reward",
        "ledger",
        "rollout",
        "fleet",
        "workflow",
        "launcher",
    },
    "importers": {"api"},
    "cli": ALL | {"trainer", "launcher", "replay", "evaluate", "importers", "serve", "planner"},
    "__main__": {"cli"},
}
"""Package -> packages that it may import besides itself. A package without a row, or a row without a package, fails."""

WITHOUT_TORCH = ("ledger", "rollout", "fleet", "launcher", "agent", "planner")
"""Packages that never import torch, also not inside a function."""
TORCH_LATER = ("api", "system", "observe", "reward", "cli", *WITHOUT_TORCH)
"""Packages whose import must not load torch."""
OPTIONAL = (
    "datasets",
    "matplotlib",
    "tensorboardX",
    "wandb",
    "swanlab",
    "mlflow",
    "trackio",
    "ray",
    "openai",
    "anthropic",
    "PIL",
)
"""Dependencies of extras: at most one module imports each of them, and names it when it is missing."""
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "core", "experimental"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 1000, 80


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of one module, found in one walk over its syntax tree."""

    has_docstring: bool
    num_lines: int
    imports: tuple[tuple[int, str], ...]
    """Every module that it imports, anywhere in it: (line, absolute dotted name)."""
    functions: tuple[tuple[int, str, int], ...]
    """(first line, name, lines)"""
    globals_and_evals: tuple[tuple[int, str], ...]
    distributed: tuple[int, ...]
    """Lines with an attribute `distributed`."""


@functools.cache
def facts(path: Path) -> Facts:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(path))
    imports: list[tuple[int, str]] = []
    functions: list[tuple[int, str, int]] = []
    forbidden: list[tuple[int, str]] = []
    distributed: list[int] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                imports += imported_names(path, node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.end_lineno is not None:
                functions.append((node.lineno, node.name, node.end_lineno - node.lineno + 1))
            case ast.Global():
                forbidden.append((node.lineno, f"global {', '.join(node.names)}"))
            case ast.Attribute(attr="distributed"):
                distributed.append(node.lineno)
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                forbidden.append((node.lineno, f"{name}()"))
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                imports.append((node.lineno, name))
    return Facts(
        has_docstring=bool(ast.get_docstring(tree)),
        num_lines=len(text.splitlines()),
        imports=tuple(imports),
        functions=tuple(functions),
        globals_and_evals=tuple(forbidden),
        distributed=tuple(distributed),
    )


def package_of(path: Path) -> str:
    """The first-level package a module belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "areal" if parts == ("__init__",) else parts[0]


def imported_names(path: Path, node: ast.Import | ast.ImportFrom) -> list[tuple[int, str]]:
    if isinstance(node, ast.Import):
        return [(node.lineno, alias.name) for alias in node.names]
    here = path.relative_to(ROOT).with_suffix("").parts
    base = [*(here[: -node.level] if node.level else ()), *(node.module.split(".") if node.module else ())]
    return [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]


def test_every_import_follows_the_table() -> None:
    broken: list[str] = []
    for path in MODULES:
        package = package_of(path)
        if package not in MAY_IMPORT:
            broken.append(f"{path.relative_to(ROOT)}: package {package!r} is not in the table")
            continue
        for line, name in facts(path).imports:
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
        for line, name in facts(path).imports
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


def test_the_names_of_scripts_come_from_the_top_package_at_their_first_use() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    code = (
        f"import areal, sys; before = set(sys.modules); names = {sorted(typed)}; assert set(names) <= set(dir(areal))\n"
    )
    code += (
        "assert not {name for name in before if name.startswith('areal.')}; from areal import PPOTrainer, load_rows\n"
    )
    code += (
        "assert 'torch' not in sys.modules; print(*(name for name in names if getattr(areal, name).__name__ != name))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.returncode) == ("\n", 0), done.stderr
    assert {"GRPOConfig", "PPOTrainer", "RLVRWorkflow", "RolloutWorkflow", "load_config"} <= typed


def test_algorithms_do_not_use_torch_distributed() -> None:
    broken: list[str] = []
    for path in MODULES:
        if package_of(path) != "algorithm":
            continue
        lines = [line for line, name in facts(path).imports if "distributed" in name]
        broken += [f"{path.name}:{line}" for line in [*lines, *facts(path).distributed]]
    assert not broken, f"torch.distributed in areal/algorithm: {broken}"


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_dependency_is_imported_in_one_module(name: str) -> None:
    users = {path.name for path in MODULES for _, module in facts(path).imports if module.split(".")[0] == name}
    assert len(users) <= 1, f"{name} is imported by {sorted(users)}"


def test_every_module_has_a_docstring() -> None:
    silent = [str(path.relative_to(ROOT)) for path in MODULES if not facts(path).has_docstring]
    assert not silent, f"without a docstring: {silent}"


def test_no_global_state_pickle_or_eval() -> None:
    broken: list[str] = []
    for path in MODULES:
        where = path.relative_to(ROOT)
        broken += [f"{where}:{line}: {what}" for line, what in facts(path).globals_and_evals]
        for line, name in facts(path).imports:
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
        if facts(path).num_lines > MAX_FILE_LINES:
            too_long.append(f"{where}: {facts(path).num_lines} lines")
        for line, name, length in facts(path).functions:
            if length > MAX_FUNCTION_LINES:
                too_long.append(f"{where}:{line}: {name} has {length} lines")
    assert not too_long, "\n".join(too_long)
