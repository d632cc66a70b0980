"""Attention over packed rows takes torch's kernel where it can, and computes row by row everywhere else."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import varlen_reference
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForImageTextToText

from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.preflight.checks import check_attention
from mobula.learner.policies.attention import packed as attention
from mobula.learner.policies.attention.packed import PACKED, RowBounds, RowKeys, packed_attention
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny

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
    assert own.config.vision_config._attn_implementation == PACKED
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
