import sys

import pytest

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
from areal.observe.step_files import JsonlTracker
from areal.observe.trackers import GuardedTracker, build_trackers
from areal.system.run_paths import RunPaths


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
    assert [type(one) for one in trackers] == [JsonlTracker]
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
