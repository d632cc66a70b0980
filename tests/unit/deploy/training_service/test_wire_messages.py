"""Messages of the client as calls, and results as messages, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tinker.types as tk
import torch
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from training_server import LIMITS

from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.training_service.interfaces import LossCall, LossResult
from mobula.deploy.training_service.errors import RequestError
from mobula.deploy.training_service.wire.inputs import Chunk, ImageChunk, InputBuilder, PlacedImage, TextChunk
from mobula.deploy.training_service.wire.training import read_call, write_result


@dataclass
class FourTokens:
    """Every image is four tokens of id 7."""

    max_images: int = 2

    def place(self, content: bytes, name: str) -> PlacedImage:
        if content == b"damaged":
            raise MediaError(f"{name} is damaged")
        handle = MediaHandle(str(content), "image", 1, None)
        return PlacedImage(handle, 7, np.full(4, 7, dtype=np.int32))


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


def call_of(*data: tk.Datum, loss: str = "cross_entropy") -> LossCall:
    request = tk.ForwardBackwardRequest(
        forward_backward_input=tk.ForwardBackwardInput(data=list(data), loss_fn=loss), model_id="m", seq_id=1
    )
    return read_call(forward_backward_request_to_proto(request).SerializeToString(), BUILDER, LIMITS)


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
