"""RunConfig: the whole configuration of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from mobula.configs.schema.algorithm import AlgorithmConfig
from mobula.configs.schema.base import NOT_EMPTY, ByDtype, Field, PositiveInt, Section, UserCode
from mobula.configs.schema.data import AUTO_SUFFIX, BOXED_SUFFIX, DataConfig
from mobula.configs.schema.environment import EnvironmentConfig
from mobula.configs.schema.learner import LearnerConfig, WarmStartConfig
from mobula.configs.schema.offline import OfflineConfig
from mobula.configs.schema.resources import ResourcesConfig
from mobula.configs.schema.rewards import RewardsConfig
from mobula.configs.schema.rollout import PolicyConfig, ReferenceConfig, SamplerConfig

LATEST = "latest"  # the link to the newest run in the folder of the runs
MAX_SECONDS = 30 * 24 * 3600  # what waits longer than a month hangs; timers deep inside overflow somewhere beyond it

NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class Resume(StrEnum):
    """Handling of checkpoints that are found in the run folder."""

    NEVER = "never"
    AUTO = "auto"


class EvaluationSuite(Section):
    """Further held-out prompts, or the same ones decoded in another way, that are evaluated at the same versions."""

    split: Literal["validation", "test"]
    """The split that is scored."""
    num_prompts: PositiveInt
    """How many prompts of the split are scored (the first ones, always the same)."""
    num_samples: PositiveInt
    """Responses for each prompt; pass@k is reported for powers of two up to it."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Nucleus sampling: the smallest set of tokens with this probability in all; 1 samples from all tokens."""


class EvaluationConfig(Section):
    """Held-out evaluation with the run's own rollout actors."""

    split: Literal["validation", "test"]
    """The split that is scored; never the one that is trained on."""
    interval_steps: NonNegativeInt
    """Evaluate after every so many steps; 0 means only before and after RL."""
    num_prompts: PositiveInt
    """How many prompts of the split are scored (the first ones, always the same)."""
    num_samples: PositiveInt
    """Responses for each prompt, with the same seeds at every version: the gain since the first evaluation and its
    standard error are of pairs. More than one needs a temperature above 0, or a flow model."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature of evaluation; 0 is greedy, and for a flow model the ODE from noise."""
    correct_from: float
    """The value of the accuracy component from which a response counts as correct, for pass@k and reflection ratios."""
    suites: dict[str, EvaluationSuite]
    """Further suites by name, evaluated beside this one; `evaluation=maye` has the six of MAYE."""
    save_responses: bool
    """Write every response of an evaluation to `evaluations/<suite>-<version>.jsonl` in the run folder."""


class CheckpointConfig(Section):
    """Run checkpoints."""

    interval_steps: NonNegativeInt = 10
    """Write a checkpoint after every so many steps; 0 means only at the end."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many complete checkpoints to keep."""


class ReplayConfig(Section):
    """The replay buffer: finished groups on their way to the learner, in memory and on disk."""

    max_bytes: PositiveInt = 256 * 2**20
    """Byte budget of finished groups, images not counted; beyond it rollouts wait while a whole step is ready."""
    journal: bool = True
    """Write finished groups and trained steps to disk, so that a killed run goes on exactly where it was."""
    trajectory_log: bool = False
    """Keep every trained step as a Parquet file below the run folder, for `mobula replay` and for other tools."""


class MetricsConfig(Section):
    """Metrics sinks, the report's samples and the artifacts of generated media."""

    tensorboard: bool = True
    """Write TensorBoard event files below the run folder."""
    trackers: tuple[Literal["mlflow", "trackio", "wandb"] | UserCode, ...] = ()
    """Trackers of experiments that get the same numbers as TensorBoard. Each needs the extra of its name; keys of their
    servers are read from the environment, never from here."""
    project: Annotated[str, NOT_EMPTY] = "mobula"
    """The run's project (W&B, trackio) or experiment (MLflow)."""
    tracker_address: str = ""
    """URL of the server of the one tracker in `trackers`; empty keeps everything below the run folder."""
    ray: bool = True
    """Export to `ray.util.metrics` (Prometheus, Ray dashboard)."""
    progress: bool = True
    """Show a progress bar."""
    heartbeat_s: Annotated[float, Field(gt=0, le=10)] = 5.0
    """How often gauges are re-emitted; Ray drops a gauge about 20 s after its last value."""
    num_report_samples: PositiveInt = 24
    """How many samples, good and bad, the report shows."""
    artifacts_per_step: NonNegativeInt = 0
    """How many generated images or videos of each step are written to `artifacts/` of the run folder, as PNG or MP4,
    with their sha256 and rewards in `artifacts.jsonl`; 0 writes none."""
    artifact_frame_rate: PositiveInt = 16
    """Frames per second of those videos."""


class TracingConfig(Section):
    """Traces of prompts, steps and updates. Nothing is recorded unless one of these keys enables it."""

    exporter: Literal["none", "file", "otlp"] = "none"
    """Where OpenTelemetry spans of each prompt (queued, generated, scored, buffered, trained) and of each step's phases
    go: `traces/spans.jsonl` in the run folder, or a collector. Needs the extra `tracing`."""
    address: str = ""
    """URL of the collector's traces over OTLP/HTTP, e.g. http://127.0.0.1:4318/v1/traces. Headers are read from
    OTEL_EXPORTER_OTLP_HEADERS, never from here."""
    chrome_steps: tuple[int, ...] = ()
    """Steps that are written as Chrome traces, `traces/step-000003.json`: phases of the loop and stages of prompts."""
    profile_steps: tuple[int, ...] = ()
    """Updates that torch's profiler records on every learner rank, `traces/update-000003-rank-0.json`."""


class WeightSyncConfig(Section):
    """How the learner's weights reach the rollout actors."""

    payload: Literal["weights", "adapters"] = "weights"
    """Content of a push: all weights (adapters merged into them), or the adapters alone, which the receiver merges into
    the weights of its own checkpoint."""
    bucket_bytes: PositiveInt = 64 * 2**20
    """Tensors are packed into buckets of at most this size before they are sent."""
    max_senders: PositiveInt = 4
    """Learner ranks that send at the same time, at most: the buckets are dealt out over them. A receiver needs memory
    for a bucket of each."""
    timeout_s: Seconds = 120.0
    """Deadline of one push to one wave; the error names the actors that did not answer. A quarter more has to be less
    than `supervision.probe_timeout_s` and `timeouts.rollout_s`."""
    wave_size: NonNegativeInt = 0
    """Rollout actors that are updated together while the others generate on; 0 updates all at once."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """The KV cache of running requests after a push. `recompute`: it is computed again with the new weights; `keep`: it
    stays, which is faster, and later tokens attend to keys and values of older weights. Later requests never reuse it.
    """
    max_attempts: PositiveInt = 4
    """How often one push is sent to a wave that loses members, or to an engine that it did not reach."""
    canary_interval: NonNegativeInt = 5
    """After every so many pushes the engines' log-probs of a probe prompt are compared with the learner's; 0 is off."""
    canary_tolerance: ByDtype = ByDtype(float32=0.0001, bfloat16=0.3)
    """Largest mean of absolute log-prob differences, in nat, that the canary accepts, by `resources.dtype`. In bfloat16
    it is ten times the rounding of the model, measured at the start, where that is more."""
    canary_share: ByDtype = ByDtype(float32=0.0, bfloat16=0.4)
    """Largest share of the probe's tokens that may differ by more than `canary_tolerance`."""

    @property
    def answer_s(self) -> float:
        """Seconds that the driver waits for an engine's part of a push. A member of a transfer group gives up after
        `timeout_s`, so a healthy one reports its failure before the driver stops waiting."""
        return 1.25 * self.timeout_s


class SupervisionConfig(Section):
    """How workers are watched, and how often lost ones are started again."""

    interval_s: Seconds = 5.0
    """Time between two pings of each worker's process."""
    sign_timeout_s: Seconds = 60.0
    """How long a process may take to answer a ping, also while it computes."""
    probe_interval_s: Seconds = 60.0
    """A rollout actor that has finished nothing for this long is probed: it has to sample one token. After a missed
    deadline it is probed at once."""
    probe_timeout_s: Seconds = 180.0
    """Deadline of such a probe; has to be longer than a weight push, during which the engine is paused."""
    max_restarts: NonNegativeInt = 5
    """How often one worker is started again within `restart_window_s` before it is given up."""
    restart_window_s: Seconds = 3600.0
    """A restart counts towards `max_restarts` for this long."""
    backoff_s: Seconds = 2.0
    """Pause before the first restart of a worker; each further one within the window waits twice as long."""
    max_backoff_s: Seconds = 60.0
    """Longest pause before a restart."""
    max_failures_in_a_row: PositiveInt = 3
    """Consecutive groups that one rollout actor may fail or lose before it is replaced, although its process is alive.
    """
    no_worker_s: Seconds = 900.0
    """How long a prompt waits while no rollout actor serves; longer than starting one takes."""
    max_logprob_gap: ByDtype = ByDtype(float32=0.001, bfloat16=0.3)
    """Largest mean log-prob difference, in nat, of engine and learner on a step's tokens of the weights that it trains
    from, by `resources.dtype`. In float32 it is about 1e-6; in bfloat16 kernels of one trained model differ by 0.03 to
    0.1, and ten times the measured rounding is the limit where that is more. Flow models and
    `weight_sync.kv_cache=keep` have no limit."""
    on_logprob_gap: Literal["stop", "warn"] = "stop"
    """Whether a step over that limit ends the run or writes a warning; both name the likely causes."""


class TimeoutsConfig(Section):
    """Every wait has a deadline, in seconds."""

    start_s: Seconds = 600.0
    """Starting one role, engine load included."""
    prepare_s: Seconds = 120.0
    """Preparing one prompt on a processor worker, its videos decoded; downloads get `data.download_timeout_s` more."""
    rollout_s: Seconds = 180.0
    """Generating one group; the deadline is renewed whenever a response has grown by `sampler.chunk_tokens` tokens, and
    at every turn of an episode."""
    reward_s: Seconds = 30.0
    """Scoring one group."""
    reference_s: Seconds = 120.0
    """Reference log-probs of one step's groups."""
    update_s: Seconds = 300.0
    """One learner update."""
    checkpoint_s: Seconds = 120.0
    """Writing or reading one checkpoint."""
    object_s: Seconds = 60.0
    """Fetching one object from the object store, and one write of the journal."""
    backpressure_s: Seconds = 1800.0
    """How long a finished group may wait for room in the replay buffer: the longest step, evaluation included."""
    stop_checkpoint_s: Seconds = 60.0
    """From the signal that stops a run until its checkpoint is complete: the rest of an update and of an evaluation, a
    push, and the write. Past it the run ends without that checkpoint. `mobula submit --stop-wait`, Slurm and Kubernetes
    should leave a stopped run a minute more."""
    stop_s: Seconds = 20.0
    """Graceful stop of one role before it is killed."""


class RunConfig(Section):
    """Everything that defines a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """The run's id: its folder is `<folder>/<name>`. Give a new name for a new run."""
    folder: Annotated[Path, NOT_EMPTY] = Path("runs")
    """Parent folder of runs."""
    seed: Annotated[int, Field(ge=0, le=4294967295)] = 0
    """Seeds data order, sampling and initialisation."""
    num_steps: PositiveInt = 100
    """Steps of RL or of the offline job: weight versions after the initial one."""
    resume: Resume = Resume.NEVER
    """`auto` goes on from the newest complete checkpoint of this run; `never` refuses a folder that holds one."""
    max_rollout_retries: NonNegativeInt = 3
    """How often one prompt is tried again after a failure before the run gives up."""
    policy: PolicyConfig
    """The network that is trained."""
    data: DataConfig
    """The prompts."""
    environment: EnvironmentConfig
    """The environment of episodes of several turns."""
    sampler: SamplerConfig
    """How responses are sampled."""
    rewards: RewardsConfig
    """The components of the reward and how they are combined."""
    algorithm: AlgorithmConfig
    """The RL algorithm."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy."""
    learner: LearnerConfig
    """The optimizer and how it is distributed."""
    warm_start: WarmStartConfig
    """Supervised steps before RL."""
    offline: OfflineConfig = OfflineConfig()
    """Training on rows of a data set in place of rollouts."""
    resources: ResourcesConfig
    """Workers of each role, and the devices that they take."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How the learner's weights reach the rollout actors."""
    """How many groups run at once."""
    supervision: SupervisionConfig = SupervisionConfig()
    """How workers are watched and replaced."""
    replay: ReplayConfig = ReplayConfig()
    """The replay buffer, its journal and the trajectory log."""
    evaluation: EvaluationConfig
    """Held-out evaluation."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Run checkpoints."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics sinks, the report and artifacts."""
    tracing: TracingConfig = TracingConfig()
    """Spans of prompts and steps, and profiles of updates."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines, in seconds."""

    @property
    def run_folder(self) -> Path:
        return self.folder / self.name

    @property
    def question_suffix(self) -> str:
        """Text appended to every question: `data.prompt_suffix`, or what `auto` stands for."""
        if self.data.prompt_suffix != AUTO_SUFFIX:
            return self.data.prompt_suffix
        has_questions = not (self.environment.is_on or self.offline.is_on)
        return BOXED_SUFFIX if has_questions and self.rewards.reads_box else ""

    @property
    def of_critic_ranks(self) -> RunConfig:
        """The configuration as the ranks of a critic read it, whose learner they are."""
        own = self.resources.learner.model_copy(update={**dict(self.resources.critic), "replicas": 1})
        return self.model_copy(update={"resources": self.resources.model_copy(update={"learner": own})})

    @property
    def needs_reference(self) -> bool:
        """Whether scorers are asked for the log-probs of the reference, or of the teacher in its place."""
        if self.reference.place == "learner_ranks":
            return False
        has_kl = self.algorithm.kl.coef > 0 and not self.sampler.is_flow  # a flow model is its own reference
        has_pairs = self.offline.job == "dpo" and not self.sampler.is_flow
        return has_kl or self.algorithm.distillation.is_on or has_pairs
