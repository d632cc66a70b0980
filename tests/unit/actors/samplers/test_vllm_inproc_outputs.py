"""Outputs that the core's thread notes: responses and pieces of them reach the event loop, texts as before."""

from __future__ import annotations

import asyncio
import threading
import time
from copy import copy
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from actors.samplers.vllm.patches.inproc_outputs import ThreadedOutputs
from actors.samplers.vllm.patches.logprobs import SampledLogprobs

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _log_probs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.engine.output_processor.LogprobsProcessor", SampledLogprobs)


class _Detokenizer(IncrementalDetokenizer):
    """One that would turn tokens into text."""


def outputs_of(
    processor: ThreadedOutputs, name: str, kind: RequestOutputKind, n: int = 1, stream_interval: int = 1
) -> RequestOutputCollector:
    """Add a request the way AsyncLLM does; where its outputs come to."""
    params = SamplingParams(
        n=n,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kind,
        stream_interval=stream_interval,
    )
    request = EngineCoreRequest(name, [1, 2], None, params, None, 0.0, None, None, None, external_req_id=name)
    collector = RequestOutputCollector(kind, name)
    if n == 1:
        processor.add_request(request, None, None, 0, collector)
        return collector
    parent = ParentRequest(request)
    for index in range(n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        processor.add_request(child, None, parent, index, collector)
    return collector


def step(token: int, *names: str, end: bool = False) -> EngineCoreOutputs:
    """One step of the core, which samples `token` for each of these requests."""
    row = np.array([[-float(token)]], dtype=np.float32)
    lists = LogprobsLists(np.array([[token]]), row, np.array([1]))
    reason = FinishReason.LENGTH if end else None
    sampled = [EngineCoreOutput(name, [token], new_logprobs=lists, finish_reason=reason) for name in names]
    return EngineCoreOutputs(outputs=sampled, weight_version=str(token // 2))


async def on_the_cores_thread(work: Any, *args: Any) -> None:
    await asyncio.wait_for(asyncio.to_thread(work, *args), PATIENCE_S)


async def test_a_response_that_comes_once_is_put_together_there_and_read_here() -> None:
    processor = ThreadedOutputs(None, log_stats=False)
    collector = outputs_of(processor, "r", RequestOutputKind.FINAL_ONLY, n=2)
    for token in range(4):
        outputs = step(token, "0_r", "1_r", end=token == 3)
        await on_the_cores_thread(processor.note, outputs)
        assert outputs.outputs == []
    found = await asyncio.wait_for(collector.get(), PATIENCE_S)
    assert found.finished and [one.index for one in found.outputs] == [0, 1]
    for one in found.outputs:
        assert (list(one.token_ids), list(one.logprobs)) == ([0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
        assert [(span.version, span.start, span.end) for span in one.weight_versions] == [("0", 0, 2), ("1", 2, 4)]
    assert not processor.has_unfinished_requests() and not processor.external_req_ids


async def test_pieces_come_when_they_are_due_each_with_the_weights_of_all_tokens_so_far() -> None:
    processor = ThreadedOutputs(None, log_stats=False)
    collector = outputs_of(processor, "r", RequestOutputKind.DELTA, stream_interval=3)
    found = []
    for token in range(8):
        outputs = step(token, "r", end=token == 7)
        await on_the_cores_thread(processor.note, outputs)
        assert outputs.outputs == []
        if (piece := collector.get_nowait()) is not None:
            [one] = piece.outputs
            spans = [(span.version, span.start, span.end) for span in one.weight_versions]
            found.append((list(one.token_ids), list(one.logprobs), spans))
    assert found == [
        ([0], [0.0], [("0", 0, 1)]),
        ([1, 2, 3], [-1.0, -2.0, -3.0], [("0", 0, 2), ("1", 2, 4)]),
        ([4, 5, 6], [-4.0, -5.0, -6.0], [("0", 0, 2), ("1", 2, 4), ("2", 4, 6), ("3", 6, 7)]),
        ([7], [-7.0], [("0", 0, 2), ("1", 2, 4), ("2", 4, 6), ("3", 6, 8)]),
    ]


async def test_unread_pieces_are_one_with_the_weights_of_the_last() -> None:
    processor = ThreadedOutputs(None, log_stats=False)
    collector = outputs_of(processor, "r", RequestOutputKind.DELTA, n=2)
    for token in range(4):
        await on_the_cores_thread(processor.note, step(token, "0_r", "1_r", end=token == 3))
    await asyncio.sleep(0)
    for one in (await asyncio.wait_for(collector.get(), PATIENCE_S)).outputs:
        assert (list(one.token_ids), list(one.logprobs)) == ([0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
        assert [(span.version, span.start, span.end) for span in one.weight_versions] == [("0", 0, 2), ("1", 2, 4)]


async def test_what_is_read_as_text_and_what_is_not_awaited_is_left_to_the_event_loop() -> None:
    processor = ThreadedOutputs(None, log_stats=False)
    text = outputs_of(processor, "text", RequestOutputKind.DELTA)
    processor.request_states["text"].detokenizer = _Detokenizer()
    whole = outputs_of(processor, "whole", RequestOutputKind.FINAL_ONLY)
    outputs = step(7, "text", "gone", "whole", end=True)
    await on_the_cores_thread(processor.note, outputs)
    assert [output.request_id for output in outputs.outputs] == ["text", "gone"]
    assert (await asyncio.wait_for(whole.get(), PATIENCE_S)).finished
    assert text.get_nowait() is None
    processor.process_outputs(outputs.outputs, 0.0, None, outputs.weight_version)
    assert text.get_nowait().outputs[0].token_ids == [7]


async def test_an_error_reaches_every_waiting_caller() -> None:
    processor = ThreadedOutputs(None, log_stats=False)
    collector = outputs_of(processor, "r", RequestOutputKind.FINAL_ONLY)
    processor.propagate_error(RuntimeError("dead"))
    with pytest.raises(RuntimeError, match="dead"):
        await asyncio.wait_for(collector.get(), PATIENCE_S)


async def test_a_request_that_is_broken_off_during_a_step_is_whole_if_the_step_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor, is_in_step = ThreadedOutputs(None, log_stats=False), threading.Event()
    collector, finish = outputs_of(processor, "r", RequestOutputKind.FINAL_ONLY), processor._finish_request

    def finish_slowly(state: Any) -> None:
        is_in_step.set()
        time.sleep(0.2)
        finish(state)

    monkeypatch.setattr(processor, "_finish_request", finish_slowly)
    noting = asyncio.create_task(on_the_cores_thread(processor.note, step(3, "r", end=True)))
    assert await asyncio.to_thread(is_in_step.wait, PATIENCE_S)
    assert processor.abort_requests(["r"], internal=True) == [], "there is nothing left to break off"
    await noting
    assert (await asyncio.wait_for(collector.get(), PATIENCE_S)).outputs[0].finish_reason == "length"
    assert not processor.has_unfinished_requests() and not processor.external_req_ids
