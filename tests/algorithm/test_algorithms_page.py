"""docs/algorithms.md: every row's configuration loads, and every loss and estimator has a row."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.api.config import PPOActorConfig, PPOCriticConfig, RewardModelConfig, TeacherConfig
from areal.api.config.experiment import DPOOptions, RWOptions, SFTOptions
from areal.api.config.load import read
from areal.api.config.schema import fields_of

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
NAMED = ("policy_loss", "adv_estimator")
"""Options whose every choice needs a row."""


def tables(text: str) -> list[list[list[str]]]:
    """Every Markdown table as rows of cells, the header row first."""
    result: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            result[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
        elif result[-1]:
            result.append([])
    return [[row for row in table if not set("".join(row)) <= set("-: ")] for table in result if table]


def rows(section: str = "actor") -> list[tuple[str, list[dict[str, Any]]]]:
    """(name, options that its config cell gives) of every row of a table with a config column for a section."""
    result = []
    for header, *body in tables(PAGE.read_text(encoding="utf-8")):
        places = [i for i, title in enumerate(header) if title.startswith(f"config (`{section}.`)")]
        for cells in body if places else []:
            spans = re.findall(r"`([^`]+)`", cells[places[0]])
            inputs = [yaml.safe_load(span if span.startswith("{") else f"{{{span}}}") for span in spans if ":" in span]
            result.append((cells[0], inputs))
    return result


SECTIONS: dict[str, type[Any]] = {
    "actor": PPOActorConfig,
    "critic": PPOCriticConfig,
    "teacher": TeacherConfig,
    "reward_model": RewardModelConfig,
    "sft": SFTOptions,
    "rw": RWOptions,
    "dpo": DPOOptions,
}
"""The configuration class behind each column `config (X.)` of the page."""
ROWS = [(cls, *row) for name, cls in SECTIONS.items() for row in rows(name)]


@pytest.mark.parametrize(("cls", "name", "inputs"), ROWS, ids=[name for _, name, _ in ROWS])
def test_the_configuration_of_every_row_loads(cls, name, inputs):
    tree: dict[str, Any] = {}
    for part in inputs:
        tree |= part
    needs_path = {"path": "x"} if "path" in fields_of(cls) else {}
    problems = read(cls, needs_path | tree).problems
    assert not problems, f"{name}: {problems}"


def test_every_config_column_is_checked():
    titles = re.findall(r"config \(`(\w+)\.`\)", PAGE.read_text(encoding="utf-8"))
    assert set(titles) == set(SECTIONS)
    assert all(rows(name) for name in SECTIONS)


def test_every_named_choice_has_a_row():
    pairs = [(key, part[key]) for _, item in rows() for part in item for key in NAMED if key in part]
    shown = {(key, value["name"] if isinstance(value, dict) else value) for key, value in pairs}
    wanted = {(key, value) for key in NAMED if (spec := fields_of(PPOActorConfig).get(key)) for value in spec.choices}
    assert len(rows()) > 10
    assert wanted - shown == set(), "docs/algorithms.md lacks rows for these"


def test_every_option_named_on_the_page_exists():
    known = set(fields_of(PPOActorConfig)) | set(_names_below(PPOActorConfig))
    options = {name for _, item in rows() for part in item for name in part}
    assert {"reward_norm", "use_decoupled_loss", "c_clip"} <= options
    assert options <= known


def _names_below(cls):
    for spec in fields_of(cls).values():
        yield spec.name
        if spec.is_section:
            yield from _names_below(spec.hint)
