"""The host of a foreign server: what it makes of a command and of a death, and what it does with real processes."""

import errno
import json
import os
import signal
import socket
import sys

import pytest

from areal.api.errors import ConfigError
from areal.fleet.native import NativeReplica
from areal.fleet.replica import ReplicaInfo, ReplicaLoad
from areal.fleet.server_host import Health, HostOptions, ServerHost, filled_in, parse_options, port_names
from tests.fleet.foreign_host import FOLDER, Host, alive, host_argv, pid_of, processes_of, run_paths, wait_until

HOST = (sys.executable, "-m", "areal.fleet.server_host")
INFO = ReplicaInfo(version=7, vocab_size=9, context_length=99, weights_whole=True)
LOAD = ReplicaLoad(running=2, queued=1, cache_usage=0.5, generated_tokens=5)


def options(**inputs):
    known = {
        "backend": "vllm",
        "command": ("serve", "{port}"),
        "index": 0,
        "process_name": "server-0",
        "log_path": None,
        "registry": None,
        "stop_grace_s": 1.0,
        "update_limit_s": 100.0,
    }
    return HostOptions(**(known | inputs))


# The command


def test_placeholders_become_ports_and_indices():
    command = ["serve", "--port={port}", "--nccl", "{port_nccl}", "{port}", "--seed", "{index+40}", "{index}"]
    assert port_names(command) == ["{port_nccl}", "{port}"]
    filled = filled_in(command, {"{port}": 8000, "{port_nccl}": 8001}, 2)
    assert filled == ["serve", "--port=8000", "--nccl", "8001", "8000", "--seed", "42", "2"]


def test_braces_of_json_stay():
    json_flag = '{"backend":"areal","ports":{"a":1}}'
    assert filled_in(["{port}", json_flag], {"{port}": 1}, 0) == ["1", json_flag]


def test_everything_after_the_first_dashes_is_the_command():
    inputs = parse_options(["--backend", "sglang", "--", "serve", "{port}", "--", "--help", "--config=x"])
    assert inputs.command == ("serve", "{port}", "--", "--help", "--config=x")
    assert (inputs.backend, inputs.registry) == ("sglang", None)


@pytest.mark.parametrize("argv", [[], ["--"], ["--", "serve", "--port", "8000"]])
def test_a_command_without_a_port_is_refused(argv):
    with pytest.raises(ConfigError) as error:
        parse_options(["--backend", "vllm", *argv])
    assert error.value.code == "fleet.host_command"


def test_ports_are_taken_for_all_but_the_server():
    """Held bound, so that no two hosts of a machine get the same; a server that binds as uvicorn does can listen."""
    hosts = [ServerHost(options(command=("{port}", "{port_b}")), NativeReplica) for _ in range(20)]
    ports = [bound.getsockname()[1] for host in hosts for bound in host._ports.values()]
    assert len(set(ports)) == 40
    with socket.socket() as other, pytest.raises(OSError) as taken:  # noqa: PT011 - its errno is compared
        other.bind(("127.0.0.1", ports[0]))
    assert taken.value.errno == errno.EADDRINUSE
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        socket.create_connection(("127.0.0.1", ports[0])).close()


# Health


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    """Of a server that is ready, and whose engine may be silent for 100 s."""
    health = Health("vllm", 100.0, clock=clock)
    assert health.beat_text() == "starts vllm: 0 s"
    clock.now_s += 23.4
    assert health.beat_text() == "starts vllm: 23 s"
    health.got_info(INFO)
    health.got_ready()
    assert health.beat_text() is not None
    return health


def test_each_answer_allows_one_heartbeat(health):
    assert health.beat_text() is None
    health.got_load(LOAD)
    assert health.beat_text() == "runs 2 requests, 1 queued, version 7"
    assert health.beat_text() is None


def test_an_engine_is_hung_only_beyond_the_update_limit(health, clock):
    clock.now_s += 99.0
    health.got_load(LOAD)
    assert health.beat_text() == "answers, but not its engine, which was at version 7"
    clock.now_s += 2.0
    health.got_load(LOAD)
    assert health.beat_text() is None
    health.got_info(INFO)
    health.got_load(LOAD)
    assert health.beat_text() == "runs 2 requests, 1 queued, version 7"


@pytest.mark.parametrize("question", ["load", "info"])
def test_an_error_answer_gives_no_heartbeat(health, question):
    health.got_load(LOAD)
    health.failed(question, "status 500")
    assert health.beat_text() is None
    health.answered(question)
    health.got_load(LOAD)
    assert health.beat_text() is not None


def test_an_orderly_end_is_not_a_hang(health):
    health.ends()
    assert health.beat_text() == "ends"
    assert health.beat_text() == "ends"
    health.has_ended()
    assert health.beat_text() is None


# Processes


@pytest.fixture
def start(tmp_path):
    """Starts a host whose server misbehaves as told."""
    hosts = []
    paths = run_paths(tmp_path)

    def make(*words, argv=None, process_group=0, **settings):
        made = host_argv(paths, *words, **settings)
        host = Host(paths, made if argv is None else argv(str(paths.config)), process_group)
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.abandon()
    wait_until(lambda: not processes_of(paths))


def test_a_ready_server_is_announced_like_a_native_one(start):
    host = start()
    address = host.wait_ready()
    assert json.loads(host.registry.get("servers/4")) == {"address": address, "pid": host.pid}
    assert json.loads(host.registry.get("ready/server-4")) == {"pid": host.pid}
    assert host.wait_beat("runs 2 requests, 1 queued, version 3").pid == host.pid


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_servers_of_each_dialect_are_hosted(start, backend):
    """By the command itself, with the adapters of the fleet."""
    server = [sys.executable, str(FOLDER / "serve_dialect.py"), backend, "{port}"]
    host = start(argv=lambda config: [*HOST, "--backend", backend, "--config", config, "--", *server])
    host.wait_ready()
    assert host.wait_beat("runs 0 requests, 0 queued, version 5").pid == host.pid
    host.process.terminate()
    assert host.wait_end() == 0


def test_all_of_it_stays_in_the_group_of_the_host(start):
    host = start()
    host.wait_ready()
    assert {os.getpgid(process.pid) for process in processes_of(host.paths)} == {host.pid}
    assert len(processes_of(host.paths)) == 4, "host, guard, server, engine"


def test_a_stopped_host_leaves_no_process(start):
    host = start()
    host.wait_ready()
    host.process.terminate()
    assert host.wait_end() == 0
    assert "areal: error" not in host.log
    assert host.beat() is None


def test_the_host_ends_after_all_others(start):
    """Without help from the guard: whoever sees the host's end may take the server's GPU."""
    host = start()
    host.wait_ready()
    guard = next(process for process in processes_of(host.paths) if "group_guard.py" in " ".join(process.cmdline()))
    guard.kill()
    wait_until(lambda: not alive(guard.pid))
    host.process.terminate()
    assert host.process.wait(timeout=60) == 0
    assert processes_of(host.paths) == []


def test_a_host_started_by_hand_makes_a_group_of_its_own(start):
    """The guard would otherwise kill whoever started it."""
    host = start(process_group=None)
    host.wait_ready()
    assert os.getpgid(host.pid) == host.pid != os.getpgrp()
    host.process.kill()
    host.wait_end()


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(start):
    host = start("ignores-sigterm", grace_s=0.2)
    host.wait_ready()
    host.process.terminate()
    assert host.wait_end() == 0


def test_a_server_gets_its_grace(start):
    host = start("ends-slowly", grace_s=240.0)
    host.wait_ready()
    host.process.terminate()
    assert host.wait_end() == 0
    assert "ended by itself" in host.log


def test_one_that_never_gets_ready_says_so_and_can_be_ended(start):
    host = start("never-ready")
    host.wait_beat("starts vllm: ")
    pid_of(host.paths, "server")
    assert host.registry.list("") == {}
    host.process.terminate()
    assert host.wait_end() == 0


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["says-why"], 1, "areal: error: the vllm server ended with exit code 1\n"),
        (["port-taken"], 75, "server ended with exit code 1\n"),
        (["killed-at-start"], 75, "areal: error: the vllm server was killed by SIGKILL\n"),
    ],
)
def test_a_death_before_it_was_ready(start, words, code, line):
    """75 for what may be chance, so that the launcher tries again."""
    host = start(*words)
    assert host.wait_end() == code
    assert line in host.log


def test_an_error_names_the_option_that_set_the_flag(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("")
    host = ServerHost(options(command=("{port}",), log_path=log, section=("max_modle_len", "max")), NativeReplica)
    log.write_text("usage: x\nmain.py: error: unrecognized arguments: --max-modle-len=8\n")
    code, text = host.report(2)
    assert code == 1
    assert text == "the vllm server ended with exit code 2 (set by vllm.max_modle_len)"


def test_output_of_an_earlier_start_is_not_used(start):
    start("says-why").wait_end()
    host = start("killed-at-start")
    assert host.wait_end() == 75
    assert "the vllm server was killed by SIGKILL\n" in host.log


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_death_after_it_was_ready(start, victim):
    host = start()
    host.wait_ready()
    os.kill(pid_of(host.paths, victim), signal.SIGKILL)
    assert host.wait_end() == 1
    told = {"server": "was killed by SIGKILL", "engine": "ended with exit code 1"}
    assert f"areal: error: the vllm server {told[victim]}\n" in host.log


def test_a_server_that_takes_no_more_connections_is_ended_though_it_lives(start):
    host = start()
    host.wait_ready()
    (host.paths.root / "close-the-port").touch()
    assert host.wait_end() == 1
    assert "the vllm server accepted no connection for 5 s and was killed\n" in host.log


def test_an_unrequested_orderly_end_is_an_error(start):
    host = start("ends-slowly")
    host.wait_ready()
    os.kill(pid_of(host.paths, "server"), signal.SIGTERM)
    assert host.wait_end() == 1
    assert "areal: error: the vllm server ended with exit code 0\n" in host.log


def test_kill_9_of_the_host_leaves_nothing(start):
    host = start("ignores-engine", "ignores-sigterm")
    host.wait_ready()
    host.process.kill()
    assert host.wait_end() == -signal.SIGKILL


def test_a_command_that_cannot_start_is_a_user_error(start, tmp_path):
    paths = run_paths(tmp_path)
    argv = host_argv(paths)
    host = Host(paths, [*argv[: argv.index("--") + 1], str(tmp_path / "no-such-python"), "{port}"])
    assert host.wait_end() == 2, "the guard does not change it"
    assert "areal: error: cannot start" in host.log


def test_a_request_for_stacks_reaches_the_host_only(start):
    host = start()
    host.wait_ready()
    os.kill(host.pid, signal.SIGUSR1)
    wait_until(lambda: "watch the server" in host.paths.stacks_of("server-4").read_text())
    assert alive(pid_of(host.paths, "server"))
    assert host.process.poll() is None


def beats_stop(host):
    """Waits until the count of beats stands still for twenty intervals; it may count up meanwhile."""
    wait_until(lambda: is_silent_for(host, 2.0))


def is_silent_for(host, seconds):
    before = host.beat().beats
    try:
        wait_until(lambda: host.beat().beats > before, seconds)
    except AssertionError:
        return True
    return False


def beats_go_on(host, number=3):
    before = host.beat().beats
    wait_until(lambda: host.beat().beats >= before + number)


def test_a_server_that_hangs_is_silent_until_it_goes_on(start):
    host = start()
    host.wait_ready()
    host.wait_beat("runs")
    os.kill(pid_of(host.paths, "server"), signal.SIGSTOP)
    beats_stop(host)
    os.kill(pid_of(host.paths, "server"), signal.SIGCONT)
    beats_go_on(host)


def test_a_weight_update_does_not_stop_heartbeats(start):
    host = start()
    host.wait_ready()
    (host.paths.root / "engine-hangs").touch()
    host.wait_beat("answers, but not its engine")
    beats_go_on(host)


def test_a_silent_engine_beyond_the_update_limit_stops_heartbeats(start):
    host = start(update_s=0.5)
    host.wait_ready()
    host.wait_beat("runs")
    (host.paths.root / "engine-hangs").touch()
    beats_stop(host)
    (host.paths.root / "engine-hangs").unlink()
    beats_go_on(host)


def test_a_server_whose_engine_is_dead_is_silent(start):
    host = start("ignores-engine")
    host.wait_ready()
    host.wait_beat("runs")
    (host.paths.root / "engine-is-dead").touch()
    beats_stop(host)
    wait_until(lambda: "the vllm server fails: server-4 answered /health with status 500" in host.log)
