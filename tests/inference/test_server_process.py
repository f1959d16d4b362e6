"""The server as a process of a run: configured by context and config, found by name, ended by SIGTERM."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from areal.api.config.load import load_experiment
from areal.inference.server import parse_options
from areal.system.discovery import registry_of
from areal.system.heartbeat import NodeBeats
from areal.system.run_paths import RunPaths
from areal.system.stacks import request_stacks
from tests.process_context import a_context
from tests.run_token import BEARER

CONTEXT = a_context(role="server", index=1, num_servers=2, run_dir="/dev/null")


@pytest.fixture
def config_file(tmp_path: Path, checkpoint) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "experiment_name": "e",
                "trial_name": "t",
                "cluster": {"fileroot": str(tmp_path / "runs")},
                "allocation_mode": "native:d2+fsdp:d1",
                "actor": {"path": str(checkpoint(0)), "optimizer": {"lr": 1e-4}},
                "train_dataset": {"path": "none.jsonl", "batch_size": 2},
                "native": {"dtype": "float32", "max_running_requests": 4, "random_seed": 5},
            }
        )
    )
    return path


def test_options_come_from_the_config_and_the_context(config_file, monkeypatch):
    for name, value in CONTEXT.to_env().items():
        monkeypatch.setenv(name, value)
    options = parse_options(["--config", str(config_file)])
    assert options.native.model_path.endswith("weights-0")
    assert (options.native.dtype, options.native.max_running_requests) == ("float32", 4)
    assert (options.process_name, options.index, options.device, options.num_threads) == ("server-1", 1, "cpu", 1)
    assert options.registry is not None
    assert not options.from_scratch
    config_file.write_text(config_file.read_text().replace('"random_seed"', '"quantization": "int8", "random_seed"'))
    off = ["--quantization", "none"]
    kinds = [parse_options(["--config", str(config_file), *more]).native.quantization for more in ([], off)]
    assert kinds == ["int8", "none"]
    text = config_file.read_text().replace('"optimizer"', '"init_from_scratch": true, "optimizer"')
    config_file.write_text(text)
    assert parse_options(["--config", str(config_file)]).from_scratch


HEADERS = {**BEARER, "Content-Type": "application/json"}


def contains_soon(read, text: str) -> bool:
    """Whether `read()` contains `text` within the time limit."""
    deadline = time.monotonic() + 200.0
    while text not in read() and time.monotonic() < deadline:
        time.sleep(0.02)
    return text in read()


def test_a_process_registers_serves_and_ends(config_file, tmp_path):
    paths = RunPaths(tmp_path)
    context = dataclasses.replace(CONTEXT, run_dir=str(tmp_path))
    node = NodeBeats()
    env = {**os.environ, **context.to_env(), **node.slot("server-1"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "areal.inference.server", "--config", str(config_file)]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, pass_fds=[node.descriptor])
    try:
        registry = registry_of(load_experiment(["--config", str(config_file)]))
        registry.wait("ready/server-1", 200)
        record = json.loads(registry.wait("servers/1", 200))
        assert record["pid"] == process.pid
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}
        request = urllib.request.Request(record["address"] + "/generate", json.dumps(body).encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=200) as response:
            assert len(json.loads(response.read())["output_ids"]) == 3
        assert contains_soon(lambda: str(node.read()), "runs 0 requests, 0 queued, version 0")
        assert node.read()["server-1"].pid == process.pid
        request_stacks(paths.stacks_of("server-1"), process.pid, "nothing has moved")
        assert contains_soon(paths.stacks_of("server-1").read_text, " tasks\n")
        assert "inference/server.py" in paths.stacks_of("server-1").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert "serving" in (tmp_path / "log").read_text()
    assert "Loading weights" not in (tmp_path / "log").read_text(), "no progress bar"
