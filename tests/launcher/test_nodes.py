"""Processes on nodes: real agents, each connected by a pipe instead of ssh or srun."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from areal.api.config.launcher import SlurmConfig
from areal.api.errors import LaunchError
from areal.launcher import node_link
from areal.launcher.job import moved
from areal.launcher.node_agent import own_address
from areal.launcher.node_link import CommandTransport, NodeLink, agent_command
from areal.launcher.node_messages import FROM_AGENT, TO_AGENT, Alive, Hello, Open, Reply, Start
from areal.launcher.nodes import NodeChoice, NodesBackend
from areal.launcher.placement import Machine
from areal.system.network import Host
from areal.system.process import ProcessContext, is_alive
from areal.system.run_paths import RunPaths
from tests.cluster.nodes import wait_for
from tests.expect import raises_code
from tests.launcher.fake_apptainer import path_with_apptainer
from tests.launcher.fake_backend import planned_process

AGENT = (sys.executable, "-m", "areal.launcher.node_agent")
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"


@contextmanager
def connections(run_dir):
    """Connects to agents on this machine, and closes the connections at the end."""
    opened = []

    def connect(name="node1", command=AGENT, *, silence_s=10.0, **changes):
        hello = dataclasses.replace(Hello(folder=os.getcwd(), silence_s=silence_s), **changes)
        opened.append(NodeLink(name, CommandTransport(command), hello, connect_limit_s=30.0))
        opened[-1].open(RunPaths(run_dir), {"GREETING": "hello"})
        return opened[-1]

    yield connect
    for item in opened:
        item.close()


def backend_of(connect, silence_s):
    """Two nodes."""
    links = {name: connect(name, silence_s=silence_s) for name in ("node1", "node2")}

    def agent_for(planned):
        name = planned.host.node
        if links[name].lost:
            links[name] = connect(name, silence_s=silence_s)
        return links[name], planned

    return NodesBackend(agent_for)


@pytest.fixture
def link(tmp_path):
    with connections(tmp_path) as connect:
        yield connect


@pytest.fixture
def backend(link):
    """Its agents may be killed."""
    return backend_of(link, silence_s=1.0)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A backend whose agents all tests of the module share."""
    with connections(tmp_path_factory.mktemp("run")) as connect:
        yield backend_of(connect, silence_s=10.0)


def program(tmp_path, source, *, name="server-0", node="node1"):
    planned = planned_process(name, run_dir=tmp_path)
    return dataclasses.replace(planned, argv=(sys.executable, "-c", source), host=Host(node=node))


def agent_of(pid):
    return psutil.Process(pid).parent()


def test_an_agent_reports_the_facts_of_its_node(link, tmp_path):
    facts = link(peers=("127.0.0.1",)).facts
    assert facts.cores >= 1
    assert facts.memory_bytes > 0
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.address == "127.0.0.1"
    assert abs(facts.clock_s - time.time()) < 60


def test_a_run_folder_that_is_another_one_there_is_refused(link, tmp_path, monkeypatch):
    """Each node has a private /dev/shm, as folders that only look shared."""
    monkeypatch.setattr(node_link, "_FOLDER_LIMIT_S", 0.2)
    private = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{tmp_path}" && exec {" ".join(AGENT)}')
    with raises_code("launch.folder_not_shared", "node2"):
        link("node2", private)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def agent_with_run(folder, *, limit_s):
    """An agent that has received the name of a run."""
    with subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        run = Open(id=0, run_dir=str(folder), secrets={}, probe="probe", probe_text="x", limit_s=limit_s)
        for message in (Hello(folder=os.getcwd(), silence_s=600.0), run):
            agent.stdin.write(TO_AGENT.dump_json(message).decode() + "\n")
        agent.stdin.flush()
        yield agent


def next_message(agent, kind):
    messages = (FROM_AGENT.validate_json(line) for line in agent.stdout)
    return next(message for message in messages if isinstance(message, kind))


def test_an_agent_waits_for_a_run_folder_that_its_node_does_not_see_yet(tmp_path):
    """As a client of NFS that remembers that the folder did not exist. The launcher hears of the agent meanwhile."""
    folder = tmp_path / "run"
    with agent_with_run(folder, limit_s=600.0) as agent:
        next_message(agent, Alive)
        next_message(agent, Alive)
        folder.mkdir()
        (folder / "probe").write_text("x")
        assert next_message(agent, Reply).error == ""


def test_an_agent_that_waits_for_a_run_folder_ends_when_the_launcher_does(tmp_path):
    with agent_with_run(tmp_path / "run", limit_s=600.0) as agent:
        next_message(agent, Alive)
        agent.stdin.close()
        assert agent.wait(30) == 0


def test_an_agent_says_why_it_cannot_look_for_a_run_folder(tmp_path):
    with agent_with_run(tmp_path / ("x" * 300), limit_s=0.0) as agent:
        reply = next_message(agent, Reply)
    assert "File name too long: cluster.fileroot must be" in reply.error
    assert reply.code == "launch.folder_not_shared"


def test_a_process_runs_in_the_container_of_its_agent(link, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with_apptainer(tmp_path / "bin"))
    slurm = SlurmConfig(trainer_image="i.sif", mount="/a:/b", additional_bash_cmds=["echo noise", "export WORD=set"])
    backend = NodesBackend(lambda planned: (link("node1", agent_command(slurm, None)), planned))
    backend.start(program(tmp_path, "import os; print(*(os.environ[name] for name in ('IMAGE', 'MOUNT', 'WORD')))"))
    assert wait_for(lambda: backend.poll("server-0") is not None)
    assert backend.last_lines("server-0").lines == ["i.sif /a:/b set"]


def test_a_process_runs_with_the_environment_of_the_launcher_and_reports_its_exit(lasting, tmp_path):
    source = "import os, sys; print(os.environ['GREETING']); sys.exit(7)"
    lasting.start(program(tmp_path, source))
    assert wait_for(lambda: lasting.poll("server-0")) == 7
    assert lasting.last_lines("server-0").lines == ["hello"]


def test_each_node_runs_its_own_processes(lasting, tmp_path):
    pids = [
        lasting.start(program(tmp_path, SLEEPS, name=f"server-{index}", node=f"node{index + 1}")) for index in (0, 1)
    ]
    assert agent_of(pids[0]).pid != agent_of(pids[1]).pid
    assert [lasting.poll(name) for name in ("server-0", "server-1")] == [None, None]
    assert wait_for(lambda: lasting.last_lines("server-1").lines) == ["up"]


def test_a_signal_reaches_the_process(lasting, tmp_path):
    lasting.start(program(tmp_path, SLEEPS))
    lasting.signal("server-0", signal.SIGKILL)
    assert wait_for(lambda: lasting.poll("server-0")) == -signal.SIGKILL


def test_stop_ends_processes_on_all_nodes_after_the_grace_period(lasting, tmp_path):
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    lasting.start(program(tmp_path, ignores, name="server-0", node="node1"))
    lasting.start(program(tmp_path, SLEEPS, name="server-1", node="node2"))
    wait_for(lambda: lasting.last_lines("server-0").lines)
    lasting.stop(["server-0", "server-1", "never-started"], 0.2, hurry=lambda: False)
    assert lasting.poll("server-0") == -signal.SIGKILL
    assert lasting.poll("server-1") == -signal.SIGTERM


def test_hurry_ends_the_grace_period(lasting, tmp_path):
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    lasting.start(program(tmp_path, ignores))
    wait_for(lambda: lasting.last_lines("server-0").lines)
    lasting.stop(["server-0"], 3600.0, hurry=lambda: True)
    assert lasting.poll("server-0") == -signal.SIGKILL


def test_a_process_may_be_started_again_after_its_end(lasting, tmp_path):
    lasting.start(program(tmp_path, "raise SystemExit(3)"))
    assert wait_for(lambda: lasting.poll("server-0")) == 3
    lasting.start(program(tmp_path, SLEEPS))
    assert lasting.poll("server-0") is None


def test_a_killed_agent_ends_its_processes_and_its_node_is_connected_again(backend, tmp_path):
    pid = backend.start(program(tmp_path, SLEEPS))
    process = psutil.Process(pid)
    agent_of(pid).kill()
    assert wait_for(lambda: backend.poll("server-0")) == 75
    wait_for(lambda: not is_alive(process))
    assert "launch.node_lost" in backend.last_lines("server-0").lines[-1]
    again = backend.start(program(tmp_path, SLEEPS))
    assert again != pid
    assert backend.poll("server-0") is None


BEATS = """
import time
from areal.system.heartbeat import beating_thread, launched_heartbeat
with beating_thread(launched_heartbeat()) as heartbeat:
    heartbeat.doing("trains", 3)
    time.sleep(600)
"""


def test_the_heartbeat_of_a_process_on_a_node_comes_through_its_connection(backend, tmp_path):
    pid = backend.start(program(tmp_path, BEATS))
    beat = wait_for(lambda: (result := backend.beats().get("server-0")) and result.doing == "trains" and result)
    assert (beat.pid, beat.step) == (pid, 3)
    assert wait_for(lambda: backend.beats()["server-0"].resident_bytes) > 2**20


def test_a_frozen_agent_is_lost_after_a_silence(backend, tmp_path):
    agent = agent_of(backend.start(program(tmp_path, SLEEPS)))
    agent.suspend()
    assert wait_for(lambda: backend.poll("server-0")) == 75
    assert backend.resident_bytes() > 0


def test_an_agent_ends_its_processes_when_the_launcher_is_silent(tmp_path):
    """A launcher that has lost the node may start the same processes elsewhere."""
    with subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        hello = Hello(folder=os.getcwd(), silence_s=0.5)
        (tmp_path / "probe").write_text("x")
        run = Open(id=0, run_dir=str(tmp_path), secrets={}, probe="probe", probe_text="x", limit_s=0.0)
        for message in (hello, run, Start(id=1, planned=program(tmp_path, SLEEPS))):
            agent.stdin.write(TO_AGENT.dump_json(message).decode() + "\n")
            agent.stdin.flush()
        line = wait_for(lambda: next((line for line in agent.stdout if '"id":1' in line), None))
        process = psutil.Process(int(line.partition('"pid":')[2].partition(",")[0]))
        assert agent.wait(30) == 0  # the pipe is open, and nothing was written for 0.5 s
        wait_for(lambda: not process.is_running())


def test_a_transport_that_fails_names_the_node_and_its_last_error(link):
    failing = ("sh", "-c", "echo 'Permission denied (publickey)' >&2; exit 255")
    with raises_code("launch.node_unreachable", "far") as error:
        link("far", failing)
    assert "Permission denied (publickey)" in str(error.value)


def test_a_node_without_the_folder_is_refused(link):
    with raises_code("launch.folder_not_shared"):
        link(folder="/nowhere/at/all", silence_s=1.0)


def test_a_node_that_cannot_resolve_its_peers_is_refused(link):
    with raises_code("launch.node_unreachable"):
        link(peers=("no-such-host.invalid",))


def test_lines_that_a_login_script_prints_do_not_disturb(link):
    chatty = ("sh", "-c", f'echo Welcome; exec "{sys.executable}" -m areal.launcher.node_agent')
    assert link("chatty", chatty).lost == ""


def test_own_address_is_loopback_when_every_peer_is_this_machine():
    assert own_address(["127.0.0.1", "localhost"]) == "127.0.0.1"
    assert own_address([]) == "127.0.0.1"


def test_a_node_that_stays_unreachable_counts_as_the_death_of_the_process(tmp_path, link):
    first = link("node1", silence_s=1.0)

    def agent_for(planned):
        if first.lost:
            raise LaunchError("node1 cannot be reached", code="launch.node_unreachable")
        return first, planned

    backend = NodesBackend(agent_for)
    agent_of(backend.start(program(tmp_path, SLEEPS))).kill()
    assert wait_for(lambda: backend.poll("server-0")) == 75
    assert backend.start(program(tmp_path, SLEEPS)) == 0
    assert backend.poll("server-0") == 75
    assert "launch.node_unreachable" in backend.last_lines("server-0").lines[-1]


@pytest.fixture
def choice(link, tmp_path):
    """Two nodes, of which `connect` reaches those in the list `reachable`."""
    reachable = ["node1", "node2"]
    links = {name: link(name, silence_s=10.0) for name in reachable}
    hosts = {name: Host(bind="127.0.0.1", advertise=f"10.0.0.{name[-1]}", node=name) for name in links}
    attempts = []

    def connect(name):
        attempts.append(name)
        command = AGENT if name in reachable else ("sleep", "600")
        hello = Hello(folder=os.getcwd(), silence_s=10.0)
        return NodeLink(name, CommandTransport(command), hello, connect_limit_s=30.0, waits=False)

    made = NodeChoice(
        links,
        [Machine(cores=4, host=host) for host in hosts.values()],
        gpu_limit=0,
        connect_limit_s=600.0,
        connect=connect,
        open_run=lambda link: link.open(RunPaths(tmp_path), {}),
    )
    made.reachable, made.hosts, made.attempts, made.links = reachable, hosts, attempts, links
    yield made
    for item in (*links.values(), *made.pending):
        item._transport.kill()
        item.close()


def test_a_process_of_a_lost_node_starts_on_another_one_and_returns_with_its_node(choice, tmp_path):
    backend = NodesBackend(choice.agent_for)
    shows_host = f"import os; print(os.environ['AREAL_PROCESS'], flush=True); {SLEEPS}"
    planned = moved(program(tmp_path, shows_host), choice.hosts["node1"], ())

    def address():
        lines = wait_for(lambda: backend.last_lines("server-0").lines)
        return ProcessContext.from_env({"AREAL_PROCESS": lines[0]}).host.advertise

    def start_again():
        backend.signal("server-0", signal.SIGKILL)
        wait_for(lambda: backend.poll("server-0") is not None)
        backend.start(planned)

    choice.reachable.remove("node1")
    agent_of(backend.start(planned)).kill()
    assert wait_for(lambda: backend.poll("server-0")) == 75
    backend.start(planned)
    assert address() == "10.0.0.2"
    start_again()
    assert choice.attempts == ["node1"], "one attempt to connect at a time"
    choice.reachable.append("node1")
    for item in choice.pending:
        item._transport.kill()  # as if ssh gave up
    wait_for(lambda: start_again() or address() == "10.0.0.1")


def test_a_node_that_is_added_later_is_connected_before_its_first_process(choice, tmp_path):
    backend = NodesBackend(choice.agent_for)
    planned = moved(program(tmp_path, SLEEPS), Host(node="node3"), ())
    choice._moved_to = lambda link: Machine(cores=4, host=Host(node=link.node))
    assert not choice.is_connected("node3")
    assert backend.start(planned) == 0
    assert "launch.node_unreachable" in backend.last_lines("server-0").lines[-1]
    for item in choice.pending:
        item._transport.kill()
    wait_for(lambda: choice.has_tried("node3"))
    choice.reachable.append("node3")
    wait_for(lambda: choice.has_tried("node3") and choice.is_connected("node3"))
    assert backend.start(planned) > 0
    host, _ = backend.place_of(planned)
    assert host.node == "node3"
    choice.drop("node3")
    assert wait_for(lambda: backend.poll("server-0")) == 75
    assert not choice.is_connected("node3")


def test_without_a_node_that_is_alive_a_start_counts_as_a_death(choice, tmp_path):
    backend = NodesBackend(choice.agent_for)
    choice.reachable.clear()
    for each in choice.links.values():
        each._transport.kill()
    wait_for(lambda: all(item.lost for item in choice.links.values()))
    assert backend.start(program(tmp_path, SLEEPS)) == 0
    assert backend.poll("server-0") == 75
    assert "launch.node_lost" in backend.last_lines("server-0").lines[-1]
