"""Servers that already run: named by config or environment, waited for, registered, never started or ended."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from areal.api.config import (
    ClusterSpecConfig,
    GRPOConfig,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.api.errors import ConfigError, LaunchError
from areal.launcher import attach
from areal.launcher.attach import ADDRESSES_VARIABLE, register, wait_until_all_answer, with_attached_servers
from areal.launcher.preflight import run_lock
from areal.launcher.status import StatusLine
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from tests.expect import raises_code
from tests.launcher.fake_run import SERVE


def config_of(servers="native:d2", *, addresses=(), channel="xccl"):
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode=f"{servers}+fsdp:d1",
        cluster=ClusterSpecConfig(fileroot="/runs"),
        train_dataset=TrainDatasetConfig(path="x", batch_size=8),
        actor=PPOActorConfig(path="org/model", optimizer=OptimizerConfig(), weight_update_mode=channel),
        rollout=InferenceEngineConfig(server_addrs=list(addresses)),
    )


def attached(config, **environ):
    return with_attached_servers(config, environ).rollout.server_addrs


@pytest.mark.parametrize("servers", ["native:d2", "sglang:d2t4", "vllm:d2"])
def test_the_environment_names_servers(servers):
    inputs = {ADDRESSES_VARIABLE: " 127.0.0.1:1, localhost:2,"}
    assert attached(config_of(servers), **inputs) == ["127.0.0.1:1", "localhost:2"]
    assert attached(config_of(servers)) == []
    assert attached(config_of(servers), **{ADDRESSES_VARIABLE: ""}) == []


def test_environment_and_configuration_may_name_the_same_servers():
    config = config_of(addresses=["http://127.0.0.1:1", "127.0.0.1:2"])
    assert attached(config, **{ADDRESSES_VARIABLE: "127.0.0.1:1,127.0.0.1:2"})
    with raises_code("launch.bad_server_addresses", "rollout.server_addrs", ADDRESSES_VARIABLE, "127.0.0.1:3"):
        attached(config, **{ADDRESSES_VARIABLE: "127.0.0.1:3,127.0.0.1:2"})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("127.0.0.1:1", "config.conflict"),
        ("127.0.0.1,127.0.0.1:2", "launch.bad_server_addresses"),
        ("127.0.0.1:1,127.0.0.1:1", "launch.bad_server_addresses"),
    ],
)
def test_wrong_addresses_in_the_environment_are_refused(text, code):
    with pytest.raises(ConfigError, match=ADDRESSES_VARIABLE) as error:
        attached(config_of(), **{ADDRESSES_VARIABLE: text})
    assert error.value.code == code


def test_servers_on_other_machines_need_a_token():
    far = config_of("native:d1", addresses=["http://10.0.0.7:1"], channel="disk")
    with raises_code("launch.token_missing", "http://10.0.0.7:1", "AREAL_SERVER_TOKEN"):
        attached(far)
    assert attached(far, **{TOKEN_VARIABLE: "secret"})


@pytest.mark.parametrize("channel", ["xccl", "http", "delta"])
def test_servers_on_other_machines_need_disk_updates(channel):
    far = config_of("native:d1", addresses=["127.0.0.1:1", "[2001:db8::7]:1"], channel=channel)
    with pytest.raises(ConfigError, match=rf"^actor.weight_update_mode: {channel} .*http://\[2001:db8::7\]:1") as error:
        attached(far, **{TOKEN_VARIABLE: "secret"})
    assert error.value.code == "launch.attached_needs_disk"
    assert attached(config_of(addresses=["localhost:1", "[::1]:1"]))


def test_training_without_servers_ignores_server_addresses():
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="fsdp:d1",
        train_dataset=TrainDatasetConfig(path="x", type="sft"),
        model=TrainEngineConfig(path="org/model", optimizer=OptimizerConfig()),
    )
    assert with_attached_servers(config, {ADDRESSES_VARIABLE: "127.0.0.1:1"}) is config


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Starts HTTP servers that answer with a status."""
    servers = []

    def start(status):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.status = status
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_any_http_answer_counts_as_running(serve):
    wait_until_all_answer([serve(200), serve(503), serve(404)], 60, pytest.fail)


def test_a_server_without_an_answer_is_named(serve):
    good = serve(200)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(LaunchError) as error:
            wait_until_all_answer([good, silent], 0.1, lambda _: None)
    text = str(error.value)
    assert error.value.code == "launch.attached_silent"
    assert f"from {silent} (Connection refused)" in text
    assert good not in text


def test_a_server_that_starts_later_is_awaited(serve, monkeypatch):
    monkeypatch.setattr("areal.launcher.attach._REPORTED_AFTER_S", 0.0)
    monkeypatch.setattr("areal.launcher.attach._POLL_S", 0.01)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    said = []

    def begin(text):
        said.append(text)
        bound.listen()
        threading.Thread(target=answer, daemon=True).start()

    def answer():
        connection, _ = bound.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        connection.close()

    with bound:
        wait_until_all_answer([f"http://127.0.0.1:{port}"], 60, begin)
    assert len(said) == 1
    assert f"60 s for attached servers: http://127.0.0.1:{port} (Connection refused)" in said[0]


def test_an_interruption_ends_the_wait():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        wait_until_all_answer([f"http://127.0.0.1:{bound.getsockname()[1]}"], 600, pytest.fail, hurry=lambda: True)


def test_attached_servers_are_registered_like_started_ones(tmp_path):
    registry = FileRegistry(tmp_path)
    register(registry, ["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert {name: json.loads(value)["address"] for name, value in registry.list("servers").items()} == {
        "servers/0": "http://127.0.0.1:1",
        "servers/1": "http://127.0.0.1:2",
    }


def test_a_run_with_attached_servers_adds_or_removes_none(run):
    run.attached = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    controller = "note(str(context['num_servers'])); " + SERVE
    trainer = "ready()\nwhile not (names / 'done').exists(): time.sleep(.01)"
    answers = []

    def ask():
        for name in ("controller", "trainer-0"):
            run.pid_of(name)
        try:
            for words in (["--add-replica"], ["--remove-replica", "server-0"]):
                paths, request = attach.read_command_line(["--attach", str(run.folder), *words])
                with pytest.raises(LaunchError) as error:
                    attach.ask(paths, request, StatusLine(run.screen))
                answers.append(str(error.value))
        finally:
            (run.names / "done").touch()

    thread = threading.Thread(target=ask)
    with run_lock(run.paths):
        thread.start()
        outcome = run(controller=controller, trainer_0=trainer)
    thread.join()
    assert outcome.status == "completed"
    assert run.notes() == ["2"]
    assert len(answers) == 2
    assert all("were not started by it (rollout.server_addrs)" in answer for answer in answers)


CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: sglang:d1+fsdp:d1
cluster: {{fileroot: {root}/runs}}
train_dataset: {{path: org/data, batch_size: 2}}
gconfig: {{max_new_tokens: 8}}
actor: {{path: org/model, optimizer: {{lr: 1e-3}}}}
sglang: {{attention_backend: fa3}}
"""
SCRIPT = """
import os, pathlib, time
from areal.system.process import ProcessContext
context = ProcessContext.from_env()
run = pathlib.Path(context.run_dir)
(run / "names" / "ready").mkdir(parents=True, exist_ok=True)
(run / "names" / "ready" / f"{context.name}.json").write_text(str(os.getpid()))
if context.role == "controller":
    (run / "seen").write_text((run / "names" / "servers" / "0.json").read_text())
while not (run / "seen").exists(): time.sleep(0.01)
"""


def launch(folder, address, *words):
    (folder / "x.yaml").write_text(CONFIG.format(root=folder))
    (folder / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "areal.launcher.local", str(folder / "script.py"), "--config", str(folder / "x.yaml")]
    env = os.environ | {ADDRESSES_VARIABLE: address}
    return subprocess.run([*argv, *words], capture_output=True, text=True, timeout=240, env=env)


def test_a_server_with_another_token_is_an_immediate_error(serve):
    with raises_code("launch.token_mismatch"):
        wait_until_all_answer([serve(200), serve(401)], 600, pytest.fail, token="other")


def test_a_launch_with_attached_servers_starts_none(serve, tmp_path):
    url = serve(200)
    done = launch(tmp_path, url.removeprefix("http://"))
    assert done.returncode == 0, done.stderr
    assert "areal: sglang: " in done.stderr
    run = tmp_path / "runs" / "e" / "t"
    assert json.loads((run / "seen").read_text())["address"] == url
    assert set(json.loads((run / "summary.json").read_text())["exit_codes"]) == {"controller", "trainer-0"}
    assert "server_addrs:\n  - 127.0.0.1:" in (run / "config.yaml").read_text(), "other processes see them too"


def test_a_launch_names_the_attached_server_that_is_missing(tmp_path):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = launch(tmp_path, address, "rollout.setup_timeout=0.1")
    assert done.returncode == 2
    assert f"from http://{address}" in done.stderr
    assert "[launch.attached_silent]" in done.stderr
