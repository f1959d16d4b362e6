"""Every error that areal raises has a code, every code is in the table, and the table's page is up to date."""

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from areal.api.error_codes import ERROR_CODES, errors_page

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Path below the repository -> the parsed module."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "areal").rglob("*.py"))
        if path.name != "error_codes.py"
    }


@functools.cache
def error_classes() -> dict[str, bool]:
    """Every subclass of ArealError -> whether its body, or that of a base other than ArealError, sets the code."""
    classes = {
        node.name: node for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    found = {"ArealError": False}
    while True:
        added = {
            name: any(found[base] for base in bases) or sets_code(node)
            for name, node in classes.items()
            if name not in found and (bases := [b.id for b in node.bases if isinstance(b, ast.Name) and b.id in found])
        }
        if not added:
            return found
        found |= added


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


def codes_given() -> Iterator[tuple[str, str]]:
    """Each code that is passed as `code=` or set in the body of an error class: (file:line, code)."""
    classes = error_classes()
    for path, tree in sources().items():
        for node in ast.walk(tree):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call) and name_of(node.func) in {*classes, "__init__"}:
                values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            elif isinstance(node, ast.ClassDef) and node.name in classes and node.name != "ArealError":
                values = [
                    part.value for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign) and part.value
                ]
            for value in values:
                for part in ast.walk(value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and "." in part.value:
                        yield f"{path}:{part.lineno}", part.value


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


def test_every_code_is_in_the_table() -> None:
    unknown = [f"{where}: {code}" for where, code in codes_given() if code not in ERROR_CODES]
    assert not unknown, "\n".join(unknown)


def test_every_entry_of_the_table_is_used() -> None:
    texts = {
        node.value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not [code for code in ERROR_CODES if code not in texts]


def test_the_table_is_sorted_within_its_areas() -> None:
    areas = [list(group) for _, group in itertools.groupby(ERROR_CODES, key=lambda code: code.partition(".")[0])]
    assert [sorted(area) for area in areas] == areas
    assert len({area[0].partition(".")[0] for area in areas}) == len(areas)


def test_every_cause_and_fix_is_a_sentence() -> None:
    bad = [code for code, entry in ERROR_CODES.items() for text in (entry.cause, entry.fix) if not text.endswith(".")]
    assert not bad
