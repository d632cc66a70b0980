"""Roofline: speeds of planned GPUs from their peak rates, for hardware that no run has measured."""

from __future__ import annotations

from dataclasses import dataclass

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES
from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.learner.policies.shapes import ModelShape

TRAINING_MFU = 0.35  # share of the peak rate that forward and backward reach, with communication
PREFILL_MFU = 0.5
MEMORY_SHARE = 0.6  # share of the memory bandwidth that decoding reaches
STEP_OVERHEAD_S = 0.004  # of an engine step: scheduling, sampling, launches
CALL_S = 0.5  # of an update: collation, the optimizer's step, metrics
NETWORK_SHARE = 0.5  # share of the network's bandwidth that a push reaches
REWARD_S = 0.02
FORWARD, BACKWARD, RECOMPUTED = 2, 4, 2  # floating-point operations per parameter and token


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU as its vendor states them: dense bfloat16, memory, and a share of its node's network."""

    flops: float
    bytes_per_s: float
    network_bytes_per_s: float


GPUS = {
    "A10G": Gpu(70e12, 600e9, 3e9),
    "L40S": Gpu(362e12, 864e9, 6e9),
    "A100": Gpu(312e12, 2039e9, 25e9),
    "H100": Gpu(989e12, 3350e9, 50e9),
    "H200": Gpu(989e12, 4800e9, 50e9),
    "B200": Gpu(2250e12, 8000e9, 50e9),
}
BY_MEMORY = ((30e9, "A10G"), (50e9, "L40S"), (85e9, "H100"), (145e9, "H200"), (float("inf"), "B200"))


def gpu_of_memory(num_bytes: int) -> str:
    """The name of a GPU with so much memory; the A100 of 80 GB has to be named."""
    return next(name for limit, name in BY_MEMORY if num_bytes < limit)


def estimated_speeds(config: RunConfig, shape: ModelShape, gpu: str) -> Speeds:
    """Speeds of the run's model on a GPU.

    Decoding reads all weights and the KV cache of the batch once a step; prefill, training and scoring compute. Every
    parameter counts for every token, so experts are overestimated.
    """
    if gpu not in GPUS:
        raise PreflightError(f"--gpu {gpu} is unknown: choose {', '.join(GPUS)}, or state the speeds")
    peak, width = GPUS[gpu], config.resources.rollout.tensor_parallel
    params, dtype = shape.num_parameters, DTYPE_BYTES[config.resources.dtype]
    length = config.data.max_prompt_tokens / 2 + config.sampler.max_tokens / 2
    cache = (shape.cache.num_full + shape.cache.num_windowed) * shape.cache.width * dtype * length
    reading = MEMORY_SHARE * peak.bytes_per_s * width
    prefill = PREFILL_MFU * peak.flops / (FORWARD * params)
    again = RECOMPUTED if config.learner.activation_checkpointing != "none" else 0
    return Speeds(
        decode_step_s=STEP_OVERHEAD_S + params * dtype / reading,
        decode_sequence_s=cache / reading + FORWARD * params / (PREFILL_MFU * peak.flops * width),
        prefill_tokens_per_s=prefill * width,
        learner_tokens_per_s=TRAINING_MFU * peak.flops / ((FORWARD + BACKWARD + again) * params),
        update_s=CALL_S,
        reference_tokens_per_s=prefill,
        reward_s=REWARD_S,
        push_s=0.2,
        push_bytes_per_s=NETWORK_SHARE * peak.network_bytes_per_s,
        start_s=60.0 + params * dtype / 2e9,
    )
