"""What each rank of a Megatron mesh does in `test_equality.py`."""

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.api.allocation import ParallelDims
from areal.api.config.train import DistributedDataParallelConfig, MegatronEngineConfig
from areal.engine.build import build_megatron_engine
from areal.engine.mesh import TrainerMesh
from areal.models.stored_form import StoredForm
from areal.system.network import TOKEN_VARIABLE
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel
from areal.weights.weight_files import WeightsChecksum
from tests.engine import mesh_cases
from tests.expect import serve
from tests.weights.test_disk_channel import DiskReplica
from tests.weights.test_weight_channels import Replicas

SHARED = MegatronEngineConfig()
"""Data ranks share the optimiser's state: the default."""

OVERLAP = DistributedDataParallelConfig(
    overlap_grad_reduce=True, overlap_param_gather=True, align_param_gather=True, bucket_size=2000
)
AVERAGE = DistributedDataParallelConfig(
    use_distributed_optimizer=False, average_in_collective=True, check_for_nan_in_grad=True
)
SELECTIVE = replace(SHARED, recompute_granularity="selective", recompute_modules=["moe", "core_attn"])


@dataclass(frozen=True)
class Mesh:
    dims: ParallelDims
    megatron: MegatronEngineConfig = SHARED


MESHES = {
    "d1": Mesh(ParallelDims()),
    "t2": Mesh(ParallelDims(tp=2)),
    "p2": Mesh(ParallelDims(pp=2)),
    "p2v2": Mesh(ParallelDims(pp=2), replace(SHARED, virtual_pipeline_parallel_size=2)),
    "c2": Mesh(ParallelDims(cp=2)),
    "d2": Mesh(ParallelDims(dp=2)),
    "t2p2": Mesh(ParallelDims(tp=2, pp=2)),
    "t2p2v2": Mesh(ParallelDims(tp=2, pp=2), replace(SHARED, virtual_pipeline_parallel_size=2)),
    "d2t2": Mesh(ParallelDims(dp=2, tp=2)),
    "d2p2": Mesh(ParallelDims(dp=2, pp=2)),
    "c2t2": Mesh(ParallelDims(cp=2, tp=2)),
    "d2e2": Mesh(ParallelDims(dp=2, ep=2)),
    "c2e2": Mesh(ParallelDims(cp=2, ep=2)),
    "t2e2": Mesh(ParallelDims(tp=2, ep=2)),
    "t2ffn_t2": Mesh(ParallelDims(tp=2, etp=2)),
    "d2e2p2": Mesh(ParallelDims(dp=2, pp=2, ep=2)),
    "d2t2ffn_e2t2": Mesh(ParallelDims(dp=2, tp=2, ep=2, etp=2)),
    "d2e2p2v2": Mesh(ParallelDims(dp=2, pp=2, ep=2), replace(SHARED, virtual_pipeline_parallel_size=2)),
    "d2e2_allgather": Mesh(ParallelDims(dp=2, ep=2), replace(SHARED, moe_token_dispatcher_type="allgather")),
    "d2e2_selective": Mesh(ParallelDims(dp=2, ep=2), SELECTIVE),
    "d2e2_parts": Mesh(ParallelDims(dp=2, ep=2), replace(SELECTIVE, recompute_modules=["mlp", "shared_experts"])),
    "d2_overlap": Mesh(ParallelDims(dp=2), replace(SHARED, ddp=OVERLAP, use_deterministic_algorithms=True)),
    "d2p2v2_overlap": Mesh(
        ParallelDims(dp=2, pp=2),
        replace(SHARED, virtual_pipeline_parallel_size=2, ddp=OVERLAP, overlap_param_gather_with_optimizer_step=True),
    ),
    "d2e2_overlap": Mesh(ParallelDims(dp=2, ep=2), replace(SHARED, ddp=OVERLAP, moe_shared_expert_overlap=True)),
    "d2_offloaded": Mesh(ParallelDims(dp=2), replace(SHARED, offload_optimizer=True)),
    "d2_average": Mesh(
        ParallelDims(dp=2),
        replace(SHARED, ddp=AVERAGE),
    ),
    "t2_distributed": Mesh(
        ParallelDims(tp=2),
        replace(SHARED, recompute_method="block", recompute_num_layers=3, distribute_saved_activations=True),
    ),
}


PUBLISHED = ("qwen2-plain", "deepseek_v3-plain")
"""Tied embeddings, biases; experts, latents."""


def changes_of(mesh: str) -> dict:
    return {"build": build_megatron_engine, "megatron": MESHES[mesh].megatron}


def weighs_once(engine) -> bool:
    """Whether the norm that is checked after a step counts each weight once; a collective."""
    squares = sum(value.double().square().sum().item() for _, value in engine.named_weights())
    return math.isclose(engine._optimizer._weight_norm_squared(), squares, rel_tol=1e-6)


def most_held(engine) -> float:
    """The most bytes of published weights that a rank holds besides its own, in multiples of the largest weight; a
    collective."""
    ours = {value.untyped_storage().data_ptr() for value in engine._weights.parameters.values()}
    sizes: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0
    for _, value in engine.named_weights():
        sizes.append(value.nbytes)
        alive.append(weakref.ref(value))
        del value
        result = [subject for each in alive if (subject := each()) is not None]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in result}
        peak = max(peak, sum(size for place, size in storages.items() if place not in ours))
        result.clear()
    return peak / max(sizes)


def starts_exact(engine, folder: Path) -> bool:
    """Whether the weights that are trained are those of the float32 checkpoint bit for bit; a collective."""
    result = {name: value.clone() for name, value in engine.named_weights(stored=True)}
    return mesh_cases.is_equal(result, load_file(folder / "model.safetensors"))


def publications(engine, mesh: TrainerMesh, folder: Path, case: str) -> dict[str, str]:
    """By channel: the checksum of what a replica has after a publication of the state of one FSDP process, or of what
    the trainer sent where that is other; on rank 0, a collective."""
    engine.load(folder / f"one-{case}")
    model_folder, target = folder / "models" / case.partition("-")[0], folder / f"published-{case}"
    result: dict[str, str] = {}
    for kind in ("disk", "collective"):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        if kind == "disk":
            channel = DiskChannel(engine, mesh, DiskReplica(model), target, model_folder=model_folder)
        else:
            channel = CollectiveChannel(
                engine, mesh, Replicas(model), bucket_bytes=20_000, backend="gloo", timeout_s=60.0
            )
        result[kind] = serve(channel, 1)
        channel.close()
        if mesh.rank == 0:
            received = WeightsChecksum()
            ours, form = model.state_dict(), StoredForm(model)
            names = {spec.name for spec in engine.weight_specs()}
            for key, value in ours.items():
                for part in form.parts(key):
                    if part.name in names:
                        received.add(part.name, part.of(value))
            result[kind] = received.hexdigest() if received.hexdigest() == result[kind] else "other"
    return result


def run_cases(mesh_name: str, cases: Sequence[str], mesh: TrainerMesh, folder: Path) -> dict[str, dict[str, Any]]:
    os.environ[TOKEN_VARIABLE] = "secret"
    facts = {}
    changes = changes_of(mesh_name)
    for case in cases:
        facts[case] = mesh_cases.run_case(folder, case, mesh, None, **changes)
        if case in ("qwen2-rich", "deepseek_v3-plain"):  # tied embeddings: the last stage has a copy; experts
            engine = mesh_cases.make_engine(folder / "models", case, mesh, **changes)
            facts[case] |= {"weighs_once": weighs_once(engine), "held": most_held(engine)}
        if case in PUBLISHED:
            engine = mesh_cases.make_engine(folder / "models", case, mesh, **changes)
            facts[case]["publications"] = publications(engine, mesh, folder, case)
        if case.endswith(mesh_cases.BF16):
            engine = mesh_cases.make_engine(folder / "models", case, mesh, **changes)
            facts[case]["starts_exact"] = starts_exact(engine, folder / "models" / case.partition("-")[0])
    return facts
