"""RunConfig: the whole configuration of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from mobula.configs.schema.algorithm import AlgorithmConfig
from mobula.configs.schema.base import NOT_EMPTY, ByDtype, Section, UserCode
from mobula.configs.schema.data import AUTO_SUFFIX, BOXED_SUFFIX, DataConfig, DataKind, EnvironmentConfig
from mobula.configs.schema.learner import LearnerConfig, OfflineConfig, WarmStartConfig
from mobula.configs.schema.resources import ResourcesConfig, TrainingServiceConfig
from mobula.configs.schema.rewards import GuardConfig, RewardsConfig
from mobula.configs.schema.rollout import PolicyConfig, ReferenceConfig, SamplerConfig

LATEST = "latest"  # link to the newest run, in the folder of the runs
MAX_SECONDS = 30 * 24 * 3600  # a longer wait is a hang; far larger values overflow timers of the event loop

NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class Resume(StrEnum):
    """Handling of checkpoints in the run folder."""

    NEVER = "never"
    AUTO = "auto"


class Control(StrEnum):
    """Another way to get the answers of a suite, which needs less than the policy is trained for."""

    DIRECT_PROMPT = "direct_prompt"
    BLANK_IMAGE = "blank_image"
    SWAPPED_IMAGE = "swapped_image"
    NO_IMAGE = "no_image"


class EvaluationSuite(Section):
    """An additional evaluation at the same versions, on other prompts or with other sampling."""

    split: Literal["validation", "test"]
    """The evaluated split."""
    num_prompts: PositiveInt
    """Number of evaluated prompts: the first of the split, always the same."""
    num_samples: PositiveInt
    """Responses for each prompt; pass@k is reported for powers of two up to this number."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Nucleus sampling: the smallest set of tokens with this total probability; 1 samples from all tokens."""


class EvaluationConfig(Section):
    """Held-out evaluation with the rollout actors of the run."""

    split: Literal["validation", "test"]
    """The evaluated split; never the training split."""
    interval_steps: NonNegativeInt
    """Steps between evaluations; 0 evaluates only before and after RL."""
    num_prompts: PositiveInt
    """Number of evaluated prompts: the first of the split, always the same."""
    num_samples: PositiveInt
    """Responses for each prompt, with the same seeds at every version: the gain since the first evaluation and the
    standard error are paired. More than 1 needs a temperature above 0, or a flow model."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature of evaluation; 0 is greedy, for a flow model the ODE from noise."""
    correct_from: float
    """Least value of the accuracy component of a correct response, for pass@k and reflection ratios."""
    suites: dict[str, EvaluationSuite]
    """Additional suites by name; `evaluation=maye` has the six suites of MAYE."""
    save_responses: bool
    """Write every response of an evaluation to `evaluations/<suite>-<version>.jsonl` in the run folder."""
    controls: tuple[Control, ...] = ()
    """Controls of every suite, with the same rows and seeds: `direct_prompt` asks the policy before RL for the answer
    alone; `blank_image`, `swapped_image` and `no_image` show the policy before and after RL blank media, those of
    another row, or none. The gain over the best control is reported."""
    direct_prompt: str = "Answer with the final answer alone."
    """What the control `direct_prompt` appends to questions, in place of `data.prompt_suffix` and system turns."""
    max_control_prompts: PositiveInt = 200
    """Number of prompts of each control: the first of its suite."""


class CheckpointConfig(Section):
    """Run checkpoints."""

    interval_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 writes one only at the end."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of complete checkpoints to keep."""


class ReplayConfig(Section):
    """The replay buffer: finished groups that wait for the learner, in memory and on disk."""

    max_bytes: PositiveInt = 256 * 2**20
    """Byte budget of finished groups without images; above it, rollouts wait while a whole step is ready."""
    journal: bool = True
    """Write finished groups and trained steps to disk, so that a killed run resumes without losing groups."""
    trajectory_log: bool = False
    """Write every trained step to a Parquet file below the run folder, for `mobula replay` and other tools."""


class MetricsConfig(Section):
    """Metrics sinks, the report's samples and the artifacts of generated media."""

    tensorboard: bool = True
    """Write TensorBoard event files below the run folder."""
    trackers: tuple[Literal["mlflow", "swanlab", "trackio", "wandb"] | UserCode, ...] = ()
    """Experiment trackers that receive the same numbers as TensorBoard. Each needs the extra of the same name; API keys
    are read from the environment, never from here."""
    project: Annotated[str, NOT_EMPTY] = "mobula"
    """The run's project (W&B, SwanLab, trackio) or experiment (MLflow)."""
    tracker_address: str = ""
    """URL of the tracker's server, with a single tracker in `trackers`; empty writes below the run folder."""
    ray: bool = True
    """Export to `ray.util.metrics` (Prometheus, Ray dashboard)."""
    progress: bool = True
    """Show a progress bar."""
    heartbeat_s: Annotated[float, Field(gt=0, le=10)] = 5.0
    """Interval at which gauges are emitted again; Ray drops a gauge about 20 s after the last value."""
    num_report_samples: PositiveInt = 24
    """Number of samples, good and bad, in the report."""
    artifacts_per_step: NonNegativeInt = 0
    """Generated images or videos of each step written to `artifacts/` of the run folder, as PNG or MP4, with sha256 and
    rewards in `artifacts.jsonl`; 0 writes none."""
    artifact_frame_rate: PositiveInt = 16
    """Frames per second of videos in `artifacts/`."""
    audit: bool = True
    """Write `audit.jsonl` in the run folder, a hash chain of trained groups, pushes and states, for `mobula audit`."""


class AuditConfig(Section):
    """The signature of `audit.jsonl`."""

    key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """Environment variable of the driver with a key of 32 characters or more, with which the records of `audit.jsonl`
    are signed; empty signs none. A chain without a key proves order and content, but not its author. Workers do not get
    the variable. `mobula audit --key-env` checks the signatures."""


class TracingConfig(Section):
    """Traces of prompts, steps and updates; all off by default."""

    exporter: Literal["none", "file", "otlp"] = "none"
    """Destination of OpenTelemetry spans of prompts (queued, generated, scored, buffered, trained) and of the phases of
    steps: `traces/spans.jsonl` in the run folder (`file`), or a collector (`otlp`). Needs the extra `tracing`."""
    address: str = ""
    """URL of the collector's traces over OTLP/HTTP, e.g. http://127.0.0.1:4318/v1/traces. Headers are read from
    OTEL_EXPORTER_OTLP_HEADERS, never from here."""
    chrome_steps: tuple[int, ...] = ()
    """Steps with a Chrome trace, `traces/step-000003.json`: phases of the loop and stages of prompts."""
    profile_steps: tuple[int, ...] = ()
    """Updates with a torch profile of every learner rank, `traces/update-000003-rank-0.json`."""


class WeightSyncConfig(Section):
    """Transfer of the learner's weights to the rollout actors."""

    payload: Literal["weights", "adapters", "delta"] = "weights"
    """Content of a push: `weights` with adapters merged; `adapters`, which the receiver merges into the weights of the
    checkpoint; or `delta`, the elements of the weights whose value in `resources.dtype` changed since the push before.
    `delta` needs a copy of the weights in the host memory of the learner, and in that of each rank of a vLLM engine.
    Weights in `policy.freeze` are sent only where engines lack them (`resources.sleep_level=2`), or where vLLM loads
    them as one layer with trained ones."""
    bucket_bytes: PositiveInt = 64 * 2**20
    """Largest size of the buckets that tensors are packed into."""
    max_senders: PositiveInt = 4
    """Most learner ranks that send in parallel; buckets are distributed over them. A receiver needs memory for one
    bucket of each sender."""
    same_host: Literal["memory", "network"] = "memory"
    """How weights reach engines on a sender's host. `memory`: memory that they share, or CUDA IPC handles where they
    share a GPU; between GPUs of a host NCCL stays, where it is `resources.transport`, and a host that can share none
    uses that too. `network`: `resources.transport`, as between hosts."""
    timeout_s: Seconds = 120.0
    """Timeout of a push to one wave; the error names the actors that did not reply. 1.25 times this value must be less
    than `supervision.probe_timeout_s` and `timeouts.rollout_s`."""
    wave_size: NonNegativeInt = 0
    """Rollout actors that are updated together, while the others generate; 0 updates all at once."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """The KV cache of running requests after a push. `recompute`: computed again with the new weights; `keep`: kept,
    which is faster, but later tokens attend to keys and values of older weights. New requests never reuse it."""
    max_attempts: PositiveInt = 4
    """Most attempts of a push to a wave that loses members, or to an engine that missed it."""
    canary_interval: NonNegativeInt = 5
    """Pushes between comparisons of the log-probs of a probe prompt in engines and learner; 0 is off."""
    canary_tolerance: ByDtype = ByDtype(float32=0.0001, bfloat16=0.3)
    """Largest mean of absolute log-prob differences, in nat, that the canary accepts, by `resources.dtype`. In bfloat16
    the limit is at least ten times the model's rounding error, measured at the start."""
    canary_share: ByDtype = ByDtype(float32=0.0, bfloat16=0.4)
    """Largest share of the probe's tokens that may differ by more than `canary_tolerance`."""

    @property
    def answer_s(self) -> float:
        """Seconds that the driver waits for an engine's part of a push. Longer than `timeout_s`, so that healthy
        members of a transfer group report their timeout first."""
        return 1.25 * self.timeout_s


class SupervisionConfig(Section):
    """Health checks and restarts of workers."""

    interval_s: Seconds = 5.0
    """Time between two pings of each worker process."""
    sign_timeout_s: Seconds = 60.0
    """Timeout of a ping, also while the process computes."""
    probe_interval_s: Seconds = 60.0
    """A rollout actor that has finished nothing for this long is probed: it must sample one token. After a timeout it
    is probed immediately."""
    probe_timeout_s: Seconds = 180.0
    """Timeout of a probe; must be longer than a weight push, which pauses the engine."""
    max_restarts: NonNegativeInt = 5
    """Most restarts of a worker within `restart_window_s`, and of the learner at one step; after that the worker is
    given up."""
    restart_window_s: Seconds = 3600.0
    """Time for which a restart counts towards `max_restarts`."""
    backoff_s: Seconds = 2.0
    """Delay before the first restart of a worker; doubled for each further restart within the window."""
    max_backoff_s: Seconds = 60.0
    """Longest delay before a restart."""
    max_failures_in_a_row: PositiveInt = 3
    """Consecutive groups that a rollout actor may fail or lose before it is replaced, even if the process is alive."""
    no_worker_s: Seconds = 900.0
    """Time that a prompt waits while no rollout actor serves; must be longer than the start of an actor."""
    max_logprob_gap: ByDtype = ByDtype(float32=0.001, bfloat16=0.3)
    """Largest mean log-prob difference between engine and learner, in nat, by `resources.dtype`, on tokens sampled with
    the weights before the step. Typical values are 1e-6 in float32, and 0.03 to 0.1 in bfloat16, where the limit is at
    least ten times the measured rounding error. Flow models and `weight_sync.kv_cache=keep` have no limit."""
    on_logprob_gap: Literal["stop", "warn"] = "stop"
    """Whether a step over `max_logprob_gap` ends the run or logs a warning; both list the likely causes."""


class TimeoutsConfig(Section):
    """Timeouts, in seconds."""

    start_s: Seconds = 600.0
    """Start of one role, including loading the engine."""
    prepare_s: Seconds = 120.0
    """Preparing one prompt on a processor worker, including decoding; `data.download_timeout_s` is added for downloads.
    """
    rollout_s: Seconds = 180.0
    """Generating one group; restarted after every `sampler.chunk_tokens` tokens of a response and every turn of an
    episode."""
    reward_s: Seconds = 30.0
    """Scoring one group."""
    reference_s: Seconds = 120.0
    """Reference log-probs of one step's groups, and loading the frozen policy."""
    update_s: Seconds = 300.0
    """One learner update."""
    checkpoint_s: Seconds = 120.0
    """Writing or reading one checkpoint."""
    object_s: Seconds = 60.0
    """Fetching an object from the object store, or one write of the journal."""
    backpressure_s: Seconds = 1800.0
    """A finished group's wait for room in the replay buffer: the longest step, evaluation included."""
    stop_checkpoint_s: Seconds = 60.0
    """From the stop signal until the checkpoint is complete: the rest of an update and an evaluation, a push, and the
    write. After the timeout the run ends without this checkpoint. Give `mobula submit --stop-wait`, Slurm and
    Kubernetes a minute more."""
    stop_s: Seconds = 20.0
    """Graceful stop of one role before it is killed."""


class RunConfig(Section):
    """Everything that defines a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """The run's id; the run folder is `<folder>/<name>`. A new run needs a new name."""
    folder: Annotated[Path, NOT_EMPTY] = Path("runs")
    """Parent folder of runs."""
    folder_access: Literal["owner", "group"] = "owner"
    """Who may read the files of a run, of a training service and of captured sessions. `owner`: folders have mode 0700
    and files 0600; `group`: the group of their folder as well, 0750 and 0640. A resumed run changes its earlier files.
    """
    seed: Annotated[int, Field(ge=0, le=4294967295)] = 0
    """Seeds data order, sampling and initialisation."""
    seeds: tuple[int, ...] = ()
    """Seeds of several runs, one after the other: `mobula train` prints mean, standard error and range of what they
    show. A run that is done is not repeated."""
    num_steps: PositiveInt = 100
    """Steps of RL or of the offline job: weight versions after the initial one."""
    resume: Resume = Resume.NEVER
    """`auto` resumes from the newest complete checkpoint of the run; `never` refuses a folder with a checkpoint."""
    reproduce: str = ""
    """Folder of a run, or its name below `runs`, whose `config.yaml` this run takes; further words are listed as
    differences, with those of code, packages, machine, data and model. The run is called `NAME-again` unless `name` is
    set."""
    max_rollout_retries: NonNegativeInt = 3
    """Retries of a prompt before the run fails."""
    policy: PolicyConfig
    """The trained network."""
    data: DataConfig
    """Sources and limits of prompts."""
    environment: EnvironmentConfig
    """The environment of multi-turn episodes."""
    sampler: SamplerConfig
    """Sampling of responses."""
    rewards: RewardsConfig
    """Components of the reward, and recipes that combine them."""
    algorithm: AlgorithmConfig
    """The RL algorithm."""
    guard: GuardConfig = GuardConfig()
    """Guard against reward hacking."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy."""
    learner: LearnerConfig
    """Optimizer and distributed training."""
    warm_start: WarmStartConfig
    """Supervised steps before RL."""
    offline: OfflineConfig = OfflineConfig()
    """Training on dataset rows instead of rollouts."""
    resources: ResourcesConfig
    """Workers and devices of each role."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of the learner's weights to the rollout actors."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Health checks and restarts of workers."""
    replay: ReplayConfig = ReplayConfig()
    """The replay buffer, its journal and the trajectory log."""
    evaluation: EvaluationConfig
    """Held-out evaluation."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Run checkpoints."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics sinks, the report and artifacts."""
    audit: AuditConfig = AuditConfig()
    """The signature of the audit's records (`metrics.audit` writes them)."""
    tracing: TracingConfig = TracingConfig()
    """Spans of prompts and steps, and profiles of updates."""
    training_service: TrainingServiceConfig = TrainingServiceConfig()
    """The training service (`mobula serve-training`); training does not use it."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Timeouts, in seconds."""

    @property
    def umask(self) -> int:
        """The umask of every process that writes files of the run."""
        return 0o027 if self.folder_access == "group" else 0o077

    @property
    def run_folder(self) -> Path:
        return self.folder / self.name

    @property
    def question_suffix(self) -> str:
        """Text appended to every question: `data.prompt_suffix` with `auto` resolved."""
        if self.data.prompt_suffix != AUTO_SUFFIX:
            return self.data.prompt_suffix
        has_questions = not (self.data.kind is DataKind.ENVIRONMENT or self.offline.is_on)
        return BOXED_SUFFIX if has_questions and self.rewards.reads_box else ""

    @property
    def plays_rows(self) -> bool:
        """Whether an environment plays rows of data, and not prompts that it makes."""
        return self.environment.is_on and self.data.kind is not DataKind.ENVIRONMENT

    @property
    def of_critic_ranks(self) -> RunConfig:
        """The configuration for critic ranks: `resources.critic` as `resources.learner`."""
        own = self.resources.learner.model_copy(update={**dict(self.resources.critic), "replicas": 1})
        return self.model_copy(update={"resources": self.resources.model_copy(update={"learner": own})})

    @property
    def needs_reference(self) -> bool:
        """Whether scorers compute log-probs of the reference or the teacher."""
        if self.reference.place == "learner_ranks":
            return False
        # A policy of denoising steps computes the reference itself, with adapters off.
        has_kl = self.algorithm.kl.coef > 0 and not self.sampler.denoises
        has_pairs = self.offline.job in ("dpo", "kto") and not self.sampler.is_flow
        return has_kl or self.algorithm.distillation.is_on or has_pairs
