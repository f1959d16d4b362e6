"""Marks every test of this folder as `cluster`, and makes the nodes that the tests run on."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Nodes, Ssh, missing, ssh_missing
from tests.faults.driver import ROOT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: the other make targets leave them out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of the nodes: that of the user may hold a token of Ray, which Ray writes there itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def can_have_nodes() -> None:
    if problem := missing():
        pytest.fail(problem)


@pytest.fixture
def make_nodes(can_have_nodes: None) -> Iterator[Callable[..., Nodes]]:
    """Makes nodes that end with the test."""
    made: list[Nodes] = []

    def make(count: int, *, private: tuple[str, ...] = ()) -> Nodes:
        made.append(Nodes(count, private=private))
        return made[-1].__enter__()

    yield make
    for nodes in made:
        nodes.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's data and random model."""
    folder = tmp_path_factory.mktemp("cluster") / "data"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def can_have_ssh(can_have_nodes: None) -> None:
    if problem := ssh_missing():
        pytest.fail(problem)


@pytest.fixture
def ssh(can_have_ssh: None, tmp_path: Path) -> Ssh:
    """Keys for ssh servers; `ssh.serve(node)` starts one."""
    return Ssh(tmp_path / "ssh")
