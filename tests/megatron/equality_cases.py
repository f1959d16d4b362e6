"""What each rank of a Megatron mesh does in `test_equality.py`.

The ranks run this file through runpy with `RANK` and `FOLDER` set; the folder has `mesh.json` with mesh and cases.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from areal.api.allocation import ParallelDims
from areal.api.config.megatron import MegatronEngineConfig
from areal.engine.megatron.builder import build_megatron_engine
from areal.engine.mesh import TrainerMesh
from areal.system.file_registry import FileRegistry
from areal.system.process import ProcessContext
from tests.engine import mesh_cases

SHARED = MegatronEngineConfig()
"""Data ranks share the optimiser's state: the default."""


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
}


def changes_of(mesh: str) -> dict:
    return {"build": build_megatron_engine, "megatron": MESHES[mesh].megatron}


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    order = json.loads((folder / "mesh.json").read_text())
    layout = MESHES[order["mesh"]]
    context = ProcessContext(
        role="trainer", index=rank, world_size=layout.dims.world_size, num_servers=0, run_id=0, run_dir=str(folder),
        num_threads=1, recover=False, device="cpu",
    )  # fmt: skip
    mesh = TrainerMesh.open(context, FileRegistry(folder / "names"), dims=layout.dims, timeout_s=60)
    facts = {}
    for case in order["cases"]:
        facts[case] = mesh_cases.run_case(folder, case, mesh, None, **changes_of(order["mesh"]))
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    mesh.close()


if __name__ == "areal_megatron_ranks":
    run_rank(globals()["RANK"], Path(globals()["FOLDER"]))
