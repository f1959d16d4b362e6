"""The page of options that `make docs` builds."""

from areal.api.config.docs import config_page
from areal.api.config.experiment import KINDS
from areal.api.config.schema import leaf_paths


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
