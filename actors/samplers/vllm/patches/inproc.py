"""AsyncLLM with an engine core on a thread of this process instead of a child process.

vLLM 0.32 offers this for `LLM` (VLLM_ENABLE_V1_MULTIPROCESSING=0) but not for `AsyncLLM`. On CPU a second process costs
a second import of all modules, and a serialised copy of every request with images for each sibling, on the cores of the
engine. The core's loop is unchanged; queues replace the sockets.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError

from mobula.actors.samplers.vllm.patches.engine import keep_images
from mobula.cluster.runtime.vitals import EngineLoad

JOIN_S = 10.0
BURST_GAP_S = 0.004  # longest gap between the requests of a burst
BURST_S = 0.1  # longest wait for a burst to end


def in_process_engine(arguments: AsyncEngineArgs, *, stat_loggers: list[Any] | None = None) -> AsyncLLM:
    """Builds an `AsyncLLM` without a second process, in a running event loop."""
    keep_images()
    with _made_by(InProcessClient):
        return AsyncLLM.from_engine_args(arguments, stat_loggers=stat_loggers)


class ThreadedCore(EngineCoreProc):
    """The loop of an engine core: reads an input queue and passes outputs to `deliver`."""

    last_came = 0.0  # time.monotonic() of the newest request, set by its sender
    num_coming = 0  # announced requests that are not in the queue yet

    def __init__(self, config: Any, executor: Any, log_stats: bool, deliver: Callable[[Any], None]) -> None:
        self.input_queue = queue.Queue()
        self.output_queue = SimpleNamespace(put_nowait=deliver)  # type: ignore[assignment]  # vLLM only calls put_nowait
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.tensor_ipc_receiver = None
        self.has_coordinator = False
        self.frontend_stats_publish_address = None
        self.publish_dp_lb_stats = False
        self.process_input_queue_block = True
        self.enable_fault_tolerance = False
        EngineCore.__init__(self, config, executor, log_stats, self._executor_failed)

    def _process_input_queue(self) -> None:
        """Takes requests until there is work; an idle engine waits for the end of a burst.

        A step costs almost the same for few and for many sequences, and requests are not read during a step. Without
        the wait the burst would be spread over many small steps. A full step starts at once.
        """
        was_idle = not self.has_work()
        super()._process_input_queue()  # type: ignore[no-untyped-call]  # vLLM's
        if was_idle and self.has_work():
            latest = time.monotonic() + BURST_S
            while not self._is_full() and (wait_s := min(self._gap_end(), latest) - time.monotonic()) > 0:
                time.sleep(wait_s)
            super()._process_input_queue()  # type: ignore[no-untyped-call]  # vLLM's

    def _gap_end(self) -> float:
        """Returns the time (`time.monotonic`) until which the next request of a burst is expected."""
        return (time.monotonic() if self.num_coming else self.last_came) + BURST_GAP_S

    def _is_full(self) -> bool:
        """Whether the requests fill a step."""
        num_come = self.scheduler.get_num_unfinished_requests() + self.input_queue.qsize()
        return num_come >= self.vllm_config.scheduler_config.max_num_seqs

    def request_shutdown(self) -> None:
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _executor_failed(self) -> None:
        self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))


class InProcessClient(AsyncMPClient):
    """Client of `AsyncLLM`: requests go into the core's queue, outputs come back through the event loop."""

    def __init__(
        self, vllm_config: Any, executor_class: Any, log_stats: bool, *, renderer: Any = None, **_: Any
    ) -> None:
        self.vllm_config = vllm_config
        self.client_index = 0
        self.core_engine = b"\x00\x00"
        self.core_engines = [self.core_engine]
        self.engine_ranks_managed = [0]
        self.engines_running = False
        self.resources = SimpleNamespace(engine_dead=False)  # type: ignore[assignment]  # no sockets
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.utility_results: dict[int, Any] = {}
        self._engine_status: dict[int, dict[str, Any]] = {}
        self._renderer = renderer
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(vllm_config, executor_class, log_stats), name="engine-core", daemon=True
        )
        self._is_ready = threading.Event()
        self.failure: BaseException | None = None  # the exception that ended the core
        self._thread.start()
        self._start_mm_warmup()
        self._is_ready.wait()  # no deadline: the caller that starts this actor has a deadline
        if self.failure is not None:
            raise self.failure

    @property
    def transfer_engine(self) -> Any:
        """The worker's weight-transfer engine, for receiving on a thread other than the core's."""
        return self._core.model_executor.driver_worker.worker.weight_transfer_engine

    def measured(self, load: EngineLoad) -> EngineLoad:
        """Returns `load` with the current queue and KV cache, without vLLM's statistics."""
        scheduler = self._core.scheduler
        assert isinstance(scheduler, Scheduler), "its interface has no KV cache"
        num_running, num_waiting = scheduler.get_request_counts()
        usage = scheduler.kv_cache_manager.usage
        return replace(load, kv_usage=usage, num_running=num_running, num_waiting=num_waiting)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self.outputs_queue.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Announces a request while the body runs; it is added when the body ends."""
        self._core.num_coming += 1
        try:
            yield
        finally:
            self._core.num_coming -= 1
            self._core.last_came = time.monotonic()

    async def add_request_async(self, request: Any) -> None:
        self.ensure_alive()
        request.client_index = self.client_index
        self._core.last_came = time.monotonic()
        self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, self._core.preprocess_add_request(request)))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            self._core.aborts_queue.put_nowait(request_ids)
            self._core.input_queue.put_nowait((EngineCoreRequestType.ABORT, request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        if not self.resources.engine_dead and self._thread.is_alive():
            self._core.request_shutdown()
            self._thread.join(JOIN_S if timeout is None else timeout)
        self.resources.engine_dead = True

    async def _call_utility_async(self, method: str, *args: Any, engine: Any) -> Any:
        self.ensure_alive()
        call_id = uuid.uuid1().int >> 64
        future = self.utility_results[call_id] = self._loop.create_future()
        self._core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (self.client_index, call_id, method, args)))
        return await future

    def _run(self, config: Any, executor: Any, log_stats: bool) -> None:
        """Runs the core's thread, which also loads the model: OpenMP has a thread pool per calling thread."""
        try:
            self._core = ThreadedCore(config, executor, log_stats, self._deliver)
        except BaseException as error:
            self.failure = error
            return
        finally:
            self._is_ready.set()
        try:
            self._core.run_busy_loop()
        except SystemExit:
            pass  # the loop ends by SystemExit after `request_shutdown`
        except Exception as error:
            self.failure = error
            self._tell(self._died)
        finally:
            self._core.shutdown()

    def _deliver(self, output: tuple[int, EngineCoreOutputs]) -> None:
        """Passes outputs to the event loop. The core's thread calls it after every step and with every reply."""
        _, outputs = output
        if outputs.outputs or outputs.scheduler_stats or outputs.utility_output:
            self._tell(self._take, outputs)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _take(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output:
            _process_utility_output(outputs.utility_output, self.utility_results)
        else:
            self.outputs_queue.put_nowait(outputs)

    def _died(self) -> None:
        """Marks the core as dead; `VLLMSampler` ends the calls that wait for it."""
        self.resources.engine_dead = True
        self.outputs_queue.put_nowait(EngineDeadError())


@contextmanager
def _made_by(client: type) -> Iterator[None]:
    """Replaces the factory of AsyncLLM's client, for which vLLM has no parameter."""
    make_client = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(client)  # type: ignore[method-assign]  # a patch of vLLM
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(make_client)  # type: ignore[method-assign]
