"""How weights travel for each pair of devices, the variables of GPU processes, and limits by the size of a model."""

from dataclasses import replace

import pytest

from areal.api.config import GRPOConfig, InferenceEngineConfig, LauncherConfig, NativeServerConfig
from areal.api.config.schema import options_without_effect
from areal.api.config.train import LoRAConfig
from areal.launcher.job import NcclVersions, gpu_variables, make_plan, with_time_limits
from areal.launcher.local import plan_text
from areal.launcher.placement import Machine
from areal.system.process import ProcessContext
from tests.expect import raises_code

ON_CPU, ON_GPUS, ON_ONE = Machine(cores=8), Machine(cores=8, gpus=("0", "1")), Machine(cores=8, gpus=("0", "0"))
SAME, OTHER = NcclVersions(trainers="2.28.9", servers="2.28.9.1"), NcclVersions(trainers="2.28.9", servers="2.27.5")


def config_of(mode="auto", backend="native", **changes):
    config = replace(GRPOConfig(), allocation_mode=f"{backend}:d1+fsdp:d1", **changes)
    return replace(config, actor=replace(config.actor, path="m", weight_update_mode=mode))


def plan_of(config, machine, nccl=None):
    return make_plan(config, [machine], nccl=nccl)


@pytest.mark.parametrize(
    ("backend", "machine", "nccl", "expected"),
    [
        ("native", ON_CPU, None, {"auto": "gloo", "xccl": "gloo"}),
        ("native", ON_GPUS, None, {"auto": "nccl", "xccl": "nccl"}),
        ("vllm", ON_CPU, None, {"auto": "gloo", "xccl": "gloo"}),
        ("vllm", ON_GPUS, SAME, {"auto": "nccl", "xccl": "nccl"}),
        ("vllm", ON_GPUS, OTHER, {"auto": "disk", "xccl": None}),
        ("vllm", ON_GPUS, None, {"auto": "disk", "xccl": "nccl"}),
        ("native", ON_ONE, None, {"auto": "disk", "xccl": None}),
    ],
)
def test_weights_travel_in_a_collective_where_both_ends_can(backend, machine, nccl, expected):
    for mode, transport in {**expected, "disk": "disk"}.items():
        if transport is None:
            with raises_code("launch.no_common_transport"):
                plan_of(config_of(mode, backend), machine, nccl)
            continue
        plan = plan_of(config_of(mode, backend), machine, nccl)
        assert plan.weight_path.transport == transport
        trainer = next(process for process in plan.processes if process.role == "trainer")
        assert ProcessContext.from_env(trainer.env).weight_transport == transport
        assert f"weight updates: {transport} ({plan.weight_path.reason})\n" in plan_text(plan, None)


@pytest.mark.parametrize(("adapters", "transport", "is_unused"), [("auto", "disk", True), ("merged", "nccl", False)])
def test_adapters_alone_are_files(adapters, transport, is_unused):
    config = config_of("xccl", "vllm")
    actor = replace(config.actor, lora=LoRAConfig(), adapter_update_mode=adapters)
    config = replace(config, actor=actor)
    assert plan_of(config, ON_GPUS, SAME).weight_path.transport == transport
    unused = {item.path for item in options_without_effect(config)}
    assert ("actor.weight_update_mode" in unused) == is_unused
    by_disk = replace(config, actor=replace(actor, weight_update_mode="disk"))
    assert "actor.weight_update_mode" not in {item.path for item in options_without_effect(by_disk)}


def test_a_native_server_on_the_cpu_beside_a_trainer_on_a_gpu_uses_gloo_or_the_disk():
    for mode, transport in {"auto": "disk", "xccl": "gloo"}.items():
        config = config_of(mode, native=NativeServerConfig(device="cpu"))
        assert plan_of(config, Machine(cores=8, gpus=("0",))).weight_path.transport == transport


def test_attached_servers_get_weights_over_the_disk_unless_the_user_knows_better():
    for mode, transport in {"auto": "disk", "xccl": "gloo"}.items():
        config = config_of(mode, rollout=InferenceEngineConfig(server_addrs=["127.0.0.1:1"]))
        assert plan_of(config, ON_CPU).weight_path.transport == transport


def test_processes_with_gpus_count_them_by_bus_and_trainers_get_an_allocator_without_fragments(monkeypatch):
    for name in ("CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_variables("trainer", (), {"NCCL_NVLS_ENABLE": "0"}) == {}
    server, trainer = (gpu_variables(role, ("1",), {"NCCL_NVLS_ENABLE": "0"}) for role in ("server", "trainer"))
    assert server["CUDA_DEVICE_ORDER"] == trainer["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert int(server["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == 300
    assert trainer["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert trainer["NCCL_NVLS_ENABLE"] == "0"
    assert "PYTORCH_ALLOC_CONF" not in server
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert gpu_variables("trainer", ("1",), {})["PYTORCH_ALLOC_CONF"] == "garbage_collection_threshold:0.8"


def limits_of(config):
    return config.launcher.ready_timeout_s, config.rollout.setup_timeout, config.rollout.weight_update_timeout_s


@pytest.mark.parametrize(
    ("gib", "on_gpu", "expected"),
    [(0, False, (300, 300, 300)), (2, True, (1800, 1800, 300)), (470, True, (10093.2, 10093.2, 10093.2))],
)
def test_limits_of_a_start_grow_with_the_checkpoint(gib, on_gpu, expected):
    assert limits_of(with_time_limits(config_of(), checkpoint_bytes=gib * 2**30, on_gpu=on_gpu)) == pytest.approx(
        expected, rel=1e-4
    )


def test_limits_that_the_user_gave_stay():
    rollout = InferenceEngineConfig(setup_timeout=60, weight_update_timeout_s=70)
    inputs = config_of(launcher=LauncherConfig(ready_timeout_s=50), rollout=rollout)
    assert limits_of(with_time_limits(inputs, checkpoint_bytes=2**40, on_gpu=True)) == (50, 60, 70)
