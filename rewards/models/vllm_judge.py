"""The reward function `vllm_judge`: a generative model in a vLLM engine of the reward worker scores an answer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from pydantic import ValidationError
from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from mobula.cluster.environment_variables import environment_variables
from mobula.cluster.errors import EngineLostError, RewardError
from mobula.cluster.failures import Failure
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.user_code import did_you_mean
from mobula.rewards.contract import Outcome, RewardRequest, TimedOutError, failure, score_prepared
from mobula.rewards.models.loading import positive_int
from mobula.rewards.models.server_judge import Grading, checked_extra
from mobula.rewards.tools import Tools

OWN_KEYS = ("model", "dtype", "runner", "distributed_executor_backend", "disable_log_stats")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # in-process core, which ends with this process
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the process already has its CPUs and number of threads


@dataclass(frozen=True)
class Reply:
    """The text of a reply; `is_cut`: it was cut off at max_tokens."""

    text: str
    is_cut: bool


class ChatEngine:
    """One engine, which starts and runs in a single thread, because OpenMP has a thread pool per calling thread.

    `options` are keyword arguments of `vllm.LLM`, without `OWN_KEYS`. With `tensor_parallel_size` above 1 the ranks are
    child processes, which end with this process.
    """

    def __init__(self, model: str, options: Mapping[str, Any], tools: Tools) -> None:
        self.options = dict(options)
        arguments = _arguments(model, self.options, tools)
        self._thread = DaemonThread("vllm-engine")
        self._llm: LLM = self._thread.submit(_load, model, arguments, tools.device).result()
        self._failure: Failure | None = None
        weakref.finalize(self, self._thread.shutdown)  # otherwise the thread's last job keeps the model

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling parameters in the checkpoint's generation_config.json, as vLLM's server applies them."""
        return self._llm.model_config.get_diff_sampling_param()

    def replies(
        self, conversations: Sequence[list[dict[str, Any]]], params: SamplingParams, template: Mapping[str, Any]
    ) -> list[Reply | RewardError]:
        """Returns one reply per conversation, in order, or the error of a refused one (too long, too many images).
        `template` holds further arguments of the chat template."""
        return self._thread.submit(self._replies, conversations, params, template).result()

    def _replies(
        self, conversations: Sequence[list[dict[str, Any]]], params: SamplingParams, template: Mapping[str, Any]
    ) -> list[Reply | RewardError]:
        if self._failure is not None:
            raise EngineLostError(self._failure)
        refused: dict[int, RewardError] = {}
        for index, conversation in enumerate(conversations):
            try:
                # Each conversation alone: `LLM.chat` drops all of them if it refuses one. The messages' type name
                # changes with vLLM's versions.
                messages: list[Any] = list(conversation)
                self._llm.enqueue_chat(messages, params, use_tqdm=False, chat_template_kwargs=dict(template) or None)
            except Exception as error:
                refused[index] = RewardError(f"the judge's engine refuses the request: {reason_of(error)}")
        try:
            outputs = iter(self._llm.wait_for_completion(RequestOutput, use_tqdm=False))
        except Exception as error:  # after a failure no result of the engine can be trusted
            self._failure = Failure.of(error)
            raise EngineLostError(self._failure) from error
        replies = (Reply(o.outputs[0].text, o.outputs[0].finish_reason == "length") for o in outputs)
        return [refused[index] if index in refused else next(replies) for index in range(len(conversations))]


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Builds vLLM's sampling parameters; `structured_outputs` is a mapping, such as {regex: "[1-5]"}."""
    given = dict(values)
    try:
        if isinstance(given.get("structured_outputs"), Mapping):
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        return SamplingParams(**given)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise ValueError(
            f"options.extra does not fit vLLM's SamplingParams ({reason_of(error)}): use its fields, and "
            "chat_template_kwargs"
        ) from error


def reason_of(error: Exception) -> str:
    """Formats an error of vLLM in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(str(detail["msg"]) for detail in error.errors())
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _arguments(model: str, options: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    own = sorted(set(options) & set(OWN_KEYS))
    if own:
        raise ValueError(
            f"options.engine has {', '.join(own)}, which the judge sets itself: leave it out (the model is "
            "options.model, its type resources.dtype)"
        )
    known = [field.name for field in fields(EngineArgs)]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"options.engine has {name!r}, which vLLM does not know{hint}: use its engine arguments")
    if current_platform.device_type != tools.device:
        raise ValueError(
            f"vLLM computes on {current_platform.device_type or 'no device'} here, and the worker on {tools.device}: "
            "install vLLM for that device, and give the service GPUs with resources.reward_services.NAME.num_gpus"
        )
    num_ranks = options.get("tensor_parallel_size", 1)
    if tools.device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ValueError(
            f"options.engine.tensor_parallel_size={num_ranks} needs as many GPUs, the worker has "
            f"{torch.cuda.device_count()}: set resources.reward_services.NAME.num_gpus={num_ranks}"
        )
    share: dict[str, float] = {}
    if tools.device == "cuda" and tools.gpu_share < 1:
        if "kv_cache_memory_bytes" not in options:
            raise ValueError(
                f"options.engine has no kv_cache_memory_bytes, and the service books {tools.gpu_share:g} of a GPU, "
                "where vLLM cannot measure what is left: set it to the bytes of its KV cache, or give the service a "
                "whole GPU with resources.reward_services.NAME.num_gpus=1"
            )
        share = {"gpu_memory_utilization": tools.gpu_share}
    # Without a backend vLLM would start Ray actors inside a placement group.
    backend = "mp" if num_ranks > 1 else None
    own_values = {"model": model, "dtype": tools.dtype, "runner": "generate", "distributed_executor_backend": backend}
    return {**share, **options, **own_values}


def _load(model: str, arguments: Mapping[str, Any], device: str) -> LLM:
    set_num_threads = torch.set_num_threads  # on CPU vLLM replaces it by a function that logs a warning per image
    variables = ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {})
    try:
        with environment_variables({name: value for name, value in variables.items() if name not in os.environ}):
            return LLM(**arguments)
    except Exception as error:
        raise ValueError(
            f"options.model={model!r} cannot be loaded with options.engine ({reason_of(error)}): use a checkpoint of a "
            "model that vLLM generates text with, and options that fit the device"
        ) from error
    finally:
        torch.set_num_threads = set_num_threads


OWN_FIELDS = ("max_tokens", "temperature", "n", "output_kind")
TEMPLATE_FIELD = "chat_template_kwargs"


class VllmJudge:
    """Scores with the checkpoint `model`; all requests of a batch are answered together.

    `engine` holds arguments of vLLM's engine: max_model_len, kv_cache_memory_bytes, gpu_memory_utilization,
    tensor_parallel_size, limit_mm_per_prompt, ... Functions of one worker with the same `model` share the engine.
    `extra` holds further fields of `vllm.SamplingParams`, e.g. {seed: 0, structured_outputs: {regex: "..."}}, and
    `chat_template_kwargs`; defaults are the checkpoint's generation_config.json. See `Grading` for the conversation and
    the verdict.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        engine: dict[str, Any],
        system: str | None,
        template: str,
        images: str,
        verdict: str,
        minimum: float,
        maximum: float,
        max_tokens: int,
        temperature: float,
        extra: dict[str, Any],
        question_pattern: str | None,
        frame_stride: int = 1,
    ) -> None:
        self._grading = Grading(
            system=system,
            template=template,
            images=images,
            verdict=verdict,
            minimum=minimum,
            maximum=maximum,
            question_pattern=question_pattern,
            frame_stride=frame_stride,
        )
        limits = {"max_tokens": positive_int("max_tokens", max_tokens), "temperature": float(temperature)}
        fields = limits | checked_extra(extra, OWN_FIELDS)
        self._template_fields = fields.pop(TEMPLATE_FIELD, {})
        sampling_params(fields)  # refused before a model is loaded
        self._engine: ChatEngine = tools.shared((ChatEngine, model), lambda: ChatEngine(model, engine, tools))
        if self._engine.options != dict(engine):
            raise ValueError(
                f"options.engine={dict(engine)} differs from {self._engine.options} of another component of this "
                f"service with options.model={model!r}, whose engine they share: give both the same, or each a service "
                "of its own"
            )
        self._params = sampling_params({**self._engine.sampling_defaults, **fields})
        self._in_time = tools.in_time

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        return score_prepared(requests, self._grading.messages, self._scored)

    def _scored(self, conversations: Sequence[list[dict[str, Any]]]) -> list[Outcome]:
        num = len(conversations)
        try:
            replies = self._in_time.call(
                lambda: self._engine.replies(conversations, self._params, self._template_fields),
                f"{num} replies of the judge",
                num,
            )
        except TimedOutError as error:
            return [failure(error)] * num
        return [self._outcome(reply) for reply in replies]

    def _outcome(self, reply: Reply | RewardError) -> Outcome:
        if isinstance(reply, RewardError):
            return failure(reply)
        try:
            return self._grading.score(reply.text, is_cut=reply.is_cut)
        except RewardError as error:
            return failure(error)
