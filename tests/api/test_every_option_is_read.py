"""No dead options: whatever a user may configure is read, by its type, somewhere outside the configuration classes."""

from pathlib import Path

import pytest

from areal.api.config.experiment import KINDS
from areal.api.config.schema import FieldSpec, leaf_paths
from areal.fleet.backends import BACKENDS
from tests.api.typed_reads import Reads
from tests.api.typed_source import Class, Program

AREAL = Path(__file__).resolve().parents[2] / "areal"

CHECKED_ONLY = {
    "rollout.consumer_batch_size": "AReaL repeats train_dataset.batch_size here; experiment.py checks that they agree",
    "actor.group_size": "AReaL repeats gconfig.n_samples here; experiment.py checks that they agree",
}
"""Options that only a check of the config classes reads, and why that is enough."""


class OptionReads:
    """The reads of options in a package whose configuration classes are below `definitions`."""

    def __init__(self, package: Path, definitions: str) -> None:
        program = Program(package, "onfig")
        self._found = Reads(program, definitions).found
        self._classes: dict[tuple[str, str], Class] = {
            (module.name, name): one for module in program.modules.values() for name, one in module.classes.items()
        }

    def has(self, spec: FieldSpec) -> bool:
        return self.of(spec.owner.__module__, spec.owner.__name__, spec.name)

    def of(self, module: str, cls: str, name: str) -> bool:
        """Whether the attribute is read of an object that may be of the class."""
        return any((up, name) in self._found for up in self._classes[module, cls].lineage)


@pytest.fixture(scope="module")
def reads() -> OptionReads:
    return OptionReads(AREAL, "areal.api.config")


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_option_is_read(cls: type, reads: OptionReads) -> None:
    unread = [path for path, spec in leaf_paths(cls) if not reads.has(spec)]
    unread = sorted(set(unread) - set(CHECKED_ONLY) - set(BACKENDS))  # a backend's section is read by its name
    text = "no code reads these options, or through objects whose type no annotation says"
    assert not unread, f"{text}; implement, annotate or remove:\n" + "\n".join(unread)


def test_the_exceptions_are_needed(reads: OptionReads) -> None:
    options = {path: spec for cls in KINDS for path, spec in leaf_paths(cls)}
    assert [path for path in CHECKED_ONLY if reads.has(options[path])] == []


CONFIG = """
class Discovery:
    type: str
    root: str
    kept: int
    timeout_s: float
    twice: int
    logged: int
    raised: int
    checked: int

    @property
    def both(self):
        return self.twice

    def problems(self):
        return [self.root, self.kept]

class Part:
    read: int
    dead: int

class MaybePart:
    read: int
    dead: int

class Item:
    read: int
    dead: int

class Config:
    discovery: Discovery
    others: list[Discovery]
    part: Part
    maybe: MaybePart | None
    items: list[Item]
"""
USER = """
from package.config import Config

class Other:
    type: str
    root: str
    dead: int

def start(config: Config, other: Other) -> Discovery | None:
    print(other.type, other.root, config.discovery.timeout_s)
    for place, one in enumerate(config.others):
        print(one.both)
    print(config.part.read, other.dead, [item.read for item in config.items])
    if config.maybe is not None:
        print(config.maybe.read)
    config.discovery.problems()
    log.info(f"starts with {config.discovery.logged}")
    raise ValueError(f"no {config.discovery.raised}")

def start_problems(config: Config):
    yield config.discovery.checked
"""


def test_a_namesake_a_check_and_a_message_are_no_reads(tmp_path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "config.py").write_text(CONFIG)
    (package / "user.py").write_text(USER)
    reads = OptionReads(package, "package.config")
    names = ("type", "root", "kept", "timeout_s", "twice", "logged", "raised", "checked")
    assert {name for name in names if reads.of("package.config", "Discovery", name)} == {"timeout_s", "twice"}
    for section in ("Part", "MaybePart", "Item"):  # nested, in a union, in a list
        assert reads.of("package.config", section, "read")
        assert not reads.of("package.config", section, "dead")
