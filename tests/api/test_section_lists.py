"""A list of sections in a config: given as YAML or on the command line, checked item by item, written and read back."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal.api.config import check_config, load_config, save_config
from areal.api.config.load import help_text
from areal.api.config.schema import Problems, choice, find_field, leaf_paths, number
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


def test_a_list_replaces_the_default_list(tmp_path: Path) -> None:
    assert load(tmp_path, "inner: {name: x}").inner == Inner(name="x", limits=[Limit(size=9)])
    assert load(tmp_path, "inner: {limits: []}").inner == Inner(limits=[])


@pytest.mark.parametrize(
    ("override", "path", "code", "values"),
    [
        ("[{kind: hard}, {sise: 2}]", "[1].sise", "unknown_key", ["inner.limits[1].size"]),
        ("[{}, {size: 0}]", "[1].size", "out_of_range", ["0", "at least 1"]),
        ("[{kind: odd}]", "[0].kind", "not_a_choice", ["'odd'", "soft, hard"]),
        ("[{size: many}]", "[0].size", "wrong_type", ["'many'", "integer"]),
        ("[{}, {kind: hard, size: 7}]", "[1].size", "conflict", ["is unlucky"]),
        ("[{}, 4]", "[1]", "wrong_type", ["4", "section"]),
        ("[null]", "[0]", "wrong_type", ["null", "section"]),
        ("{size: 2}", "", "wrong_type", ["{'size': 2}", "list of sections"]),
        ("null", "", "wrong_type", ["null", "list of sections"]),
        ("[{size: '${nowhere}'}]", "[0].size", "unresolved_interpolation", ["${nowhere}"]),
        ('[{}, {size: "???"}]', "[1].size", "required", []),
    ],
)
def test_a_problem_names_the_item_of_the_list(tmp_path: Path, override: str, path: str, code: str, values) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", f"inner.limits={override}")
    (result,) = caught.value.problems
    assert (result.path, result.code) == (f"inner.limits{path}", f"config.{code}")
    assert [value for value in values if value not in result.message] == []


def test_configs_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Outer(inner=Inner(limits=[Limit(), Limit(kind="hard", size=7), Limit(size=0)])))
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [
        ("inner.limits[2].size", "config.out_of_range"),
        ("inner.limits[1].size", "config.conflict"),
    ]


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
