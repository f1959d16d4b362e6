"""Owns what a user may configure: one file per area; import the classes from here."""

from areal.api.config.algorithm import NormConfig, PPOActorConfig, PPOCriticConfig
from areal.api.config.data import DatasetConfig, TrainDatasetConfig, ValidDatasetConfig
from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig, PPOConfig, SFTConfig
from areal.api.config.inference import GenerationHyperparameters, NativeServerConfig
from areal.api.config.launcher import ClusterSpecConfig, LauncherConfig, NameResolveConfig
from areal.api.config.load import load_config, load_experiment, save_config, script_keys
from areal.api.config.observe import (
    Cadence,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    WandBConfig,
)
from areal.api.config.rollout import InferenceEngineConfig, RewardConfig
from areal.api.config.train import (
    FSDPEngineConfig,
    FSDPWrapPolicy,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.config.validate import check_config

__all__ = [
    "BaseExperimentConfig",
    "Cadence",
    "ClusterSpecConfig",
    "DatasetConfig",
    "EvaluatorConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "LauncherConfig",
    "MicroBatchSpec",
    "NameResolveConfig",
    "NativeServerConfig",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "PPOCriticConfig",
    "PerfTracerConfig",
    "RecoverConfig",
    "RewardConfig",
    "SFTConfig",
    "SaverConfig",
    "StatsLoggerConfig",
    "SwanlabConfig",
    "TensorBoardConfig",
    "TrainDatasetConfig",
    "TrainEngineConfig",
    "ValidDatasetConfig",
    "WandBConfig",
    "check_config",
    "load_config",
    "load_experiment",
    "save_config",
    "script_keys",
]
