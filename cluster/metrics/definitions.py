"""Every metric of a run: name, unit and description.

Names are the keys of `StepRecord.values`, of `metrics.jsonl`, of TensorBoard tags and (with the prefix `mobula_`) of
Prometheus series. Other numbers that a learner reports keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MetricName(StrEnum):
    """The values of one step."""

    REWARD_MEAN = "reward_mean"
    REWARD_STD = "reward_std"
    REWARD_MAX = "reward_max"
    REWARD_MIN = "reward_min"
    ACCURACY = "accuracy"
    SAMPLED_REWARD_MEAN = "sampled_reward_mean"
    SAMPLED_ACCURACY = "sampled_accuracy"
    NUM_SAMPLED_GROUPS = "num_sampled_groups"
    UNSCORED_FRACTION = "unscored_fraction"
    KL = "kl"
    ENTROPY = "entropy"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    CLIP_FRACTION = "clip_fraction"
    LEARNING_RATE = "learning_rate"
    CHOSEN_REWARD = "chosen_reward"
    REJECTED_REWARD = "rejected_reward"
    MARGIN = "margin"
    TOKEN_ACCURACY = "token_accuracy"
    HELD_OUT_LOSS = "held_out_loss"
    HELD_OUT_MARGIN = "held_out_margin"
    OPTIMIZER_STEPS = "optimizer_steps"
    SUPERVISED_LOSS = "supervised_loss"
    VALUE_LOSS = "value_loss"
    EXPLAINED_VARIANCE = "explained_variance"
    VALUE_CLIP_FRACTION = "value_clip_fraction"
    CRITIC_GRAD_NORM = "critic_grad_norm"
    LOGPROB_GAP_MEAN = "logprob_gap_mean"
    LOGPROB_GAP_MAX = "logprob_gap_max"
    LOGPROB_GAP_FIRST = "logprob_gap_first"
    LOGPROB_GAP_LAST = "logprob_gap_last"
    LOGPROB_GAP_TEMPLATE = "logprob_gap_template"
    LOGPROB_DRIFT_MEAN = "logprob_drift_mean"
    POLICY_CHANGE = "policy_change"
    WEIGHT_CHANGE = "weight_change"
    RESPONSE_LENGTH = "response_length"
    TRUNCATED_FRACTION = "truncated_fraction"
    UNIFORM_FRACTION = "uniform_fraction"
    UNIFORM_RIGHT_FRACTION = "uniform_right_fraction"
    UNIFORM_WRONG_FRACTION = "uniform_wrong_fraction"
    STALENESS = "staleness"
    STALENESS_MAX = "staleness_max"
    OVER_AGE_TOKENS = "over_age_tokens"
    DROPPED_LENGTH = "dropped_length"
    NUM_GROUPS = "num_groups"
    NUM_SAMPLES = "num_samples"
    NUM_TOKENS = "num_tokens"
    SHARED_PROMPT_SHARE = "shared_prompt_share"
    SAMPLES_PER_S = "samples_per_s"
    TOKENS_PER_S = "tokens_per_s"
    BYTES_PER_TRAJECTORY = "bytes_per_trajectory"
    MEDIA_BYTES_UNIQUE = "media_bytes_unique"
    MEDIA_BYTES_REFERENCED = "media_bytes_referenced"
    QUEUE_READY = "queue_ready"
    QUEUE_TAKEN = "queue_taken"
    QUEUE_BYTES = "queue_bytes"
    QUEUE_OLDEST_AGE_S = "queue_oldest_age_s"
    QUEUE_WAITING = "queue_waiting"
    QUEUE_OVERSIZED = "queue_oversized"
    CANARY = "canary"
    CANARY_MEDIA = "canary_media"
    CANARY_TEMPLATE = "canary_template"
    CANARY_TEXT = "canary_text"
    PUSH_SECONDS = "push_seconds"
    PUSH_BYTES = "push_bytes"
    PUSH_CHANGED_SHARE = "push_changed_share"
    CURRICULUM_STAGE = "curriculum_stage"
    GUARD_REWARD = "guard_reward"
    GUARD_JUDGE = "guard_judge"
    GUARD_LENGTH = "guard_length"
    GUARD_REPETITION = "guard_repetition"
    GUARD_SCRIPT_MIX = "guard_script_mix"
    GUARD_FORMAT = "guard_format"
    GUARD_STRENGTH = "guard_strength"
    GUARD_KL_SCALE = "guard_kl_scale"


class CounterName(StrEnum):
    """Counts since the start of the run, split by reason."""

    REJECTED = "rejected"
    REJECTED_RESPONSES = "rejected_responses"
    REJECTED_TOKENS = "rejected_tokens"
    SKIPPED = "skipped"
    RESTARTS = "restarts"
    WEIGHT_SYNCS = "weight_syncs"
    WEIGHT_RESENDS = "weight_resends"
    ROLLOUT_RETRIES = "rollout_retries"
    REFERENCE_RETRIES = "reference_retries"
    RESUMED = "resumed"
    REWARD_FAILURES = "reward_failures"
    REWARD_REASONS = "reward_reasons"
    SCORED_AHEAD = "scored_ahead"
    DROPPED_SINKS = "dropped_sinks"
    DROPPED_SAMPLES = "dropped_samples"
    RECOVERED = "recovered"
    UNLOGGED_STEPS = "unlogged_steps"
    EPISODE_FAILURES = "episode_failures"
    GUARD_ALARMS = "guard_alarms"
    GUARD_ACTIONS = "guard_actions"


class LiveName(StrEnum):
    """Ray gauges with a value from the start of the process."""

    UP = "up"
    PHASE = "phase"
    PHASE_SECONDS = "phase_seconds"
    STEP = "step"
    TOTAL_STEPS = "total_steps"
    LAST_STEP_TIME = "last_step_time"
    IN_FLIGHT = "in_flight"
    IN_FLIGHT_OLDEST_AGE_S = "in_flight_oldest_age_s"
    WORKERS = "workers"
    WORKER_VERSION = "worker_version"
    WORKER_IN_FLIGHT = "worker_in_flight"
    WORKER_RESTARTS = "worker_restarts"
    WORKER_TOKENS_PER_S = "worker_tokens_per_s"
    WORKER_KV_USAGE = "worker_kv_usage"
    WORKER_RUNNING = "worker_running"
    WORKER_QUEUE = "worker_queue"
    WORKER_BUSY_SHARE = "worker_busy_share"
    WORKER_RSS_BYTES = "worker_rss_bytes"
    WORKER_GPU_BYTES = "worker_gpu_bytes"
    WORKER_GPU_BUSY_SHARE = "worker_gpu_busy_share"
    LOOP_LAG_S = "loop_lag_s"
    OBJECT_STORE_BYTES = "object_store_bytes"
    OBJECT_STORE_SIZE_BYTES = "object_store_size_bytes"


class SplitName(StrEnum):
    """Gauges of a step or an evaluation with a tag, or without an entry in `MetricName`."""

    SECONDS = "seconds"
    REWARD_COMPONENT = "reward_component"
    STALENESS_TOKENS = "staleness_tokens"
    EVALUATION_ACCURACY = "evaluation_accuracy"
    EVALUATION_VERSION = "evaluation_version"


@dataclass(frozen=True)
class Metric:
    """Description of a metric. `unit` may be empty; `tag` splits the metric, in addition to the run's tags."""

    unit: str
    help: str
    tag: str = ""


METRICS: Mapping[str, Metric] = {
    MetricName.REWARD_MEAN: Metric("", "Mean reward over the trained responses of one step"),
    MetricName.REWARD_STD: Metric("", "Standard deviation of the reward over the trained responses of one step"),
    MetricName.REWARD_MAX: Metric("", "Highest reward in one step"),
    MetricName.REWARD_MIN: Metric("", "Lowest reward in one step"),
    MetricName.ACCURACY: Metric("", "Mean of rewards.accuracy_component over the trained responses"),
    MetricName.SAMPLED_REWARD_MEAN: Metric(
        "", "Mean reward over all sampled responses: trained groups, and groups rejected since the previous step"
    ),
    MetricName.SAMPLED_ACCURACY: Metric("", "As sampled_reward_mean, of rewards.accuracy_component"),
    MetricName.NUM_SAMPLED_GROUPS: Metric("", "Trained groups, and groups rejected since the previous step"),
    MetricName.UNSCORED_FRACTION: Metric(
        "", "Share of sampled responses without a reward, such as failed episodes; no mean counts them"
    ),
    MetricName.KL: Metric("nat/token", "Estimated divergence of the policy from the reference"),
    MetricName.ENTROPY: Metric("nat/token", "Entropy of the policy's token distribution"),
    MetricName.LOSS: Metric("", "Loss of the update"),
    MetricName.GRAD_NORM: Metric("", "Global gradient norm before clipping"),
    MetricName.CLIP_FRACTION: Metric("", "Share of trained tokens with a clipped ratio"),
    MetricName.LEARNING_RATE: Metric("", "Learning rate of the update"),
    MetricName.CHOSEN_REWARD: Metric("", "Mean implicit reward (dpo) or score (reward_model) of chosen answers"),
    MetricName.REJECTED_REWARD: Metric("", "Mean implicit reward (dpo) or score (reward_model) of rejected answers"),
    MetricName.MARGIN: Metric("", "Mean of chosen minus rejected reward over the pairs of one step"),
    MetricName.TOKEN_ACCURACY: Metric("", "Share of trained tokens with the highest probability (sft)"),
    MetricName.HELD_OUT_LOSS: Metric("", "Loss of an offline job on held-out rows, at the last assessment"),
    MetricName.HELD_OUT_MARGIN: Metric("", "Margin on held-out pairs, at the last assessment"),
    MetricName.OPTIMIZER_STEPS: Metric("", "Optimizer steps of policy and critic in one step, without skipped ones"),
    MetricName.SUPERVISED_LOSS: Metric("nat/token", "Cross-entropy of the rows of algorithm.supervised"),
    MetricName.VALUE_LOSS: Metric("", "Loss of the critic"),
    MetricName.EXPLAINED_VARIANCE: Metric("", "Share of the variance of returns that the critic explains"),
    MetricName.VALUE_CLIP_FRACTION: Metric("", "Share of trained tokens with a clipped value"),
    MetricName.CRITIC_GRAD_NORM: Metric("", "Global gradient norm of the critic before clipping"),
    MetricName.LOGPROB_GAP_MEAN: Metric(
        "nat", "Mean absolute log-prob difference of engine and learner with equal weights: tokens of version lag 0"
    ),
    MetricName.LOGPROB_GAP_MAX: Metric(
        "nat", "Largest absolute log-prob difference of engine and learner with equal weights: tokens of version lag 0"
    ),
    MetricName.LOGPROB_GAP_FIRST: Metric("nat", "As logprob_gap_mean, of the first token of each response"),
    MetricName.LOGPROB_GAP_LAST: Metric("nat", "As logprob_gap_mean, of the last token of each response"),
    MetricName.LOGPROB_GAP_TEMPLATE: Metric(
        "nat", "As logprob_gap_mean, of the tokenizer's added tokens in responses: end of text, tool calls, thinking"
    ),
    MetricName.POLICY_CHANGE: Metric(
        "nat", "Mean absolute log-prob difference of a few trained tokens before and after the update"
    ),
    MetricName.WEIGHT_CHANGE: Metric("", "Norm of the change of the update divided by the norm of the weights"),
    MetricName.LOGPROB_DRIFT_MEAN: Metric(
        "nat", "Mean absolute log-prob difference between the learner and the older weights that sampled a token"
    ),
    MetricName.RESPONSE_LENGTH: Metric("tokens", "Mean number of tokens of a response"),
    MetricName.TRUNCATED_FRACTION: Metric("", "Share of responses truncated at sampler.max_tokens"),
    MetricName.UNIFORM_FRACTION: Metric("", "Share of sampled groups with equal rewards (no gradient)"),
    MetricName.UNIFORM_RIGHT_FRACTION: Metric("", "As uniform_fraction, with an accuracy of at least 0.5"),
    MetricName.UNIFORM_WRONG_FRACTION: Metric("", "As uniform_fraction, with an accuracy below 0.5"),
    MetricName.STALENESS: Metric(
        "versions", "Mean age of trained tokens: version before the step minus version that sampled"
    ),
    MetricName.STALENESS_MAX: Metric("versions", "Age of the oldest trained token"),
    MetricName.OVER_AGE_TOKENS: Metric("tokens", "Tokens beyond algorithm.max_staleness: masked or reweighted"),
    MetricName.DROPPED_LENGTH: Metric("tokens", "Mean length of responses dropped as over-age, since the start"),
    MetricName.NUM_GROUPS: Metric("", "Groups trained on in one step"),
    MetricName.NUM_SAMPLES: Metric("", "Responses trained on in one step"),
    MetricName.NUM_TOKENS: Metric("tokens", "Generated tokens trained on in one step"),
    MetricName.SHARED_PROMPT_SHARE: Metric(
        "", "Share of the tokens of prompts and responses that another row of their forward pass computed"
    ),
    MetricName.SAMPLES_PER_S: Metric("1/s", "Responses trained on per second of the whole step"),
    MetricName.TOKENS_PER_S: Metric("tokens/s", "Generated tokens trained on per second of the whole step"),
    MetricName.BYTES_PER_TRAJECTORY: Metric("B", "Bytes of one trajectory in the object store, media excluded"),
    MetricName.MEDIA_BYTES_UNIQUE: Metric("B", "Bytes of all media stored since the start, each counted once"),
    MetricName.MEDIA_BYTES_REFERENCED: Metric(
        "B", "Bytes of the media of trained samples with one copy for each sample"
    ),
    MetricName.QUEUE_READY: Metric("", "Groups in the replay buffer that are ready for a step"),
    MetricName.QUEUE_TAKEN: Metric("", "Groups in the replay buffer that are leased to a step"),
    MetricName.QUEUE_BYTES: Metric("B", "Bytes of groups in the replay buffer"),
    MetricName.QUEUE_OLDEST_AGE_S: Metric("s", "Age of the oldest group in the replay buffer"),
    MetricName.QUEUE_WAITING: Metric("", "Finished groups that wait for room in the replay buffer"),
    MetricName.QUEUE_OVERSIZED: Metric("", "Groups larger than replay.max_bytes, since the start of the buffer"),
    MetricName.CANARY: Metric("nat", "Mean log-prob difference of engine and learner on the probe prompt"),
    MetricName.CANARY_MEDIA: Metric("nat", "As canary, of the tokens of media"),
    MetricName.CANARY_TEMPLATE: Metric("nat", "As canary, of the tokens with which all prompts begin and end"),
    MetricName.CANARY_TEXT: Metric("nat", "As canary, of the other tokens of the prompt"),
    MetricName.PUSH_SECONDS: Metric("s", "Duration of the newest push, until every engine serves the weights"),
    MetricName.PUSH_BYTES: Metric("B", "Bytes sent to each engine by the newest push"),
    MetricName.PUSH_CHANGED_SHARE: Metric("", "Share of weights that changed, with weight_sync.payload=delta"),
    MetricName.CURRICULUM_STAGE: Metric("", "Newest open stage of environment.curriculum, from 0"),
    MetricName.GUARD_REWARD: Metric("", "Mean reward over the groups of one step with a judge; `_se`: standard error"),
    MetricName.GUARD_JUDGE: Metric("", "Mean of the judge (components with trained=false) over the same groups"),
    MetricName.GUARD_LENGTH: Metric("tokens", "Mean response length over groups, with guard.limits.length"),
    MetricName.GUARD_REPETITION: Metric("", "Share of repeated n-grams of words, with guard.limits.repetition"),
    MetricName.GUARD_SCRIPT_MIX: Metric("", "Share of letters outside the main script, with guard.limits.language"),
    MetricName.GUARD_FORMAT: Metric("", "Mean of the `format` components over groups, with guard.limits.format"),
    MetricName.GUARD_STRENGTH: Metric("", "Largest evidence for reward hacking in critical values: an alarm from 1 on"),
    MetricName.GUARD_KL_SCALE: Metric("", "Factor of algorithm.kl.coef that the guard has set"),
}

ALL_REASONS = "all"
"""Reason of the sum in a counter's Ray gauge; present from the start, with 0."""

LIVE: Mapping[str, Metric] = {
    LiveName.UP: Metric("", "1 while the run's process is alive"),
    LiveName.PHASE: Metric("", "1 for the current phase of the loop, 0 for earlier phases", "phase"),
    LiveName.PHASE_SECONDS: Metric("s", "Time since the start of the phase"),
    LiveName.STEP: Metric("", "Current or last step; 0 before the first step"),
    LiveName.TOTAL_STEPS: Metric("", "Planned steps of the run"),
    LiveName.LAST_STEP_TIME: Metric(
        "s", "End of the last step in seconds since the epoch; before it, the start of the run"
    ),
    LiveName.IN_FLIGHT: Metric("", "Prompts in flight"),
    LiveName.IN_FLIGHT_OLDEST_AGE_S: Metric("s", "Age of the oldest prompt in flight"),
    LiveName.WORKERS: Metric("", "Workers of a role by state", "state"),
    LiveName.WORKER_VERSION: Metric("", "Weight version that a worker serves"),
    LiveName.WORKER_IN_FLIGHT: Metric("", "Prompts or calls in flight at a worker"),
    LiveName.WORKER_RESTARTS: Metric("", "Restarts of a worker"),
    LiveName.WORKER_TOKENS_PER_S: Metric("tokens/s", "Tokens sampled by an engine"),
    LiveName.WORKER_KV_USAGE: Metric("", "Share of an engine's KV cache in use"),
    LiveName.WORKER_RUNNING: Metric("", "Responses in decoding at an engine"),
    LiveName.WORKER_QUEUE: Metric("", "Responses in an engine's queue"),
    LiveName.WORKER_BUSY_SHARE: Metric("", "Share of a worker's planned threads that compute"),
    LiveName.WORKER_RSS_BYTES: Metric("B", "Host memory of a worker process and child processes"),
    LiveName.WORKER_GPU_BYTES: Metric("B", "Memory in use on a worker's GPUs, by all processes"),
    LiveName.WORKER_GPU_BUSY_SHARE: Metric("", "Share of time in which a worker's GPUs compute, from NVML"),
    LiveName.LOOP_LAG_S: Metric("s", "Largest delay of the driver's event loop"),
    LiveName.OBJECT_STORE_BYTES: Metric("B", "Bytes in the object stores of all nodes"),
    LiveName.OBJECT_STORE_SIZE_BYTES: Metric("B", "Size of the object stores of all nodes"),
}

SPLIT: Mapping[str, Metric] = {
    SplitName.SECONDS: Metric("s", "Seconds of one step by phase; `total` is the whole step", "phase"),
    SplitName.REWARD_COMPONENT: Metric("", "Mean of a reward component over the responses of one step", "component"),
    SplitName.STALENESS_TOKENS: Metric("tokens", "Tokens of one step by version lag", "lag"),
    SplitName.EVALUATION_ACCURACY: Metric("", "Held-out accuracy of the newest evaluation"),
    SplitName.EVALUATION_VERSION: Metric("", "Weight version of the newest evaluation"),
}

COUNTERS: Mapping[str, Metric] = {
    CounterName.REJECTED: Metric("", "Finished groups that were not trained on"),
    CounterName.REJECTED_RESPONSES: Metric("", "Finished responses that were not trained on"),
    CounterName.REJECTED_TOKENS: Metric("tokens", "Tokens of finished responses that were not trained on"),
    CounterName.SKIPPED: Metric("", "Unusable dataset samples"),
    CounterName.RESTARTS: Metric("", "Restarts of workers after a failure"),
    CounterName.WEIGHT_SYNCS: Metric("", "Weight versions pushed to the rollout actors"),
    CounterName.WEIGHT_RESENDS: Metric("", "Engines that missed a push and were sent whole tensors"),
    CounterName.ROLLOUT_RETRIES: Metric("", "Retries of prompts after a failure"),
    CounterName.REFERENCE_RETRIES: Metric("", "Parts of a step that were sent to another reference scorer"),
    CounterName.RESUMED: Metric("", "Retried prompts, and their sampled tokens that were kept and lost"),
    CounterName.REWARD_FAILURES: Metric("", "Responses that could not be scored"),
    CounterName.REWARD_REASONS: Metric("", "Trained responses whose component is not above 0, by component and reason"),
    CounterName.SCORED_AHEAD: Metric("", "Responses scored before the group was complete, used or not"),
    CounterName.DROPPED_SINKS: Metric("", "Metric sinks that were removed after a failure"),
    CounterName.DROPPED_SAMPLES: Metric("", "Report samples that could not be fetched"),
    CounterName.RECOVERED: Metric("", "Steps and groups recovered from the journal, and losses, by reason"),
    CounterName.EPISODE_FAILURES: Metric("", "Attempts of episodes that failed in the environment, by kind"),
    CounterName.GUARD_ALARMS: Metric("", "Alarms of the guard against reward hacking, by sign"),
    CounterName.GUARD_ACTIONS: Metric("", "Actions of the guard: warn, raise_kl, rollback, stop"),
    CounterName.UNLOGGED_STEPS: Metric("", "Steps that could not be written to the trajectory log"),
}


def describe(name: str) -> Metric:
    """Returns the description of a metric; for unknown names, of a number that the learner reports."""
    for known in (METRICS, LIVE, SPLIT):
        if name in known:
            return known[name]
    counter = name.removesuffix("_total")
    if counter != name and counter in COUNTERS:
        return COUNTERS[counter]
    return Metric("", f"{name}, as the learner reports it")
