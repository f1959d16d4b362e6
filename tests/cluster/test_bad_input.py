"""Bad input over each launcher: the command ends with 2 and one code, and nothing is left on any node or in a queue."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster_run import Cluster, left_behind, require, write_config
from tests.cluster.nodes import Nodes, wait_for
from tests.faults.driver import ROOT

pytestmark = pytest.mark.timeout(900)
only_ssh = pytest.mark.parametrize("site", ["ssh"], indirect=True, scope="module")
RESERVED = """
import ray
ray.init(address="auto", logging_level="error", log_to_driver=False)
print([group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"])
"""


class Site:
    """Nodes with what one launcher needs, shared by the tests of this file: each test leaves them as they were."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path) -> None:
        self.cluster, self.nodes, self.launcher = cluster, cluster.nodes, cluster.launcher
        self.folder = folder
        self.fileroot = folder / "runs"
        self.fileroot.mkdir()
        self._config = write_config(folder, data)

    @property
    def last(self) -> Any:
        """The last node; the launcher uses it."""
        return list(self.nodes)[-1]

    def refusal(self, *overrides: str, hosts: str = "", environ: dict[str, str] | None = None) -> str:
        """The code of the error with which a run ends before it starts."""
        words = [f"cluster.fileroot={self.fileroot}", "cluster.node_connect_s=90", "cluster.node_silence_s=20"]
        argv = [sys.executable, "-m", f"areal.launcher.{self.launcher}", "--config", str(self._config)]
        argv += [*words, *self.cluster.words(hosts), *overrides]
        done = self.nodes[1].run(argv, cwd=ROOT, env=self.cluster.environ | (environ or {}), timeout_s=600)
        errors = [line for line in done.stderr.splitlines() if line.startswith("areal: error:")]
        assert done.returncode == 2, done.stderr
        assert 1 <= len(errors) <= (2 if self.launcher == "slurm" else 1), errors
        assert "Traceback" not in done.stderr
        wait_for(lambda: self.left() == [])
        return re.findall(r"\[([a-z]+\.[a-z_]+)\]", errors[0])[-1] if "[" in errors[0] else errors[0]

    def left(self) -> list[str]:
        """Processes and jobs of the run."""
        return left_behind(self.nodes) + ([] if self.cluster.slurm is None else self.cluster.slurm.queue().splitlines())


@pytest.fixture(
    scope="module",
    params=["ssh", pytest.param("ray", marks=pytest.mark.ray), pytest.param("slurm", marks=pytest.mark.slurm)],
)
def site(request: Any, can_have_nodes: None, data: Path, tmp_path_factory: Any) -> Iterator[Site]:
    launcher = request.param
    require(launcher)
    folder = tmp_path_factory.mktemp(launcher)
    with Nodes(4 if launcher == "slurm" else 3, private=("/tmp/ray",)) as nodes:
        made = Site(Cluster(nodes, launcher, folder / "files"), folder, data)
        yield made
        if launcher == "ray":
            assert nodes[1].run([sys.executable, "-c", RESERVED]).stdout.strip() == "[]"


@contextlib.contextmanager
def mounted(site: Site, target: Path, *words: str) -> Iterator[None]:
    """Something else at a path of the last node."""
    assert site.last.run(["mount", *words, str(target)]).returncode == 0
    try:
        yield
    finally:
        assert site.last.run(["umount", str(target)], cwd="/").returncode == 0


@contextlib.contextmanager
def firewall(site: Site) -> Iterator[None]:
    """The last two nodes lose each other silently. The launcher reaches both."""
    two = len(list(site.nodes)) - 1
    site.nodes.cut(two, two + 1)
    try:
        yield
    finally:
        site.nodes.heal(two, two + 1)


def test_no_cluster(site: Site) -> None:
    if site.launcher == "ssh":
        assert site.refusal(hosts="10.255.0.1:2222,10.255.0.9:2222") == "launch.node_unreachable"
    elif site.launcher == "ray":
        assert site.refusal(environ={"RAY_ADDRESS": "10.255.0.9:6379"}) == "launch.no_ray"
    else:
        conf = Path(site.cluster.environ["SLURM_CONF"])
        elsewhere = conf.read_text().replace("(10.255.0.1)", "(10.255.0.9)")
        (site.folder / "slurm.conf").write_text(elsewhere)
        assert site.refusal(environ={"SLURM_CONF": str(site.folder / "slurm.conf")}) == "launch.slurm_silent"


def test_closed_port_of_the_cluster(site: Site) -> None:
    if site.launcher == "ssh":
        assert site.refusal(hosts="10.255.0.1:2222,10.255.0.2:2223") == "launch.node_unreachable"
    elif site.launcher == "ray":
        assert site.refusal(environ={"RAY_ADDRESS": "10.255.0.1:6380"}) == "launch.no_ray"
    else:
        conf = Path(site.cluster.environ["SLURM_CONF"])
        (site.folder / "slurm.conf").write_text(conf.read_text() + "SlurmctldPort=6999\n")
        assert site.refusal(environ={"SLURM_CONF": str(site.folder / "slurm.conf")}) == "launch.slurm_silent"


def test_an_unknown_partition_or_host(site: Site) -> None:
    if site.launcher == "slurm":
        assert site.refusal("launcher.slurm.partition=nope") == "launch.slurm_refused"
    elif site.launcher == "ssh":
        assert site.refusal(hosts="10.255.0.1:2222,no-such-host:2222") == "launch.node_unreachable"
    else:
        assert site.refusal(environ={"RAY_ADDRESS": "no-such-host:6379"}) == "launch.no_ray"


def test_impossible_resources(site: Site) -> None:
    if site.launcher == "slurm":
        assert site.refusal("cluster.n_gpus_per_node=16") == "launch.slurm_refused"
    elif site.launcher == "ray":
        assert site.refusal("cluster.n_nodes=9", "cluster.node_connect_s=1") == "launch.ray_too_small"
    else:
        assert site.refusal("native.device=cuda") == "launch.no_gpu"


def test_a_node_without_the_shared_folder(site: Site) -> None:
    with mounted(site, site.fileroot, "-t", "tmpfs", "none"):
        assert site.refusal() == "launch.folder_not_shared"


def test_another_version_on_a_node(site: Site) -> None:
    ours = ROOT / "areal" / "__init__.py"
    other = site.folder / "__init__.py"
    other.write_text(f"{ours.read_text()}\n__version__ = '0.0.0'\n")
    with mounted(site, ours, "--bind", str(other)):
        assert site.refusal() == "launch.other_version"


def test_a_firewall_between_two_nodes(site: Site) -> None:
    with firewall(site):
        assert site.refusal() == "launch.port_closed"


@only_ssh
def test_a_refused_key(site: Site) -> None:
    assert site.cluster.ssh is not None
    keys = site.cluster.ssh.folder / "authorized_keys"
    known = keys.read_text()
    keys.write_text("")
    try:
        assert site.refusal() == "launch.node_unreachable"
    finally:
        keys.write_text(known)


@only_ssh  # Ray and Slurm start nothing there
def test_a_node_without_the_working_folder(site: Site) -> None:
    with mounted(site, ROOT.parent, "-t", "tmpfs", "none"):
        assert site.refusal() in ("launch.folder_not_shared", "launch.node_unreachable")


def test_a_run_completes_after_all_this(site: Site) -> None:
    """What the refusals may have left would be in its way: locks, reserved CPUs, jobs, files."""
    argv = [sys.executable, "-m", f"areal.launcher.{site.launcher}", "--config", str(site.folder / "config.yaml")]
    words = [
        f"cluster.fileroot={site.fileroot}",
        *site.cluster.words(),
        "total_train_steps=2",
        "evaluator.freq_steps=null",
    ]
    done = site.nodes[1].run([*argv, *words], cwd=ROOT, env=site.cluster.environ, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    run = next(path for path in site.fileroot.glob("*/*") if (path / "ledger").is_dir())
    audit = [sys.executable, "-m", "areal.ledger", "audit", str(run)]
    assert subprocess.run(audit, cwd=ROOT, env=os.environ, capture_output=True, check=False).returncode == 0
    wait_for(lambda: site.left() == [])
    assert sorted(path.name for path in run.glob(".probe*")) == []
