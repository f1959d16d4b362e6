"""The process groups of Megatron-Core over the ranks of a mesh."""
# pyright: reportMissingImports=false

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from areal.engine.mesh import TrainerMesh

_ORDER = "tp-cp-ep-dp-pp"
"""Tensor innermost, pipeline outermost: the ranks of `TrainerMesh`."""


def open_groups(mesh: TrainerMesh, chunks: int, seed: int) -> ProcessGroupCollection:
    """The groups of all models of this process; a collective the first time. `chunks`: model chunks of a stage."""
    if not parallel_state.is_initialized():
        mesh.require_groups()
        dims = mesh.dims
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tp,
            pipeline_model_parallel_size=dims.pp,
            context_parallel_size=dims.cp,
            expert_model_parallel_size=dims.ep,
            expert_tensor_parallel_size=dims.etp,
            order=_ORDER,
        )
        mesh.when_closed(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(seed)
    use_chunks(chunks)
    return ProcessGroupCollection.use_mpu_process_groups()


def use_chunks(count: int) -> None:
    """Let Megatron-Core build and run a model of `count` chunks on each stage."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(count if count > 1 else None)
