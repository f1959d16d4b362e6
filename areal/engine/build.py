"""The train engines by backend name: a new backend adds its module and one row of the table.

`python -m areal.engine.build --config RUN/config.yaml` prints as JSON how the FSDP engine refuses models of a run.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from areal.api.batch import OutputSpec
from areal.api.config import BaseExperimentConfig, PPOConfig, RWConfig, TrainEngineConfig
from areal.api.config.load import load_experiment
from areal.api.engine import ModelRole, TrainEngine
from areal.api.errors import ArealError, ConfigError
from areal.api.images import ImageStore
from areal.engine.fsdp import build_fsdp_engine, check_model
from areal.engine.hf_model import resolve_model_folder
from areal.engine.mesh import TrainerMesh
from areal.models.mesh_rules import mesh_problem, package_problem
from areal.models.model_shape import ModelShape
from areal.models.recurrent_layers import require_native

# ----------------------------------------------------------------------------------------------------------------------
# Builds `MegatronEngine`. The modules that import Megatron-Core, which needs CUDA, are imported here.


def build_megatron_engine(
    config: TrainEngineConfig,
    *,
    role: ModelRole,
    total_steps: int,
    mesh: TrainerMesh,
    seed: int,
    outputs: OutputSpec | None = None,
    images: ImageStore | None = None,
) -> TrainEngine:
    """Build an engine of Megatron-Core as `areal.engine.fsdp.build_fsdp_engine` does one of FSDP; a collective.

    A model with an optimiser keeps float32 weights besides those of config.compute_dtype with which it computes. It
    takes no `images`.
    """
    if role in ("critic", "reward") and outputs not in (None, OutputSpec()):
        raise ValueError(f"a {role} model has no distribution over tokens, so it cannot compute {outputs}")
    if problem := package_problem("megatron", config.megatron):
        raise ConfigError(problem, code="launch.package_missing")
    if mesh.device.type == "cpu" and "megatron_on_cpu" not in sys.modules:  # the fixture of its tests
        message = "allocation_mode: Megatron-Core trains on GPUs only: use fsdp on a machine without one"
        raise ConfigError(message, code="launch.no_gpu")
    folder = resolve_model_folder(config.path)
    if (shape := ModelShape.read(str(folder))) is not None:
        chunks = config.megatron.virtual_pipeline_parallel_size
        if problem := mesh_problem(shape, mesh.dims, backend="megatron", chunks=chunks):
            raise ConfigError(f"model {folder}: {problem}", code="model.cannot_split")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that are not installed, and options that are not used
        from areal.engine.megatron import assembly

        return assembly.assembled_engine(
            config, folder, role=role, total_steps=total_steps, mesh=mesh, seed=seed, outputs=outputs or OutputSpec()
        )


TRAIN_ENGINES: Mapping[str, Callable[..., TrainEngine]] = {
    "fsdp": build_fsdp_engine,
    "megatron": build_megatron_engine,
}
"""Backend name in `allocation_mode` -> factory."""


def role_of(config: BaseExperimentConfig, key: str) -> ModelRole:
    """The role of a model of `config.models`, as it is loaded."""
    if isinstance(config, RWConfig) or key == "reward_model":
        return "reward"
    return "critic" if key == "critic" else "actor"


def refused_models(config: BaseExperimentConfig) -> list[tuple[str, str]]:
    """Line and code for each model in a local folder that its engine will refuse, whatever its weights are, or that
    native servers will."""
    refusals: dict[tuple[str, str], None] = {}
    for key, model in config.models.items():
        if config.train_backend == "fsdp" and Path(model.path, "config.json").is_file():
            try:
                built = check_model(model, role=role_of(config, key), dims=config.allocation.train[0].parallel)
                if key == "actor" and isinstance(config, PPOConfig) and config.server_backend == "native":
                    require_native(built)
            except ArealError as error:
                refusals[str(error), error.code] = None
    return list(refusals)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(refused_models(load_experiment(sys.argv[1:]))))
