import contextlib
import io
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from areal.api.config import (
    MlflowConfig,
    SFTConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.api.errors import ConfigError
from areal.data.image_files import ImageFiles, png_of
from areal.observe import trackers
from areal.observe.step_files import SAMPLE_COLUMNS, JsonlTracker, SampleRow
from areal.observe.trackers import GuardedTracker, build_trackers
from areal.system.run_paths import RunPaths

SAMPLE = SampleRow(
    group=3,
    reward=1.1,
    reward_parts={"form": 0.1},
    prompt="what is | here",
    answer="line\nwrong-answer",
    num_generated=5,
    versions=[2, 3],
    stop_reason="stop",
)


def config_with(**stats):
    return SFTConfig(experiment_name="exp", trial_name="trial", stats_logger=StatsLoggerConfig(**stats))


def with_pictures(folder):
    """A row with an image, a row with two and one whose file is gone, a row without."""
    files = ImageFiles(RunPaths(folder).images)
    names = [
        files.put(png_of(Image.fromarray(np.full((8, 12, 3), colour, np.uint8))))
        for colour in ((9, 99, 199), (7, 7, 7))
    ]
    return [replace(SAMPLE, images=names[:1]), replace(SAMPLE, images=[*names, "ab" * 32]), SAMPLE]


def colours_below(folder):
    """First colours of the PNG files in a folder."""
    files = (path.read_bytes() for path in folder.rglob("*") if path.is_file())
    pictures = (Image.open(io.BytesIO(file)) for file in files if file.startswith(b"\x89PNG"))
    return {np.asarray(picture.convert("RGB"))[0, 0].tolist()[2] for picture in pictures}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_three(trackers, rows=(SAMPLE,)):
    for step in (1, 2, 3):
        for tracker in trackers:
            tracker.log(step, {"loss": 1.0 / step, "bad": math.nan, "huge": math.inf})
            tracker.log_samples(step, rows)
    for tracker in trackers:
        tracker.close()


def test_jsonl_lines(tmp_path):
    log_three(build_trackers(config_with(), RunPaths(tmp_path)))
    lines = rows(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["loss"] == 0.5
    assert lines[0]["bad"] is None
    assert lines[0]["huge"] is None
    assert lines[0]["time"] > 1.7e9


def test_recovery_cuts_the_steps_that_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(6):
        tracker.log(step, {"x": step})
    tracker.close()
    with open(path, "a") as file:
        file.write('{"step": 6, "x"')
    tracker = JsonlTracker(path, first_step=4)
    tracker.log(4, {"x": 40.0})
    tracker.close()
    assert [(row["step"], row["x"]) for row in rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40.0)]


def test_samples_are_a_file_per_step_and_later_ones_are_removed_at_a_recovery(tmp_path):
    log_three(build_trackers(config_with(), RunPaths(tmp_path)))
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["step-000001.jsonl", "step-000002.jsonl", "step-000003.jsonl"]
    (row,) = rows(tmp_path / "samples" / files[1])
    assert (row["step"], row["reward"], row["answer"]) == (2, 1.1, "line\nwrong-answer")
    JsonlTracker(tmp_path / "metrics.jsonl", first_step=3).close()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == files[:2]


def test_torn_tail_before_the_first_step_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    JsonlTracker(path, first_step=3).close()
    assert path.read_text() == '{"step": 1}\n'


def test_start_from_the_beginning_keeps_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    JsonlTracker(path, first_step=1).close()
    assert path.read_text() == ""


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboardX")
    config = config_with(tensorboard=TensorBoardConfig(path=str(tmp_path / "tb")))
    log_three(build_trackers(config, RunPaths(tmp_path)), with_pictures(tmp_path))
    (events,) = (tmp_path / "tb").iterdir()
    content = events.read_bytes()
    assert content.count(b"loss") == 3
    assert content.count(b"line<br>wrong-answer") == 9
    assert [content.count(b"row_%d_image_%d" % place) for place in ((1, 1), (2, 1), (2, 2), (2, 3))] == [3, 3, 3, 0]
    assert content.count(b"\x89PNG") == 9
    assert b"what is \\| here" in content
    assert b"huge" not in content


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.observe.test_trackers import *
package, first_step, value, steps, waits = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5]
folder = Path.cwd()
kinds = {"tensorboard": TensorBoardConfig(path="tb"), "mlflow": MlflowConfig(mode="local")}
kinds["trackio"] = TrackioConfig(mode="local")
trackers = build_trackers(config_with(**{package: kinds[package]}), RunPaths(folder), first_step=first_step)
for step in map(int, steps.split(",")):
    for tracker in trackers:
        tracker.log(step, {"loss": value + step, "epoch": 0.0})
while len(logged(package, folder)) < int(waits):
    time.sleep(0.05)  # a thread of the package sends them
os.kill(os.getpid(), signal.SIGKILL)
"""


def logged(package, folder):
    """(run, step, loss) of every point that a dashboard has."""
    if package == "tensorboard":
        return [("", step, loss) for step, loss in points_of(folder / "tb")]
    if package == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        runs = [run.info.run_id for run in client.search_runs([client.get_experiment_by_name("exp").experiment_id])]
        return [(run, point.step, point.value) for run in runs for point in client.get_metric_history(run, "loss")]
    try:
        with contextlib.closing(sqlite3.connect(folder / "trackio" / "exp.db")) as database:
            rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    except sqlite3.OperationalError:  # its thread has not made the tables yet
        return []
    return [(run, step, json.loads(metrics)["loss"]) for run, step, metrics in rows]


def points_of(folder):
    """What TensorBoard shows of event files: a start of a session removes what earlier files have from its step on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[0] < event.step]
            points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
    return points


@pytest.mark.parametrize(
    "package",
    ["tensorboard", pytest.param("mlflow", marks=pytest.mark.slow), pytest.param("trackio", marks=pytest.mark.slow)],
)
def test_after_a_kill_no_step_is_missing_or_there_twice_and_a_start_is_a_new_run(tmp_path, package):
    pytest.importorskip({"tensorboard": "tensorboardX"}.get(package, package))
    environ = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def life(*words, num_points):
        waits = "0" if package == "tensorboard" else str(num_points)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, package, *words, waits],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    life("1", "0.5", "1,2,3,4", num_points=4)
    assert [point[1:] for point in logged(package, tmp_path)] == [(step, 0.5 + step) for step in (1, 2, 3, 4)]
    life("3", "0.25", "3,4,5", num_points=5)
    repeated = 0.25 if package == "tensorboard" else 0.5  # it replaces what it gets again
    expected = [(1, 1.5), (2, 2.5), (3, 3 + repeated), (4, 4 + repeated), (5, 5.25)]
    assert [point[1:] for point in logged(package, tmp_path)] == expected
    life("1", "0.75", "1,2", num_points=7)
    newest = [(1, 1.75), (2, 2.75)]
    points = logged(package, tmp_path)
    if package == "tensorboard":  # one folder has one run: the earlier one is no longer shown
        assert [point[1:] for point in points] == newest
    else:
        runs = {run: [point[1:] for point in points if point[0] == run] for run, _, _ in points}
        assert sorted(runs.values()) == sorted([expected, newest])


def test_wandb_refuses_an_address_without_showing_its_password(tmp_path):
    pytest.importorskip("wandb")
    wrong = WandBConfig(mode="offline", wandb_base_url="me:s3cr3t@wandb.example")
    with pytest.raises(ConfigError) as error:
        build_trackers(config_with(wandb=wrong), RunPaths(tmp_path))
    assert error.value.code == "launch.tracker_failed"
    assert "s3cr3t" not in "".join(traceback.format_exception(error.value))


class RecordedRun:
    """Takes what a tracker does with a run."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        return lambda *args, **inputs: self.calls.append((name, args, inputs))


def fake_package(calls):
    """A tracker's package that records how runs are started."""

    def init(**inputs):
        calls.append(("init", (), inputs))
        return RecordedRun(calls)

    def login(**passed):
        calls.append(("login", (), passed))

    return SimpleNamespace(
        __spec__=object(),
        init=init,
        login=login,
        Settings=lambda **options: options,
        Table=None,
        Text=None,
        Image=None,
        Error=RuntimeError,
    )


def test_every_option_of_wandb_reaches_its_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_package(calls))
    texts = {
        name: f"my-{name}" for name in ("entity", "project", "name", "job_type", "group", "notes", "wandb_api_key")
    }
    ours = WandBConfig(
        mode="online", wandb_base_url="https://w.example", tags=["a"], config={"x": 1}, id_suffix="s", **texts
    )
    build_trackers(config_with(wandb=ours), RunPaths(tmp_path))
    inputs = calls[0][2]
    assert {name: inputs[name] for name in texts if name in inputs} == {
        name: text for name, text in texts.items() if name != "wandb_api_key"
    }
    assert (inputs["mode"], inputs["tags"], inputs["config"]["x"]) == ("online", ["a"], 1)
    assert re.fullmatch("exp_trial_s_[0-9a-f]{8}", inputs["id"])
    assert inputs["settings"]["base_url"] == "https://w.example"
    assert inputs["settings"]["api_key"] == "my-wandb_api_key"


@pytest.mark.parametrize(("package", "mode"), [("wandb", "online"), ("swanlab", "cloud")])
def test_a_recovery_continues_the_run_and_a_start_makes_a_new_one(tmp_path, monkeypatch, package, mode):
    calls = []
    monkeypatch.setitem(sys.modules, package, fake_package(calls))
    kind = {"wandb": WandBConfig, "swanlab": SwanlabConfig}[package]
    for first_step in (1, 5, 0):
        build_trackers(config_with(**{package: kind(mode=mode)}), RunPaths(tmp_path), first_step=first_step)
    first, recovered, again = [item["id"] for name, _, item in calls if name == "init"]
    assert first == recovered != again
    assert {item["resume"] for name, _, item in calls if name == "init"} == {"allow"}


def test_a_timestamp_in_the_id_of_wandb_is_that_of_the_start(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_package(calls))
    times = iter(["first", "second"])
    monkeypatch.setattr(trackers.time, "strftime", lambda form: next(times))
    config = config_with(wandb=WandBConfig(mode="online", id_suffix="timestamp"))
    for first_step in (1, 4, 1):
        build_trackers(config, RunPaths(tmp_path), first_step=first_step)
    ids = [item["id"].rpartition("_")[0] for name, _, item in calls if name == "init"]
    assert ids == ["exp_trial_first", "exp_trial_first", "exp_trial_second"]


def test_every_option_of_swanlab_reaches_its_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "swanlab", fake_package(calls))
    ours = SwanlabConfig(
        mode="cloud", project="p", name="n", api_key="k", config={"x": 1}, logdir=str(tmp_path / "logs")
    )
    build_trackers(config_with(swanlab=ours), RunPaths(tmp_path))
    (login, (_, _, inputs), *_) = calls
    assert login[2] == {"api_key": "k"}
    assert (inputs["mode"], inputs["project"], inputs["name"], inputs["config"]["x"]) == ("online", "p", "n", 1)
    assert inputs["log_dir"] == str(tmp_path / "logs")


@pytest.mark.parametrize(("mode", "names"), [("online", ["login", "init"]), ("offline", ["init"])])
def test_only_a_run_of_swanlab_that_is_online_logs_in(tmp_path, monkeypatch, mode, names):
    calls = []
    monkeypatch.setitem(sys.modules, "swanlab", fake_package(calls))
    build_trackers(config_with(swanlab=SwanlabConfig(mode=mode, api_key="k")), RunPaths(tmp_path))
    assert [name for name, _, _ in calls if name in ("login", "init")] == names
    assert [item["mode"] for name, _, item in calls if name == "init"] == [mode]


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "250")  # its own process gets half a minute to start otherwise
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "250")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "artifacts"))
    ours = WandBConfig(mode="offline", wandb_api_key="k" * 40, tags=["a"], config={"note": "own-note"})
    config = config_with(wandb=ours)
    log_three(build_trackers(config, RunPaths(tmp_path)), with_pictures(tmp_path))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-exp_trial_train_*.wandb")
    deadline = time.monotonic() + 200
    while b"train_step" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)  # wandb's own process writes on for a moment after finish()
    assert b"loss" in content
    assert b"train_step" in content
    assert b"own-note" in content
    assert b"samples" in content
    (table, *_) = (tmp_path / "wandb").rglob("*.table.json")
    assert b"wrong-answer" in table.read_bytes()
    shown = json.loads(table.read_bytes())
    assert [row[len(SAMPLE_COLUMNS) :] for row in shown["data"]] == [["Image", None], ["Image", "Image"], [None, None]]
    assert colours_below(tmp_path / "artifacts") == {199, 7}  # of the table's cells
    assert b"k" * 40 not in content


def test_swanlab_offline(tmp_path):
    pytest.importorskip("swanlab")
    ours = SwanlabConfig(mode="offline", logdir=str(tmp_path / "own"), config={"note": "my-own-note"})
    log_three(build_trackers(config_with(swanlab=ours), RunPaths(tmp_path)), with_pictures(tmp_path))
    files = [path for path in (tmp_path / "own").rglob("*") if path.is_file()]
    assert any(b"my-own-note" in path.read_bytes() for path in files)
    assert any(b"loss" in path.read_bytes() for path in files)
    assert any(b"wrong-answer" in path.read_bytes() for path in files)
    assert colours_below(tmp_path / "own") == {199, 7}


@pytest.mark.slow  # a database, or a process
def test_mlflow_keeps_one_run_over_a_recovery(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    config = replace(config_with(mlflow=MlflowConfig(mode="local")), trial_name="it's")
    log_three(build_trackers(config, RunPaths(tmp_path)), with_pictures(tmp_path))
    (*_, tracker) = build_trackers(config, RunPaths(tmp_path), first_step=4)
    tracker.log(4, {"eval/pass@4": 0.25})
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("exp")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1.0 / 3),
    ]
    assert set(run.data.metrics) == {"loss", "eval/pass_4"}
    assert run.data.params["stats_logger.mlflow.mode"] == "local"
    assert run.info.status == "FINISHED"
    (table, *_) = sorted(tmp_path.rglob("step-000002.md"))
    assert "line<br>wrong-answer" in table.read_text()
    assert colours_below(tmp_path / "mlflow") == {199, 7}


@pytest.mark.slow  # the import
def test_mlflow_refuses_an_address_without_showing_its_password(tmp_path):
    pytest.importorskip("mlflow")
    wrong = MlflowConfig(mode="online", tracking_uri="nosuch://me:s3cr3t@mlflow.example")
    with pytest.raises(ConfigError) as error:
        build_trackers(config_with(mlflow=wrong), RunPaths(tmp_path))
    assert error.value.code == "launch.tracker_failed"
    assert "s3cr3t" not in "".join(traceback.format_exception(error.value))


@pytest.mark.slow  # a database, or a process
def test_metrics_that_mlflow_does_not_take_are_warnings(tmp_path, caplog, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    (*_, tracker) = build_trackers(config_with(mlflow=MlflowConfig(mode="local")), RunPaths(tmp_path))
    tracker.log(1, {"loss": 1.0})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    tracker.flush()
    client.delete_run(run.info.run_id)
    tracker.log(2, {"loss": 1.0})
    tracker.log_samples(2, [SAMPLE])
    tracker.flush()
    assert [record.name for record in caplog.records if record.levelname == "WARNING"] == ["areal.observe.trackers"]


@pytest.mark.slow  # a database, or a process
def test_trackio_writes_to_its_folder(tmp_path):
    pytest.importorskip("trackio")
    program = (
        "import sys\nfrom pathlib import Path\nfrom areal.api.config import TrackioConfig\n"
        "from tests.observe.test_trackers import *\n"
        "config = config_with(trackio=TrackioConfig(mode='local'))\n"
        "folder = Path(sys.argv[1])\nlog_three(build_trackers(config, RunPaths(folder)), with_pictures(folder))\n"
    )
    environ = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}  # which trackio reads when it is imported
    subprocess.run([sys.executable, "-c", program, tmp_path], env=environ, check=True, stdout=subprocess.DEVNULL)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "exp.db")) as database:
        lines = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'trial' ORDER BY id").fetchall()
    assert [step for step, metrics in lines if "loss" in json.loads(metrics)] == [1, 2, 3]
    assert sum(b"wrong-answer" in bytes(metrics) for _, metrics in lines) == 3
    assert colours_below(tmp_path / "trackio") == {199, 7}


@pytest.mark.parametrize(
    ("stats", "package", "extra"),
    [
        ({"wandb": WandBConfig(mode="offline")}, "wandb", "wandb"),
        ({"swanlab": SwanlabConfig(mode="local")}, "swanlab", "swanlab"),
        ({"tensorboard": TensorBoardConfig(path="tb")}, "tensorboardX", "tensorboard"),
        ({"mlflow": MlflowConfig(mode="online")}, "mlflow", "mlflow"),
        ({"trackio": TrackioConfig(mode="local")}, "trackio", "trackio"),
    ],
)
def test_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, stats, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        build_trackers(SFTConfig(stats_logger=StatsLoggerConfig(**stats)), RunPaths(tmp_path))
    assert error.value.code == "launch.package_missing"
    assert package in str(error.value)
    assert f".[{extra}]" in str(error.value)


def test_a_dashboard_that_cannot_start_is_an_error_of_its_option(tmp_path):
    (tmp_path / "file").write_text("no folder")
    stats = StatsLoggerConfig(tensorboard=TensorBoardConfig(path=str(tmp_path / "file" / "tb")))
    with pytest.raises(ConfigError) as error:
        build_trackers(SFTConfig(stats_logger=stats), RunPaths(tmp_path))
    assert error.value.code == "launch.tracker_failed"
    assert "stats_logger.tensorboard.path" in str(error.value)


def test_a_restart_leaves_out_a_dashboard_that_does_not_start(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    stats = StatsLoggerConfig(tensorboard=TensorBoardConfig(path=str(tmp_path / "file" / "tb")))
    config = SFTConfig(stats_logger=stats)
    trackers = build_trackers(config, RunPaths(tmp_path), first_step=5, after_failure=True)
    assert [type(tracker) for tracker in trackers] == [JsonlTracker]
    (record,) = caplog.records
    assert "stats_logger.tensorboard.path" in record.getMessage()


class FailingTracker:
    """Every call fails while `is_down`."""

    def __init__(self):
        self.is_down = True
        self.logged = []

    def log(self, step, values):
        if self.is_down:
            raise OSError("the dashboard is gone")
        self.logged.append(step)

    def log_samples(self, step, rows):
        self.log(step, {})

    def flush(self):
        self.log(-1, {})

    close = flush


def test_an_error_of_a_dashboard_is_logged_once_and_does_not_end_training(caplog):
    inner = FailingTracker()
    tracker = GuardedTracker(inner)
    tracker.log(1, {})
    tracker.log_samples(2, [])
    tracker.flush()
    assert len(caplog.records) == 1
    inner.is_down = False
    tracker.log(3, {})
    inner.is_down = True
    tracker.close()
    assert (inner.logged, len(caplog.records)) == ([3], 2)


# --- Requests to an MLflow server that does not answer, with a client that the tests make


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
