"""Every metric of a run: name, unit and description.

Names are the keys of `StepRecord.values`, of `metrics.jsonl`, of TensorBoard tags and (with the prefix `mobula_`) of
Prometheus series. Other numbers that a learner reports keep their names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Metric(StrEnum):
    """Name of a metric with its description. `unit` may be empty; `tag` splits it, in addition to the run's tags."""

    help: str
    unit: str
    tag: str

    def __new__(cls, name: str, help: str, unit: str = "", tag: str = "") -> Self:
        metric = str.__new__(cls, name)
        metric._value_ = name
        metric.help, metric.unit, metric.tag = help, unit, tag
        return metric

    @property
    def text(self) -> str:
        return f"{self.help} [{self.unit}]" if self.unit else self.help


class MetricName(Metric):
    """The values of one step."""

    REWARD_MEAN = "reward_mean", "Mean reward over the trained responses of one step"
    REWARD_STD = "reward_std", "Standard deviation of the reward over the trained responses of one step"
    REWARD_MAX = "reward_max", "Highest reward in one step"
    REWARD_MIN = "reward_min", "Lowest reward in one step"
    ACCURACY = "accuracy", "Mean of rewards.accuracy_component over the trained responses"
    SAMPLED_REWARD_MEAN = "sampled_reward_mean", "Mean reward over all sampled responses: trained and rejected groups"
    SAMPLED_ACCURACY = "sampled_accuracy", "As sampled_reward_mean, of rewards.accuracy_component"
    NUM_SAMPLED_GROUPS = "num_sampled_groups", "Trained groups, and groups rejected since the previous step"
    UNSCORED_FRACTION = "unscored_fraction", "Share of sampled responses without a reward, which no mean counts"
    KL = "kl", "Estimated divergence of the policy from the reference", "nat/token"
    ENTROPY = "entropy", "Entropy of the policy's token distribution", "nat/token"
    LOSS = "loss", "Loss of the update"
    GRAD_NORM = "grad_norm", "Global gradient norm before clipping"
    CLIP_FRACTION = "clip_fraction", "Share of trained tokens with a clipped ratio"
    LEARNING_RATE = "learning_rate", "Learning rate of the update"
    CHOSEN_REWARD = "chosen_reward", "Mean implicit reward (dpo) or score (reward_model) of chosen answers"
    REJECTED_REWARD = "rejected_reward", "Mean implicit reward (dpo) or score (reward_model) of rejected answers"
    MARGIN = "margin", "Mean of chosen minus rejected reward over the pairs of one step"
    TOKEN_ACCURACY = "token_accuracy", "Share of trained tokens with the highest probability (sft)"
    HELD_OUT_LOSS = "held_out_loss", "Loss of an offline job on held-out rows, at the last assessment"
    HELD_OUT_MARGIN = "held_out_margin", "Margin on held-out pairs, at the last assessment"
    OPTIMIZER_STEPS = "optimizer_steps", "Optimizer steps of policy and critic in one step, without skipped ones"
    SUPERVISED_LOSS = "supervised_loss", "Cross-entropy of the rows of algorithm.supervised", "nat/token"
    VALUE_LOSS = "value_loss", "Loss of the critic"
    EXPLAINED_VARIANCE = "explained_variance", "Share of the variance of returns that the critic explains"
    VALUE_CLIP_FRACTION = "value_clip_fraction", "Share of trained tokens with a clipped value"
    CRITIC_GRAD_NORM = "critic_grad_norm", "Global gradient norm of the critic before clipping"
    LOGPROB_GAP_MEAN = "logprob_gap_mean", "Mean absolute log-prob gap of engine and learner at version lag 0", "nat"
    LOGPROB_GAP_MAX = "logprob_gap_max", "Largest absolute log-prob gap of engine and learner at version lag 0", "nat"
    LOGPROB_GAP_FIRST = "logprob_gap_first", "As logprob_gap_mean, of the first token of each response", "nat"
    LOGPROB_GAP_LAST = "logprob_gap_last", "As logprob_gap_mean, of the last token of each response", "nat"
    LOGPROB_GAP_TEMPLATE = "logprob_gap_template", "As logprob_gap_mean, of tokens that the tokenizer adds", "nat"
    POLICY_CHANGE = "policy_change", "Mean absolute log-prob change of a few trained tokens by the update", "nat"
    WEIGHT_CHANGE = "weight_change", "Norm of the change of the update divided by the norm of the weights"
    LOGPROB_DRIFT_MEAN = "logprob_drift_mean", "Mean absolute log-prob gap of learner and sampling weights", "nat"
    RESPONSE_LENGTH = "response_length", "Mean number of tokens of a response", "tokens"
    TRUNCATED_FRACTION = "truncated_fraction", "Share of responses truncated at sampler.max_tokens"
    UNIFORM_FRACTION = "uniform_fraction", "Share of sampled groups with equal rewards (no gradient)"
    UNIFORM_RIGHT_FRACTION = "uniform_right_fraction", "As uniform_fraction, with an accuracy of at least 0.5"
    UNIFORM_WRONG_FRACTION = "uniform_wrong_fraction", "As uniform_fraction, with an accuracy below 0.5"
    STALENESS = "staleness", "Mean age of trained tokens: version before the step minus their own", "versions"
    STALENESS_MAX = "staleness_max", "Age of the oldest trained token", "versions"
    OVER_AGE_TOKENS = "over_age_tokens", "Tokens beyond algorithm.max_staleness: masked or reweighted", "tokens"
    DROPPED_LENGTH = "dropped_length", "Mean length of responses dropped as over-age, since the start", "tokens"
    NUM_GROUPS = "num_groups", "Groups trained on in one step"
    NUM_SAMPLES = "num_samples", "Responses trained on in one step"
    NUM_TOKENS = "num_tokens", "Generated tokens trained on in one step", "tokens"
    SHARED_PROMPT_SHARE = "shared_prompt_share", "Share of tokens that another row of their forward pass computed"
    SAMPLES_PER_S = "samples_per_s", "Responses trained on per second of the whole step", "1/s"
    TOKENS_PER_S = "tokens_per_s", "Generated tokens trained on per second of the whole step", "tokens/s"
    BYTES_PER_TRAJECTORY = "bytes_per_trajectory", "Bytes of one trajectory in the object store, media excluded", "B"
    MEDIA_BYTES_UNIQUE = "media_bytes_unique", "Bytes of all media stored since the start, each counted once", "B"
    MEDIA_BYTES_REFERENCED = "media_bytes_referenced", "Bytes of the media of trained samples, one copy for each", "B"
    QUEUE_READY = "queue_ready", "Groups in the replay buffer that are ready for a step"
    QUEUE_TAKEN = "queue_taken", "Groups in the replay buffer that are leased to a step"
    QUEUE_BYTES = "queue_bytes", "Bytes of groups in the replay buffer", "B"
    QUEUE_OLDEST_AGE_S = "queue_oldest_age_s", "Age of the oldest group in the replay buffer", "s"
    QUEUE_WAITING = "queue_waiting", "Finished groups that wait for room in the replay buffer"
    QUEUE_OVERSIZED = "queue_oversized", "Groups larger than replay.max_bytes, since the start of the buffer"
    CANARY = "canary", "Mean log-prob difference of engine and learner on the probe prompt", "nat"
    CANARY_MEDIA = "canary_media", "As canary, of the tokens of media", "nat"
    CANARY_TEMPLATE = "canary_template", "As canary, of the tokens with which all prompts begin and end", "nat"
    CANARY_TEXT = "canary_text", "As canary, of the other tokens of the prompt", "nat"
    PUSH_SECONDS = "push_seconds", "Duration of the newest push, until every engine serves the weights", "s"
    PUSH_BYTES = "push_bytes", "Bytes sent to each engine by the newest push", "B"
    PUSH_CHANGED_SHARE = "push_changed_share", "Share of weights that changed, with weight_sync.payload=delta"
    CURRICULUM_STAGE = "curriculum_stage", "Newest open stage of environment.curriculum, from 0"
    GUARD_REWARD = "guard_reward", "Mean reward over the groups of one step with a judge; `_se`: standard error"
    GUARD_JUDGE = "guard_judge", "Mean of the judge (components with trained=false) over the same groups"
    GUARD_LENGTH = "guard_length", "Mean response length over groups, with guard.limits.length", "tokens"
    GUARD_REPETITION = "guard_repetition", "Share of repeated n-grams of words, with guard.limits.repetition"
    GUARD_SCRIPT_MIX = "guard_script_mix", "Share of letters outside the main script, with guard.limits.language"
    GUARD_FORMAT = "guard_format", "Mean of the `format` components over groups, with guard.limits.format"
    GUARD_STRENGTH = "guard_strength", "Largest evidence for reward hacking in critical values: an alarm from 1 on"
    GUARD_KL_SCALE = "guard_kl_scale", "Factor of algorithm.kl.coef that the guard has set"


class CounterName(Metric):
    """Counts since the start of the run, split by reason."""

    REJECTED = "rejected", "Finished groups that were not trained on"
    REJECTED_RESPONSES = "rejected_responses", "Finished responses that were not trained on"
    REJECTED_TOKENS = "rejected_tokens", "Tokens of finished responses that were not trained on", "tokens"
    SKIPPED = "skipped", "Unusable dataset samples"
    RESTARTS = "restarts", "Restarts of workers after a failure"
    WEIGHT_SYNCS = "weight_syncs", "Weight versions pushed to the rollout actors"
    WEIGHT_RESENDS = "weight_resends", "Engines that missed a push and were sent whole tensors"
    ROLLOUT_RETRIES = "rollout_retries", "Retries of prompts after a failure"
    REFERENCE_RETRIES = "reference_retries", "Parts of a step that were sent to another reference scorer"
    RESUMED = "resumed", "Retried prompts, and their sampled tokens that were kept and lost"
    REWARD_FAILURES = "reward_failures", "Responses that could not be scored"
    REWARD_REASONS = "reward_reasons", "Trained responses whose component is not above 0, by component and reason"
    SCORED_AHEAD = "scored_ahead", "Responses scored before the group was complete, used or not"
    DROPPED_SINKS = "dropped_sinks", "Metric sinks that were removed after a failure"
    DROPPED_SAMPLES = "dropped_samples", "Report samples that could not be fetched"
    RECOVERED = "recovered", "Steps and groups recovered from the journal, and losses, by reason"
    EPISODE_FAILURES = "episode_failures", "Attempts of episodes that failed in the environment, by kind"
    GUARD_ALARMS = "guard_alarms", "Alarms of the guard against reward hacking, by sign"
    GUARD_ACTIONS = "guard_actions", "Actions of the guard: warn, raise_kl, rollback, stop"
    UNLOGGED_STEPS = "unlogged_steps", "Steps that could not be written to the trajectory log"


class LiveName(Metric):
    """Ray gauges with a value from the start of the process."""

    UP = "up", "1 while the run's process is alive"
    PHASE = "phase", "1 for the current phase of the loop, 0 for earlier phases", "", "phase"
    PHASE_SECONDS = "phase_seconds", "Time since the start of the phase", "s"
    STEP = "step", "Current or last step; 0 before the first step"
    TOTAL_STEPS = "total_steps", "Planned steps of the run"
    LAST_STEP_TIME = "last_step_time", "End of the last step, or start of the run, in seconds since the epoch", "s"
    IN_FLIGHT = "in_flight", "Prompts in flight"
    IN_FLIGHT_OLDEST_AGE_S = "in_flight_oldest_age_s", "Age of the oldest prompt in flight", "s"
    WORKERS = "workers", "Workers of a role by state", "", "state"
    WORKER_VERSION = "worker_version", "Weight version that a worker serves"
    WORKER_IN_FLIGHT = "worker_in_flight", "Prompts or calls in flight at a worker"
    WORKER_RESTARTS = "worker_restarts", "Restarts of a worker"
    WORKER_TOKENS_PER_S = "worker_tokens_per_s", "Tokens sampled by an engine", "tokens/s"
    WORKER_KV_USAGE = "worker_kv_usage", "Share of an engine's KV cache in use"
    WORKER_RUNNING = "worker_running", "Responses in decoding at an engine"
    WORKER_QUEUE = "worker_queue", "Responses in an engine's queue"
    WORKER_BUSY_SHARE = "worker_busy_share", "Share of a worker's planned threads that compute"
    WORKER_RSS_BYTES = "worker_rss_bytes", "Host memory of a worker process and child processes", "B"
    WORKER_GPU_BYTES = "worker_gpu_bytes", "Memory in use on a worker's GPUs, by all processes", "B"
    WORKER_GPU_BUSY_SHARE = "worker_gpu_busy_share", "Share of time in which a worker's GPUs compute, from NVML"
    LOOP_LAG_S = "loop_lag_s", "Largest delay of the driver's event loop", "s"
    OBJECT_STORE_BYTES = "object_store_bytes", "Bytes in the object stores of all nodes", "B"
    OBJECT_STORE_SIZE_BYTES = "object_store_size_bytes", "Size of the object stores of all nodes", "B"


class SplitName(Metric):
    """Gauges of a step or an evaluation with a tag, or without an entry in `MetricName`."""

    SECONDS = "seconds", "Seconds of one step by phase; `total` is the whole step", "s", "phase"
    REWARD_COMPONENT = "reward_component", "Mean of a reward component over the responses of one step", "", "component"
    STALENESS_TOKENS = "staleness_tokens", "Tokens of one step by version lag", "tokens", "lag"
    EVALUATION_ACCURACY = "evaluation_accuracy", "Held-out accuracy of the newest evaluation"
    EVALUATION_VERSION = "evaluation_version", "Weight version of the newest evaluation"


ALL_REASONS = "all"  # reason of the sum in a counter's Ray gauge; present from the start, with 0


def describe(name: str) -> str:
    """Returns the text of a Ray gauge with its unit; for unknown names, of a number that the learner reports."""
    texts = {f"{counter}_total": counter.text for counter in CounterName}
    texts |= {metric.value: metric.text for metric in (*SplitName, *LiveName, *MetricName)}
    return texts.get(name, f"{name}, as the learner reports it")
