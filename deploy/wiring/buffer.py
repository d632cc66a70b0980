"""The replay buffer of a run, which lives in the driver's process, and its deadlines."""

from __future__ import annotations

from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.tracing.spans import UNTRACED, RunTracer
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.persistence import build_journal_writer


def replay_buffer(config: RunConfig, tracer: RunTracer = UNTRACED) -> ReplayBuffer:
    """The replay buffer, and the journal that it writes."""
    return ReplayBuffer(
        journal=build_journal_writer(config),
        max_bytes=config.replay.max_bytes,
        min_ready=config.algorithm.prompts_per_step,
        room_s=config.timeouts.backpressure_s,
        take_s=_take_deadline(config),
        close_s=config.timeouts.stop_s,
        tracer=tracer,
    )


def _take_deadline(config: RunConfig) -> float:
    """Returns the longest time of a step's groups: all attempts of the slowest prompt, with backoff and reward.

    Each sampled chunk extends an attempt's deadline, and retries resume behind sampled chunks. A chunk of an episode is
    a turn of at least one token.
    """
    timeouts, supervision, sampler = config.timeouts, config.supervision, config.sampler
    one_try = timeouts.rollout_s + supervision.probe_timeout_s + supervision.no_worker_s
    tries = (config.max_rollout_retries + 1) * one_try
    num_chunks = (sampler.max_tokens - 1) // sampler.chunk_tokens
    if config.environment.is_on:
        num_chunks = config.environment.max_tokens - 1
    num_chunks *= config.algorithm.samples_per_prompt
    return tries + num_chunks * timeouts.rollout_s + timeouts.reward_s
