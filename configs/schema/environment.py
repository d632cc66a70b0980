"""Episodes of several turns in place of one response: which environment, where it runs, its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mobula.configs.schema.base import NOT_EMPTY, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Field(gt=0, le=3600)]


class StagesConfig(Section):
    """A curriculum: training episodes begin with the first stage, and later ones open as the run goes on."""

    kind: Literal["none", "episodes", "success"] = "none"
    """Condition that opens the next stage. `none`: there are no stages; `episodes`: a number of episodes of the newest
    one; `success`: a share of them that reached `evaluation.correct_from` in `rewards.accuracy_component`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Options of the environment's reset for each stage, the first one first: of a difficulty, or of a task. All open
    stages are sampled alike; held-out episodes are of the last one."""
    episodes: PositiveInt = 512
    """Episodes of the newest stage before the next one opens; with `success`, the last ones that the share is of."""
    success: Annotated[float, Field(ge=0, le=1)] = 0.8
    """The share that opens the next stage."""

    @property
    def is_on(self) -> bool:
        return self.kind != "none"


class EnvironmentConfig(Section):
    """The environment that answers the policy's turns (docs/environments.md). It needs `data.kind=environment`."""

    name: Annotated[str, NOT_EMPTY]
    """`none`, a built-in environment or adapter (docs/environments.md lists them), or your own: `module:Class` or
    `FILE.py:Class`."""
    options: dict[str, Any]
    """Arguments of the environment."""
    host: Literal["inline", "process", "ray", "remote"] = "process"
    """`process` runs each environment in a process of its own, which is killed at a deadline; `inline` runs it on a
    thread of the rollout actor, which costs less and cannot be killed; `ray` runs it in a Ray actor on any node;
    `remote` asks the server of `environment.url` (`mobula serve-environment`)."""
    ray_num_cpus: NonNegativeFloat = 0.0
    """CPUs that Ray books for one environment with `host=ray`, beside the run's own; 0 books none."""
    url: str = ""
    """The server of `host=remote`, e.g. `http://127.0.0.1:8600`."""
    token_env: str = ""
    """The environment variable with the bearer token of that server; empty for none."""
    max_tokens: PositiveInt = 512
    """Longest episode behind its prompt, tokens of observations and images included; `sampler.max_tokens` bounds one
    turn."""
    max_concurrent: PositiveInt = 64
    """Environments that one rollout actor runs at a time."""
    start_timeout_s: Seconds = 60.0
    """The longest start of an environment."""
    reset_timeout_s: Seconds = 30.0
    """The longest reset."""
    step_timeout_s: Seconds = 30.0
    """The longest step."""
    retries: NonNegativeInt = 1
    """How often an episode that failed is run again with the same seed, before it stays without a reward."""
    max_failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A rollout actor whose last 100 episodes failed more often ends the run."""
    max_observation_bytes: PositiveInt = 4 * 2**20
    """Text and image files of one observation; an episode with a larger one fails."""
    num_train: PositiveInt = 1024
    """Training episodes of one epoch, each with a seed of its own."""
    num_validation: PositiveInt = 64
    """Episodes of the validation split; their seeds are in no other split."""
    num_test: PositiveInt = 128
    """Episodes of the test split."""

    curriculum: StagesConfig = StagesConfig()
    """The order of training episodes by difficulty or task."""

    @property
    def is_on(self) -> bool:
        return self.name != "none"
