"""The schema of a run's configuration."""

from mobula.configs.schema.algorithm import AlgorithmConfig, CriticConfig, KLConfig, OverAgeConfig
from mobula.configs.schema.data import DataConfig, DataKind
from mobula.configs.schema.environment import EnvironmentConfig
from mobula.configs.schema.guard import GuardConfig, GuardLimits
from mobula.configs.schema.learner import LearnerConfig, WarmStartConfig
from mobula.configs.schema.offline import DPOConfig, OfflineConfig, RewardModelConfig
from mobula.configs.schema.resources import ResourcesConfig, WorkerResources
from mobula.configs.schema.rewards import Gate, Recipe, RewardComponent, RewardPoolConfig, RewardsConfig
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
from mobula.configs.schema.training_service import TrainingServiceConfig

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
