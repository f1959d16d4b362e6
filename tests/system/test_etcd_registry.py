import threading
import time
import uuid

import pytest

from areal.api.config import ClusterSpecConfig, NameResolveConfig, SFTConfig
from areal.system.discovery import EtcdRegistry, registry_of
from tests.expect import raises_code
from tests.system.etcd_kit import EtcdCluster
from tests.system.registry_cases import RegistryCases

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(200)]
LIMIT_S = 60.0
LEASE_S = 5


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory):
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(tmp_path):
    """Three members that a test may damage."""
    cluster = EtcdCluster(tmp_path, num_members=3)
    yield cluster
    cluster.stop()


@pytest.fixture
def opened():
    registries: list[EtcdRegistry] = []
    yield registries
    for registry in registries:
        registry.close()


@pytest.fixture
def until():
    def until(condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return until


def opener(cluster, opened):
    run = uuid.uuid4().hex

    def open_registry(**options):
        registry = EtcdRegistry(cluster.addresses, f"e/{run}", **{"lease_s": LEASE_S, "timeout_s": LIMIT_S, **options})
        opened.append(registry)
        return registry

    return open_registry


class TestEtcd(RegistryCases):
    @pytest.fixture
    def open_registry(self, shared_cluster, opened):
        return opener(shared_cluster, opened)


@pytest.fixture
def open_registry(cluster, opened):
    return opener(cluster, opened)


def test_a_run_sees_only_its_own_names(shared_cluster):
    names = NameResolveConfig(type="etcd3", etcd3_addr=shared_cluster.addresses)
    trials = [
        SFTConfig(experiment_name="e", trial_name=name, cluster=ClusterSpecConfig(name_resolve=names))
        for name in ("t", "t1")
    ]
    first, second = map(registry_of, trials)
    first.add("controller", "first")
    second.add("controller", "second")
    second.clear()
    assert (first.get("controller"), second.get("controller")) == ("first", None)
    first.clear()
    first.close()
    second.close()


def test_names_expire_with_their_process_and_only_then(shared_cluster, opened, until):
    open_registry = opener(shared_cluster, opened)
    lost, alive, reader = open_registry(), open_registry(), open_registry()
    lost.add("servers/0", "lost")
    alive.add("servers/1", "alive")
    assert len(reader.list("servers")) == 2
    lost.close()  # nothing renews its lease any more, as after kill -9
    until(lambda: reader.list("servers") == {"servers/1": "alive"})


def test_an_expired_lease_registers_again_but_takes_no_name_of_others(shared_cluster, opened, until):
    open_registry = opener(shared_cluster, opened)
    cut, other = open_registry(), open_registry()
    for name in ("a", "b", "c"):
        cut.add(name, "cut")
    other.add("b", "other", replace=True)
    other.remove("c")
    assert other.list("") == {"a": "cut", "b": "other"}
    cut._client.call("lease/revoke", {"ID": cut._lease})
    until(lambda: other.get("a") is None)
    until(lambda: other.get("a") == "cut")
    assert other.get("b") == "other"


def test_a_removed_name_stays_removed_while_its_process_lives(shared_cluster, opened):
    """The launcher removes a server that still runs: renewing its lease must not bring the name back."""
    open_registry = opener(shared_cluster, opened)
    server, launcher = open_registry(), open_registry()
    server.add("servers/0", "a")
    launcher.remove("servers/0")
    answer = server._client.call("lease/keepalive", {"ID": server._lease})
    assert int(answer["result"]["TTL"]) == LEASE_S
    assert launcher.list("servers") == {}


def test_restart_of_all_members_keeps_names_and_readers(cluster, open_registry, until):
    writer, reader = open_registry(), open_registry()
    writer.add("servers/0", "before")
    assert reader.list("servers") == {"servers/0": "before"}
    for index in range(3):
        cluster.kill(index)
    assert reader.list("servers") == {"servers/0": "before"}  # from the copy
    added = threading.Thread(target=writer.add, args=("servers/1", "during"))
    added.start()
    for index in range(3):
        cluster.start(index, wait=False)
    cluster.wait_until_ready()
    added.join(LIMIT_S)
    until(lambda: reader.list("servers") == {"servers/0": "before", "servers/1": "during"})


@pytest.mark.parametrize("loss", ["kill", "freeze"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_loss_of_any_member_stops_nobody(cluster, open_registry, until, loss, index):
    """kill -9 closes connections; SIGSTOP, like a cut cable, leaves them silent."""
    writer, reader, waiter = open_registry(), open_registry(), open_registry()
    writer.add("servers/0", "before")
    assert reader.get("servers/0") == "before"
    result: list[str] = []
    waiting = threading.Thread(target=lambda: result.append(waiter.wait("servers/1", LIMIT_S)))
    waiting.start()
    getattr(cluster, loss)(index)
    writer.add("servers/1", "after")
    waiting.join(LIMIT_S)
    assert result == ["after"]
    until(lambda: reader.get("servers/1") == "after")
    deadline = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline:  # the leases are still renewed
        assert reader.list("servers") == {"servers/0": "before", "servers/1": "after"}
        time.sleep(0.1)


def test_a_member_without_a_majority_is_left(cluster, open_registry):
    """Two of three are frozen: nothing can be registered until one is back, and then everything."""
    writer = open_registry()
    cluster.freeze(0)
    cluster.freeze(1)
    adding = threading.Thread(target=writer.add, args=("controller", "here"))
    adding.start()
    adding.join(1.0)
    assert adding.is_alive()
    cluster.unfreeze(1)
    adding.join(LIMIT_S)
    assert open_registry().get("controller") == "here"


def test_silence_of_all_members_is_an_error_with_their_addresses(cluster, open_registry):
    known, new = open_registry(timeout_s=1.0), open_registry(timeout_s=1.0)
    known.add("controller", "here")
    assert known.get("controller") == "here"
    for index in range(3):
        cluster.kill(index)
    for call in (lambda: known.add("a", "b"), lambda: known.wait("a", 1.0), lambda: new.get("a"), new.clear):
        with raises_code("process.registry_silent", cluster.addresses):
            call()
    with raises_code("process.registry_silent"):
        new.list("")  # a failed first reading is repeated
    assert known.get("controller") == "here"


def test_a_server_that_is_not_etcd_is_named(tmp_path, opened):
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        registry = EtcdRegistry(address, "e/t", lease_s=LEASE_S, timeout_s=5.0)
        opened.append(registry)
        with raises_code("process.registry_refused", address):
            registry.clear()
        server.shutdown()
