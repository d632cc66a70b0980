"""Schema of multi-turn episodes: the environment, the process that runs it, and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mobula.configs.schema.base import NOT_EMPTY, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Field(gt=0, le=3600)]


class StagesConfig(Section):
    """A curriculum: training episodes start with the first stage; later stages open during the run."""

    kind: Literal["none", "episodes", "success"] = "none"
    """Condition that opens the next stage. `none`: there are no stages; `episodes`: a number of episodes of the newest
    stage; `success`: the share of them that reached `evaluation.correct_from` in `rewards.accuracy_component`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Options of the environment's reset for each stage, in order, e.g. a difficulty or a task. Open stages are sampled
    with equal probability; held-out episodes use the last stage."""
    episodes: PositiveInt = 512
    """Episodes of the newest stage before the next stage opens; with `success`, the window of the share."""
    success: Annotated[float, Field(ge=0, le=1)] = 0.8
    """The share of successes that opens the next stage."""

    @property
    def is_on(self) -> bool:
        return self.kind != "none"


class EnvironmentConfig(Section):
    """The environment of multi-turn episodes (docs/environments.md). Needs `data.kind=environment`."""

    name: Annotated[str, NOT_EMPTY]
    """`none`, a built-in environment or adapter (docs/environments.md lists them), or user code: `module:Class` or
    `FILE.py:Class`."""
    options: dict[str, Any]
    """Arguments of the environment."""
    host: Literal["inline", "process", "ray", "remote"] = "process"
    """`process` runs each environment in a subprocess, which is killed on a timeout; `inline` runs it on a thread of
    the rollout actor, which is cheaper and cannot be killed; `ray` runs it in a Ray actor on any node; `remote` calls
    the server of `environment.url` (`mobula serve-environment`)."""
    ray_num_cpus: NonNegativeFloat = 0.0
    """CPUs that Ray reserves for one environment with `host=ray`, in addition to the run's workers; 0 for none."""
    url: str = ""
    """The server of `host=remote`, e.g. `http://127.0.0.1:8600`."""
    token_env: str = ""
    """The environment variable with the server's bearer token; empty for none."""
    max_tokens: PositiveInt = 512
    """Longest episode after the prompt, including tokens of observations and images; `sampler.max_tokens` bounds one
    turn."""
    max_concurrent: PositiveInt = 64
    """Environments that one rollout actor runs concurrently."""
    start_timeout_s: Seconds = 60.0
    """Timeout for the start of an environment."""
    reset_timeout_s: Seconds = 30.0
    """Timeout for a reset."""
    step_timeout_s: Seconds = 30.0
    """Timeout for a step."""
    retries: NonNegativeInt = 1
    """Retries of a failed episode with the same seed; after that it has no reward."""
    max_failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed episodes among the last 100 of a rollout actor above which the run ends."""
    max_observation_bytes: PositiveInt = 4 * 2**20
    """Largest observation, text and image files together; a larger observation fails the episode."""
    num_train: PositiveInt = 1024
    """Training episodes of one epoch, with distinct seeds."""
    num_validation: PositiveInt = 64
    """Episodes of the validation split; the seeds are in no other split."""
    num_test: PositiveInt = 128
    """Episodes of the test split."""

    curriculum: StagesConfig = StagesConfig()
    """The order of training episodes by difficulty or task."""

    @property
    def is_on(self) -> bool:
        return self.name != "none"
