"""The size of each package: most lines, files and options. A change that needs more edits the table, with a reason.

`python -m tests.test_budget` prints the table with the sizes of the tree.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from areal.api.config.experiment import KINDS
from areal.api.config.schema import fields_of
from areal.api.registry import entries

ROOT = Path(__file__).resolve().parent.parent
WITH_OPTIONS = ("losses", "estimators", "optimizers", "trackers")
"""Kinds of registered things that may have options."""


class Size(NamedTuple):
    """What a package has, or may have at most."""

    lines: int
    files: int
    options: int
    """Fields of configuration classes that are defined in the package, without those that are sections."""


BUDGET = {
    "agent": Size(6542, 20, 0),
    "algorithm": Size(2501, 17, 33),
    "api": Size(9048, 28, 582),
    "areal": Size(66, 2, 0),
    "cli": Size(3874, 18, 0),
    "data": Size(3875, 18, 0),
    "engine": Size(8500, 27, 0),
    "environments": Size(2004, 13, 0),
    "evaluate": Size(976, 5, 0),
    "fleet": Size(6542, 17, 0),
    "importers": Size(3459, 8, 0),
    "inference": Size(6347, 18, 0),
    "launcher": Size(8773, 25, 0),
    "ledger": Size(4021, 11, 0),
    "models": Size(1814, 11, 0),
    "observe": Size(2122, 12, 0),
    "planner": Size(2309, 12, 0),
    "replay": Size(1018, 5, 0),
    "reward": Size(3442, 13, 0),
    "rollout": Size(4103, 12, 0),
    "serve": Size(3844, 14, 0),
    "server_side": Size(687, 8, 0),
    "system": Size(3684, 15, 0),
    "trainer": Size(5626, 25, 0),
    "weights": Size(1747, 9, 0),
    "workflow": Size(1783, 8, 0),
}
TESTS_LINES = 101332


def option_classes() -> Iterator[type[Any]]:
    """Every configuration class, also those of registered things."""
    waiting = [*KINDS, *(entry.options for kind in WITH_OPTIONS for entry in entries(kind).values() if entry.options)]
    seen: set[type[Any]] = set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            yield cls
            for spec in fields_of(cls).values():
                sections = (spec.hint if spec.is_section else None, spec.item_section)
                waiting += [section for section in sections if isinstance(section, type)]


def measured() -> dict[str, Size]:
    """Package -> its size. The files directly in `areal/` are those of the package "areal"."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in (ROOT / "areal").rglob("*.py"):
        *folders, _ = path.relative_to(ROOT / "areal").parts
        package = folders[0] if folders else "areal"
        lines[package] += len(path.read_text(encoding="utf-8").splitlines())
        files[package] += 1
    options = {
        (cls.__module__.split(".")[1], cls.__qualname__, name)
        for cls in option_classes()
        for name, spec in fields_of(cls).items()
        if not spec.is_section
    }
    num_options = Counter(package for package, _, _ in options)
    return {package: Size(lines[package], files[package], num_options[package]) for package in sorted(lines)}


def test_no_package_exceeds_its_budget() -> None:
    sizes = measured()
    assert set(sizes) == set(BUDGET)
    exceeded = [
        f"{package}: {amount} {name}, the budget is {most}"
        for package, size in sizes.items()
        for name, amount, most in zip(Size._fields, size, BUDGET[package], strict=True)
        if amount > most
    ]
    assert not exceeded, "\n".join(exceeded)


def test_the_tests_do_not_exceed_their_budget() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    assert lines <= TESTS_LINES


if __name__ == "__main__":
    sizes = measured()
    for package, size in sizes.items():
        print(f'    "{package}": Size({size.lines}, {size.files}, {size.options}),')  # noqa: T201
    print("all:", *(sum(column) for column in zip(*sizes.values(), strict=True)))  # noqa: T201
