"""Builds the arguments of a vLLM engine and the sampling parameters of a request.

Importing this module does not patch vLLM: patches are applied by `VLLMSampler.start` and by the worker extension that
`engine_args` names.
"""

from __future__ import annotations

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.roles import SamplingSettings
from mobula.learner.policies.logprobs import BAN_BIAS

WEIGHT_TRANSFER = "mobula"  # name of our transport in vLLM's registry
LOGITS = {"cuda": {"head_dtype": "float32"}}  # like the learner; on CPU in the dtype of the model
LOAD_FORMAT = "mobula"  # name of our loader in vLLM's registry
MAX_TEMPERATURE = 2.0  # limit of the SamplingParams constructor; samplers have no limit
SPARE_LOGPROBS = 16  # beyond top_k: tokens with the logit of the k-th are also kept


def engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    """Builds the arguments of a vLLM engine."""
    return AsyncEngineArgs(
        model=settings.model,
        load_format=LOAD_FORMAT,
        config_format="hf",  # the learner reads config.json only
        dtype=settings.dtype,
        hf_overrides=LOGITS.get(settings.device, {}),
        seed=settings.seed,
        tensor_parallel_size=settings.tensor_parallel,
        # Child processes: without a backend vLLM would start Ray actors inside a placement group.
        distributed_executor_backend="mp" if settings.tensor_parallel > 1 else None,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs or None,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        limit_mm_per_prompt={
            "image": settings.max_images_per_prompt,
            "video": settings.max_videos_per_prompt,
            "audio": settings.max_audios_per_prompt,
        },
        kv_cache_memory_bytes=settings.kv_cache_bytes or None,
        gpu_memory_utilization=_memory_share(settings),
        enable_lora=settings.served.are_on,
        max_loras=min(settings.served.max_in_batch, settings.served.max_served) or 1,
        max_cpu_loras=settings.served.max_served or None,
        max_lora_rank=settings.served.max_rank,
        block_size=settings.block_size,
        enforce_eager=settings.enforce_eager,
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,  # no limit: a truncated distribution is reported completely
        generation_config="vllm",  # ignores the sampling defaults of the checkpoint
        mm_processor_cache_gb=0,  # images arrive processed
        mm_device_do_normalize=False,  # and normalised
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER),
        worker_extension_cls="mobula.actors.samplers.vllm.weights.WorkerExtension",
        enable_sleep_mode=settings.sleep_level > 0 and settings.device == "cuda",
        scheduling_policy="priority",  # training prompts before held-out prompts
        enable_log_requests=False,
        disable_log_stats=True,
    )


def _memory_share(settings: EngineSettings) -> float:
    """Returns the share of a GPU that must be free at engine start (`vllm.v1.worker.utils.request_memory`).

    vLLM requires it for any size of the KV cache. Its default, 0.92, fails if a learner shares the GPU.
    """
    if settings.device == "cpu" or not (settings.memory_fraction or settings.memory_bytes):
        return AsyncEngineArgs.gpu_memory_utilization
    share = settings.memory_fraction or settings.memory_bytes / current_platform.get_device_total_memory()
    return min(1.0, share)


def sampling_params(engine: EngineSettings, settings: SamplingSettings) -> SamplingParams:
    """Builds vLLM's sampling parameters of a request.

    Responses of at most one chunk are returned once, at the end.
    """
    is_reported = settings.max_tokens > engine.chunk_tokens
    params = SamplingParams(
        n=settings.num_samples,
        temperature=min(settings.temperature, MAX_TEMPERATURE),
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        logprobs=settings.top_k + SPARE_LOGPROBS if settings.keeps_sets else 0,
        flat_logprobs=True,
        logit_bias=dict.fromkeys(engine.banned_ids, BAN_BIAS),
        stop_token_ids=[*engine.stop_ids, *settings.stop_token_ids],
        stop=list(settings.stop_strings),
        include_stop_str_in_output=True,
        detokenize=bool(settings.stop_strings),
        skip_special_tokens=False,  # a stop string may be a special token
        output_kind=RequestOutputKind.DELTA if is_reported else RequestOutputKind.FINAL_ONLY,
        stream_interval=engine.chunk_tokens,
        skip_clone=True,  # used by one request only
    )
    if settings.temperature > 0:
        # vLLM's parameters replace temperatures below 0.01 and refuse FIRE's above 2; its samplers compute with both.
        params.temperature = settings.temperature
    return params
