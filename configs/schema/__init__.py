"""The schema of a run's configuration."""

from mobula.configs.schema.algorithm import AlgorithmConfig, CriticConfig, KLConfig, OverAgeConfig
from mobula.configs.schema.data import DataConfig, DataKind, EnvironmentConfig
from mobula.configs.schema.learner import DPOConfig, LearnerConfig, OfflineConfig, RewardModelConfig, WarmStartConfig
from mobula.configs.schema.resources import ResourcesConfig, TrainingServiceConfig, WorkerResources
from mobula.configs.schema.rewards import (
    Gate,
    GuardConfig,
    GuardLimits,
    Recipe,
    RewardComponent,
    RewardPoolConfig,
    RewardsConfig,
)
from mobula.configs.schema.rollout import (
    LoRAConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplerConfig,
    SamplerKind,
)
from mobula.configs.schema.run import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    ReplayConfig,
    Resume,
    RunConfig,
    SupervisionConfig,
    TimeoutsConfig,
    TracingConfig,
    WeightSyncConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DPOConfig",
    "DataConfig",
    "DataKind",
    "EnvironmentConfig",
    "EvaluationConfig",
    "KLConfig",
    "Gate",
    "GuardConfig",
    "GuardLimits",
    "LearnerConfig",
    "LoRAConfig",
    "MetricsConfig",
    "OfflineConfig",
    "OverAgeConfig",
    "PolicyConfig",
    "Recipe",
    "ReferenceConfig",
    "ReplayConfig",
    "ResourcesConfig",
    "Resume",
    "RewardComponent",
    "RewardModelConfig",
    "RewardPoolConfig",
    "RewardsConfig",
    "RunConfig",
    "SamplerConfig",
    "SamplerKind",
    "SupervisionConfig",
    "TimeoutsConfig",
    "TracingConfig",
    "TrainingServiceConfig",
    "WarmStartConfig",
    "WeightSyncConfig",
    "WorkerResources",
]
