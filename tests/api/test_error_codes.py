"""Every error that areal raises has a code."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Path below the repository -> the parsed module."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "areal").rglob("*.py"))
    }


@functools.cache
def error_classes() -> dict[str, bool]:
    """Every subclass of ArealError -> whether its body, or that of a base other than ArealError, sets the code."""
    classes = {
        node.name: node for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    result = {"ArealError": False}
    while True:
        added = {
            name: any(result[base] for base in bases) or sets_code(node)
            for name, node in classes.items()
            if name not in result
            and (bases := [b.id for b in node.bases if isinstance(b, ast.Name) and b.id in result])
        }
        if not added:
            return result
        result |= added


def sets_code(node: ast.ClassDef) -> bool:
    """Whether a class sets `code` in its body, or passes it to its base in __init__ and takes no `code` itself."""
    if any(argument.arg == "code" for argument in ast.walk(node) if isinstance(argument, ast.arg)):
        return False
    assigned = any(
        isinstance(target, ast.Name) and target.id == "code"
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    )
    return assigned or any(keyword.arg == "code" for keyword in ast.walk(node) if isinstance(keyword, ast.keyword))


def name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def test_every_error_has_a_code() -> None:
    classes = error_classes()
    without = [
        f"{path}:{node.lineno}: {name_of(node.func)}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and classes.get(name_of(node.func)) is False
        if not any(keyword.arg in ("code", "problems") for keyword in node.keywords)
    ]
    assert not without, "\n".join(without)
