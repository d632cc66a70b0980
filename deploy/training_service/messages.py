"""Messages of the client: prompts, calls of the learner and the engines, and their results."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tinker.types as tk
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as proto
from tinker.types.topk_logprobs import MASK_LOGPROB

from mobula.actors.datasets.media import EncodedFile
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.training_service.interfaces import (
    AdamParameters,
    LossCall,
    LossResult,
    LossRow,
    SampleCall,
    SampleResult,
    ScoredTokens,
)
from mobula.deploy.training_service.store import RequestOutcome
from mobula.deploy.training_service.tenants import RequestError, ServiceLimits
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss

if TYPE_CHECKING:  # they load transformers
    from mobula.actors.processors.chat import ChatProcessor
    from mobula.learner.policies.families.base import Size


@dataclass(frozen=True)
class TextChunk:
    token_ids: np.ndarray  # int32 [T]


@dataclass(frozen=True)
class ImageChunk:
    """An encoded image file. `expected_tokens` is the client's own count, if it has one."""

    content: bytes
    expected_tokens: int | None = None


Chunk = TextChunk | ImageChunk


@dataclass(frozen=True)
class PlacedImage:
    handle: MediaHandle
    placeholder_id: int  # its one token in the compact ids
    expanded_ids: np.ndarray  # int32 [E]


class ChatImages:
    """Images by the model's own processor, in several threads. Methods raise SkippedSample for an unfit image."""

    def __init__(self, chat: ChatProcessor, max_images: int) -> None:
        self.max_images = max_images
        self._images = chat.images
        assert self._images.placeholder_id is not None, "a model that takes images has a placeholder"
        self._placeholder_id: int = self._images.placeholder_id
        self._lock = threading.Lock()

    def place(self, content: bytes, name: str) -> PlacedImage:
        file = EncodedFile(content, name)
        with self._lock:
            self._images.check([file], name)
            loaded = self._images.load(file)
            expanded_ids = self._expanded(file, loaded.measure, name)
            handle = self._images.store(loaded)
        return PlacedImage(handle, self._placeholder_id, expanded_ids)

    def count(self, content: bytes, name: str) -> int:
        file = EncodedFile(content, name)
        return len(self._expanded(file, self._images.measure(file), name))

    def _expanded(self, file: EncodedFile, size: Size, name: str) -> np.ndarray:
        """Returns int32 [E]: the tokens that stand for an image of this size."""
        _, [expanded_ids] = self._images.expansions(np.array([self._placeholder_id]), [file], [size], name)
        return expanded_ids


class InputBuilder:
    """Builds prompts from chunks. `max_tokens` bounds an expanded sequence."""

    def __init__(self, images: ChatImages | None, *, num_embeddings: int, max_tokens: int) -> None:
        self._images = images
        self._num_embeddings = num_embeddings
        self.max_tokens = max_tokens

    def build(self, chunks: Sequence[Chunk], name: str) -> Prompt:
        num_images = sum(isinstance(chunk, ImageChunk) for chunk in chunks)
        if num_images and self._images is None:
            raise RequestError(f"{name} has {num_images} images, and the model takes no images")
        if self._images is not None and num_images > self._images.max_images:
            raise RequestError(
                f"{name} has {num_images} images, and the service takes {self._images.max_images} "
                "(sampler.max_images_per_prompt): leave some out"
            )
        compact: list[np.ndarray] = []
        expanded: list[np.ndarray] = []
        media: list[MediaHandle] = []
        spans: list[MediaSpan] = []
        length = 0
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                ids = self._checked(chunk.token_ids, name)
                compact.append(ids)
            else:
                placed = self._placed(chunk, name)
                ids = placed.expanded_ids
                compact.append(np.array([placed.placeholder_id], dtype=np.int32))
                media.append(placed.handle)
                spans.append(MediaSpan(length, length + len(ids)))
            expanded.append(ids)
            length += len(ids)
        if not 0 < length <= self.max_tokens:
            raise RequestError(f"{name} has {length} tokens, 1 to {self.max_tokens} are allowed")
        return Prompt(
            prompt_id=name,
            sample_id=name,
            text="",
            compact_ids=np.concatenate(compact),
            expanded_ids=np.concatenate(expanded),
            media=tuple(media),
            media_spans=tuple(spans),
        )

    def count(self, chunk: Chunk) -> int:
        """Returns the number of tokens of a chunk, without processing an image."""
        if isinstance(chunk, TextChunk):
            return len(chunk.token_ids)
        if chunk.expected_tokens is not None:
            return chunk.expected_tokens
        if self._images is None:
            raise RequestError("the model takes no images")
        try:
            return self._images.count(chunk.content, "a row")
        except SkippedSample as error:
            raise RequestError(str(error)) from error

    def checked_targets(self, ids: np.ndarray, name: str) -> np.ndarray:
        """Returns int64 [N]. Raises: RequestError: a target is no token of the model."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._num_embeddings:
            raise RequestError(f"{name}: target_tokens has a token outside of 0 to {self._num_embeddings - 1}")
        return ids.astype(np.int64, copy=False)

    def _checked(self, ids: np.ndarray, name: str) -> np.ndarray:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._num_embeddings:
            raise RequestError(
                f"{name} has a token outside of 0 to {self._num_embeddings - 1}: use the tokenizer of get_tokenizer()"
            )
        return ids.astype(np.int32, copy=False)

    def _placed(self, chunk: ImageChunk, name: str) -> PlacedImage:
        assert self._images is not None, "the caller has checked it"
        try:
            placed = self._images.place(chunk.content, name)
        except SkippedSample as error:
            raise RequestError(str(error)) from error
        if chunk.expected_tokens not in (None, len(placed.expanded_ids)):
            raise RequestError(
                f"{name} expects {chunk.expected_tokens} tokens of an image, and the model's processor makes "
                f"{len(placed.expanded_ids)}: leave expected_tokens out, or count with the model's own processor"
            )
        return placed


MAX_INTEGER = 2**53  # of the database and of all JSON parsers

M = TypeVar("M", bound=BaseModel)


class WeightsBody(BaseModel):
    tinker_path: str


class TtlBody(BaseModel):
    ttl_seconds: int | None = None


def parsed(model: type[M], body: bytes) -> M:
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise RequestError(f"{model.__name__}: {problems}") from error
    if large := [name for name, value in message if isinstance(value, int) and abs(value) > MAX_INTEGER]:
        raise RequestError(f"{model.__name__}: {', '.join(large)}: at most {MAX_INTEGER} is allowed")
    return message


def json_outcome(**fields: object) -> RequestOutcome:
    return RequestOutcome(json.dumps({name: value for name, value in fields.items() if value is not None}).encode())


def read_adam(body: bytes) -> AdamParameters:
    params = parsed(tk.OptimStepRequest, body).optim_params
    if not isinstance(params, tk.AdamParams):
        raise RequestError(f"optimizer {params.type!r} is not supported: send AdamParams")
    values = params.model_dump()
    is_fit = all(math.isfinite(value) and value >= 0 for value in values.values())
    if not (is_fit and params.beta1 < 1 and params.beta2 < 1):
        raise RequestError(f"{params!r}: every value is a number from 0, beta1 and beta2 are below 1")
    return AdamParameters(**values)


DTYPES: Mapping[int, np.dtype[Any]] = {
    proto.DTYPE_FLOAT32: np.dtype(np.float32),
    proto.DTYPE_INT64: np.dtype(np.int64),
    proto.DTYPE_INT32: np.dtype(np.int32),
}

TARGETS = "target_tokens"

RECORD = "ArrayRecord"  # the client's name of outputs by row and name


def parse_request(body: bytes) -> proto.ForwardBackwardRequest:
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError("the body is not a ForwardBackwardRequest: use tinker 0.38 or later") from error
    return message


def read_call(body: bytes, inputs: InputBuilder, limits: ServiceLimits) -> LossCall:
    message = parse_request(body)
    loss = SUMMED_LOSSES.get(message.loss_fn)
    if loss is None:
        raise RequestError(f"loss_fn {message.loss_fn!r} is not supported: use one of {', '.join(SUMMED_LOSSES)}")
    if not 0 < len(message.data) <= limits.max_rows:
        raise RequestError(f"a request of {len(message.data)} rows: 1 to {limits.max_rows} are allowed")
    name = f"{message.model_id}/{message.seq_id}"
    try:
        rows = [
            _row(datum, loss, inputs, f"{name}, row {number}", limits.max_dense_values)
            for number, datum in enumerate(message.data)
        ]
    except ValueError as error:  # numpy's, of bytes that are no tensor of the shape or dtype
        raise error if isinstance(error, RequestError) else RequestError(f"{name}: {error}") from error
    num_tokens = sum(row.prompt.num_tokens for row in rows)
    if num_tokens > limits.max_tokens:
        raise RequestError(
            f"a request of {num_tokens} tokens: at most {limits.max_tokens} are allowed, send fewer rows"
        )
    return LossCall(message.model_id, rows, message.loss_fn, _options(message, loss), not message.forward_only)


def count_tokens(body: bytes, inputs: InputBuilder) -> int:
    """Returns the number of input tokens of a request with expanded images, from the headers of the image files.

    A request that `read_call` refuses has any number: it is refused when it runs.
    """
    message = parse_request(body)
    try:
        return sum(inputs.count(chunk) for datum in message.data for chunk in _chunks(datum.model_input, "a row"))
    except ValueError:
        return 0


def write_result(result: LossResult) -> bytes:
    """Returns the client's message of a result. Metrics without a reduction in their name are sums."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type=RECORD)
    for name, value in result.metrics.items():
        message.metrics[name if ":" in name else f"{name}:sum"] = float(value)
    for _, rows in groupby(result.outputs, _trailing):
        _add_record(message, list(rows))
    return message.SerializeToString()


def _trailing(row: Mapping[str, np.ndarray]) -> list[tuple[str, tuple[int, ...]]]:
    """Names of a row's outputs with the axes after the first; one record holds rows of equal ones."""
    return sorted((name, array.shape[1:]) for name, array in row.items())


def _add_record(message: proto.ForwardBackwardOutput, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
    record = message.loss_fn_outputs.add(type_tag=RECORD, num_datums=len(rows))
    for name in sorted(rows[0]):
        arrays = [np.ascontiguousarray(row[name], dtype=np.float32) for row in rows]
        ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        record.fields[name].CopyFrom(
            proto.BatchedTensor(
                data=b"".join(array.tobytes() for array in arrays),
                offsets=ends.tobytes(),
                dtype=proto.DTYPE_FLOAT32,
                trailing_shape=arrays[0].shape[1:],
            )
        )


def _row(datum: proto.Datum, loss: SummedLoss, inputs: InputBuilder, name: str, max_dense: int) -> LossRow:
    prompt = inputs.build(list(_chunks(datum.model_input, name)), name)
    given, taken = set(datum.loss_fn_inputs), {TARGETS, *loss.inputs}
    missing, unknown = taken - given, given - taken
    if missing or unknown:
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(unknown))}"
        raise RequestError(f"{name}: loss_fn_inputs {what}; the loss takes {', '.join(sorted(taken))}")
    arrays = {key: _array(datum.loss_fn_inputs[key], f"{name}: {key}", max_dense) for key in sorted(given)}
    for key, array in arrays.items():
        if len(array) != prompt.num_tokens or array.shape != arrays[TARGETS].shape:
            raise RequestError(
                f"{name}: {key} has shape {list(array.shape)}, the model input {prompt.num_tokens} tokens: "
                "give a target for each token, and a value of every other input for each target"
            )
    targets = inputs.checked_targets(arrays[TARGETS], name)
    floats = {key: array.astype(np.float32) for key, array in arrays.items() if key != TARGETS}
    if not all(np.isfinite(array).all() for array in floats.values()):
        raise RequestError(f"{name}: loss_fn_inputs hold a value that is not finite")
    return LossRow(prompt, {TARGETS: targets, **floats})


def _chunks(chunks: Sequence[proto.Chunk], name: str) -> Iterator[Chunk]:
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            yield TextChunk(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
        elif kind == "image":
            has_count = chunk.image.HasField("expected_tokens")
            yield ImageChunk(chunk.image.data, chunk.image.expected_tokens if has_count else None)
        else:
            raise RequestError(f"{name} has a chunk of kind {kind}: only text and images are supported")


def _array(tensor: proto.Tensor, name: str, max_dense: int) -> np.ndarray:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError(f"{name} has dtype {tensor.dtype}: send float32 or int64")
    if not tensor.HasField("sparse_csr"):
        values = np.frombuffer(tensor.dense, dtype=dtype)
        return values.reshape(tuple(tensor.shape)) if tensor.shape else values
    return _dense(tensor, dtype, name, max_dense)


def _dense(tensor: proto.Tensor, dtype: np.dtype[Any], name: str, max_dense: int) -> np.ndarray:
    """Returns [N, K] of a tensor in compressed sparse rows; values that are not listed are 0."""
    csr = tensor.sparse_csr
    values = np.frombuffer(csr.values, dtype=dtype)
    ends, columns = np.frombuffer(csr.crow_indices, dtype=np.int64), np.frombuffer(csr.col_indices, dtype=np.int64)
    num_rows, num_columns = tensor.shape if len(tensor.shape) == 2 else (-1, -1)
    counts = np.diff(ends)
    is_fit = len(ends) == num_rows + 1 and (counts >= 0).all() and counts.sum() == len(values) == len(columns)
    if not (is_fit and (columns >= 0).all() and (columns < num_columns).all()):
        raise RequestError(f"{name} is no sparse tensor of shape {list(tensor.shape)}")
    if num_rows * num_columns > max_dense:
        raise RequestError(
            f"{name} has shape {list(tensor.shape)}, and the service takes {max_dense} values "
            "(training_service.max_dense_values): send fewer rows or fewer targets a position"
        )
    dense = np.zeros((num_rows, num_columns), dtype=dtype)
    dense[np.repeat(np.arange(num_rows), counts), columns] = values
    return dense


def _options(message: proto.ForwardBackwardRequest, loss: SummedLoss) -> dict[str, float]:
    options: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise RequestError(f"loss_fn_config {key}={value.text!r}: options of {message.loss_fn} are numbers")
        options[key] = value.number
    unknown = options.keys() - loss.options.keys()
    if unknown:
        known = ", ".join(sorted(loss.options)) or "none"
        raise RequestError(f"loss_fn_config {', '.join(sorted(unknown))}: options of {message.loss_fn} are {known}")
    return options


STOPS = {"stop": proto.STOP_REASON_STOP, "length": proto.STOP_REASON_LENGTH}


def read_sample(
    request: tk.SampleRequest, adapter: str | None, inputs: InputBuilder, *, seed: int, name: str
) -> SampleCall:
    """Returns the engines' call; `seed` is used if the request has none."""
    _refuse_unsupported(request)
    params = request.sampling_params
    prompt = inputs.build(list(_chunks_of_sampling(request.prompt.chunks, name)), name)
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


def _chunks_of_sampling(chunks: Sequence[tk.ModelInputChunk], name: str) -> Iterator[Chunk]:
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
