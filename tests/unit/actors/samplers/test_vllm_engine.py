"""How an engine of vLLM is built and stepped: arguments, bursts, log-probs, running requests."""

from __future__ import annotations

import asyncio
import itertools
import queue
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from mobula.actors.samplers.settings import RunningRequests
from mobula.actors.samplers.vllm.arguments import OutputReader, engine_args, sampling_params
from mobula.actors.samplers.vllm.patches import inproc
from mobula.actors.samplers.vllm.patches.engine import SampledLogprobs
from mobula.actors.samplers.vllm.patches.inproc import BURST_GAP_S, BURST_S, InProcessClient, ThreadedCore
from mobula.cluster.errors import RolloutError
from mobula.cluster.roles import SamplingSettings
from mobula.configs.schema.rollout import ServedAdaptersConfig
from mobula.deploy.rehearsal.simulated.machine import run_virtually

IMPORTS = """
import sys
import benchmarks.raw.raw_vllm, mobula.actors.samplers.vllm.arguments
print(*sorted(name for name in sys.modules if name.startswith("mobula.actors.samplers.vllm")))
"""


def test_asking_for_arguments_brings_nothing_that_changes_vllm() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["mobula.actors.samplers.vllm", "mobula.actors.samplers.vllm.arguments"]


@pytest.mark.parametrize("temperature", [0.0, 0.001, 0.009, 0.01, 1.0, 2.0, 30.0])
def test_an_engine_samples_at_the_temperature_that_the_learner_divides_by(temperature: float) -> None:
    """vLLM itself raises temperatures below 0.01 and refuses those above 2."""
    engine = SimpleNamespace(chunk_tokens=16, banned_ids=(5,), stop_ids=(1,))
    params = sampling_params(engine, SamplingSettings(1, temperature, 8, seed=0))
    assert params.temperature == temperature


def test_stop_strings_may_be_special_tokens() -> None:
    engine = SimpleNamespace(chunk_tokens=16, banned_ids=(), stop_ids=(1,))
    params = sampling_params(engine, SamplingSettings(1, 1.0, 8, seed=0, stop_strings=("</answer>",)))
    assert (params.detokenize, params.skip_special_tokens) == (True, False)


@pytest.mark.parametrize(("device", "overrides"), [("cuda", {"head_dtype": "float32"}), ("cpu", {})])
def test_logits_of_an_engine_have_the_dtype_of_the_learners(device: str, overrides: dict[str, str]) -> None:
    lengths = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": 16}
    media = {f"max_{kind}_per_prompt": 0 for kind in ("images", "videos", "audios")}
    settings = SimpleNamespace(
        model="model", dtype="bfloat16", device=device, seed=0, tensor_parallel=1, kv_cache_bytes=1 << 20,
        memory_fraction=0.3, memory_bytes=0, enforce_eager=True, sleep_level=0, served=ServedAdaptersConfig(),
        **lengths, **media,
    )  # fmt: skip
    assert engine_args(settings).hf_overrides == overrides


LONG_AGO_S = 10.0


class Burst(ThreadedCore):
    """Requests come at `times` while the core sleeps; `taken` is what it has taken in when it goes on to a step."""

    def __init__(self, times: list[float], *, max_num_seqs: int = 1_000, is_busy: bool = False) -> None:
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engines_running = is_busy
        self.batch_queue = None
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.taken), get_num_unfinished_requests=lambda: len(self.taken)
        )
        self.taken: list[float] = []
        self.now = 0.0
        self._times = list(times)
        self.sleep(0.0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._times and self._times[0] <= self.now:
            self.last_came = self._times.pop(0)
            self.input_queue.put(("request", self.last_came))

    def _notify_idle_state_callbacks(self) -> None:
        """No caller waits for an idle engine here."""

    def _handle_client_request(self, kind: str, request: float) -> None:
        self.taken.append(request)

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        monkeypatch.setattr(inproc, "time", self)
        self._process_input_queue()
        return self.taken


def test_requests_that_follow_each_other_closely_are_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [n * BURST_GAP_S * 0.9 for n in range(5)]
    burst = Burst([*times, times[-1] + 2 * BURST_GAP_S])
    assert burst.begin(monkeypatch) == times
    assert burst.now == pytest.approx(times[-1] + BURST_GAP_S)


def test_a_burst_that_is_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a push: what came while the engine stood still is all there."""
    burst = Burst([-LONG_AGO_S, -LONG_AGO_S, -BURST_GAP_S])
    assert len(burst.begin(monkeypatch)) == 3 and burst.now == 0.0


def test_a_burst_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    burst = Burst([n * BURST_GAP_S / 2 for n in range(1_000)])
    burst.begin(monkeypatch)
    assert burst.now == pytest.approx(BURST_S)


def test_a_full_step_and_a_busy_engine_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Burst([0.0, 0.0, BURST_GAP_S / 2], max_num_seqs=2)
    assert full.begin(monkeypatch) == [0.0, 0.0] and full.now == 0.0
    busy = Burst([0.0, BURST_GAP_S / 2], is_busy=True)
    assert busy.begin(monkeypatch) == [0.0] and busy.now == 0.0


def test_a_request_that_is_on_its_way_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arriving(Burst):
        """The one request that is known of comes at `comes_at`."""

        def __init__(self, times: list[float], comes_at: float) -> None:
            self._comes_at = comes_at
            super().__init__(times)

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.num_coming = int(self.now < self._comes_at)

    late = 5 * BURST_GAP_S
    burst = Arriving([0.0, late], comes_at=late)
    assert burst.begin(monkeypatch) == [0.0, late]
    assert burst.now == pytest.approx(late + BURST_GAP_S)
    never = Arriving([0.0], comes_at=2 * BURST_S)
    assert never.begin(monkeypatch) == [0.0] and never.now == pytest.approx(BURST_S)


def test_what_is_coming_counts_until_it_is_there_or_given_up() -> None:
    client = object.__new__(InProcessClient)
    client._core = core = SimpleNamespace(num_coming=0, last_came=0.0)
    with client.coming():
        with client.coming(), pytest.raises(OSError, match="unreadable"), client.coming():
            assert core.num_coming == 3
            raise OSError("unreadable")
        assert core.num_coming == 1
    assert core.num_coming == 0 and core.last_came > 0.0, "it is about to be added: the gap begins now"


def request(**params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(flat_logprobs=True, detokenize=False, **params))


def step(logprobs: np.ndarray) -> Any:
    """What the engine's core returns for one step; the first column is of the sampled tokens."""
    ids = np.arange(logprobs.size, dtype=np.int32).reshape(logprobs.shape)
    lists = LogprobsLists(ids, logprobs, np.ones(len(logprobs), dtype=np.int32))
    return SimpleNamespace(new_logprobs=lists, new_prompt_logprobs_tensors=None, prompt_token_id_logprobs=None)


def test_they_are_the_ones_that_vllm_keeps_of_any_stretch() -> None:
    rng = np.random.default_rng(0)
    ours = SampledLogprobs.from_new_request(None, request(logprobs=0))
    theirs = LogprobsProcessor.from_new_request(None, request(logprobs=0))
    for num_tokens in (1, 1, 3, 1, 2):  # more than one where the engine drafts tokens
        sampled = rng.standard_normal((num_tokens, 1)).astype(np.float32)
        for processor in (ours, theirs):
            processor.update_from_output(step(sampled))
        assert ours.logprobs == theirs.logprobs.logprobs
        assert ours.logprobs[-num_tokens:] == theirs.logprobs[-num_tokens:].logprobs
    assert len(ours.logprobs) == 8
    ours.update_from_output(SimpleNamespace(new_logprobs=None))
    assert len(ours.logprobs) == 8


@pytest.mark.parametrize(
    ("tokenizer", "params"),
    [
        (None, {"logprobs": 2}),
        (None, {"logprobs": None}),
        (None, {"logprobs": 0, "prompt_logprobs": 0}),
        (object(), {"logprobs": 0}),
    ],
)
def test_requests_for_more_get_vllms_own(tokenizer: Any, params: dict[str, Any]) -> None:
    assert type(SampledLogprobs.from_new_request(tokenizer, request(**params))) is LogprobsProcessor


def kept_by_vllm(rows: list[list[float]]) -> FlatLogprobs:
    """What vLLM makes of steps whose first column is the sampled token and the others fall."""
    found = FlatLogprobs()
    for n, row in enumerate(rows):
        found.append_fast([100 + n, *range(10, 9 + len(row))], row, itertools.repeat(1), itertools.repeat(None))
    return found


def completion(logprobs: FlatLogprobs | None) -> Any:
    spans = [SimpleNamespace(version="3", start=0, end=2)]
    own = {"index": 0, "token_ids": [100, 101], "finish_reason": "stop", "stop_reason": None}
    return SimpleNamespace(outputs=[SimpleNamespace(**own, logprobs=logprobs, weight_versions=spans)])


def test_kept_sets_are_the_tokens_of_finite_log_prob() -> None:
    gone = float("-inf")
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    found = kept_by_vllm([[-0.7, -0.1, -0.7, gone], [-0.2, -0.2, gone, gone]])
    [(_, piece)] = reader.read(completion(found))
    assert piece.logprobs.tolist() == pytest.approx([-0.7, -0.2])
    assert (piece.actions.kept.counts.tolist(), piece.actions.kept.ids.tolist()) == ([2, 1], [10, 11, 10])


def test_a_set_that_may_be_larger_than_what_is_reported_is_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    with pytest.raises(RolloutError, match="more than the 2 tokens that it reports.*lower sampler.top_k"):
        list(reader.read(completion(kept_by_vllm([[-0.7, -0.1, -0.7], [-0.2, -0.2, -3.0]]))))


def test_tokens_without_log_probs_are_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=False)
    with pytest.raises(RolloutError, match="2 tokens but 0 log-probs"):
        list(reader.read(completion(None)))


def test_a_request_that_is_not_flat_gets_vllms_own() -> None:
    params = SamplingParams(logprobs=0, detokenize=False)
    found = SampledLogprobs.from_new_request(None, SimpleNamespace(sampling_params=params))
    assert type(found) is LogprobsProcessor


async def end_of_a_wait(ends_s: tuple[float, ...], timeout_s: float) -> float:
    """When a wait of at most `timeout_s` ends that begins at 0, with requests that end at `ends_s`."""
    in_flight = RunningRequests()

    async def request(end_s: float) -> None:
        with in_flight.one_more():
            await asyncio.sleep(end_s)

    requests = [asyncio.create_task(request(end_s)) for end_s in ends_s]
    await asyncio.sleep(0)
    await in_flight.drained(timeout_s)
    ended_s = asyncio.get_running_loop().time()
    await asyncio.gather(*requests)
    return ended_s


@pytest.mark.parametrize(
    ("ends_s", "ended_s"), [((), 0.0), ((0.01,), 0.01), ((0.03, 0.01), 0.03), ((0.01, 9.0), 0.05)], ids=str
)
def test_a_wait_ends_with_the_last_request_or_in_its_time(ends_s: tuple[float, ...], ended_s: float) -> None:
    assert run_virtually(end_of_a_wait(ends_s, timeout_s=0.05)) == pytest.approx(ended_s)


async def test_a_request_that_fails_is_no_longer_there() -> None:
    in_flight = RunningRequests()
    with pytest.raises(ValueError, match="broken off"), in_flight.one_more():
        raise ValueError("broken off")
    await asyncio.wait_for(in_flight.drained(60), 1)
