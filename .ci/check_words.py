"""Finds phrases that the project's documentation style does not use, and prints each with its file and line.

Run by `make lint`: `python .ci/check_words.py [--report]`. The exit code is 1 when a phrase is found; with `--report`
it is 0 and only the numbers are printed. docs/glossary.md has the terms of the project, CONTRIBUTING.md the style.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"areal": "*.py", "docs": "*.md", "examples": "*.*", "benchmark": "*.py"}
PAGES = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")

INSTEAD = {
    "told": "reported, stated",
    "tells": "reports, states",
    "stands?": "is, holds, means",
    "stood": "was, held, meant",
    "anew": "again",
    "so (?:many|long)(?! as)": "the number itself, for example: every N steps",
    "begun": "started",
    "(?-i:Owns)": "a verb that says what the module is for",
    "whoever": "the caller, the user, the process",
    "(?:mend|mends|mended|mending)": "fix",
    "torn": "incomplete",
    "_?obituary": "exit report",
    "_?(?:bury|buried|buries)": "a verb that says what happens: remove, record the exit",
    "see_off|see off": "end, close",
    r"\w*hopeless": "cannot succeed, permanent",
    r"\w*outliv(?:e|es|ed)": "still runs after, longer than",
    r"\w*leftovers?": "remaining files, orphan processes",
    "(?:go|goes|went|going) on": "continue",
    "asked for": "requested",
    "of its own": "separate, own",
    "beside": "next to, in addition to",
    "brings?": "contains, causes, provides",
    "gone": "removed, ended, missing",
    "no longer than": "at most",
    "for good": "permanently",
    "as it is then": "current",
    "for ever": "without limit",
    "judges?": "reward model, assertion checker, verdict (docs/glossary.md)",
    "off-policyness": "staleness",
}
"""Regular expression, matched as a whole word; a space also matches a line break. -> What to write instead."""
_GAP = r"(?:\s|#)+"
PATTERNS = {
    re.compile(r"(?<![\w-])(?:" + phrase.replace(" ", _GAP) + r")(?![\w-])", re.IGNORECASE): use
    for phrase, use in INSTEAD.items()
}


def sources() -> Iterator[Path]:
    """Every file that is checked."""
    for folder, names in SOURCES.items():
        yield from (path for path in sorted((ROOT / folder).rglob(names)) if path.suffix in (".py", ".md", ".yaml"))
    yield from (ROOT / page for page in PAGES if (ROOT / page).exists())


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the phrase and what to write instead, for each banned phrase of a file."""
    text = path.read_text(encoding="utf-8")
    for pattern, use in PATTERNS.items():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), use


def main(argv: list[str]) -> int:
    found: Counter[str] = Counter()
    lines: list[str] = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for line, phrase, use in sorted(findings(path)):
            found["/".join(name.split("/")[:2])] += 1
            lines.append(f"{name}:{line}: {phrase!r}: write instead: {use}")
    report = "--report" in argv
    if report:
        lines = [f"{number:5d} {folder}" for folder, number in found.most_common()]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"check_words: {found.total()} phrases to replace\n")
    return 0 if report or not lines else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
