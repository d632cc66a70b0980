"""Packed rows on a GPU: torch's kernel computes what scaled dot products compute row by row, gradients and shared
prefixes included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gpus import ON_A_GPU
from learner_data import image, prompt
from torch import Tensor, nn
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.learner.policies.attention import packed as attention
from mobula.learner.policies.attention.packed import RowBounds, RowKeys, packed_attention
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy

pytestmark = [*ON_A_GPU]

GPU = torch.device("cuda")
LENGTHS = (3, 70, 1, 129, 64)
CLOSE = 3e-2  # bfloat16, of outputs and gradients of order 1


class Attention(nn.Module):
    num_key_value_groups = 4
    is_causal = True


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], device=GPU).cumsum(0).int()


def shared_keys() -> RowKeys:
    """The second row goes on from the third token of the first, the fourth from its 50th, and so does the fifth."""
    starts = ends(LENGTHS).tolist()
    own = [torch.arange(start, start + num, device=GPU) for start, num in zip(starts, LENGTHS, strict=False)]
    second = torch.cat([own[0][:3], own[1]])
    rows = [own[0], second, own[2], torch.cat([second[:50], own[3]]), torch.cat([second[:50], own[4]])]
    lengths = tuple(map(len, rows))
    return RowKeys(torch.cat(rows), ends(lengths), max(lengths), lengths)


def computed(parts: list[Tensor], grad: Tensor, keys: RowKeys | None = None, **options) -> list[Tensor]:
    """Output and the gradients of queries, keys and values."""
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    bounds = RowBounds(ends(LENGTHS), max(LENGTHS), LENGTHS, keys=keys)
    found, _ = packed_attention(Attention(), *leaves, None, row_bounds=bounds, **options)
    found.backward(grad)
    return [found, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("width", [8, 64, 72, 128, 192, 224, 256])
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, False),
        ({"sliding_window": 16}, False),
        ({"is_causal": False}, False),
        ({}, True),
        ({"sliding_window": 16}, True),
        ({"sliding_window": 100}, True),
    ],
    ids=["causal", "window", "both", "shared", "window of shared rows", "long window of shared rows"],
)
def test_the_kernel_is_row_by_row(width: int, options: dict, shares: bool) -> None:
    generator, num = torch.Generator(GPU).manual_seed(0), sum(LENGTHS)
    shapes = [(1, count, num, width) for count in (8, 2, 2)] + [(1, num, 8, width)]
    made = [torch.randn(shape, generator=generator, device=GPU).bfloat16() for shape in shapes]
    assert attention.kernel_takes(*made[:3])
    options = {**options, "keys": shared_keys() if shares else None}
    by_kernel = computed(made[:3], made[3], **options)
    wide = [part.float() for part in made]  # of which the kernel takes none
    for found, expected in zip(by_kernel, computed(wide[:3], wide[3], **options), strict=True):
        torch.testing.assert_close(found.float(), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_images_are_padded_rows(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoder and vision tower, by the kernel in bfloat16 and row by row in float32."""
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0)
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    shown = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)]]
    rows = [
        TokenSequence.of_response(prompt(tokenizer, f"p{n}", some), rng.integers(0, 250, size))
        for n, (some, size) in enumerate(zip(shown, (3, 40, 12), strict=True))
    ]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the patch embedding, a convolution
    calls, kernel = [], attention._kernel
    monkeypatch.setattr(attention, "_kernel", lambda *args: (calls.append(1), kernel(*args))[1])
    found = {}
    for packs in (True, False):
        config = load_config(["experiment=digits", f"learner.packing={str(packs).lower()}"]).learner
        policy = TokenPolicy(load_model(str(folder), torch.float32, "sdpa").train(), config).to(GPU)
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            batch = collate(rows, MediaReader(timeout_s=1, max_items=8), GPU)
            logprobs = policy(batch, Distribution(0.7, (5, 9))).logprobs
        logprobs.sum().backward()
        found[packs] = logprobs, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    model = policy.model
    blocks = len(model.model.visual.blocks)
    num = 2 * blocks + len(model.get_decoder().layers)  # of both passes the tower, of one the decoder
    assert len(calls) == (0 if dtype is torch.float32 else num)
    atol = 1e-5 if dtype is torch.float32 else 0.1
    close = {"atol": atol, "rtol": atol}
    torch.testing.assert_close(found[True][0], found[False][0], **close)
    for name, gradient in found[True][1].items():
        torch.testing.assert_close(gradient, found[False][1][name], **close)
