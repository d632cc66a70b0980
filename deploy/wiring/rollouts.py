"""Builds the rollout pool of a run: placement, settings and timeouts of engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from mobula.actors.datasets.rows import Skipped
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.episodes import EpisodeActor, EpisodeSettings
from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.settings import engine_settings as settings_of_engine
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.training_service.engines import PackedWeights, PooledAdapterEngines, SampleLimits, SwappedEngines
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.deploy.wiring.pooled_roles import RoleHosts, restart_policy
from mobula.deploy.wiring.preparation import Prepared
from mobula.deploy.wiring.spawner import Spawner, engine_environment
from mobula.learner.policies.checkpoint.stored import pushed_tensors
from mobula.learner.policies.shapes import shape_of
from mobula.learner.weight_publisher import WeightPublisher

CALLS_AT_A_TIME = 16  # concurrent calls of a rollout actor, not counting its stream of groups and scored prompts


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """Returns the sampling settings of training."""
    sampler = config.sampler
    return SamplingSettings(
        num_samples=config.algorithm.samples_per_prompt,
        temperature=sampler.temperature,
        max_tokens=sampler.max_tokens,
        seed=config.seed,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        first_token_temperature=sampler.first_token_temperature,
        keeps_sets=sampler.is_cut,
        stop_strings=sampler.stop_strings,
    )


def rollout_pool(
    prepared: Prepared, spawner: Spawner, in_flight_requests: InFlightRequests, on_lost: Callable[[str], None]
) -> RolloutPool:
    """Returns the rollout pool; its `start` starts the engines. `on_lost` receives the kind of each loss."""
    config, timeouts, supervision = prepared.config, prepared.config.timeouts, prepared.config.supervision
    scored = config.sampler.vllm.max_num_seqs if config.sampler.adapters.are_on else 0

    role, *episodes = _role(config)

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(
            role,
            config.sampler.kind,
            engine_settings(prepared, worker.index),
            *episodes,
            object_timeout_s=timeouts.object_s,
            worker=worker,
            env=engine_environment(config, worker),
            max_concurrency=CALLS_AT_A_TIME + scored,
        )

    hosts = RoleHosts(spawner, "rollout", start, stop_s=timeouts.stop_s)

    async def spawn(index: int) -> RolloutClient:
        return RolloutClient(
            await hosts.start(index),
            f"rollout/{index}",
            in_flight_requests=in_flight_requests,
            start_s=timeouts.start_s,
            rollout_s=timeouts.rollout_s,
            sync_s=config.weight_sync.answer_s,
            sign_s=supervision.sign_timeout_s,
            probe_s=supervision.probe_timeout_s,
            stop_s=timeouts.stop_s,
        )

    return RolloutPool(
        spawn,
        len(spawner.workers("rollout")),
        release=hosts.release,
        policy=restart_policy(config),
        health=HealthChecks(
            interval_s=supervision.interval_s,
            probe_interval_s=supervision.probe_interval_s,
            max_failures_in_a_row=supervision.max_failures_in_a_row,
            no_worker_s=supervision.no_worker_s,
        ),
        on_lost=on_lost,
        on_excluded=lambda prompt, error: prepared.note_skipped(Skipped(prompt.sample_id, error.reason, str(error))),
    )


def adapter_engines(
    prepared: Prepared, pool: RolloutPool, in_flight_requests: InFlightRequests, on_retry: Callable[[str], None]
) -> PooledAdapterEngines:
    """Returns the training service's view of a rollout pool. `on_retry` gets the kind of each failure that is
    retried."""
    if not prepared.config.sampler.adapters.are_on:
        raise ValueError("sampler.adapters.max_served=0 serves no adapters: set it to 1 or more")
    return _pooled_engines(prepared, pool, in_flight_requests, on_retry)


def swapped_engines(
    prepared: Prepared, pool: RolloutPool, in_flight_requests: InFlightRequests, on_retry: Callable[[str], None]
) -> SwappedEngines:
    """Returns the view of a training service that trains all weights; otherwise as `adapter_engines`."""
    config = prepared.config
    bucket_bytes = config.weight_sync.bucket_bytes

    def read(folder: Path) -> PackedWeights:
        tensors = dict(pushed_tensors(folder))
        publisher = WeightPublisher(
            prepared.checkpoint,
            lambda: ((spec.name, tensors[spec.name]) for spec in prepared.checkpoint.tensors),
            rank=0,
            device=torch.device("cpu"),
            transport=config.resources.transport,
            timeout_s=config.weight_sync.timeout_s,
        )
        buckets = [ray.put(bucket) for bucket in publisher.export(bucket_bytes)]
        return PackedWeights(prepared.checkpoint, bucket_bytes, buckets)

    engines = _pooled_engines(prepared, pool, in_flight_requests, on_retry)
    return SwappedEngines(engines, pool, read, prepared.model_folder)


def _pooled_engines(
    prepared: Prepared, pool: RolloutPool, in_flight_requests: InFlightRequests, on_retry: Callable[[str], None]
) -> PooledAdapterEngines:
    config = prepared.config
    retries = RetryingRollouts(pool, in_flight_requests, max_retries=config.max_rollout_retries, on_retry=on_retry)
    is_batched = config.sampler.kind is SamplerKind.VLLM
    sizes = prepared.engine
    in_batch = (sizes.num_seqs if sizes else config.sampler.vllm.max_num_seqs) if is_batched else 1
    limits = SampleLimits(
        max_model_len=config.sampler.max_model_len,
        num_token_ids=shape_of(str(prepared.model_folder)).vocab,
        max_in_flight=in_batch * config.resources.rollout.num_workers,
        counts_sequences=is_batched,
        object_s=config.timeouts.object_s,
    )
    return PooledAdapterEngines(pool, retries, limits)


def _role(config: RunConfig) -> tuple[Any, ...]:
    """Returns the class of rollout actors and its extra constructor arguments."""
    if not config.environment.is_on:
        return (RolloutActor,)
    return EpisodeActor, EpisodeSettings(
        config.environment, config.data, config.sampler, keeps_files=config.rewards.needs_images
    )


def engine_settings(prepared: Prepared, index: int) -> EngineSettings:
    """Returns the settings of engine `index`, with its sizes from the memory plan."""
    config, sizes = prepared.config, prepared.engine
    settings = settings_of_engine(config, prepared.model_folder, prepared.checkpoint, prepared.processor, index)
    if sizes is None:
        return settings
    return replace(
        settings,
        kv_cache_bytes=sizes.kv_cache_bytes,
        max_num_seqs=sizes.num_seqs,
        memory_bytes=sizes.memory_bytes,
    )
