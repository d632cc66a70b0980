"""vLLM's output side for an engine core on a thread of this process: responses that come once grow on that thread.

`AsyncLLM` processes the outputs of every step in its event loop. Where the core is a thread, the two then take the
interpreter from each other step after step, only to note one more token of each response. So the core's own thread notes
them, and the event loop hears of a response when it is whole. Responses that are reported while they grow stay with the
event loop, which reads vLLM's records of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector


class ThreadedOutputs(OutputProcessor):
    """An `OutputProcessor` for two threads: the event loop's, in which it is made, and the core's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()

    def note(self, outputs: EngineCoreOutputs) -> None:
        """On the core's thread: take those outputs of one step that grow here; the others are left in `outputs`."""
        with self._lock:
            ours, others = [], []
            for output in outputs.outputs:
                (ours if self._comes_once(output.request_id) else others).append(output)
            outputs.outputs = others
            super().process_outputs(ours, outputs.timestamp, None, outputs.weight_version)

    def _comes_once(self, request_id: str) -> bool:
        """Whether nothing of the request is wanted before its end; texts, which may end it, are the event loop's."""
        state = self.request_states.get(request_id)
        return (
            state is not None
            and state.output_kind is RequestOutputKind.FINAL_ONLY
            and type(state.detokenizer) is IncrementalDetokenizer
        )

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        with self._lock:
            super().add_request(request, prompt, parent_req, request_index, _Handover(queue, self._loop))

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


class _Handover:
    """What a request's outputs are put into, from either thread; its reader is in the event loop."""

    def __init__(self, queue: RequestOutputCollector, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop
        self._home = threading.get_ident()

    def put(self, output: Any) -> None:
        if threading.get_ident() == self._home:
            self._queue.put(output)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put, output)
