import subprocess
import sys

import pytest

from areal.api.config import ClusterSpecConfig, SFTConfig
from areal.api.errors import ConfigError
from areal.system import device
from areal.system.device import cpu_count, has_bfloat16_products, pick_device, visible_gpus
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


def test_a_cuda_device_has_an_index(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [pick_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]


def test_a_process_runs_on_the_cores_near_its_gpu(monkeypatch, tmp_path):
    asked, bound = [], []
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("2-3,6\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(device, "_nvidia_smi", lambda *words: asked.append(words) or ["00000000:3B:00.0"])
    monkeypatch.setattr(device, "core_ids", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(device.os, "sched_setaffinity", lambda _, cores: bound.append(cores), raising=False)
    device.bind_to_gpu_node(tmp_path)
    assert asked[0][-2:] == ("-i", "4")
    (folder / "local_cpulist").write_text("8-9\n")  # outside the container
    device.bind_to_gpu_node(tmp_path)
    device.bind_to_gpu_node(tmp_path / "absent")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device.bind_to_gpu_node(tmp_path)
    assert bound == [{2, 3}]


def test_the_memory_of_gpus_is_that_of_the_smallest(monkeypatch):
    monkeypatch.setattr(device, "_nvidia_smi", lambda *_: ["81559", "40960"])
    assert device.gpu_memory_bytes() == 40960 * 2**20
    monkeypatch.setattr(device, "_nvidia_smi", lambda *_: [])
    assert device.gpu_memory_bytes() is None


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


@pytest.mark.parametrize(
    ("group", "files", "cores", "gib"),
    [
        ("0::/job", {"job/memory.max": 3 * 2**30, "job/cpu.max": "max 100000"}, 64, 3),
        ("0::/job", {"job/memory.max": "max", "memory.max": 2 * 2**30, "cpu.max": "250000 100000"}, 2, 2),
        ("0::/", {"memory.max": 2**30, "cpu.max": "50000 100000"}, 1, 1),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": 2**30}, 64, 1),
        ("4:memory:/outside", {"memory/memory.limit_in_bytes": 2**30}, 64, 1),  # the path is one of the host
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": 2**63 - 4096}, 64, 16),
        ("0::/job", {}, 64, 16),
    ],
)
def test_the_limits_of_control_groups_count(monkeypatch, tmp_path, group, files, cores, gib):
    ours, groups = tmp_path / "own", tmp_path / "groups"
    ours.write_text(group + "\n")
    for name, value in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{value}\n")
    monkeypatch.setattr(device, "core_ids", lambda: [*range(64)])
    monkeypatch.setattr(device.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}[name])
    assert (device.cpu_count(groups, ours), device.host_memory_bytes(groups, ours)) == (cores, gib * 2**30)
    assert device.host_memory_bytes(groups, tmp_path / "absent") == 16 * 2**30


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512bw avx512dq avx512vl\n", True),
        ("flags\t\t: fpu avx2 fma avx512bw\n", False),
        ("Features\t: fp asimd\n", True),
    ],
)
def test_processors_without_bfloat16_products_are_known_by_their_features(tmp_path, cpu_info, expected):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{cpu_info}\n")
    assert has_bfloat16_products(file) is expected
    assert has_bfloat16_products(tmp_path / "absent")
