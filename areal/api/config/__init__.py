"""The configuration classes, one file per area, and the functions that load, check and save them."""

# pyright: reportUnusedImport=false
from areal.api.config.algorithm import (
    AdvantageOptions,
    CorrectionRule,
    KLControlConfig,
    KLOptions,
    NormConfig,
    OffPolicyOptions,
    PPOActorConfig,
    PPOCriticConfig,
    RolloutCorrectionConfig,
)
from areal.api.config.data import DatasetConfig, TrainDatasetConfig, ValidDatasetConfig, VisionConfig
from areal.api.config.experiment import (
    AgentConfig,
    BaseExperimentConfig,
    BenchmarkConfig,
    DPOConfig,
    DPOOptions,
    GRPOConfig,
    PPOConfig,
    RewardModelConfig,
    RowsExperimentConfig,
    RWConfig,
    RWOptions,
    SFTConfig,
    SFTOptions,
)
from areal.api.config.launcher import ClusterSpecConfig, ElasticConfig, LauncherConfig, NameResolveConfig
from areal.api.config.load import load_config, load_experiment, save_config, script_keys
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
from areal.api.config.policy_losses import AdaptiveEntropyConfig, AssemblyOptions, PolicyLossOptions, ResamplingConfig
from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig, NativeServerConfig, RewardConfig
from areal.api.config.teacher import TeacherConfig, TeacherServersConfig
from areal.api.config.train import (
    Float8Config,
    FSDPEngineConfig,
    FSDPWrapPolicy,
    LoRAConfig,
    MicroBatchSpec,
    OptimizerConfig,
    ScoreModelConfig,
    TrainEngineConfig,
)
from areal.api.config.validate import check_config
