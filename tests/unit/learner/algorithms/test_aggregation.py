"""Aggregations equal plain Python references, add up over any split, and never read a masked value."""

from __future__ import annotations

import math

import pytest
import torch

from mobula.learner.algorithms.aggregation import AGGREGATIONS, Totals

ROWS = [[1.0, 2.0], [4.0], [], [-3.0, 0.5, 8.0]]
TOTALS = Totals(num_tokens=6, num_sequences=3)
NORM = 7.0
REFERENCES = {
    "token_mean": sum(sum(row) for row in ROWS) / 6,
    "sequence_mean": sum(sum(row) / len(row) for row in ROWS if row) / 3,
    "sequence_sum_token_norm": sum(sum(row) / NORM for row in ROWS) / 3,
    "constant": sum(sum(row) for row in ROWS) / NORM,
}


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is masked is NaN."""
    values = torch.full((len(rows), 3), math.nan, dtype=torch.float64)
    for n, row in enumerate(rows):
        values[n, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return values, ~values.isnan()


def test_every_aggregation_has_a_reference() -> None:
    assert REFERENCES.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_equals_its_reference(name: str) -> None:
    assert AGGREGATIONS[name](*padded(ROWS), TOTALS, NORM).item() == pytest.approx(REFERENCES[name])


@pytest.mark.parametrize("split", [[1, 3], [2, 2], [1, 1, 1, 1], [4]])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_parts_add_up_to_the_whole(name: str, split: list[int]) -> None:
    """LightRFT defect B9: the loss was not divided by the number of accumulated micro-batches, so the gradient depended
    on how rows were split."""
    values, mask = padded(ROWS)
    pairs = zip(values.split(split), mask.split(split), strict=True)
    parts = sum(AGGREGATIONS[name](v, m, TOTALS, NORM).item() for v, m in pairs)
    assert parts == pytest.approx(REFERENCES[name])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(name: str) -> None:
    """LightRFT defect B3: the masked mean of a response without tokens was 0 / 0."""
    values = torch.full((2, 3), 5.0, requires_grad=True)
    loss = AGGREGATIONS[name](values, torch.zeros(2, 3, dtype=torch.bool), Totals(0, 0), NORM)
    loss.backward()
    assert loss.item() == 0 and values.grad.abs().max() == 0
