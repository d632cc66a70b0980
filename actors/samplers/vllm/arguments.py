"""Arguments of a vLLM engine, its outputs and load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.loggers import StatLoggerBase

from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.errors import RolloutError
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.partial_response import SampledSequence, clipped, shifted
from mobula.cluster.records.trajectory import FinishReason, WeightSpan
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.learner.policies.head import BAN_BIAS


class LoadLogger(StatLoggerBase):
    """Keeps the latest statistics of one engine. With a logger vLLM collects statistics, also for Prometheus."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._kv_usage = 0.0
        self._num_running = 0
        self._num_waiting = 0
        self._num_preemptions = 0
        self._num_expected = 0  # preemptions by the next push

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._num_running = scheduler_stats.num_running_reqs
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            num_preempted = iteration_stats.num_preempted_reqs
            num_expected = min(self._num_expected, num_preempted)
            self._num_expected -= num_expected
            self._num_preemptions += num_preempted - num_expected

    def expect_push(self) -> None:
        """Excludes the preemptions of a weight push, which do not indicate load."""
        self._num_expected = self._num_running

    def log_engine_initialized(self) -> None: ...

    def load(self) -> EngineLoad:
        return EngineLoad(self._kv_usage, self._num_running, self._num_waiting, self._num_preemptions)


# Builds the arguments of a vLLM engine and the sampling parameters of a request.
#
# Importing this module does not patch vLLM: patches are applied by `VLLMSampler.start` and by the worker extension that
# `engine_args` names.

WEIGHT_TRANSFER = "mobula"  # name of our transport in vLLM's registry
LOGITS = {"cuda": {"head_dtype": "float32"}}  # like the learner; on CPU in the dtype of the model
LOAD_FORMAT = "mobula"  # name of our loader in vLLM's registry
MAX_TEMPERATURE = 2.0  # limit of the SamplingParams constructor; samplers have no limit
SPARE_LOGPROBS = 16  # beyond top_k: tokens with the logit of the k-th are also kept


def engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    sampler = settings.sampler
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
        max_model_len=sampler.max_model_len,
        max_num_seqs=settings.max_num_seqs or None,
        max_num_batched_tokens=sampler.vllm.max_num_batched_tokens,
        limit_mm_per_prompt={
            "image": sampler.max_images_per_prompt,
            "video": sampler.max_videos_per_prompt,
            "audio": sampler.max_audios_per_prompt,
        },
        kv_cache_memory_bytes=settings.kv_cache_bytes or None,
        gpu_memory_utilization=_memory_share(settings),
        enable_lora=sampler.adapters.are_on,
        max_loras=min(sampler.adapters.max_in_batch, sampler.adapters.max_served) or 1,
        max_cpu_loras=sampler.adapters.max_served or None,
        max_lora_rank=sampler.adapters.max_rank,
        block_size=sampler.vllm.block_size,
        enforce_eager=sampler.vllm.enforce_eager,
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
    """Returns the share of a GPU that must be free at engine start (`vllm.v1.worker.utils.request_memory`)."""
    # vLLM requires it for any size of the KV cache. Its default, 0.92, fails if a learner shares the GPU.
    fraction = settings.sampler.vllm.gpu_memory_fraction  # replaces `memory_bytes`
    if settings.device == "cpu" or not (fraction or settings.memory_bytes):
        return AsyncEngineArgs.gpu_memory_utilization
    share = fraction or settings.memory_bytes / current_platform.get_device_total_memory()
    return min(1.0, share)


def sampling_params(engine_settings: EngineSettings, settings: SamplingSettings) -> SamplingParams:
    """Builds vLLM's sampling parameters of a request; a response of at most one chunk is returned once, at the end."""
    is_reported = settings.max_tokens > engine_settings.sampler.chunk_tokens
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
        logit_bias=dict.fromkeys(engine_settings.banned_ids, BAN_BIAS),
        stop_token_ids=[*engine_settings.stop_ids, *settings.stop_token_ids],
        stop=list(settings.stop_strings),
        include_stop_str_in_output=True,
        detokenize=bool(settings.stop_strings),
        skip_special_tokens=False,  # a stop string may be a special token
        output_kind=RequestOutputKind.DELTA if is_reported else RequestOutputKind.FINAL_ONLY,
        stream_interval=engine_settings.sampler.chunk_tokens,
        skip_clone=True,  # used by one request only
    )
    if settings.temperature > 0:
        # vLLM's parameters replace temperatures below 0.01 and refuse FIRE's above 2; its samplers compute with both.
        params.temperature = settings.temperature
    return params


FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT, None: None}


class OutputReader:
    """Reads the outputs of one request, in steps (RequestOutputKind.DELTA) or at the end."""

    def __init__(self, engine: AsyncLLM, request_id: str, *, keeps_sets: bool) -> None:
        """`keeps_sets`: the request asks for log-probs of all kept tokens and some further tokens."""
        self._processor = engine.output_processor
        self._request_id = request_id
        self._keeps_sets = keeps_sets
        self._num_read: Counter[int] = Counter()  # sibling -> tokens
        self._states: dict[int, RequestState] = {}  # sibling -> state in vLLM

    def read(self, output: RequestOutput) -> Iterator[tuple[int, SampledSequence]]:
        """Returns (sibling, new tokens) for each sibling in the output."""
        for completion in output.outputs:
            yield completion.index, self._piece(completion)

    def _piece(self, completion: CompletionOutput) -> SampledSequence:
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        logprobs, kept = self._logprobs(completion.logprobs)
        if logprobs.shape != token_ids.shape:
            raise RolloutError(f"the engine gave {token_ids.shape[0]} tokens but {logprobs.shape[0]} log-probs")
        start = self._num_read[completion.index]
        end = self._num_read[completion.index] = start + int(token_ids.shape[0])
        spans: Sequence[WeightSpan] = self._spans(completion, end)
        if start > 0 or any(span.end > end for span in spans):
            spans = shifted(clipped(spans, start, end), -start)
        reason = FINISH_REASONS[completion.finish_reason]
        if isinstance(completion.stop_reason, str):
            reason = FinishReason.STOP_STRING
        return SampledSequence(TokenActions(token_ids, kept), logprobs, tuple(spans), reason)

    def _logprobs(self, steps: SampleLogprobs | None) -> tuple[np.ndarray, KeptSets | None]:
        """Returns float32 [T] of the sampled tokens, and the kept sets if requested."""
        # For each step vLLM gives the sampled token, then the requested tokens by decreasing log-prob; tokens that are
        # not kept have the log-prob -inf. `RequestOutput.add` drops the second mention of the sampled token from steps
        # that it merges, so steps differ in length.
        if not isinstance(steps, FlatLogprobs):  # floats, from `patches.SampledLogprobs`
            return np.asarray(steps or [], dtype=np.float32), None
        starts, ends = np.array([steps.start_indices, steps.end_indices], dtype=np.int64)
        values = np.array(steps.logprobs, dtype=np.float32)
        if not self._keeps_sets:
            return values[starts], None
        if np.isfinite(values[ends - 1]).any():
            raise RolloutError(
                f"the engine kept more than the {(ends - starts).max() - 1} tokens that it reports of a step, since "
                "their logits are equal: lower sampler.top_k, or set resources.dtype=float32"
            )
        ids = np.array(steps.token_ids, dtype=np.int32)
        is_kept = np.isfinite(values) & (ids != np.repeat(ids[starts], ends - starts))
        is_kept[starts] = True
        return values[starts], KeptSets(np.add.reduceat(is_kept, starts, dtype=np.int32), ids[is_kept])

    def _spans(self, completion: CompletionOutput, end: int) -> list[WeightSpan]:
        """Returns the versions of at least the first `end` tokens of a sibling in this request."""
        # vLLM returns versions at the end of a response. Until then they are read from the request state in vLLM, which
        # may be ahead of the tokens read here.
        if completion.weight_versions is not None:
            return [WeightSpan(int(span.version), span.start, span.end) for span in completion.weight_versions]
        starts = self._state(completion.index).weight_version_starts
        if not starts:
            raise RolloutError(f"the engine does not say which weights sampled {end} tokens of {self._request_id}")
        bounds = [start for _, start in starts] + [max(end, starts[-1][1])]
        return [WeightSpan(int(v), s, e) for (v, _), (s, e) in zip(starts, pairwise(bounds), strict=True)]

    def _state(self, sibling: int) -> RequestState:
        if sibling not in self._states:
            processor = self._processor
            known = [processor.request_states[name] for name in processor.external_req_ids.get(self._request_id, ())]
            self._states |= {state.request_index: state for state in known}
        return self._states[sibling]


def prompt_scores(output: RequestOutput, num_top: int) -> PromptScores:
    """Reads the log-probs of a prompt from the output of a request with `prompt_logprobs=num_top`."""
    ids, rows = output.prompt_token_ids, output.prompt_logprobs
    assert ids is not None and rows is not None, "the request asks for them"
    found = [row for row in rows[1:] if row is not None]
    logprobs = np.asarray([row[token].logprob for token, row in zip(ids[1:], found, strict=True)], dtype=np.float32)
    if num_top == 0:
        return PromptScores(logprobs)
    ranked = (
        sorted(((token, entry.logprob) for token, entry in row.items()), key=lambda pair: -pair[1]) for row in found
    )
    return PromptScores(logprobs, [row[:num_top] for row in ranked])
