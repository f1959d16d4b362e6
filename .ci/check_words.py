"""Finds terms that have another name in this project, and variables with a name that says nothing; prints each
with its file and line. Run by `make lint`; the exit code is 1 if there is one.

docs/README.md has the terms of the project, CONTRIBUTING.md the style.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"areal": "*.py", "docs": "*.md", "examples": "*.*", "benchmark": "*.py"}
PAGES = ("README.md", "Makefile", "pyproject.toml")

INSTEAD = {
    "off-policyness": "staleness",
    "weight versions?": "policy version",
    "model versions?": "policy version",
    "response_masks?": "loss_mask",
    "action_masks?": "loss_mask",
    "weight syncs?": "weight update, weight channel",
    "judges?": "reward model, assertion checker, verdict",
    "_?obituary": "exit report",
    "_?(?:bury|buried|buries)": "remove, record the exit",
    "torn": "incomplete",
    r"\w*outliv(?:e|es|ed)": "still runs after, longer than",
    r"\w*leftovers?": "remaining files, orphan processes",
}
"""A term of another system or of an earlier version -> the term here. Each key is a regular expression, matched as a
whole word; a space also matches a line break."""
_GAP = r"(?:\s|#)+"
PATTERNS = {
    re.compile(r"(?<![\w-])(?:" + phrase.replace(" ", _GAP) + r")(?![\w-])", re.IGNORECASE): use
    for phrase, use in INSTEAD.items()
}

NAMELESS = {"found", "one", "own", "given"}
"""Names of variables and parameters that say nothing of what these hold: use a term of the field."""


def sources() -> Iterator[Path]:
    for folder, names in SOURCES.items():
        yield from (path for path in sorted((ROOT / folder).rglob(names)) if path.suffix in (".py", ".md", ".yaml"))
    yield from (ROOT / page for page in PAGES)


def terms(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for pattern, use in PATTERNS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: write instead: {use}"


def nameless(path: Path) -> Iterator[str]:
    for line, name in names(path.read_text(encoding="utf-8")):
        if name in NAMELESS:
            yield f"{path.relative_to(ROOT)}:{line}: {name!r}: name the variable after what it holds"


def names(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each assignment and parameter."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def main() -> int:
    lines = [line for path in sources() for line in terms(path)]
    code = [path for path in sources() if path.suffix == ".py"] + sorted((ROOT / "tests").rglob("*.py"))
    lines += [line for path in code for line in nameless(path)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
