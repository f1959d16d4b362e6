import subprocess
import sys

import pytest

from areal.api.config import ClusterSpecConfig, SFTConfig
from areal.api.errors import ConfigError
from areal.system.device import cpu_count, pick_device, visible_gpus
from areal.system.run_paths import RunPaths


def test_devices():
    assert cpu_count() >= 1
    assert pick_device("cpu") == "cpu"


def test_absent_cuda_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ConfigError) as error:
        pick_device("cuda")
    assert error.value.code == "launch.no_gpu"


def test_visible_gpus_follow_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == []


def test_run_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = RunPaths.of(SFTConfig(experiment_name="e", trial_name="t", cluster=ClusterSpecConfig(fileroot="runs")))
    assert paths.root == tmp_path / "runs" / "e" / "t"
    assert paths.log_of("server-1") == paths.root / "logs" / "server-1.log"


def test_system_and_observe_need_no_torch():
    code = (
        "import sys, areal.system.device, areal.system.process, areal.system.discovery, areal.system.durable,"
        "areal.system.network, areal.observe.trace, areal.observe.phase, areal.observe.log;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
