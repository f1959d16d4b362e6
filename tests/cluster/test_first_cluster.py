"""The commands of docs/first_cluster.md in their order, on two nodes with real ssh servers."""

import json
import re
import shlex
import sys

import pytest

from tests.cluster.cluster_run import Cluster, write_config
from tests.test_docs import ROOT, areal_words, blocks


@pytest.mark.timeout(900)
def test_the_page_can_be_carried_out(make_nodes, can_have_ssh, data, tmp_path):
    nodes = make_nodes(2)
    cluster = Cluster(nodes, "ssh", tmp_path / "ssh")
    config = write_config(tmp_path, data)
    text = config.read_text().replace("d2+fsdp:d2", "d1+fsdp:d1").replace("steps: 30", "steps: 3")
    config.write_text(text.replace("cluster: {", "cluster: {n_nodes: 2, n_gpus_per_node: 0, "))
    folder = tmp_path / "faults" / "run"
    lines = [line for block in blocks(ROOT / "docs/first_cluster.md", "bash") for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        words = [shlex.quote(word) for word in cluster.words()]
        line = line.replace("--hosts node1,node2", " ".join(words)).replace("my.yaml", str(config))
        line = line.replace("/shared/runs/EXPERIMENT/TRIAL", f"{folder} --once")
        done = nodes[1].run([sys.executable, "-m", "areal", *areal_words(shlex.split(line))], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        if "--dry-run" in line:
            assert not folder.exists()
            assert all(node.name in done.stdout or node.address in done.stdout for node in nodes), done.stdout
        if "watch" in line:
            assert re.search(r"\b3\b", done.stdout)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["episodes"]["failed"] == 0
    plan = json.loads((folder / "plan.json").read_text())
    assert len({process["host"]["node"] for process in plan["processes"]}) == 2
