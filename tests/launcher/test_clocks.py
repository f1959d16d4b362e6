"""A node whose clock is two hours ahead works as the others; the difference is only reported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from areal.api.config import ClusterSpecConfig
from areal.launcher.nodes import Node, NodeCluster
from areal.system.run_paths import RunPaths
from tests.cluster.nodes import wait_for
from tests.launcher.fake_backend import plan_of, planned_process

AHEAD_S = 7200
AGENT = "import runpy, time\nreal = time.time\ntime.time = lambda: real() + {}\n"
AGENT += "runpy.run_module('areal.launcher.node_agent', run_name='__main__')\n"


def node(name: str, ahead_s: int) -> Node:
    return Node(name=name, address="127.0.0.1", command=(sys.executable, "-c", AGENT.format(ahead_s)))


def test_processes_run_on_a_node_whose_clock_differs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = NodeCluster([node("right", 0), node("ahead", AHEAD_S)], ClusterSpecConfig(fileroot=str(tmp_path)))
    try:
        machines = {machine.host.node: machine for machine in cluster.machines()}
        warned = [line for line in capfd.readouterr().err.splitlines() if str(AHEAD_S) in line]
        assert [("ahead" in line, "right" in line) for line in warned] == [(True, False)]
        backend = cluster.backend(
            plan_of([], tmp_path), RunPaths(tmp_path), {}
        )  # each node must see the other's file in the folder
        for index, machine in enumerate(machines.values()):
            planned = dataclasses.replace(planned_process(f"server-{index}", run_dir=tmp_path), host=machine.host)
            backend.start(dataclasses.replace(planned, argv=(sys.executable, "-c", "print('hello'); exit(7)")))
        for name in ("server-0", "server-1"):
            wait_for(lambda name=name: backend.poll(name) is not None)
            assert (backend.poll(name), backend.last_lines(name).lines) == (7, ["hello"])
        backend.stop(["server-0", "server-1"], 0.0, hurry=lambda: True)
    finally:
        cluster.close()
