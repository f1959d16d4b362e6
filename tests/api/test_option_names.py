"""The names of the options are a promise: files that load today load tomorrow."""

from pathlib import Path

from areal.api.config.experiment import KINDS
from areal.api.config.schema import fields_of, leaf_paths

FROZEN = Path(__file__).with_name("option_names.txt")


def current_names() -> list[str]:
    return sorted({path for cls in KINDS for path, _ in leaf_paths(cls)})


def test_no_option_disappears_and_new_ones_are_written_down() -> None:
    frozen, current = FROZEN.read_text(encoding="utf-8").split(), current_names()
    removed = sorted(set(frozen) - set(current))
    assert not removed, f"keep them, or accept them in legacy.py and edit {FROZEN.name}: {removed}"
    new = sorted(set(current) - set(frozen))
    assert not new, f"add to {FROZEN.name}: {new}"
    assert frozen == current, f"{FROZEN.name} is sorted and without repetitions"


def test_every_option_has_one_sentence() -> None:
    def check(cls: type, prefix: str) -> list[str]:
        found: list[str] = []
        for name, spec in fields_of(cls).items():
            if not spec.sentence.strip().endswith(".") or "\n" in spec.sentence:
                found.append(f"{prefix}{name}: {spec.sentence!r}")
            if spec.is_section:
                found += check(spec.hint, f"{prefix}{name}.")
        return found

    assert not (broken := [problem for cls in KINDS for problem in check(cls, "")]), "\n".join(broken)
