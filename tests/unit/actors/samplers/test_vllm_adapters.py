"""Products with the factors of several adapters in a batch: each row has its own, and the base model's rows none."""

from __future__ import annotations

import pytest
import torch

from mobula.actors.samplers.vllm.patches.engine import expand, expand_slice, shrink
from mobula.deploy.preflight.findings import engine_build

pytestmark = pytest.mark.skipif(engine_build() == "cuda", reason="patches engines on CPU alone")

SLOTS, RANK, WIDE, OUT = 3, 4, 10, 6
INDICES = torch.tensor([2, -1, 0, 2, 2, -1, 0])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_each_row_is_multiplied_with_the_factors_of_its_adapter() -> None:
    inputs, factors, found = drawn(7, WIDE), drawn(SLOTS, 1, RANK, WIDE), torch.full((7, RANK + 2), 9.0)
    shrink(inputs, factors, found, INDICES, 0.5)
    for row, index in enumerate(INDICES.tolist()):
        own = torch.zeros(RANK) if index < 0 else 0.5 * factors[index, 0] @ inputs[row]
        torch.testing.assert_close(found[row], torch.cat([own, torch.zeros(2)]))


def test_rows_of_the_base_model_are_unchanged() -> None:
    inputs, factors, before = drawn(7, RANK), drawn(SLOTS, 1, OUT, RANK), drawn(7, OUT)
    for indices in (INDICES, torch.full((7,), -1), torch.full((7,), 1)):
        found = before.clone()
        expand(inputs, factors, found, indices)
        for row, index in enumerate(indices.tolist()):
            own = torch.zeros(OUT) if index < 0 else factors[index, 0] @ inputs[row]
            torch.testing.assert_close(found[row], before[row] + own)


def test_a_slice_changes_its_columns_alone() -> None:
    inputs, factors, before = drawn(7, RANK), drawn(SLOTS, 1, OUT, RANK), drawn(7, 3 * OUT)
    found = before.clone()
    expand_slice(inputs, factors, found, INDICES, OUT, OUT)
    assert torch.equal(found[:, :OUT], before[:, :OUT])
    assert torch.equal(found[:, 2 * OUT :], before[:, 2 * OUT :])
    torch.testing.assert_close(found[2, OUT : 2 * OUT], before[2, OUT : 2 * OUT] + factors[0, 0] @ inputs[2])
    expand_slice(inputs, factors, found, INDICES, OUT, OUT, add_inputs=False)
    torch.testing.assert_close(found[3, OUT : 2 * OUT], factors[2, 0] @ inputs[3])
    assert not found[1, OUT : 2 * OUT].any()


def test_a_padded_head_and_a_head_without_padding_share_their_common_columns() -> None:
    inputs, factors = drawn(2, RANK), drawn(SLOTS, 1, OUT, RANK)
    for width in (OUT - 2, OUT + 2):
        found = torch.zeros(2, width)
        expand(inputs, factors, found, torch.tensor([1, -1]))
        common = min(width, OUT)
        torch.testing.assert_close(found[0, :common], (factors[1, 0] @ inputs[0])[:common])
        assert not found[0, common:].any()
