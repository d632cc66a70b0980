"""Messages, order of requests and refused configurations, without a running service."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tinker.types as tk
import torch
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from training_server import LIMITS

from mobula.cluster.errors import MediaError, PreflightError
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.serving import Address
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossResult
from mobula.configs.load import load_config
from mobula.deploy.training_service import messages as wire
from mobula.deploy.training_service.execution import ModelQueue, Scheduler
from mobula.deploy.training_service.serving import serve
from mobula.deploy.training_service.store import Database, Kind, ModelRecord, PendingSample, RequestRecord
from mobula.deploy.training_service.tenants import RequestError, Tenants

SPEC = AdapterSpec(rank=4, alpha=32.0, seed=0)


class RecordedExecution:
    """Finishes every request and records the calls; calls in `lost` lose the learner."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.calls: list[list[str]] = []
        self.steps: list[str] = []
        self._lost = lost

    def pause_s(self) -> float:
        return 0.0

    def is_loaded(self, queue: ModelQueue) -> bool:
        return queue.loaded_in == 0

    async def restore(self, queue: ModelQueue) -> None:
        queue.loaded_in = 0

    async def compute(self, batch: Sequence[tuple[ModelQueue, Sequence[RequestRecord]]]) -> None:
        self.calls.append([request.request_id for _, requests in batch for request in requests])
        for queue, requests in batch:
            if len(self.calls) in self._lost:
                queue.num_lost += 1
                continue
            for request in requests:
                queue.pop(request)

    async def run(self, queue: ModelQueue, request: RequestRecord) -> None:
        self.steps.append(request.request_id)
        queue.pop(request)


def queue_of(tenant: str, name: str, kinds: str) -> ModelQueue:
    """A queue of f (forward_backward) and s (step) requests; a dot is one that has not arrived."""
    record = ModelRecord(name, tenant, "session", SPEC, 0.0)
    names = {"f": Kind.FORWARD_BACKWARD, "s": Kind.STEP}
    requests = [RequestRecord(name, n, names[k], b"x" * 10) for n, k in enumerate(kinds) if k != "."]
    return ModelQueue(record, 0, {request.seq_id: request for request in requests})


async def run(queues: Sequence[ModelQueue], budget: int, lost: Sequence[int] = ()) -> RecordedExecution:
    """Runs until every request that can run has finished."""
    execution = RecordedExecution(lost)
    by_name = {queue.model_id: queue for queue in queues}
    scheduler = Scheduler(by_name, execution, max_batch_tokens=budget, count=len)  # type: ignore[arg-type]
    scheduler.wake()
    task = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(10):
        while any(queue.head is not None for queue in queues):
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return execution


async def test_models_of_several_tenants_share_a_call() -> None:
    found = await run([queue_of("ada", "a", "ffs"), queue_of("bob", "b", "fs")], budget=100)
    assert found.calls == [["a:0", "a:1", "b:0"]]
    assert sorted(found.steps) == ["a:2", "b:1"]


async def test_tenants_take_turns_when_the_budget_is_small() -> None:
    queues = [queue_of("ada", name, "ff") for name in ("a", "b", "c")] + [queue_of("bob", "d", "ff")]
    found = await run(queues, budget=20)
    assert "d:0" in found.calls[1], "the second tenant is served second, whatever the first has queued"


async def test_a_request_waits_for_the_one_before_it() -> None:
    found = await run([queue_of("ada", "a", "f.f")], budget=100)
    assert found.calls == [["a:0"]]


async def test_a_request_larger_than_the_budget_runs_alone() -> None:
    found = await run([queue_of("ada", "a", "f"), queue_of("bob", "b", "f")], budget=5)
    assert sorted(found.calls) == [["a:0"], ["b:0"]]


async def test_requests_that_lost_the_learner_twice_run_alone() -> None:
    found = await run([queue_of("ada", "a", "f"), queue_of("bob", "b", "f")], budget=100, lost=(1, 2))
    assert [sorted(call) for call in found.calls[:2]] == [["a:0", "b:0"]] * 2
    assert sorted(found.calls[2:]) == [["a:0"], ["b:0"]]


@dataclass
class FourTokens:
    """Every image is four tokens of id 7."""

    max_images: int = 2

    def place(self, content: bytes, name: str) -> wire.PlacedImage:
        if content == b"damaged":
            raise MediaError(f"{name} is damaged")
        handle = MediaHandle(str(content), "image", 1, None)
        return wire.PlacedImage(handle, 7, np.full(4, 7, dtype=np.int32))

    def count(self, content: bytes, name: str) -> int:
        return len(self.place(content, name).expanded_ids)


DTYPES = {"target_tokens": torch.int64, "weights": torch.float32}

BUILDER = wire.InputBuilder(FourTokens(), num_embeddings=100, max_tokens=12)


def text(*ids: int) -> wire.TextChunk:
    return wire.TextChunk(np.array(ids, dtype=np.int32))


def test_images_are_expanded_in_place() -> None:
    prompt = BUILDER.build([text(1, 2), wire.ImageChunk(b"a", 4), text(3), wire.ImageChunk(b"b")], "row")
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
        ([wire.ImageChunk(b"a", 5)], "expects 5 tokens"),
        ([wire.ImageChunk(b"damaged")], "is damaged"),
        ([wire.ImageChunk(b"a")] * 3, "has 3 images, and the service takes 2"),
    ],
)
def test_unfit_inputs_are_refused(chunks: Sequence[wire.Chunk], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        BUILDER.build(chunks, "row")


def message_of(*data: tk.Datum, loss: str = "cross_entropy") -> proto.ForwardBackwardRequest:
    request = tk.ForwardBackwardRequest(
        forward_backward_input=tk.ForwardBackwardInput(data=list(data), loss_fn=loss), model_id="m", seq_id=1
    )
    return forward_backward_request_to_proto(request)


def call_of(*data: tk.Datum, loss: str = "cross_entropy") -> LossCall:
    return wire.read_call(message_of(*data, loss=loss).SerializeToString(), BUILDER, LIMITS)


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
    assert wire.count_tokens(message.SerializeToString(), BUILDER) == number


def test_bytes_that_are_no_tensor_are_refused() -> None:
    inputs = {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}
    row = tk.Datum(model_input=tk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    torn_tokens, torn_targets, misshapen = (message_of(row) for _ in range(3))
    torn_tokens.data[0].model_input[0].encoded_text.tokens = b"abc"
    torn_targets.data[0].loss_fn_inputs["target_tokens"].dense = b"abc"
    misshapen.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2, 2]
    for message in (torn_tokens, torn_targets, misshapen):
        with pytest.raises(RequestError, match="m/1: "):
            wire.read_call(message.SerializeToString(), BUILDER, LIMITS)
    assert wire.count_tokens(torn_tokens.SerializeToString(), BUILDER) == 0


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
    inputs = {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
    row = tk.Datum(model_input=tk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    with pytest.raises(RequestError, match="3 tokens"):
        call_of(row)


def test_outputs_of_unequal_shapes_keep_their_rows() -> None:
    outputs = [np.arange(n, dtype=np.float32).reshape(shape) for n, shape in ((3, (3,)), (2, (2,)), (6, (3, 2)))]
    message = wire.write_result(LossResult([{"logprobs": output} for output in outputs], {"loss": 2.5, "kl:mean": 1.0}))
    read = deserialize_forward_backward_output(message)
    assert read.metrics == {"loss:sum": 2.5, "kl:mean": 1.0}
    assert [row["logprobs"].to_numpy().tolist() for row in read.loss_fn_outputs] == [o.tolist() for o in outputs]


FULL, MUON, HERE = "training_service.weights=full", "learner.optimizer=muon", "127.0.0.1"
TWO = {"ada": "tml-the-key-of-tenant-ada", "bob": "tml-the-key-of-tenant-bob"}


@pytest.mark.parametrize(
    ("words", "host", "tokens", "reason"),
    [
        ([], "0.0.0.0", {}, "no token: give --tenants"),
        ([FULL], HERE, TWO, "serves one tenant, and --tenants names 2"),
        ([FULL, "sampler.adapters.max_served=2"], HERE, {}, "max_served=2 freezes the weights"),
        (["learner=deepspeed"], HERE, {}, "learner.backend=deepspeed does not go with a training service"),
        ([FULL, MUON], HERE, {}, f"{MUON} does not go with a training service: set learner.optimizer to adamw"),
    ],
)
def test_unfit_services_are_refused(
    tmp_path: Path, words: list[str], host: str, tokens: Mapping[str, str], reason: str
) -> None:
    config = load_config([*words, f"policy.model={tmp_path}"], is_complete=False)
    with pytest.raises(PreflightError, match=reason):
        serve(config, Address(host, 0, None), Tenants(tokens), tmp_path, None, lambda url: None)


OLD_TABLES = """
CREATE TABLE models (model_id TEXT PRIMARY KEY, tenant TEXT, session_id TEXT, spec TEXT, created_s REAL,
    user_metadata TEXT, snapshot_seq INTEGER, snapshot TEXT, is_trainable INTEGER);
CREATE TABLE requests (model_id TEXT, seq_id INTEGER, kind TEXT, body BLOB, status TEXT, result BLOB,
    is_proto INTEGER, error TEXT, category TEXT, finished_s REAL, PRIMARY KEY (model_id, seq_id));
INSERT INTO models VALUES ('s:train:0', 'ada', 's', '{"rank": 4, "alpha": 32.0, "seed": 0}', 1.5, '{"a": 1}', -1,
    '', 0);
INSERT INTO requests VALUES ('s:train:0', 0, 'create', x'7b7d', 'done', x'31', 0, '', '', 2.0);
INSERT INTO requests VALUES ('s:train:0', 1, 'step', x'7b7d', 'queued', NULL, NULL, NULL, NULL, NULL);
PRAGMA user_version=2;
"""


async def test_records_keep_their_types_in_files_of_earlier_versions_too(tmp_path: Path) -> None:
    file = tmp_path / "service.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(OLD_TABLES)
    database = Database(file)
    old = ModelRecord("s:train:0", "ada", "s", SPEC, 1.5, {"a": 1}, is_trainable=False)
    assert await database.all(ModelRecord) == [old]
    position = await database.position("s:train:0")
    assert (position.next_seq, [request.seq_id for request in position.queued]) == (1, [1])
    new = replace(old, model_id="s:train:1", user_metadata=None, is_trainable=True)
    sample = PendingSample("sample-s:0", "s", b"{}")
    await database.add(new, sample)
    await database.add(replace(new, tenant="bob"), replace(sample, body=b"other"))
    await database.close()
    again = Database(file)
    assert await again.all(ModelRecord) == [old, new] and await again.all(PendingSample) == [sample]
    await again.remove(PendingSample, [sample.request_id])
    assert await again.find(PendingSample, sample.request_id) is None
    await again.close()
