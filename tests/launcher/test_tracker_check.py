"""The check of dashboards before a start: packages, addresses, folders and keys, on the machine of rank 0."""

import dataclasses
import json
import os
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from areal.api.config import (
    LauncherConfig,
    MlflowConfig,
    OptimizerConfig,
    SFTConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
    WandBConfig,
)
from areal.launcher.job import make_plan
from areal.launcher.placement import Machine
from areal.launcher.preflight import tracker_problems
from areal.system.network import Host

KEYS = ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI", "TRACKIO_DIR")


@pytest.fixture(autouse=True)
def without_keys(tmp_path, monkeypatch):
    """A user without any login."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "HF_HOME", "SWANLAB_SAVE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)


def problems_with(*, node=None, launcher=None, **stats):
    config = SFTConfig(
        experiment_name="exp",
        trial_name="trial",
        allocation_mode="fsdp:d1",
        train_dataset=TrainDatasetConfig(path="org/data", type="sft"),
        model=TrainEngineConfig(path="org/model", optimizer=OptimizerConfig()),
        stats_logger=StatsLoggerConfig(**stats),
        launcher=launcher or LauncherConfig(),
    )
    return tracker_problems(config, make_plan(config, [Machine(cores=2, host=Host(node=node or socket.gethostname()))]))


def places(problems):
    return [problem.partition(":")[0].removeprefix("stats_logger.") for problem in problems]


def broken_package(folder, name, monkeypatch):
    (folder / f"{name}.py").write_text("raise OSError('libbroken.so is missing')")
    monkeypatch.syspath_prepend(folder)


def test_a_package_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    broken_package(tmp_path, "tensorboardX", monkeypatch)
    (problem,) = problems_with(tensorboard=TensorBoardConfig(path=str(tmp_path / "tb")))
    assert places([problem]) == ["tensorboard.path"]
    assert "libbroken.so" in problem
    assert not (tmp_path / "tb").exists()


def test_a_package_that_ends_the_process_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "tensorboardX.py").write_text("import os; os._exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems_with(tensorboard=TensorBoardConfig(path=str(tmp_path / "tb")))
    assert "exit code 3" in problem


def test_nothing_is_checked_without_dashboards():
    assert problems_with() == []


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    broken_package(tmp_path, "tensorboardX", monkeypatch)
    broken_package(tmp_path, "swanlab", monkeypatch)
    broken_package(tmp_path, "trackio", monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRACKIO_DIR", "/proc/nope")
    stats = {
        "tensorboard": TensorBoardConfig(path=str(tmp_path / "file")),
        "swanlab": SwanlabConfig(mode="local", logdir="/proc/nope"),
        "trackio": TrackioConfig(mode="local"),
    }
    result = places(problems_with(**stats))
    assert result[:3] == ["tensorboard.path", "swanlab.logdir", "TRACKIO_DIR"]
    assert places(problems_with(node="elsewhere", **stats)) == result[3:]


def test_mlflow_needs_an_address(monkeypatch, tmp_path):
    broken_package(tmp_path, "mlflow", monkeypatch)
    online = MlflowConfig(mode="online")
    assert places(problems_with(mlflow=online))[:1] == ["mlflow.tracking_uri"]
    variable = LauncherConfig(trainer_env_vars="MLFLOW_TRACKING_URI=http://mlflow.example")
    assert places(problems_with(mlflow=online, launcher=variable)) == ["mlflow.mode"]
    file = MlflowConfig(mode="online", tracking_uri="sqlite:////proc/nope/x.db")
    assert places(problems_with(mlflow=file)) == ["mlflow.tracking_uri", "mlflow.mode"]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST"}).encode()
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.mark.slow  # the import
def test_mlflow_is_asked_on_the_machine_of_rank_0():
    pytest.importorskip("mlflow")

    def places_with(uri, **more):
        return places(problems_with(mlflow=MlflowConfig(mode="online", tracking_uri=uri), **more))

    assert places_with("nosuch://host", node="elsewhere") == ["mlflow.tracking_uri"]
    assert places_with("http://127.0.0.1:9") == ["mlflow.tracking_uri"]
    assert places_with("http://127.0.0.1:9", node="elsewhere") == []
    assert places_with("sqlite:///own.db") == []
    assert not os.path.exists("own.db")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert places_with(f"http://127.0.0.1:{server.server_port}") == []
        server.shutdown()


@pytest.mark.slow  # the import
def test_wandb_needs_a_key_from_any_of_its_sources(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    online, key = WandBConfig(mode="online", wandb_base_url="https://wandb.example"), "k" * 40
    assert places(problems_with(wandb=online)) == ["wandb"]
    assert problems_with(wandb=online, node="elsewhere") == []
    assert problems_with(wandb=dataclasses.replace(online, mode="offline")) == []
    assert problems_with(wandb=dataclasses.replace(online, wandb_api_key=key)) == []
    assert problems_with(wandb=online, launcher=LauncherConfig(trainer_env_vars=f"WANDB_API_KEY={key}")) == []
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine wandb.example login user password {key}\n")
    netrc.chmod(0o600)
    assert problems_with(wandb=online) == []
    assert places(problems_with(wandb=dataclasses.replace(online, project="a/b"))) == ["wandb"]


@pytest.mark.slow  # the imports
def test_swanlab_and_trackio_need_a_key_when_they_are_online(monkeypatch):
    pytest.importorskip("swanlab")
    pytest.importorskip("trackio")
    stats = {"swanlab": SwanlabConfig(mode="cloud"), "trackio": TrackioConfig(mode="online", space_id="me/space")}
    assert places(problems_with(**stats)) == ["swanlab.api_key", "trackio.mode"]
    assert problems_with(swanlab=SwanlabConfig(mode="local"), trackio=TrackioConfig(mode="local")) == []
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    monkeypatch.setenv("HF_TOKEN", "hf_key")
    assert problems_with(**stats) == []
