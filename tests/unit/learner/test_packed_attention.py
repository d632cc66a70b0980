"""Attention of packed rows equals attention of padded ones."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import varlen_reference
from learner_data import image, prompt, random_groups, tiny_config
from one_learner import UNCLIPPED, Tensors, as_sampled, connected_learner, gradient_of, largest, scorer_of
from scored_rows import HOT, assert_equal, collated, family_prompts, learner_config, model_type, policy_at, scores_of
from tiny_checkpoints import write_text_policy
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.cluster.records.trajectory import MediaSpan, ScoredGroup
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.preflight.checks import check_attention
from mobula.learner.policies.attention import packed as attention
from mobula.learner.policies.attention.packed import RowBounds, RowKeys, RowPacking, packed_attention
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl

LENGTHS = (3, 7, 1, 12)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The windows of the kernel's calls, which plain arithmetic answers."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_reference.varlen_attn)
    monkeypatch.setattr(attention, "_has_kernel", lambda device: True)
    varlen_reference.calls.clear()
    return varlen_reference.calls


class Attention(nn.Module):
    """What transformers' functions read of the module that calls them."""

    num_key_value_groups = 2
    is_causal = True


def heads(
    dtype: torch.dtype = torch.bfloat16,
    width: int = 16,
    value_width: int | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> list[Tensor]:
    """Queries of four heads, keys and values of two."""
    generator, num = torch.Generator().manual_seed(0), sum(lengths)
    shapes = ((4, width), (2, width), (2, value_width or width))
    return [torch.randn(1, count, num, size, generator=generator).to(dtype) for count, size in shapes]


def bounds(lengths: Sequence[int] = LENGTHS) -> RowBounds:
    return RowBounds(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), tuple(lengths))


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True, sliding_window: int = 10**6) -> Tensor:
    """[1, N, heads, D], of one row."""
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    mask = (behind >= 0) & (behind < sliding_window) if is_causal else None
    return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)


def row_by_row(parts: Sequence[Tensor], lengths: Sequence[int] = LENGTHS, **options: Any) -> Tensor:
    rows = zip(*(part.float().split(list(lengths), dim=2) for part in parts), strict=True)
    return torch.cat([attend(*row, **options) for row in rows], dim=1)


def test_the_reference_takes_arguments_of_the_kernel() -> None:
    own, torchs = (inspect.signature(f).parameters for f in (varlen_reference.varlen_attn, varlen.varlen_attn))
    assert own.keys() <= torchs.keys()
    assert all(own[name].kind == torchs[name].kind for name in own)


@pytest.mark.parametrize(
    ("options", "window"),
    [({}, (-1, 0)), ({"sliding_window": 5}, (4, 0)), ({"is_causal": False}, (-1, -1))],
    ids=["causal", "window", "both directions"],
)
def test_the_kernel_keeps_rows_apart(kernel: list, options: dict, window: tuple[int, int]) -> None:
    parts = heads()
    found, _ = packed_attention(Attention(), *parts, None, row_bounds=bounds(), **options)
    assert kernel == [window]
    torch.testing.assert_close(found.float(), row_by_row(parts, **options), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_windows_without_the_kernel_are_computed_in_blocks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 2)
    parts = heads(torch.float32)
    output, _ = packed_attention(Attention(), *parts, None, row_bounds=bounds(), sliding_window=window)
    torch.testing.assert_close(output, row_by_row(parts, sliding_window=window))


def shared_rows() -> tuple[RowBounds, list[list[int]]]:
    """Bounds of the packed tokens of four rows, and the tokens of each: two answers of one prompt, a second turn that
    goes on from the second, and a row that shares nothing."""
    rows = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 5, 6, 9], [*range(10, 23)]]
    own, lengths = (5, 4, 1, 13), tuple(map(len, rows))
    index = torch.tensor([token for row in rows for token in row])
    keys = RowKeys(index, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), lengths)
    return RowBounds(torch.tensor([0, *own]).cumsum(0).int(), max(own), own, keys=keys), rows


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_that_share_tokens_are_rows_alone(
    by_kernel: bool, window: int | None, kernel: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, with masks of several blocks."""
    monkeypatch.setattr(attention, "HALF", (torch.float32,) if by_kernel else ())
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 2)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 3)
    bounds, rows = shared_rows()
    one, other = ([part.requires_grad_() for part in heads(torch.float32)] for _ in range(2))
    output, _ = packed_attention(Attention(), *one, None, row_bounds=bounds, sliding_window=window)
    expected = torch.zeros_like(output)
    for row in rows:
        alone = attend(*(part[:, :, row] for part in other), sliding_window=window or len(row))
        expected = expected.index_copy(1, torch.tensor(row), alone)
    torch.testing.assert_close(output, expected)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(weights)
    expected.backward(weights)
    for part, same in zip(one, other, strict=True):
        torch.testing.assert_close(part.grad, same.grad)
    assert len(kernel) == by_kernel


def test_bounds_of_towers_are_those_that_transformers_passes(kernel: list) -> None:
    parts, ends = heads(), bounds().ends.long()
    own = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    found, _ = packed_attention(Attention(), *parts, None, is_causal=False, **own)
    torch.testing.assert_close(found.float(), row_by_row(parts, is_causal=False), atol=2e-2, rtol=2e-2)
    assert kernel == [(-1, -1)]


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (heads(torch.float32), {}),
        (heads(width=12), {}),
        (heads(width=264), {}),
        (heads(value_width=8), {}),
        (heads(), {"dropout": 1e-9}),
    ],
    ids=["float32", "width 12", "width 264", "other width of values", "dropout"],
)
def test_the_rest_is_computed_row_by_row(kernel: list, parts: list[Tensor], options: dict) -> None:
    found, _ = packed_attention(Attention(), *parts, None, row_bounds=bounds(), **options)
    torch.testing.assert_close(found.float(), row_by_row(parts), atol=2e-2, rtol=2e-2)
    assert kernel == []


def test_devices_without_the_kernel_compute_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attention.kernel_takes(*heads())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not attention._has_kernel(torch.device("cuda", 6))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention._has_kernel(torch.device("cuda", 7))


def test_the_kernel_gets_the_type_of_autocast(kernel: list) -> None:
    """Position embeddings leave queries and keys in float32, which the kernel does not take."""
    query, key, value = heads(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = packed_attention(Attention(), query, key, value.bfloat16(), None, row_bounds=bounds())
    assert kernel == [(-1, 0)] and found.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}])
def test_caps_and_sinks_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"Attention caps .* set policy\.attention=eager and learner\.packing=false"):
        packed_attention(Attention(), *heads(), None, row_bounds=bounds(), **options)


@pytest.mark.parametrize(
    "name",
    ["qwen2.5-vl", *(pytest.param(n, marks=[pytest.mark.exhaustive]) for n in ("qwen2-vl", "qwen3-vl", "glm4v"))],
)
def test_towers_compute_windows_as_transformers_does(tmp_path: Path, kernel: list, name: str, monkeypatch) -> None:
    """By the kernel in one call a block and by rows; transformers calls its attention once for each window."""
    folder = write_tiny(name, tmp_path / "model", seed=0)
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    own = load_model(str(folder), torch.float32, "sdpa").eval()
    assert own.config.vision_config._attn_implementation == attention.PACKED
    assert own.get_decoder().config._attn_implementation == "sdpa"
    vision = plain.config.vision_config
    frames = [[1, 4, 4], [1, 4, 4]] if name == "glm4v" else [[2, 4, 4]]  # its tower takes a video frame by frame
    grid = torch.tensor([[1, 8, 12], *frames])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.model.visual(pixels, grid_thw=grid).pooler_output
        torch.testing.assert_close(own.model.visual(pixels, grid_thw=grid).pooler_output, expected)
        assert kernel == [], "float32"
        monkeypatch.setattr(attention, "HALF", (torch.float32,))
        torch.testing.assert_close(own.model.visual(pixels, grid_thw=grid).pooler_output, expected)
    assert kernel == [(-1, -1)] * len(own.model.visual.blocks)


@pytest.mark.parametrize("version", [2, 3])
def test_attention_of_a_package_that_is_missing_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda package: None)
    name = f"flash_attention_{version}"
    with pytest.raises(ValueError, match=rf"policy\.attention={name} needs the package flash_attn.*set policy\.att"):
        load_model("nowhere", torch.bfloat16, name)
    gpu = ["experiment=digits", "resources=two_gpu", f"policy.attention={name}"]
    [finding] = check_attention(load_config(gpu), None)
    assert str(finding).startswith(f"policy.attention={name} needs the package flash_attn")
    assert not list(check_attention(load_config(gpu[:2]), None))
    with pytest.raises(ConfigError, match=rf"{name} needs resources\.device=cuda"):
        load_config(["experiment=digits", f"policy.attention={name}"])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"is_causal": False}], ids=str)
def test_equal_rows_that_follow_one_another_are_computed_in_one_call(
    monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    """Without the kernel; longer rows are computed one by one."""
    lengths, calls = (9, 9, 9, 4, 9, 200, 200), []

    def counted(query: Tensor, *args, **more) -> Tensor:
        calls.append(query.shape[0])
        return scaled_dot_product_attention(query, *args, **more)

    parts = heads(torch.float32, lengths=lengths)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    found, _ = packed_attention(Attention(), *parts, None, row_bounds=bounds(lengths), **options)
    assert calls[:3] == [3, 1, 1] and set(calls[3:]) == {1}
    torch.testing.assert_close(found, row_by_row(parts, lengths, **options), atol=1e-6, rtol=1e-6)


PACKED, PADDED = "learner.packing=true", "learner.packing=false"
VISION = "qwen2.5-vl"
# Text alone, and families whose images or layers packing refuses.
UNPACKED = ("qwen3", "qwen2.5", "llama", "gemma3", "qwen3.5")
# gemma3_text has a layer with a window of 16 tokens, which is shorter than the rows.
FAMILIES = (VISION, "gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    return write_tiny_qwen2_5_vl(at) if request.param == VISION else write_text_policy(at, request.param)


@pytest.fixture
def rows(folder: Path) -> list[TokenSequence]:
    """Rows of very different lengths; of a vision model some have one image, two, or one that a sibling has too."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    shown = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)], [image(1)], []]
    sees = "vl" in model_type(folder)
    prompts = [prompt(tokenizer, f"p{n}", some if sees else []) for n, some in enumerate(shown)]
    sizes = (3, 1, 40, 12, 2)
    return [TokenSequence.of_response(p, rng.integers(0, 250, n)) for p, n in zip(prompts, sizes, strict=True)]


def test_packed_rows_are_padded_rows_are_single_rows(folder: Path, rows) -> None:
    packed, padded = scores_of(folder, [rows], PACKED), scores_of(folder, [rows], PADDED)
    assert_equal(packed, padded)
    assert_equal(packed, scores_of(folder, [[row] for row in rows], PADDED))
    assert_equal(packed, scores_of(folder, [rows[:2], rows[2:]], PACKED))
    assert max(gradient.abs().max() for gradient in packed[1].values()) > 0.01


def test_the_kernel_for_rows_gives_what_padded_rows_give(folder: Path, rows, kernel: list, monkeypatch) -> None:
    """Decoder and vision tower; plain arithmetic stands in for the kernel, and float32 for the types that it takes."""
    padded = scores_of(folder, [rows], PADDED)
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    assert_equal(scores_of(folder, [rows], PACKED), padded, atol=1e-5)
    windows = {"qwen2_5_vl": {(-1, 0), (-1, -1)}, "gemma3_text": {(15, 0)}, "mistral": {(4095, 0)}}
    assert set(kernel) == windows.get(model_type(folder), {(-1, 0)})


@pytest.mark.exhaustive
@pytest.mark.families
@pytest.mark.parametrize("name", [name for name in TINY if name not in UNPACKED])
def test_every_family_with_images_computes_packed_rows_as_padded_ones(tmp_path: Path, name: str) -> None:
    at = write_tiny(name, tmp_path / name, seed=1)
    asked = family_prompts(at, tmp_path).cases.values()
    rows = [TokenSequence.of_response(case.prompt, np.arange(20, 24 + n)) for n, case in enumerate(asked)]
    assert_equal(scores_of(at, [rows], PACKED), scores_of(at, [rows], PADDED))


@torch.no_grad()
def test_the_decoder_computes_tokens_and_no_padding(folder: Path, rows) -> None:
    widths = []
    for packing in (PADDED, PACKED):
        policy = policy_at(folder, packing, "learner.share_prompts=false")
        block = policy.model.get_decoder().layers[0]
        block.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[:2].numel()))
        policy(collated(rows), HOT)
    num_tokens = [row.num_tokens for row in rows]
    assert widths == [len(rows) * max(num_tokens), sum(num_tokens)]


def test_blocks_that_are_computed_again_keep_the_rows_apart(folder: Path, rows) -> None:
    policy, plain = (policy_at(folder, packing).train() for packing in (PACKED, PADDED))
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    for some in (rows, rows[:2]):  # the bounds of the first batch are not those of the second
        policy.zero_grad()
        policy(collated(some), HOT).logprobs.sum().backward()
    plain(collated(rows[:2]), HOT).logprobs.sum().backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(policy.get_parameter(name).grad, p.grad, atol=1e-5, rtol=1e-5)


def test_a_decoder_that_leaves_the_bounds_out_is_refused(folder: Path, rows) -> None:
    policy = policy_at(folder, PACKED)
    for layer in policy.model.get_decoder().layers:
        forward = layer.forward
        layer.forward = lambda *args, row_bounds=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="cannot be packed: set learner.packing=false"):
        policy(collated(rows), HOT)


def test_eager_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.attention=eager: set policy\.attention=sdpa"):
        load_config(["experiment=digits", "learner.packing=true", "policy.attention=eager"])
    model = load_model(str(write_text_policy(tmp_path, "qwen2")), torch.float32, "eager")
    with pytest.raises(ValueError, match="set policy.attention=sdpa or learner.packing=false"):
        RowPacking(model)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path / "tiny")


def gradients(folder: Path, groups: list[ScoredGroup], *overrides: str) -> Tensors:
    """Of an update, after which the learner exports its policy."""
    learner = connected_learner(tiny_config(folder, UNCLIPPED, *overrides), (250,))
    gradient, _ = gradient_of(learner, groups)
    learner.export(folder / "out")
    return gradient


def gradient_by_hand(folder: Path, groups: list[ScoredGroup], kl_coef: float) -> Tensors:
    """Of -sum A_t log p_t / number of tokens, row by row, with A_t = r - coef * sum over k >= t of KL_k."""
    policy = policy_at(folder, PADDED).train()
    num_tokens = sum(t.num_steps for scored in groups for t in scored.group.trajectories)
    for scored in groups:
        siblings = zip(scored.group.trajectories, scored.rewards, scored.reference_logprobs, strict=True)
        for t, reward, reference in siblings:
            kl_from_here = np.cumsum((t.behavior_logprobs - reference)[::-1])[::-1]
            advantages = torch.from_numpy(reward.value - kl_coef * kl_from_here)
            alone = TokenSequence.of_response(scored.group.prompt, t.actions.token_ids)
            output = policy(collated([alone]), Distribution(0.8, (250,)))
            (-(advantages * output.logprobs[0]).sum() / num_tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def test_every_response_of_a_pack_is_trained_with_its_own_reward_and_kl(tiny: Path) -> None:
    """LightRFT defect B7: the KL was not unpacked, so that of a pack's responses only the first got its reward."""
    words = ["algorithm.advantage=reinforce", "algorithm.loss_aggregation=token_mean", "algorithm.kl.coef=0.5",
             "algorithm.kl.estimator=k1", "algorithm.kl.place=reward", "resources.reference.num_workers=1"]  # fmt: skip
    rng, groups = np.random.default_rng(2), random_groups(AutoTokenizer.from_pretrained(tiny), 6, 4, longest=12)
    groups = [
        replace(g, reference_logprobs=[r - rng.normal(0, 0.5, len(r)).astype(np.float32) for r in g.reference_logprobs])
        for g in as_sampled(scorer_of(tiny_config(tiny), tiny, (250,)), groups)
    ]
    expected = gradient_by_hand(tiny, groups, 0.5)
    assert largest(expected) > 1e-3
    for packing in (PACKED, PADDED):
        for tokens in (1, 200, 100_000):  # each row alone, several together, all of them
            found = gradients(tiny, groups, packing, f"learner.tokens_per_microbatch={tokens}", *words)
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)
    assert "varlen" not in (tiny / "out" / "config.json").read_text()


def row(num_tokens: int, *images: int) -> TokenSequence:
    """Images of 16 tokens each, behind one another."""
    spans = tuple(MediaSpan(16 * n, 16 * n + 16) for n in range(len(images)))
    return TokenSequence(np.zeros(num_tokens, dtype=np.int32), 1, tuple(image(n, 8, 8) for n in images), spans)


def test_packed_microbatches_hold_tokens_up_to_the_budget() -> None:
    lengths = np.random.default_rng(1).integers(2, 60, size=37).tolist()
    rows = [TokenSequence(np.zeros(n, dtype=np.int32), 1, (), ()) for n in lengths]
    [plan] = split_microbatches(rows, learner_config("learner.packing=true", "learner.tokens_per_microbatch=100"), 1)
    sums = [sum(lengths[i] for i in batch) for batch in plan]
    assert sorted(i for batch in plan for i in batch) == list(range(37))
    assert max(sums) <= 100 and all(a + b > 100 for a, b in zip(sums, sums[1:], strict=False))


def test_ranks_share_images_and_tokens_evenly() -> None:
    """24 rows of 40 tokens: four have an image of 16 tokens each, which costs 20 tokens of the decoder a token."""
    rows = [row(40, n) if n < 4 else row(40) for n in range(24)]
    loads = {}
    for cost in (20, 0):
        plan = split_microbatches(rows, learner_config(f"learner.image_token_cost={cost}"), 2)
        loads[cost] = [sum(40 + 16 * 20 * (i < 4) for batch in share for i in batch) for share in plan]
    assert abs(loads[20][0] - loads[20][1]) <= 360, "they differ by one row at most"
    assert abs(loads[0][0] - loads[0][1]) > 360, "by tokens alone one rank has most of the images"


def test_siblings_share_what_their_image_costs() -> None:
    """Eight rows of 40 tokens and 320 / 8 for their image, and eight of 40: 960 in all, 480 are six of the first."""
    rows = [row(40, 1) for _ in range(8)] + [row(40) for _ in range(8)]
    plan = split_microbatches(rows, learner_config("learner.image_token_cost=20"), 2)
    assert [sum(i < 8 for batch in share for i in batch) for share in plan] == [6, 2]
