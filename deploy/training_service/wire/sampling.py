"""Messages of sampling: the client's requests to calls of the engines, and their results to protocol buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tinker.types as tk
from tinker.proto import tinker_public_pb2 as proto
from tinker.types.topk_logprobs import MASK_LOGPROB

from mobula.cluster.roles import SamplingSettings
from mobula.cluster.training_service.interfaces import SampleCall, SampleResult, ScoredTokens
from mobula.deploy.training_service.tenants import RequestError
from mobula.deploy.training_service.wire.inputs import Chunk, ImageChunk, InputBuilder, TextChunk
from mobula.deploy.training_service.wire.training import parsed

STOPS = {"stop": proto.STOP_REASON_STOP, "length": proto.STOP_REASON_LENGTH}


def parse_sample(body: bytes) -> tk.SampleRequest:
    """Parses the request."""
    return parsed(tk.SampleRequest, body)


def read_sample(
    request: tk.SampleRequest, adapter: str | None, inputs: InputBuilder, *, seed: int, name: str
) -> SampleCall:
    """Returns the engines' call; `seed` is used if the request has none."""
    _refuse_unsupported(request)
    params = request.sampling_params
    prompt = inputs.build(list(_chunks(request.prompt.chunks, name)), name)
    room = inputs.max_tokens - prompt.num_tokens
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if not 0 < max_tokens <= room:
        raise RequestError(
            f"max_tokens={max_tokens} after a prompt of {prompt.num_tokens} tokens: the context has {inputs.max_tokens}"
        )
    strings, ids = _stops(params.stop)
    settings = SamplingSettings(
        num_samples=request.num_samples,
        temperature=params.temperature,
        max_tokens=max_tokens,
        seed=seed if params.seed is None else params.seed,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_strings=strings,
    )
    has_scores = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    return SampleCall(prompt, settings, adapter, ids, has_scores, request.topk_prompt_logprobs)


def write_samples(result: SampleResult, request: tk.SampleRequest) -> bytes:
    """Returns the client's message of a result."""
    message = proto.SampleResponse(sequences=[_sequence(sample) for sample in result.samples])
    last = request.prompt_logprobs_last_n
    if request.prompt_logprobs and result.prompt_logprobs is not None:
        logprobs = np.array(result.prompt_logprobs, dtype=np.float32)
        logprobs[: _num_skipped(len(logprobs), last)] = np.nan
        message.prompt_logprobs = logprobs.tobytes()
    if request.topk_prompt_logprobs and result.top_prompt_tokens is not None:
        tokens = result.top_prompt_tokens
        message.topk_prompt_logprobs.CopyFrom(
            _top(tokens, request.topk_prompt_logprobs, _num_skipped(len(tokens), last))
        )
    return message.SerializeToString()


def _refuse_unsupported(request: tk.SampleRequest) -> None:
    unsupported = {
        "topk_sample_logprobs": request.topk_sample_logprobs > 0,
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "record_stability_info": bool(request.record_stability_info),
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise RequestError(f"{name} is not supported: leave it out")
    params = request.sampling_params
    if request.num_samples < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < -1:
        raise RequestError(
            f"num_samples={request.num_samples}, temperature={params.temperature}, top_p={params.top_p}, "
            f"top_k={params.top_k}: give num_samples from 1, temperature from 0, top_p in (0, 1] and top_k from -1"
        )


def _stops(stop: str | Sequence[str] | Sequence[int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        return (stop,), ()
    if not stop:
        raise RequestError("stop=[] is not supported: sampling always ends at an end token of the model")
    return tuple(s for s in stop if isinstance(s, str)), tuple(s for s in stop if isinstance(s, int))


def _chunks(chunks: Sequence[tk.ModelInputChunk], name: str) -> Iterator[Chunk]:
    for chunk in chunks:
        if isinstance(chunk, tk.EncodedTextChunk):
            yield TextChunk(np.asarray(chunk.tokens, dtype=np.int64))
        elif isinstance(chunk, tk.ImageChunk):
            yield ImageChunk(chunk.data, chunk.expected_tokens)
        else:
            raise RequestError(f"{name} has a chunk of type {chunk.type}: only text and images are supported")


def _num_skipped(num_tokens: int, last: int | None) -> int:
    return 0 if last is None else max(num_tokens - last, 0)


def _sequence(sample: ScoredTokens) -> proto.SampledSequence:
    return proto.SampledSequence(
        stop_reason=STOPS[sample.stop_reason],
        tokens=np.asarray(sample.token_ids, dtype=np.int32).tobytes(),
        logprobs=np.asarray(sample.logprobs, dtype=np.float32).tobytes(),
    )


def _top(tokens: Sequence[Sequence[tuple[int, float]]], k: int, skipped: int) -> proto.TopkLogprobs:
    ids = np.zeros((len(tokens), k), dtype=np.int32)
    logprobs = np.full((len(tokens), k), MASK_LOGPROB, dtype=np.float32)
    for position, best in enumerate(tokens):
        for rank, (token, logprob) in enumerate(best[:k]):
            if position >= skipped:
                ids[position, rank], logprobs[position, rank] = token, logprob
    return proto.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(tokens))
