"""The real processes of `areal serve`: a client trains while they are killed, and gets what it gets without kills."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal.system.heartbeat import read_beats
from tests.serve.adapters import random_data, write_model
from tests.serve.http_client import HttpClient, HttpModel

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(folder, model, *words):
    """A running service: (client, folder of the run)."""
    port, run = free_port(), folder / "serve" / model.name
    command = [
        sys.executable, "-m", "areal", "serve", "--model", str(model), "--name", "tiny", "--port", str(port),
        f"cluster.fileroot={folder}", "actor.dtype=float32", "native.dtype=float32", *words,
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AREAL_")}
    with open(folder / "output.txt", "ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        while not (run / "serve" / "keys.json").exists():
            assert process.poll() is None, (folder / "output.txt").read_text()
        keys = json.loads((run / "serve" / "keys.json").read_bytes())
        yield HttpClient(f"http://127.0.0.1:{port}", keys["user"]), run
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def train(client, steps, *, kill=lambda step: None):
    """The log-probabilities after each step, and the answer of a sampler of the last weights."""
    model = HttpModel(client, seed=3)
    actual = []
    for step in range(steps):
        requests = [model.send_loss(random_data(step, [6, 9], ("weights",))), model.send_step()]
        kill(step)
        requests.append(model.send_loss(random_data(1000, [8], ("weights",)), forward_only=True))
        actual.append([item.tolist() for item in model.loss_of(requests[-1])[0]])
        assert b"error" not in client.result(requests[1])
    sampler = json.loads(client.result(model.send("save_weights_for_sampler", sampling_session_seq_id=7)))
    return actual, sampled(client, sampler["sampling_session_id"], 0)


def sampled(client, sampler, seq):
    """The answer to a prompt with a fixed seed."""
    body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}}
    body |= {"sampling_params": {"max_tokens": 8, "seed": 1}}
    return client.result(client.ask("asample", body)["request_id"])


class Killer:
    """Kills processes of a run in turn, at chosen steps."""

    def __init__(self, run, steps, names=("trainer-0", "controller", "server-0")):
        self.run, self.steps, self.names = run, steps, names
        self.killed, self.pids = [], []
        self.draw = random.Random(4)

    def pid_of(self, name):
        """The id of the running process, once the launcher has written it after the last kill."""
        while True:
            beat = read_beats(self.run / "alive.json").get(name)
            if beat is not None and beat.pid not in self.pids:
                self.pids.append(beat.pid)
                return beat.pid
            time.sleep(0.02)

    def __call__(self, step):
        if step not in self.steps:
            return
        name = self.names[len(self.killed) % len(self.names)]
        pid = self.pid_of(name)
        timer = threading.Timer(self.draw.random() * 0.02, os.kill, (pid, signal.SIGKILL))
        timer.start()
        timer.join()
        self.killed.append(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def compared(tmp_path, model, steps, kill_at, *words):
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    with served(tmp_path / "calm", model, *words) as (client, _):
        calm = train(client, steps)
    with served(tmp_path / "killed", model, *words) as (client, run):
        killer = Killer(run, kill_at)
        killed = train(client, steps, kill=killer)
    assert killed == calm
    return killer.killed


def test_kills_change_no_number(tmp_path, model):
    assert compared(tmp_path, model, 5, {1, 2, 3}) == ["trainer-0", "controller", "server-0"]


@pytest.mark.slow
def test_kills_change_no_number_of_a_whole_model(tmp_path, model):
    assert compared(tmp_path, model, 5, {1, 2, 3, 4}, "--full") == ["trainer-0", "controller", "server-0", "trainer-0"]


@pytest.mark.slow
def test_samples_of_a_whole_model_stay_those_of_its_weights(tmp_path, model):
    with served(tmp_path, model, "--full") as (client, run):
        trained = HttpModel(client, seed=3)
        trained.send_loss(random_data(1, [6, 9], ("weights",)))
        client.result(trained.send_step(lr=0.1))
        saved = json.loads(client.result(trained.send("save_weights_for_sampler", sampling_session_seq_id=7)))
        asked = {"session_id": trained.session, "sampling_session_seq_id": 8, "base_model": "tiny"}
        samplers = [item["sampling_session_id"] for item in (saved, client.ask("create_sampling_session", asked))]
        killer, numbers = Killer(run, range(4), names=("controller", "server-0")), itertools.count()
        first = [sampled(client, sampler, next(numbers)) for sampler in samplers]
        assert first[0] != first[1]
        for number in range(4):
            killer(number)
            # A server that dies now has the weights that the new gateway loaded first.
            assert sampled(client, samplers[0], next(numbers)) == first[0]
    assert killer.killed == ["controller", "server-0"] * 2


@pytest.mark.slow
def test_twenty_kills_in_200_steps_change_no_number(tmp_path, model):
    assert len(compared(tmp_path, model, 200, set(range(5, 200, 10)))) == 20
