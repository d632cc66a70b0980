"""Memory of activations, and the sizes of engines that follow from the memory of their GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from docs.generate.scaling_guide import GPU_GB, LONG, ROWS, models, shape_of
from scored_rows import kept_bytes
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM
from vllm import AsyncEngineArgs
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

from mobula.actors.samplers.vllm import arguments
from mobula.cluster.errors import PreflightError
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.activations import (
    Microbatch,
    logits_bytes,
    media_patches,
    refuse_small_cache,
    sequence_bytes,
    training_bytes,
)
from mobula.deploy.planning.clusters import PlannedNode, described_nodes
from mobula.deploy.planning.memory import CONTEXT, KV_CACHE, SAMPLING, SYNC, TRAINING, USABLE, worker_memory
from mobula.deploy.planning.plan_command import GIB, EngineSizes, MemoryPlan, plan_memory
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.head import Distribution, token_logprobs
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.pretrained import smollm2_config
from mobula.learner.policies.shapes import ModelShape, shape_of_config, tiny_shape
from mobula.learner.policies.tiny import TINY

TOLERANCE = 0.15
TOKENS = 256


def config(dtype: str, *words: str) -> RunConfig:
    words = words or ("learner.activation_checkpointing=none",)
    return load_config(["experiment=own", "resources=gpu_1", *words, f"resources.dtype={dtype}"], is_complete=False)


def vision_model() -> Qwen2_5_VLForConditionalGeneration:
    tiny = TINY["qwen2.5-vl"]
    found = tiny.new_config(tiny.new_tokenizer())
    text, vision = found.text_config, found.vision_config
    text.hidden_size, text.intermediate_size, text.num_attention_heads = 128, 384, 4
    vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.depth = 128, 384, 4, 6
    vision.out_hidden_size = 128
    return Qwen2_5_VLForConditionalGeneration(found)


def text_model() -> Qwen3ForCausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=100))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [text_model, vision_model])
def test_blocks_of_the_language_model_keep_what_is_estimated(build: Callable[[], torch.nn.Module], dtype: str) -> None:
    model = build().to(getattr(torch, dtype))
    hidden = model.config.get_text_config().hidden_size
    embeds = torch.randn(1, TOKENS, hidden, dtype=getattr(torch, dtype), requires_grad=True)
    decoder = model.get_decoder()
    measured = kept_bytes(lambda: decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state, model.parameters())
    shape = shape_of_config(model.config)
    width = 2 * (shape.text.hidden + shape.text.intermediate) * getattr(torch, dtype).itemsize
    estimated = training_bytes(config(dtype), shape, Microbatch(1, TOKENS, TOKENS, 0))[0] - TOKENS * width
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_the_vision_tower_keep_what_is_estimated(dtype: str) -> None:
    model = vision_model().to(getattr(torch, dtype))
    pixels = torch.randn(256, 1176, dtype=getattr(torch, dtype), requires_grad=True)
    grid = torch.tensor([[1, 16, 16]])
    features = model.model.get_image_features
    measured = kept_bytes(lambda: features(pixels, grid, return_dict=True).pooler_output, model.parameters())
    shape = shape_of_config(model.config)
    width = 2 * (shape.vision.hidden + shape.vision.intermediate) * getattr(torch, dtype).itemsize
    estimated = training_bytes(config(dtype), shape, Microbatch(1, 0, 0, 256))[0] - 256 * width
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def test_log_probs_take_what_is_estimated_at_their_peak() -> None:
    """Bytes allocated by one call, counted operation by operation with the profiler."""
    rows, vocab = 128, 2048
    shape = replace(shape_of_config(text_model().config), vocab=vocab)
    hidden, head = torch.randn(rows, 64), torch.randn(vocab, 64, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)

    def forward() -> torch.Tensor:
        logits = hidden @ head.T  # held while log-probs are computed, as TokenPolicy does
        return token_logprobs(logits, targets, Distribution(0.7, (1, 2))).logprobs

    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        forward()
    now = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert logits_bytes(config("float32"), shape, rows) == pytest.approx(peak, rel=TOLERANCE)


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    shape = shape_of_config(text_model().config)
    batch = Microbatch(1, TOKENS, TOKENS, 0)
    with_blocks = config("float32", "learner.activation_checkpointing=blocks")
    assert training_bytes(with_blocks, shape, batch)[0] < training_bytes(config("float32"), shape, batch)[0] / 2


def test_the_largest_microbatch_shares_images_between_siblings() -> None:
    shape = shape_of_config(vision_model().config)
    run = config("float32", "learner.share_prompts=false", "learner.tokens_per_microbatch=30720")
    found = Microbatch.of(run, shape)
    assert (found.rows, found.tokens, found.targets) == (10, 30720, 10240)
    assert found.patches == 2 * 2 * 3072  # two groups of eight siblings, two images of 768 tokens each


SHARED = ("learner.packing=true", "learner.share_prompts=true", "learner.tokens_per_microbatch=30720")


def test_the_largest_microbatch_has_each_prompt_once() -> None:
    """A group of eight responses of 1,024 tokens and a prompt of 2,048 takes 10,240 tokens."""
    shape = shape_of_config(vision_model().config)
    found = Microbatch.of(config("float32", *SHARED), shape)
    assert (found.rows, found.tokens, found.targets) == (24, 30720, 30720)
    assert found.patches == 15 * 2 * 3072, "responses of a few tokens leave space for 15 prompts"


def test_no_microbatch_of_shared_prompts_is_larger_than_estimated() -> None:
    shape, rng = shape_of_config(vision_model().config), np.random.default_rng(0)
    run = config("float32", *SHARED)
    largest = Microbatch.of(run, shape)
    for longest in (4, 64, 1024):
        lengths = [(int(rng.integers(1700, 2048)), rng.integers(1, longest + 1, 8).tolist()) for _ in range(40)]
        rows = [(n, RowOutline(own, prompt, (own,), 0, ())) for n, (prompt, owns) in enumerate(lengths) for own in owns]
        groups = [n for n, _ in rows]
        [plan] = split_microbatches([row for _, row in rows], run.learner, 1, groups)
        for batch in plan:
            prompts = {groups[i] for i in batch}
            own = sum(rows[i][1].num_targets for i in batch)
            assert own <= largest.targets and own + sum(lengths[n][0] for n in prompts) <= largest.tokens
            assert len(prompts) <= largest.patches // media_patches(run, shape) + 2, "prompts are up to a sixth shorter"


SMALL_MODELS = ("Qwen3 0.6B", "Qwen2.5-VL 3B")
CASES = [
    pytest.param(row, model, marks=() if model in SMALL_MODELS else pytest.mark.exhaustive)
    for row in (*ROWS, ("gpu_1", 1, 1))
    for model in models()
]
VLLM_DEFAULT = AsyncEngineArgs.gpu_memory_utilization


@cache
def engine_config(*words: str) -> RunConfig:
    base = ["experiment=own", *words]
    plain = load_config(base, is_complete=False)
    longest = plain.data.max_prompt_tokens + plain.sampler.max_tokens
    return load_config([*base, f"learner.tokens_per_microbatch={longest}"], is_complete=False)


def planned(row: tuple[str, int, int], shape: ModelShape, *words: str) -> tuple[int, RunConfig, MemoryPlan] | None:
    """With the smallest GPU that holds it: its bytes, the configuration and the plan."""
    preset, num_nodes, num_gpus = row
    counted = [f"resources.num_nodes={num_nodes}"] if preset.startswith("multi_node") else []
    found = engine_config(f"resources={preset}", *counted, *words)
    for size in GPU_GB:
        plan = plan_memory(found, shape, described_nodes(f"{num_nodes}x{num_gpus}x{size}GB"))
        if not plan.shortfalls:
            return size * 10**9, found, plan
    return None


def started(total: int, free: int, share: float) -> int:
    """What vLLM asks for when an engine starts on a GPU with these bytes; it refuses with a ValueError."""
    snapshot = MemorySnapshot(total_memory=total, free_memory=free, device="cpu", auto_measure=False)
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))  # type: ignore[arg-type]


def share_of(monkeypatch: pytest.MonkeyPatch, total: int, sizes: EngineSizes, fraction: float = 0.0) -> float:
    """The share that an engine of these sizes asks of a GPU with so many bytes."""
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(get_device_total_memory=lambda: total))
    sampler = SimpleNamespace(vllm=SimpleNamespace(gpu_memory_fraction=fraction))
    settings = SimpleNamespace(device="cuda", memory_bytes=sizes.memory_bytes, sampler=sampler)
    return arguments._memory_share(settings)  # type: ignore[arg-type]


def others(plan: MemoryPlan, total: int) -> int:
    """The most that other roles of an engine's GPUs hold while an engine may start: in every phase but, in turns, the
    learner's."""
    engine, most = plan.by_role["rollout"], 0
    for node, gpu in {(worker.node_id, gpu) for worker in plan.placement.of_role("rollout") for gpu in worker.gpus}:
        beside = [w for w in plan.placement.workers if w.role != "rollout" and w.node_id == node and gpu in w.gpus]
        here = [plan.by_role[worker.role] for worker in beside]
        phases = {phase for memory in here for phase in memory.device}
        startable = [phase for phase in phases if KV_CACHE in engine.device.get(phase, {KV_CACHE: 0})]
        most = max(most, max((sum(m.in_phase(phase, total) for m in here) for phase in startable), default=0))
    return most


@pytest.mark.parametrize(("row", "model"), CASES)
def test_an_engine_starts_and_restarts_with_its_share_beside_the_other_roles(
    row: tuple[str, int, int], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(row, shape_of(model))
    if found is None:
        pytest.skip("no GPU of docs/scaling.md holds it")
    total, _, plan = found
    assert plan.engine.memory_bytes > 0
    free = total - others(plan, total) - plan.by_role["rollout"].context
    asked = started(total, free, share_of(monkeypatch, total, plan.engine))
    assert asked == pytest.approx(plan.engine.memory_bytes, abs=2)
    if others(plan, total) > 0.08 * total:
        with pytest.raises(ValueError, match="Free memory on device"):
            started(total, free, VLLM_DEFAULT)


def test_the_cache_takes_what_the_plan_leaves() -> None:
    shape = shape_of("Qwen2.5-VL 3B")
    words = ("resources=gpu_1", "policy.lora.rank=16")
    small, large = (plan_memory(engine_config(*words), shape, described_nodes(f"1x1x{size}GB")) for size in (48, 80))
    assert large.engine.kv_cache_bytes > small.engine.kv_cache_bytes > 0
    gpu = next(demand for demand in large.demands if demand.place == "GPU 0")
    assert 0.94 * 80e9 < gpu.num_bytes <= USABLE * 80e9, "nothing is left over, and no more is taken"
    fixed = engine_config(*words, "sampler.vllm.kv_cache_bytes=4294967296", "sampler.vllm.max_num_seqs=7")
    engine = plan_memory(fixed, shape, described_nodes("1x1x80GB")).engine
    assert (engine.kv_cache_bytes, engine.num_seqs) == (4 * GIB, 7)


def test_sequences_are_those_that_the_cache_holds_and_the_run_asks_for() -> None:
    shape = shape_of("Qwen3 0.6B")
    words = ("resources=gpu_1", *LONG, "learner=single")
    engine = plan_memory(engine_config(*words), shape, described_nodes("1x1x48GB")).engine
    sequence = sequence_bytes(engine_config(*words), shape, 12288)
    assert engine.num_seqs == engine.kv_cache_bytes // sequence
    few = engine_config("resources=gpu_1", "algorithm.max_concurrent_groups=2")
    found = plan_memory(few, shape, described_nodes("1x1x80GB"))
    assert found.engine.num_seqs == 2 * 8, "no more responses are under way"


def test_an_engine_with_gpus_to_itself_lets_vllm_measure_its_step() -> None:
    shape, nodes = shape_of("Qwen2.5-VL 3B"), described_nodes("1x2x141GB")
    alone = plan_memory(engine_config("resources=two_gpu"), shape, nodes).engine
    assert (alone.kv_cache_bytes, alone.memory_bytes > 100e9) == (0, True)
    fixed = engine_config("resources=two_gpu", "sampler.vllm.kv_cache_bytes=4294967296")
    assert plan_memory(fixed, shape, nodes).engine.kv_cache_bytes == 4 * GIB


def test_a_fraction_of_the_users_bounds_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of("Qwen2.5-VL 3B")
    words = ("resources=gpu_1", "policy.lora.rank=16", "sampler.vllm.gpu_memory_fraction=0.3")
    engine = plan_memory(engine_config(*words), shape, described_nodes("1x1x80GB")).engine
    assert engine.memory_bytes <= 0.3 * 80e9
    assert share_of(monkeypatch, 80 * 10**9, engine, fraction=0.3) == 0.3


def test_a_cache_that_does_not_fit_is_a_shortfall_of_the_plan() -> None:
    shape = shape_of("Qwen2.5-VL 3B")
    plan = plan_memory(engine_config("resources=gpu_1"), shape, described_nodes("1x1x24GB"))
    assert [demand.place for demand in plan.shortfalls] == ["GPU 0"]
    least = 8 * sequence_bytes(engine_config("resources=gpu_1"), shape, 3072)
    assert plan.by_role["rollout"].largest[KV_CACHE] == least, "the siblings of one prompt"


def test_engines_in_turns_hold_their_cache_beside_the_policy_only_where_one_joins_late() -> None:
    found = engine_config("resources=one_gpu_colocated", "sampler.vllm.kv_cache_bytes=4294967296")
    engine = worker_memory(found, shape_of("Qwen3 0.6B"), "rollout")
    assert [engine.device[phase].get(KV_CACHE, 0) for phase in (TRAINING, SYNC, SAMPLING)] == [0, 0, 4 * GIB]
    assert "joining" not in engine.device and worker_memory(found, shape_of("Qwen3 0.6B"), "learner").device["joining"]
    assert engine.context == engine.device[TRAINING][CONTEXT]


def test_memory_that_is_not_known_is_asked_for() -> None:
    nodes = [replace(node, gpu_bytes=None) for node in described_nodes("1x2x80GB")]
    with pytest.raises(PreflightError, match="set it and sampler.vllm.max_num_seqs"):
        plan_memory(engine_config("resources=two_gpu"), shape_of("Qwen3 0.6B"), nodes)
    given = engine_config("resources=two_gpu", "sampler.vllm.kv_cache_bytes=4294967296", "sampler.vllm.max_num_seqs=8")
    assert plan_memory(given, shape_of("Qwen3 0.6B"), nodes).shortfalls == ()


@pytest.mark.parametrize("key", ["kv_cache_bytes", "max_num_seqs"])
def test_a_cpu_has_no_sizes_to_follow_from(key: str) -> None:
    with pytest.raises(ConfigError, match=f"sampler.vllm.{key}=0 follows from the memory of a GPU"):
        load_config(["experiment=digits", f"sampler.vllm.{key}=0"])


SERVICE = (
    "resources.reward_services.judge={num_workers: 1, num_cpus: 1, num_gpus: 0.3, num_threads: 1, bind_cores: false, "
    "first_core: 0, custom_resources: {}, node_labels: {}, strategy: auto}"
)


def judge(engine: str) -> str:
    return (
        "rewards.components=[{name: accuracy, function: vllm_judge, weight: 1.0, service: judge, "
        "options: {engine: " + engine + "}}]"
    )


@pytest.mark.parametrize(("engine", "share"), [("{}", 0.3), ("{gpu_memory_utilization: 0.5}", 0.5)])
def test_a_judge_is_planned_with_its_share_of_the_gpu(engine: str, share: float) -> None:
    found = engine_config("resources=two_gpu", "resources.learner.num_gpus=0.7", SERVICE, judge(engine))
    nodes: tuple[PlannedNode, ...] = described_nodes("1x2x80GB")
    plan = plan_memory(found, shape_of("Qwen3 0.6B"), nodes)
    worker = plan.placement.of_role("reward.judge")[0]
    learner = plan.by_role["learner"]
    demand = next(d for d in plan.demands if d.place == f"GPU {worker.gpus[0]}")
    assert demand.num_bytes == pytest.approx(learner.peak + share * 80e9)


MIB = 2**20


def kv_config(*words: str) -> RunConfig:
    return load_config(["experiment=own", "policy.model=some", "data.path=none", *words])


def test_a_sequence_takes_its_blocks_in_every_layer_and_one_block_more() -> None:
    """3,072 tokens x 30 layers x keys and values of 3 heads x 64 x 4 bytes, and 32 tokens that vLLM sets apart."""
    shape = shape_of_config(smollm2_config())
    assert sequence_bytes(kv_config(), shape, 3072) == (3072 + 32) * 30 * 2 * 3 * 64 * 4 == 143_032_320
    assert sequence_bytes(kv_config("resources=two_gpu"), shape, 3072) == 143_032_320 / 2, "bfloat16"
    assert sequence_bytes(kv_config(), shape, 3073) == (3104 + 32) * 46_080


def test_windowed_layers_keep_their_window_and_the_tokens_of_a_step() -> None:
    shape = tiny_shape("gemma3", tie_word_embeddings=False)
    assert (shape.cache.num_full + shape.cache.num_windowed, shape.cache.num_states) == (shape.text.num_layers, 0)
    token = 4 * shape.cache.width
    windowed = -(-(shape.cache.window + 4096) // 32) * 32
    kinds = [n for n in (shape.cache.num_full, shape.cache.num_windowed) if n]
    expected = shape.cache.num_full * 131072 + shape.cache.num_windowed * windowed + min(kinds) * 32
    assert sequence_bytes(kv_config("sampler.vllm.max_num_batched_tokens=4096"), shape, 131072) == expected * token


def test_layers_with_a_state_keep_one_and_make_blocks_as_long_as_it() -> None:
    """Three states of the tiny Qwen3.5: 3 x (2 x 256 + 512) inputs and 4 heads of 128 x 128; two heads of 64 attend."""
    cache = tiny_shape("qwen3.5", tie_word_embeddings=False).cache
    assert (cache.num_full, cache.num_windowed, cache.num_states) == (1, 0, 3)
    assert cache.state_width == 3 * (2 * 256 + 512) + 4 * 128 * 128 == 68_608
    block = -(-68_608 // (32 * cache.width)) * 32
    tokens = -(-3072 // block) * block + 3 * block + block
    shape = tiny_shape("qwen3.5", tie_word_embeddings=False)
    assert sequence_bytes(kv_config(), shape, 3072) == tokens * cache.width * 4


@pytest.mark.parametrize("name", TINY)
def test_every_family_has_a_cache(name: str) -> None:
    shape = tiny_shape(name, tie_word_embeddings=False)
    cache = shape.cache
    assert cache.num_full + cache.num_windowed + cache.num_states == shape.text.num_layers
    assert cache.width == 2 * shape.text.num_kv_heads * shape.text.head_dim


def test_a_cache_that_holds_no_sequence_is_refused_by_the_keys_that_matter() -> None:
    shape: ModelShape = shape_of_config(smollm2_config())
    long = ("sampler.max_model_len=3072", "sampler.max_tokens=1024")
    refuse_small_cache(kv_config("sampler.vllm.kv_cache_bytes=143032320", *long), shape)
    with pytest.raises(PreflightError) as refused:
        refuse_small_cache(kv_config(f"sampler.vllm.kv_cache_bytes={128 * MIB}", *long), shape)
    assert "set sampler.vllm.kv_cache_bytes=143032320 or more" in str(refused.value)
    assert "or sampler.max_model_len=2880 or less" in str(refused.value)
    shorter = ("sampler.max_model_len=2880", "sampler.max_tokens=1024")
    refuse_small_cache(kv_config(f"sampler.vllm.kv_cache_bytes={128 * MIB}", *shorter), shape)
    refuse_small_cache(kv_config("sampler=huggingface"), shape)
