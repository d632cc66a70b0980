"""Attention of packed rows equals attention of padded ones."""

from __future__ import annotations

import inspect
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import varlen_reference
from learner_data import image, prompt, random_groups, tiny_config, with_logprobs
from one_learner import connected_learner
from scored_rows import HOT, assert_equal, family_prompts, learner_config, scores_of
from tiny_checkpoints import write_text_policy
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import MediaSpan, ScoredGroup
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.preflight.checks import check_attention
from mobula.learner.policies.attention import packed as attention
from mobula.learner.policies.attention.packed import RowBounds, RowKeys, RowPacking, packed_attention
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy

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


def heads(dtype: torch.dtype = torch.bfloat16, width: int = 16, value_width: int | None = None) -> list[Tensor]:
    generator, num = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = ((4, width), (2, width), (2, value_width or width))
    return [torch.randn(1, count, num, size, generator=generator).to(dtype) for count, size in shapes]


def bounds() -> RowBounds:
    return RowBounds(torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS), LENGTHS)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True, window: int = 10**6) -> Tensor:
    parts = zip(*(part.float().split(LENGTHS, dim=2) for part in (query, key, value)), strict=True)
    rows = []
    for q, k, v in parts:
        behind = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        mask = (behind >= 0) & (behind < window) if is_causal else None
        rows.append(scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
    return torch.cat(rows, dim=2).transpose(1, 2)


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
    expected = row_by_row(*parts, is_causal=window[1] == 0, window=options.get("sliding_window", 10**6))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_windows_without_the_kernel_are_computed_in_blocks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 2)
    parts = heads(torch.float32)
    output, _ = packed_attention(Attention(), *parts, None, row_bounds=bounds(), sliding_window=window)
    torch.testing.assert_close(output, row_by_row(*parts, window=window))


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
        parts = (part[:, :, row] for part in other)
        distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
        mask = (distance >= 0) & (distance < (window or len(row)))
        alone = scaled_dot_product_attention(*parts, mask, enable_gqa=True)
        expected = expected.index_copy(1, torch.tensor(row), alone.transpose(1, 2))
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
    torch.testing.assert_close(found.float(), row_by_row(*parts, is_causal=False), atol=2e-2, rtol=2e-2)
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
    torch.testing.assert_close(found.float(), row_by_row(*parts), atol=2e-2, rtol=2e-2)
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
    gpu = ["experiment=digits", "resources=gpu_2", f"policy.attention={name}"]
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

    generator, num = torch.Generator().manual_seed(0), sum(lengths)
    parts = [torch.randn(1, count, num, 16, generator=generator) for count in (4, 2, 2)]
    limits = RowBounds(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), lengths)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    found, _ = packed_attention(Attention(), *parts, None, row_bounds=limits, **options)
    assert calls[:3] == [3, 1, 1] and set(calls[3:]) == {1}
    for n, (q, own) in enumerate(zip(parts[0].split(lengths, dim=2), found.split(lengths, dim=1), strict=True)):
        k, v = (part.split(lengths, dim=2)[n] for part in parts[1:])
        behind = torch.arange(lengths[n])[:, None] - torch.arange(lengths[n])
        window, is_causal = options.get("sliding_window", 10**6), options.get("is_causal", True)
        mask = (behind >= 0) & (behind < window) if is_causal else None
        alone = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(own, alone, atol=1e-6, rtol=1e-6)


CPU = torch.device("cpu")
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


def sequences(folder: Path) -> list[TokenSequence]:
    """Rows of very different lengths; of a vision model some have one image, two, or one that a sibling has too."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    shown = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)], [image(1)], []]
    if "vl" not in folder_type(folder):
        shown = [[]] * len(shown)
    prompts = [prompt(tokenizer, f"p{n}", some) for n, some in enumerate(shown)]
    sizes = (3, 1, 40, 12, 2)
    return [TokenSequence.of_response(p, rng.integers(0, 250, n)) for p, n in zip(prompts, sizes, strict=True)]


def test_packed_rows_are_padded_rows_are_single_rows(folder: Path) -> None:
    rows = sequences(folder)
    packed, padded = scores_of(folder, [rows], PACKED), scores_of(folder, [rows], PADDED)
    assert_equal(packed, padded)
    assert_equal(packed, scores_of(folder, [[row] for row in rows], PADDED))
    assert_equal(packed, scores_of(folder, [rows[:2], rows[2:]], PACKED))
    assert max(gradient.abs().max() for gradient in packed[1].values()) > 0.01


def test_the_kernel_for_rows_gives_what_padded_rows_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoder and vision tower; plain arithmetic stands in for the kernel, and float32 for the types that it takes."""
    rows = sequences(folder)
    padded = scores_of(folder, [rows], PADDED)
    monkeypatch.setattr(attention, "varlen_attn", varlen_reference.varlen_attn)
    monkeypatch.setattr(attention, "_has_kernel", lambda device: True)
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    varlen_reference.calls.clear()
    assert_equal(scores_of(folder, [rows], PACKED), padded, atol=1e-5)
    windows = {"qwen2_5_vl": {(-1, 0), (-1, -1)}, "gemma3_text": {(15, 0)}, "mistral": {(4095, 0)}}
    assert set(varlen_reference.calls) == windows.get(folder_type(folder), {(-1, 0)})


def folder_type(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


@pytest.mark.exhaustive
@pytest.mark.families
@pytest.mark.parametrize("name", [name for name in TINY if name not in UNPACKED])
def test_every_family_with_images_computes_packed_rows_as_padded_ones(tmp_path: Path, name: str) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    at = write_tiny(name, tmp_path / name, seed=1)
    asked = family_prompts(at, tmp_path).cases.values()
    rows = [TokenSequence.of_response(case.prompt, np.arange(20, 24 + n)) for n, case in enumerate(asked)]
    assert_equal(scores_of(at, [rows], PACKED), scores_of(at, [rows], PADDED))


def test_the_decoder_computes_tokens_and_no_padding(folder: Path) -> None:
    rows = sequences(folder)
    widths = {}
    for packs in (False, True):
        policy = TokenPolicy(
            load_model(str(folder), torch.float32, "sdpa"),
            learner_config(f"learner.packing={packs}".lower(), "learner.share_prompts=false"),
        )
        block = policy.model.get_decoder().layers[0]
        block.register_forward_pre_hook(lambda _, args, packs=packs: widths.update({packs: args[0].shape[:2].numel()}))
        with torch.no_grad():
            policy(collate(rows, MediaReader(timeout_s=1, max_items=8), CPU), HOT)
    num_tokens = [row.num_tokens for row in rows]
    assert widths == {False: len(rows) * max(num_tokens), True: sum(num_tokens)}


def test_blocks_that_are_computed_again_keep_the_rows_apart(folder: Path) -> None:
    rows = sequences(folder)
    model = load_model(str(folder), torch.float32, "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TokenPolicy(model, learner_config(PACKED))
    for sequence in (rows, rows[:2]):  # the bounds of the first batch are not those of the second
        policy.zero_grad()
        output = policy(collate(sequence, MediaReader(timeout_s=1, max_items=8), CPU), HOT)
        output.logprobs.sum().backward()
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    plain = TokenPolicy(load_model(str(folder), torch.float32, "sdpa").train(), learner_config(PADDED))
    plain(collate(rows[:2], MediaReader(timeout_s=1, max_items=8), CPU), HOT).logprobs.sum().backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, atol=1e-5, rtol=1e-5)


def test_a_decoder_that_leaves_the_bounds_out_is_refused(folder: Path) -> None:
    model = load_model(str(folder), torch.float32, "sdpa")
    policy = TokenPolicy(deepcopy(model), learner_config(PACKED))
    decoder = policy.model.get_decoder()
    for layer in decoder.layers:
        forward = layer.forward
        layer.forward = lambda *args, row_bounds=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="cannot be packed: set learner.packing=false"):
        policy(collate(sequences(folder), MediaReader(timeout_s=1, max_items=8), CPU), HOT)


def test_eager_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.attention=eager: set policy\.attention=sdpa"):
        load_config(["experiment=digits", "learner.packing=true", "policy.attention=eager"])
    model = load_model(str(write_text_policy(tmp_path, "qwen2")), torch.float32, "eager")
    with pytest.raises(ValueError, match="set policy.attention=sdpa or learner.packing=false"):
        RowPacking(model)


def gradients(folder: Path, *overrides: str, of: list[ScoredGroup] | None = None) -> dict[str, torch.Tensor]:
    """Of an update on the groups `of`, on random ones by default."""
    words = ("learner.max_grad_norm=1000000", *overrides)
    learner = connected_learner(tiny_config(folder, *words), (250,))
    learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
    learner.update(of or random_groups(AutoTokenizer.from_pretrained(folder), 6, 4, longest=30), 1)
    learner.export(folder / "out")
    return {name: p.grad for name, p in learner._policy.named_parameters()}


def test_no_split_into_packed_microbatches_changes_the_gradient(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "tiny")
    padded = gradients(folder, PADDED, "learner.tokens_per_microbatch=100000")
    for tokens in (40, 150, 100_000):
        packed = gradients(folder, PACKED, f"learner.tokens_per_microbatch={tokens}")
        for name, gradient in padded.items():
            torch.testing.assert_close(packed[name], gradient, atol=1e-6, rtol=0)
    assert max(gradient.abs().max() for gradient in padded.values()) > 1e-3
    assert "varlen" not in (folder / "out" / "config.json").read_text()


def with_gaps(scored: ScoredGroup, logprobs: list[np.ndarray], rng: np.random.Generator) -> ScoredGroup:
    """As the untrained policy sampled them, with a reference that differs at every token."""
    references = [own - rng.normal(0, 0.5, len(own)).astype(np.float32) for own in logprobs]
    return replace(with_logprobs(scored, logprobs), reference_logprobs=references)


def gradient_by_hand(folder: Path, groups: list[ScoredGroup], kl_coef: float) -> dict[str, torch.Tensor]:
    """Of -sum A_t log p_t / number of tokens, row by row, with A_t = r - coef * sum over k >= t of KL_k."""
    policy = TokenPolicy(
        load_model(str(folder), torch.float32, "sdpa").train(), learner_config("learner.packing=false")
    )
    num_tokens = sum(t.num_steps for scored in groups for t in scored.group.trajectories)
    for scored in groups:
        for t, reward, reference in zip(
            scored.group.trajectories, scored.rewards, scored.reference_logprobs, strict=True
        ):
            kl_from_here = np.cumsum((t.behavior_logprobs - reference)[::-1])[::-1]
            advantages = torch.from_numpy(reward.value - kl_coef * kl_from_here)
            alone = TokenSequence.of_response(scored.group.prompt, t.actions.token_ids)
            output = policy(collate([alone], MediaReader(timeout_s=1, max_items=8), CPU), Distribution(0.8, (250,)))
            (-(advantages * output.logprobs[0]).sum() / num_tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def test_every_response_of_a_pack_is_trained_with_its_own_reward_and_kl(tmp_path: Path) -> None:
    """LightRFT defect B7: the KL was not unpacked, so that of a pack's responses only the first got its reward."""
    folder, rng = write_tiny_qwen2_5_vl(tmp_path / "tiny"), np.random.default_rng(2)
    words = ["algorithm.advantage=reinforce", "algorithm.loss_aggregation=token_mean", "algorithm.kl.coef=0.5",
             "algorithm.kl.estimator=k1", "algorithm.kl.place=reward", "resources.reference.num_workers=1",
             "learner.max_grad_norm=1000000"]  # fmt: skip
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 6, 4, longest=12)
    scorer = ReferenceScorer(tiny_config(folder), (250,))
    scorer.load(folder)
    groups = [with_gaps(g, own, rng) for g, own in zip(groups, scorer.score(groups), strict=True)]
    expected = gradient_by_hand(folder, groups, 0.5)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for packing in ("packing=true", "packing=false"):
        for tokens in (1, 200, 100_000):  # each row alone, several together, all of them
            found = gradients(
                folder, f"learner.{packing}", f"learner.tokens_per_microbatch={tokens}", *words, of=groups
            )
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


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
