"""The configuration classes, one file per area, and the functions that load, check and save them."""

# pyright: reportUnusedImport=false
from areal.api.config.advantages import AdvantageOptions, NormConfig
from areal.api.config.agent import AgentConfig
from areal.api.config.algorithm import PPOActorConfig, PPOCriticConfig
from areal.api.config.benchmark import BenchmarkConfig
from areal.api.config.data import DatasetConfig, TrainDatasetConfig, ValidDatasetConfig, VisionConfig
from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig, PPOConfig
from areal.api.config.inference import GenerationHyperparameters, NativeServerConfig
from areal.api.config.kl import KLControlConfig, KLOptions
from areal.api.config.launcher import ClusterSpecConfig, ElasticConfig, LauncherConfig, NameResolveConfig
from areal.api.config.load import load_config, load_experiment, save_config, script_keys
from areal.api.config.lora import LoRAConfig
from areal.api.config.loss_assembly import AdaptiveEntropyConfig, AssemblyOptions, ResamplingConfig
from areal.api.config.observe import (
    AlarmRuleConfig,
    AlarmsConfig,
    Cadence,
    ChosenAlarm,
    EvaluatorConfig,
    HubUploadConfig,
    MlflowConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.api.config.off_policy import CorrectionRule, OffPolicyOptions, RolloutCorrectionConfig
from areal.api.config.offline import (
    DPOConfig,
    DPOOptions,
    RowsExperimentConfig,
    RWConfig,
    RWOptions,
    SFTConfig,
    SFTOptions,
)
from areal.api.config.policy_losses import PolicyLossOptions
from areal.api.config.reward import RewardConfig
from areal.api.config.roles import RewardModelConfig, TeacherConfig
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.config.train import (
    FSDPEngineConfig,
    FSDPWrapPolicy,
    MicroBatchSpec,
    OptimizerConfig,
    ScoreModelConfig,
    TrainEngineConfig,
)
from areal.api.config.validate import check_config
