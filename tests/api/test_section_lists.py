"""A list of sections in a config: given as YAML or on the command line, checked item by item, written and read back."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal.api.config import check_config, load_config, save_config
from areal.api.config.fields import Problems, choice, number
from areal.api.config.help import help_text
from areal.api.config.schema import find_field, leaf_paths
from areal.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limit:
    kind: str = choice("soft", "soft", "hard")
    """How it holds."""
    size: int = number(3, low=1)
    """How much."""
    tags: list[str] = field(default_factory=list[str])
    """What for."""

    def problems(self) -> Problems:
        if self.kind == "hard" and self.size == 7:
            yield "size", "is unlucky"


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str = "none"
    """A name."""
    limits: list[Limit] = field(default_factory=lambda: [Limit(size=9)])
    """The limits."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner | None = None
    """A section."""
    named: str = "n"
    """A text."""


def load(tmp_path: Path, text: str, *overrides: str) -> Outer:
    path = tmp_path / "x.yaml"
    path.write_text(text or "{}", encoding="utf-8")
    return load_config(["--config", str(path), *overrides], Outer)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("inner: {limits: [{kind: hard}, {size: 2, tags: [a, b]}]}", []),
        ("inner:\n  limits:\n  - kind: hard\n  - size: 2\n    tags: [a, b]", []),
        ("", ["inner.limits=[{kind: hard}, {size: 2, tags: [a, b]}]"]),
        ("inner: {limits: [{size: 5}]}", ["inner.limits=[{kind: hard}, {size: 2, tags: [a, '${named}b']}]", "named="]),
    ],
)
def test_a_list_of_sections_is_read(tmp_path: Path, text: str, overrides: list[str]) -> None:
    config = load(tmp_path, text, *overrides)
    assert config.inner is not None
    expected = [Limit(kind="hard"), Limit(size=2, tags=["a", "b"])]
    assert config.inner.limits == expected
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(["--config", str(tmp_path / "saved.yaml")], Outer) == config


def test_the_default_list_stands_until_a_list_is_given(tmp_path: Path) -> None:
    assert load(tmp_path, "inner: {name: x}").inner == Inner(name="x", limits=[Limit(size=9)])
    assert load(tmp_path, "inner: {limits: []}").inner == Inner(limits=[])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "[{kind: hard}, {sise: 2}]",
            r"inner\.limits\[1\]\.sise: unknown key; did you mean inner\.limits\[1\]\.size",
        ),
        ("[{}, {size: 0}]", r"inner\.limits\[1\]\.size: 0 is not allowed: use a number of at least 1"),
        ("[{kind: odd}]", r"inner\.limits\[0\]\.kind: 'odd' is not allowed: use one of soft, hard"),
        ("[{size: many}]", r"inner\.limits\[0\]\.size: 'many' was given where integer is expected"),
        ("[{}, {kind: hard, size: 7}]", r"inner\.limits\[1\]\.size: is unlucky"),
        ("[{}, 4]", r"inner\.limits\[1\]: 4 was given where a section"),
        ("[null]", r"inner\.limits\[0\]: None was given where a section"),
        ("{size: 2}", r"inner\.limits: \{'size': 2\} was given where a list of sections is expected"),
        ("null", r"inner\.limits: null was given where list of sections is expected"),
        ("[{size: '${nowhere}'}]", r"inner\.limits\[0\]\.size: .*cannot be resolved"),
    ],
)
def test_what_is_wrong_is_told_at_its_place(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load(tmp_path, "", f"inner.limits={override}")
    assert "problems" not in str(caught.value)


def test_configs_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"inner\.limits\[1\]\.size: is unlucky"):
        check_config(Outer(inner=Inner(limits=[Limit(), Limit(kind="hard", size=7)])))


def test_help_and_the_list_of_options_name_what_an_item_holds() -> None:
    paths = [path for path, _ in leaf_paths(Outer)]
    assert paths == ["inner.name", "inner.limits[].kind", "inner.limits[].size", "inner.limits[].tags", "named"]
    whole = help_text(Outer)
    assert "inner.limits: list of sections; default" in whole
    assert "inner.limits[].kind: soft | hard; default soft" in whole
    assert help_text(Outer, "inner.limits").splitlines()[2].strip().startswith("inner.limits[].kind")
    assert "number" not in help_text(Outer, "inner.limits[].size")
    assert "integer of at least 1; default 3" in help_text(Outer, "inner.limits[].size")
    size = find_field(Outer, "inner.limits[3].size")
    assert size is not None
    assert size.name == "size"
    assert find_field(Outer, "inner.limits.size") is None
    assert find_field(Outer, "inner.name[0]") is None
