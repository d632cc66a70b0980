"""Messages of the client as calls, and results as messages, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tinker.types as tk
import torch
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from training_server import LIMITS

from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.training_service.interfaces import LossCall, LossResult
from mobula.deploy.training_service.tenants import RequestError
from mobula.deploy.training_service.wire.inputs import Chunk, ImageChunk, InputBuilder, PlacedImage, TextChunk
from mobula.deploy.training_service.wire.training import count_tokens, read_call, write_result


@dataclass
class FourTokens:
    """Every image is four tokens of id 7."""

    max_images: int = 2

    def place(self, content: bytes, name: str) -> PlacedImage:
        if content == b"damaged":
            raise MediaError(f"{name} is damaged")
        handle = MediaHandle(str(content), "image", 1, None)
        return PlacedImage(handle, 7, np.full(4, 7, dtype=np.int32))

    def count(self, content: bytes, name: str) -> int:
        return len(self.place(content, name).expanded_ids)


DTYPES = {"target_tokens": torch.int64, "weights": torch.float32}
BUILDER = InputBuilder(FourTokens(), num_embeddings=100, max_tokens=12)


def text(*ids: int) -> TextChunk:
    return TextChunk(np.array(ids, dtype=np.int32))


def test_images_are_expanded_in_place() -> None:
    prompt = BUILDER.build([text(1, 2), ImageChunk(b"a", 4), text(3), ImageChunk(b"b")], "row")
    assert prompt.compact_ids.tolist() == [1, 2, 7, 3, 7]
    assert prompt.expanded_ids.tolist() == [1, 2, 7, 7, 7, 7, 3, 7, 7, 7, 7]
    assert prompt.media_spans == (MediaSpan(2, 6), MediaSpan(7, 11))
    assert [handle.key for handle in prompt.media] == ["b'a'", "b'b'"]


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([], "0 tokens"),
        ([text(*range(13))], "13 tokens"),
        ([text(100)], "outside of 0 to 99"),
        ([ImageChunk(b"a", 5)], "expects 5 tokens"),
        ([ImageChunk(b"damaged")], "is damaged"),
        ([ImageChunk(b"a")] * 3, "has 3 images, and the service takes 2"),
    ],
)
def test_unfit_inputs_are_refused(chunks: Sequence[Chunk], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        BUILDER.build(chunks, "row")


def message_of(*data: tk.Datum, loss: str = "cross_entropy") -> proto.ForwardBackwardRequest:
    request = tk.ForwardBackwardRequest(
        forward_backward_input=tk.ForwardBackwardInput(data=list(data), loss_fn=loss), model_id="m", seq_id=1
    )
    return forward_backward_request_to_proto(request)


def call_of(*data: tk.Datum, loss: str = "cross_entropy") -> LossCall:
    return read_call(message_of(*data, loss=loss).SerializeToString(), BUILDER, LIMITS)


def image_of(content: bytes, **fields: int) -> tk.ImageChunk:
    return tk.ImageChunk(data=content, format="png", **fields)


@pytest.mark.parametrize(
    ("chunks", "number"),
    [
        ([tk.EncodedTextChunk(tokens=[1, 2, 3])], 3),
        ([tk.EncodedTextChunk(tokens=[1, 2]), image_of(b"a"), image_of(b"b", expected_tokens=4)], 10),
        ([image_of(b"damaged")], 0),
    ],
)
def test_tokens_of_images_count_in_the_budget_of_a_call(chunks: list[tk.ModelInputChunk], number: int) -> None:
    message = message_of(tk.Datum(model_input=tk.ModelInput(chunks=chunks), loss_fn_inputs={}))
    assert count_tokens(message.SerializeToString(), BUILDER) == number


def test_bytes_that_are_no_tensor_are_refused() -> None:
    inputs = {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}
    row = tk.Datum(model_input=tk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    torn_tokens, torn_targets, misshapen = (message_of(row) for _ in range(3))
    torn_tokens.data[0].model_input[0].encoded_text.tokens = b"abc"
    torn_targets.data[0].loss_fn_inputs["target_tokens"].dense = b"abc"
    misshapen.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2, 2]
    for message in (torn_tokens, torn_targets, misshapen):
        with pytest.raises(RequestError, match="m/1: "):
            read_call(message.SerializeToString(), BUILDER, LIMITS)
    assert count_tokens(torn_tokens.SerializeToString(), BUILDER) == 0


def test_several_targets_arrive_dense_and_sparse() -> None:
    targets = torch.zeros(6, 4, dtype=torch.int64)
    targets[1, 2], targets[4, 0] = 5, 9
    for sent in (targets.numpy(), targets):
        inputs = {"target_tokens": sent, "weights": np.ones((6, 4), dtype=np.float32)}
        call = call_of(tk.Datum(model_input=tk.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=inputs))
        assert call.rows[0].inputs["target_tokens"].tolist() == targets.tolist()


def test_sparse_targets_above_the_limit_are_refused() -> None:
    inputs = {name: torch.zeros(6, LIMITS.max_dense_values, dtype=dtype) for name, dtype in DTYPES.items()}
    row = tk.Datum(model_input=tk.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=inputs)
    with pytest.raises(RequestError, match="training_service.max_dense_values"):
        call_of(row)


def test_unequal_lengths_are_refused() -> None:
    row = tk.Datum(
        model_input=tk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [1, 2], "weights": [1.0, 1.0]}
    )
    with pytest.raises(RequestError, match="3 tokens"):
        call_of(row)


def test_outputs_of_unequal_shapes_keep_their_rows() -> None:
    outputs = [np.arange(n, dtype=np.float32).reshape(shape) for n, shape in ((3, (3,)), (2, (2,)), (6, (3, 2)))]
    message = write_result(LossResult([{"logprobs": output} for output in outputs], {"loss": 2.5, "kl:mean": 1.0}))
    read = deserialize_forward_backward_output(message)
    assert read.metrics == {"loss:sum": 2.5, "kl:mean": 1.0}
    assert [row["logprobs"].to_numpy().tolist() for row in read.loss_fn_outputs] == [o.tolist() for o in outputs]
