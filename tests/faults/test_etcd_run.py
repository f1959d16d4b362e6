"""A real run that finds its processes through etcd, which is killed and started again during the run."""

import json

import pytest

from tests.faults.driver import Run
from tests.faults.test_replicas import LIMIT_S, SMALL
from tests.system.etcd_kit import EtcdCluster

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(900)]


@pytest.fixture
def etcd(tmp_path):
    cluster = EtcdCluster(tmp_path)
    yield cluster
    cluster.stop()


def steps(run: Run) -> int:
    metrics = run.folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_a_run_survives_the_loss_of_etcd_and_of_a_server_meanwhile(make_run, prove_all, etcd):
    run = make_run(
        *SMALL,
        "allocation_mode=native:d2+fsdp:d1",
        "total_train_steps=16",
        "cluster.name_resolve.type=etcd",
        f"cluster.name_resolve.etcd3_addr={etcd.addresses}",
        "cluster.name_resolve.etcd_lease_s=10",
    )
    assert run.wait_for(lambda: steps(run) >= 3, LIMIT_S)
    etcd.kill(0)
    assert run.wait_for(lambda: steps(run) >= 5, LIMIT_S), "training needs no etcd"
    assert "server-1" in run.kill(["server-1"])
    assert run.wait_for(lambda: steps(run) >= 7, LIMIT_S), "training needs one server"
    etcd.start(0)
    assert run.wait_for_the_end(LIMIT_S) == 0, run.log_path.read_text()[-3000:]
    prove_all(run)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert list(summary["restarts"]) == ["server-1"]
    assert not (run.folder / "names").exists()
