"""Messages of the client: training, and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import tinker.types as tk
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as proto

from mobula.cluster.training_service.interfaces import AdamParameters, LossCall, LossResult, LossRow
from mobula.deploy.training_service.limits import ServiceLimits
from mobula.deploy.training_service.store import RequestOutcome
from mobula.deploy.training_service.tenants import RequestError
from mobula.deploy.training_service.wire.inputs import Chunk, ImageChunk, InputBuilder, TextChunk
from mobula.learner.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss

MAX_INTEGER = 2**53  # of the database and of all JSON parsers


M = TypeVar("M", bound=BaseModel)


class WeightsBody(BaseModel):
    tinker_path: str


class TtlBody(BaseModel):
    ttl_seconds: int | None = None


def parsed(model: type[M], body: bytes) -> M:
    """Returns the message in `body`."""
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
    """Returns the settings of a step."""
    params = parsed(tk.OptimStepRequest, body).optim_params
    if not isinstance(params, tk.AdamParams):
        raise RequestError(f"optimizer {params.type!r} is not supported: send AdamParams")
    values = params.model_dump()
    is_fit = all(math.isfinite(value) and value >= 0 for value in values.values())
    if not (is_fit and params.beta1 < 1 and params.beta2 < 1):
        raise RequestError(f"{params!r}: every value is a number from 0, beta1 and beta2 are below 1")
    return AdamParameters(**values)


def read_load(body: bytes) -> tuple[str, bool]:
    """Returns the checkpoint's path, and whether the optimizer's state is loaded."""
    request = parsed(tk.LoadWeightsRequest, body)
    return request.path, request.optimizer


def created(model_id: str) -> RequestOutcome:
    return json_outcome(type="create_model", model_id=model_id)


def stepped(metrics: Mapping[str, float]) -> RequestOutcome:
    """Metrics that are not finite are left out: JSON has no such numbers."""
    return json_outcome(metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)})


def loaded(path: str, model_id: str) -> RequestOutcome:
    return json_outcome(type="load_weights", path=path, model_id=model_id)


DTYPES: Mapping[int, np.dtype[Any]] = {
    proto.DTYPE_FLOAT32: np.dtype(np.float32),
    proto.DTYPE_INT64: np.dtype(np.int64),
    proto.DTYPE_INT32: np.dtype(np.int32),
}


TARGETS = "target_tokens"


RECORD = "ArrayRecord"  # the client's name of outputs by row and name


@dataclass(frozen=True)
class TrainingHeader:
    """The address of a forward or forward_backward request."""

    model_id: str
    seq_id: int
    is_forward_only: bool


def parse_request(body: bytes) -> proto.ForwardBackwardRequest:
    """Parses the message."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError("the body is not a ForwardBackwardRequest: use tinker 0.38 or later") from error
    return message


def read_header(body: bytes) -> TrainingHeader:
    message = parse_request(body)
    return TrainingHeader(message.model_id, message.seq_id, message.forward_only)


def read_call(body: bytes, inputs: InputBuilder, limits: ServiceLimits) -> LossCall:
    """Returns the learner's call."""
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
    """Returns the tensor; one in compressed sparse rows becomes dense."""
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
