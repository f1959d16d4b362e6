"""No dead options: the name of whatever a user may configure occurs outside of the configuration classes, and has one
sentence that explains it."""

import ast
from pathlib import Path

from areal.api.config.experiment import KINDS
from areal.api.config.schema import fields_of, leaf_paths
from areal.api.registry import entries

AREAL = Path(__file__).resolve().parents[2] / "areal"


def names_in_code() -> set[str]:
    """Every attribute that is read in areal, without the checks of the config classes, and every text."""
    names: set[str] = set()
    for path in AREAL.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_config = path.parent.name == "config"
        checks = {
            part
            for node in (ast.walk(tree) if is_config else ())
            if isinstance(node, ast.FunctionDef) and node.name.endswith("problems")
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node not in checks:
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_config:
                names.add(node.value)
    return names


def test_every_option_is_read() -> None:
    names = names_in_code()
    unread = {path for cls in KINDS for path, spec in leaf_paths(cls) if spec.name not in names}
    assert unread - set(entries("backends")) == set()


def test_every_option_has_one_sentence() -> None:
    def check(cls: type, prefix: str) -> list[str]:
        result: list[str] = []
        for name, spec in fields_of(cls).items():
            if not spec.sentence.strip().endswith(".") or "\n" in spec.sentence:
                result.append(f"{prefix}{name}: {spec.sentence!r}")
            if spec.is_section:
                result += check(spec.hint, f"{prefix}{name}.")
        return result

    assert not (broken := [problem for cls in KINDS for problem in check(cls, "")]), "\n".join(broken)
