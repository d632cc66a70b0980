"""The schema of a run's configuration."""

from mobula.configs.schema.algorithm import AlgorithmConfig, KLConfig
from mobula.configs.schema.data import DataConfig, DataKind
from mobula.configs.schema.learner import LearnerConfig, OfflineConfig, WarmStartConfig
from mobula.configs.schema.resources import ResourcesConfig, WorkerResources
from mobula.configs.schema.rewards import Gate, Recipe, RewardComponent, RewardPoolConfig, RewardsConfig
from mobula.configs.schema.rollout import LoRAConfig, PolicyConfig, SamplerConfig, SamplerKind
from mobula.configs.schema.run import EvaluationConfig, RunConfig, TimeoutsConfig, TracingConfig

__all__ = [
    "AlgorithmConfig", "DataConfig", "DataKind", "EvaluationConfig", "Gate", "KLConfig", "LearnerConfig",
    "LoRAConfig", "OfflineConfig", "PolicyConfig", "Recipe", "ResourcesConfig", "RewardComponent",
    "RewardPoolConfig", "RewardsConfig", "RunConfig", "SamplerConfig", "SamplerKind", "TimeoutsConfig",
    "TracingConfig", "WarmStartConfig", "WorkerResources",
]  # fmt: skip
