"""No dead options: whatever a user may configure is read somewhere outside the configuration classes."""

import ast
from pathlib import Path

import pytest

from areal.api.config import GRPOConfig
from areal.api.config.kinds import KINDS
from areal.api.config.schema import leaf_paths
from areal.fleet.backends import BACKENDS

AREAL = Path(__file__).resolve().parents[2] / "areal"
DEFINITIONS = AREAL / "api" / "config"

CHECKED_ONLY = {
    "adapter_update_mode": "experiment.py decides publishes_adapters with it, which trainer and servers read",
    "consumer_batch_size": "AReaL repeats train_dataset.batch_size here; experiment.py checks that they agree",
    "strict_config": "a switch of the check itself; experiment.py refuses options without effect when it is true",
    "group_size": "AReaL repeats gconfig.n_samples here; experiment.py checks that they agree",
}
"""Options that only a check of the config classes reads, and why that is enough. The section of an inference backend is
read by the name of the backend (`ServerBackend.given`)."""


def attributes_in(folder: Path, *, without: Path) -> set[str]:
    """Every attribute name read in the modules below `folder`, except from `self`: no config class is defined there."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        if without in path.parents:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            if not (isinstance(node.value, ast.Name) and node.value.id == "self")
        }
    return names


@pytest.fixture(scope="module")
def read_names() -> set[str]:
    return attributes_in(AREAL, without=DEFINITIONS)


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_option_is_read(cls: type, read_names: set[str]) -> None:
    options = {path: path.rpartition(".")[2] for path, _ in leaf_paths(cls)}
    known = read_names | set(CHECKED_ONLY) | set(BACKENDS)
    unread = sorted(path for path, name in options.items() if name not in known)
    assert not unread, "no code reads these options; implement or remove them:\n" + "\n".join(unread)


def test_the_exceptions_are_needed(read_names: set[str]) -> None:
    names = {path.rpartition(".")[2] for path, _ in leaf_paths(GRPOConfig)}
    assert set(CHECKED_ONLY) <= names - read_names
