"""Requests to an MLflow server that does not answer, with a client that the tests make."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from areal.api.config import MlflowConfig
from areal.api.errors import ConfigError
from areal.observe import trackers
from areal.observe.trackers import build_trackers
from areal.system.run_paths import RunPaths
from tests.observe.test_trackers import SAMPLE, config_with


def fake_mlflow(client, monkeypatch):
    entities = SimpleNamespace(Metric=lambda *fields: fields, Param=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__spec__=object(), MlflowClient=client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=OSError))


def test_the_first_request_to_mlflow_ends_within_seconds(tmp_path, monkeypatch):
    seen = []

    class Client:
        def __init__(self, tracking_uri):
            pass

        def get_experiment_by_name(self, name):
            seen.append([os.environ.get(name) for name in limits])
            raise OSError("no answer")

    fake_mlflow(Client, monkeypatch)
    limits = list(trackers.FIRST_REQUEST)
    monkeypatch.delenv(limits[0], raising=False)
    monkeypatch.setenv(limits[1], "5")  # of the user
    config = config_with(mlflow=MlflowConfig(mode="online", tracking_uri="http://mlflow.example"))
    with pytest.raises(ConfigError) as error:
        build_trackers(config, RunPaths(tmp_path))
    assert error.value.code == "launch.tracker_failed"
    assert seen == [[trackers.FIRST_REQUEST[limits[0]], "5"]]
    assert [os.environ.get(name) for name in limits] == [None, "5"]


def test_mlflow_without_an_address_is_refused(tmp_path, monkeypatch):
    fake_mlflow(None, monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError) as error:
        build_trackers(config_with(mlflow=MlflowConfig(mode="online")), RunPaths(tmp_path))
    assert error.value.code == "launch.tracker_failed"
    assert "stats_logger.mlflow.tracking_uri" in str(error.value)


def test_training_waits_a_limited_time_for_an_mlflow_server(tmp_path, caplog, monkeypatch):
    answers, received = threading.Event(), []

    class Client:
        """Its requests after the start wait until the server answers."""

        def __init__(self, tracking_uri):
            pass

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment_id, tags, run_name):
            return SimpleNamespace(info=SimpleNamespace(run_id="run"))

        def log_batch(self, run_id, metrics=(), params=(), synchronous=None):
            if not params:
                self._receive(metrics[0][-1])

        def log_text(self, run_id, text, artifact_file):
            self._receive(artifact_file)

        def set_terminated(self, run_id):
            self._receive("end")

        def _receive(self, what):
            assert answers.wait(60), "the caller waits for the server"
            received.append(what)

    fake_mlflow(Client, monkeypatch)
    monkeypatch.setattr(trackers, "_WAIT_S", 0.01)
    monkeypatch.setattr(trackers, "_MAX_CALLS", 3)
    config = config_with(mlflow=MlflowConfig(mode="online", tracking_uri="http://mlflow.example"))
    (*_, tracker) = build_trackers(config, RunPaths(tmp_path))
    tracker.log(1, {"loss": 1.0})
    tracker.log_samples(1, [SAMPLE])
    tracker.flush()
    assert len(caplog.records) == 1, "the server has not received everything"
    for step in (2, 3, 4):
        tracker.log(step, {"loss": 1.0})
    assert len(caplog.records) > 1, "the number of waiting requests has a limit"
    monkeypatch.setattr(trackers, "_WAIT_S", 60.0)
    monkeypatch.setattr(trackers, "_MAX_CALLS", 1000)
    answers.set()
    tracker.close()
    assert (received[:2], received[-1], 4 in received) == ([1, "samples/step-000001.md"], "end", False)
