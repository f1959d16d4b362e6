"""docs/config.md agrees with the config classes."""

from pathlib import Path

from areal.api.config.docs import config_page
from areal.api.config.experiment import KINDS
from areal.api.config.schema import leaf_paths

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_page(), "run `make docs`"


def test_the_page_has_every_option() -> None:
    page = config_page()
    names = {path.rpartition(".")[2] for kind in KINDS for path, _ in leaf_paths(kind)}
    assert not [name for name in names if f"| `{name}` |" not in page]


def test_a_row_has_all_facts() -> None:
    row = next(line for line in config_page().splitlines() if line.startswith("| `eps_clip_higher` |"))
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[1:3] == ["number or null", "null"]
    assert cells[4].startswith("actor.policy_loss is ppo, gspo, ")
    assert cells[5].startswith("AReaL; verl: ")
