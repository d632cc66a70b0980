"""vLLM's output side for an engine core on a thread of this process: responses grow on that thread.

`AsyncLLM` processes the outputs of every step in its event loop. Where the core is a thread, the two then take the
interpreter from each other step after step, only to note one more token of each response. So the core's own thread
notes them, and the event loop is notified when there is something to report: its end, or a chunk of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)

from actors.samplers.vllm.patches.logprobs import SampledLogprobs


class ThreadedOutputs(OutputProcessor):
    """An `OutputProcessor` for two threads: the event loop's, in which it is made, and the core's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self.on_preempted: Callable[[int], None] = lambda num_requests: None

    def note(self, outputs: EngineCoreOutputs) -> None:
        """On the core's thread: take those outputs of one step that grow here; the others are left in `outputs`."""
        with self._lock:
            direct, others = [], []
            for output in outputs.outputs:
                state = self.request_states.get(output.request_id)
                if state is None or not _grows_here(state):
                    others.append(output)
                    continue
                self._count_preempted(output)
                if _grows_silently(state, output):
                    if outputs.weight_version is not None:
                        state.track_weight_version(outputs.weight_version)
                    state.detokenizer.update(output.new_token_ids, False)
                    state.logprobs_processor.update_from_output(output)
                else:
                    direct.append(output)
            outputs.outputs = others
            super().process_outputs(direct, outputs.timestamp, None, outputs.weight_version)

    def _count_preempted(self, output: EngineCoreOutput) -> None:
        """vLLM counts preemptions with what the event loop processes; outputs that are noted here do not get there.
        Events are recorded only where the engine keeps statistics.
        """
        for event in output.events or ():
            if event.type is EngineCoreEventType.PREEMPTED:
                self.on_preempted(1)

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        handover = _Handover(queue, self._loop)
        with self._lock:
            super().add_request(request, prompt, parent_req, request_index, handover)
            handover.state = self.request_states[request.request_id]

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        with self._lock:
            return super().abort_requests(request_ids, internal)

    def process_outputs(self, *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        with self._lock:
            return super().process_outputs(*args, **kwargs)

    def propagate_error(self, e: Exception) -> None:
        with self._lock:
            super().propagate_error(e)

    def get_num_queued_tokens(self) -> int:
        with self._lock:
            return super().get_num_queued_tokens()


def _grows_here(state: RequestState) -> bool:
    """Whether nothing is wanted of the request but tokens; texts, which may end it, are the event loop's."""
    return type(state.detokenizer) is IncrementalDetokenizer


def _grows_silently(state: RequestState, output: EngineCoreOutput) -> bool:
    """Whether these tokens are not reported yet, as most are not: then noting them is all there is to do."""
    if output.finish_reason is not None or state.is_prefilling or not output.new_token_ids:
        return False
    if type(state.logprobs_processor) is not SampledLogprobs:
        return False
    if state.output_kind is RequestOutputKind.FINAL_ONLY:
        return True
    num_untold = len(state.detokenizer.token_ids) + len(output.new_token_ids) - state.sent_tokens_offset
    is_delta = state.output_kind is RequestOutputKind.DELTA
    return is_delta and state.sent_tokens_offset > 0 and num_untold < state.stream_interval


class _Handover:
    """What a request's outputs are put into, from either thread; its reader is in the event loop.

    vLLM gives the versions of a response with its end, and has it in the request's `state` until then. The
    reader of a piece cannot look there, for the state grows on: each piece has the versions of all tokens so far.
    """

    def __init__(self, queue: RequestOutputCollector, loop: asyncio.AbstractEventLoop) -> None:
        self.state: RequestState
        self._queue = queue
        self._loop = loop
        self._home = threading.get_ident()

    def put(self, output: Any) -> None:
        if isinstance(output, RequestOutput):
            for completion in output.outputs:
                if completion.weight_versions is None:
                    completion.weight_versions = self.state._weight_version_spans()
        if threading.get_ident() == self._home:
            self._queue.put(output)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put, output)
