"""Changes to private parts of vLLM, each with the defect that it works around."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import AsyncEngineArgs
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, output_processor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mobula.cluster.errors import EngineDiedError
from mobula.cluster.failures import Failure
from mobula.cluster.runtime.vitals import EngineLoad

# Patches of vLLM's adapters on CPU, in the engine's process: products by adapter, and prompt logits.
#
# vLLM 0.32 multiplies every row with its own copy of the factors, and rows without an adapter, of index -1, with those
# of the last one: a prompt of the base model gets an adapter if another one is in its batch. Here each adapter's rows
# are multiplied together, and rows of the base model are left out.
#
# To compute the logits of a prompt, vLLM assigns rows to the requests of the step, not to the tokens of the prompt.
# With an output layer that takes adapters the rows do not match. Here the rows of each prompt are assigned to its
# adapter. GPU engines are unchanged: `VLLMSampler` refuses there what they would compute wrongly.

_prompt_logprobs = GPUModelRunner._get_prompt_logprobs_dict


def shrink(inputs: Tensor, factors: Tensor, results: Tensor, indices: Tensor, scaling: float = 1.0) -> None:
    """Sets `results` [T, >= r] to the products of `inputs` [T, I] with each row's A, of `factors` [L, 1, r, I]."""
    results.zero_()
    for index, rows in _rows_by_adapter(indices):
        product = inputs[rows].to(results.dtype) @ _matrix(factors, index).to(results.dtype).T
        results[rows, : product.shape[1]] = scaling * product


def expand(inputs: Tensor, factors: Tensor, results: Tensor, indices: Tensor, add_inputs: bool = True) -> None:
    """Adds the products of `inputs` [T, r] with each row's B, of `factors` [L, 1, O, r], to `results` [T, O]."""
    # The LM head of vLLM has rows of padding, the adapter's has not, or the other way round.
    expand_slice(inputs, factors, results, indices, 0, min(results.shape[1], factors.shape[-2]), add_inputs)


def expand_slice(
    inputs: Tensor,
    factors: Tensor,
    results: Tensor,
    indices: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Like `expand`, for the columns [slice_offset, slice_offset + slice_size) of `results`."""
    columns = results[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for index, rows in _rows_by_adapter(indices):
        matrix = _matrix(factors, index)[:slice_size].to(results.dtype)
        columns[rows] += inputs[rows, : matrix.shape[1]].to(results.dtype) @ matrix.T


def _rows_by_adapter(indices: Tensor) -> Iterator[tuple[int, Any]]:
    """Yields (slot, rows) of each adapter in a batch, without the rows of the base model."""
    slots = indices.tolist()
    distinct = set(slots)
    for slot in distinct - {-1}:
        yield slot, slice(0, len(slots)) if len(distinct) == 1 else torch.nonzero(indices == slot)[:, 0]


def _matrix(factors: Tensor, index: int) -> Tensor:
    """Returns the factor of one slot, [r, I] or [O, r]."""
    return factors[index].squeeze(0)


def prompt_logprobs(runner: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
    """Computes prompt log-probs request by request, each with its own adapter; arguments and result are vLLM's."""
    asked = runner.num_prompt_logprobs
    if runner.lora_config is None or not asked:
        return _prompt_logprobs(runner, hidden_states, num_scheduled_tokens)
    found: dict[str, Any] = {}
    for request_id in list(asked):
        request, num_tokens = runner.requests[request_id], num_scheduled_tokens.get(request_id, 0)
        num_rows = min(num_tokens, len(request.prompt_token_ids) - request.num_computed_tokens - 1)
        if num_rows > 0:
            adapter = request.lora_request
            rows = (0 if adapter is None else adapter.lora_int_id,) * num_rows
            runner._set_active_loras(rows, rows, set() if adapter is None else {adapter})
        runner.num_prompt_logprobs = {request_id: asked[request_id]}
        found |= _prompt_logprobs(runner, hidden_states, num_scheduled_tokens)
        if not runner.num_prompt_logprobs:  # the prompt is complete
            del asked[request_id]
    runner.num_prompt_logprobs = asked
    return found


def adapt_rows_of_each_adapter() -> None:
    """Patches the CPU engines of this process."""
    modules: tuple[Any, ...] = (lora_ops, punica_cpu)  # which import each function by its name
    for module in modules:
        module.bgmv_shrink = shrink
        module.bgmv_expand = expand
        module.bgmv_expand_slice = expand_slice
    GPUModelRunner._get_prompt_logprobs_dict = prompt_logprobs  # type: ignore[method-assign, assignment]  # a patch of vLLM


# Patch of vLLM's scheduler, in the process of the engine core: sends every image of a new request to the worker.
#
# Replaces `vllm.v1.core.sched.output.strip_covered_mm_data`. vLLM 0.32 does not send an image to the worker when the
# prefix cache covers its tokens, as it does for every sibling but the first. If such a request is preempted later, by a
# weight push or for lack of KV blocks, and the prefix cache no longer covers them, the worker has nothing to embed and
# the engine dies. With one rank the worker shares the core's process, so an image that is sent costs nothing; with
# `resources.rollout.tensor_parallel` above 1 it is copied to the worker processes once for each sibling.


def keep_images() -> None:
    """Patches this process: the scheduler also sends images of a new request that the prefix cache covers."""
    scheduler_output.strip_covered_mm_data = _all_of_them


def _all_of_them(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features


# Runs vLLM's engine core in a child process, which sends its last exception to the actor and keeps images.
#
# Replaces `EngineCoreProc.run_engine_core` while an engine starts, and `EngineCoreProc._send_engine_dead` in the core's
# process. vLLM 0.32 logs the exception of a core in the core's process only; the client gets an `EngineDeadError`
# without a cause. `run_core` sends the exception through a pipe before vLLM reports the death. The scheduler runs in
# this process, so `keep_images` is applied here.

EXIT_S = 2.0  # wait for the exit code of a dead core
RUN_ENGINE_CORE = EngineCoreProc.run_engine_core  # vLLM's original


def engine_in_its_own_process(arguments: AsyncEngineArgs, *, stat_loggers: list[Any] | None = None) -> AsyncLLM:
    """Builds an `AsyncLLM` in a running event loop. `core_failure` returns the reason if its core dies."""
    failures, sender = multiprocessing.Pipe(duplex=False)
    try:
        with sender, _run_by(partial(run_core, sender)):
            engine = AsyncLLM.from_engine_args(arguments, stat_loggers=stat_loggers)
    except Exception as error:
        if (failure := _sent(failures)) is None:
            raise
        if failure.summary.startswith(f"{ValueError.__name__}:"):
            raise ValueError(failure.summary.partition(": ")[2]) from error
        raise EngineDiedError("the engine failed to start", failure) from error
    core = engine.engine_core
    core.failures = failures
    core.processes = list(core.resources.engine_manager.processes)
    return engine


def core_failure(engine: AsyncLLM) -> Failure:
    """Returns why the core of `engine_in_its_own_process` died; call it once."""
    core = engine.engine_core
    if (failure := _sent(core.failures)) is not None:
        return failure
    for process in core.processes:
        process.join(EXIT_S)
        if process.exitcode:
            return Failure.of_exit(process.exitcode, f"the engine's process {process.pid}")
    return Failure.of_exit(None, "the engine's process")


def run_core(sender: Connection, *args: Any, **kwargs: Any) -> None:
    """Runs `EngineCoreProc.run_engine_core` in the core's process; sends the exception that ends it to `sender`."""
    keep_images()
    send_dead = EngineCoreProc._send_engine_dead
    is_sent = False

    def send(error: BaseException | None) -> None:
        nonlocal is_sent
        if error is not None and not is_sent:
            is_sent = True
            sender.send(Failure.of(error))

    def send_failure_first(core: EngineCoreProc) -> None:
        send(sys.exception())  # before vLLM reports the death, so that the client can read it
        send_dead(core)

    EngineCoreProc._send_engine_dead = send_failure_first
    try:
        RUN_ENGINE_CORE(*args, **kwargs)
    except Exception as error:
        send(error)
        raise


def _sent(failures: Connection) -> Failure | None:
    try:
        return failures.recv() if failures.poll() else None
    except EOFError:  # the process ended without a failure
        return None


@contextmanager
def _run_by(run: Callable[..., None]) -> Iterator[None]:
    """Replaces the method that vLLM's core process runs, for which vLLM has no parameter."""
    EngineCoreProc.run_engine_core = staticmethod(run)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(RUN_ENGINE_CORE)


# Patch of vLLM's output side in the actor's process: keeps only the log-probs of sampled tokens.
#
# vLLM 0.32 keeps ids, log-probs, ranks and texts of all requested alternatives per token, in six lists, even without
# alternatives. These are half of the output side's work per token, on the CPU core of the engine.


def keep_sampled_logprobs_alone() -> None:
    """Patches this process: requests with `logprobs=0` in flat form and without text get one float per token as
    `CompletionOutput.logprobs`; other requests are unchanged."""
    output_processor.LogprobsProcessor = SampledLogprobs  # type: ignore[misc]  # a patch of vLLM


class SampledLogprobs(LogprobsProcessor):
    """Keeps the first log-prob of each row of a step, the log-prob of the sampled token."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> LogprobsProcessor:
        params = request.sampling_params
        asks_for_texts = tokenizer is not None
        if asks_for_texts or params.logprobs != 0 or not params.flat_logprobs or params.prompt_logprobs is not None:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        return cls(
            tokenizer=None,
            logprobs=[],
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=0,
            num_prompt_logprobs=None,
        )

    def update_from_output(self, output: Any) -> None:
        """Appends the log-probs of one step, [T, 1]."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


# Runs inside vLLM's engine process: on CPU, the random numbers of a token depend only on the request's seed and the
# token's position.
#
# vLLM 0.32's CPU sampler has a `torch.Generator` per request, which advances with every engine step. A step with only a
# part of a prefill also samples a token, which is discarded, and vLLM then rewinds the generator by `set_offset`. CPU
# generators have no offset, so the engine dies when a prefill is split by a long prompt, a small token budget, a small
# KV cache, or recomputation after a preemption or a weight push.
#
# Here the generator of a request is replaced by the stateless `TokenSeeds`, so that discarded, preempted and recomputed
# steps do not change later draws. vLLM's GPU runners need no patch: the V2 runner hashes seed and position, and the V1
# runner's CUDA generators have an offset.

SEEDS = 2**31  # seeds are below this, like in vLLM
FIRST_INCREMENT, SECOND_INCREMENT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_forward = TopKTopPSampler.forward_cpu
_add_request = InputBatch.add_request


class TokenSeeds:
    """The seeds of one request's tokens; replaces the `torch.Generator` in vLLM's batch."""

    def __init__(self, request: Any) -> None:
        """`request` is vLLM's `CachedRequestState`, whose list of sampled tokens grows."""
        self.seed: int = request.sampling_params.seed
        self._request = request

    @property
    def position(self) -> int:
        """Returns the index of the next sampled token of the response."""
        return len(self._request.output_token_ids)

    def generator(self) -> torch.Generator:
        """Returns a generator for the next token, for samplers of vLLM that need one."""
        seed = token_seeds(np.array([self.seed]), np.array([self.position]))[0]
        return torch.Generator().manual_seed(int(seed))

    def get_offset(self) -> int:
        """Returns 0: vLLM rewinds the generator if a sampled token is discarded, and this one has no state."""
        return 0

    def set_offset(self, offset: int) -> None:
        """See `get_offset`."""


def token_seeds(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Hashes int64 [B] request seeds and [B] positions to int64 [B] below `SEEDS`.

    Uses one step of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") for each.
    """
    with np.errstate(over="ignore"):
        hashed = _mixed(seeds.astype(np.uint64) * FIRST_INCREMENT + FIRST_INCREMENT)
        hashed = _mixed(hashed + (positions.astype(np.uint64) + np.uint64(1)) * SECOND_INCREMENT)
    return (hashed >> np.uint64(33)).astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer; uint64, wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_by_position() -> None:
    """Patches the CPU engines of this process; engines on GPUs are unchanged."""
    InputBatch.add_request = _added  # type: ignore[method-assign, assignment]  # a patch of vLLM
    TopKTopPSampler.forward_cpu = _sampled  # type: ignore[method-assign, assignment]  # and of its generators


def _added(batch: InputBatch, request: Any) -> int:
    if request.generator is not None and batch.device.type == "cpu" and not isinstance(request.generator, TokenSeeds):
        request.generator = TokenSeeds(request)
    return _add_request(batch, request)


def _sampled(
    sampler: TopKTopPSampler, logits: Tensor, generators: dict[int, TokenSeeds], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Samples [B, V] logits by Gumbel-max: returns tokens, int64 [B], and optionally float32 [B, V] log-probs.

    `generators` has the rows of requests with a seed; other rows use torch's global generator.
    """
    if sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
        return _forward(sampler, logits, {row: drawn.generator() for row, drawn in generators.items()}, k, p)
    logits = apply_top_k_top_p(logits, k, p).to(torch.float32)
    seeds = torch.randint(0, SEEDS, logits.shape[:1])
    if generators:
        drawn = list(generators.values())
        values = token_seeds(np.array([one.seed for one in drawn]), np.array([one.position for one in drawn]))
        seeds[list(generators)] = torch.from_numpy(values)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, seeds), logprobs


# AsyncLLM with an engine core on a thread of this process instead of a child process.
#
# vLLM 0.32 offers this for `LLM` (VLLM_ENABLE_V1_MULTIPROCESSING=0) but not for `AsyncLLM`. On CPU a second process
# costs a second import of all modules, and a serialised copy of every request with images for each sibling, on the
# cores of the engine. The core's loop is unchanged; queues replace the sockets.

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
        """Takes requests until there is work; an idle engine waits for the end of a burst."""
        # A step costs almost the same for few and for many sequences, and requests are not read during a step. Without
        # the wait the burst would be spread over many small steps. A full step starts at once.
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
