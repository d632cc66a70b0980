"""A reference in 8 bits: smaller weights, log-probs close by, the output layer as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.actors.reference.quantised import num_weight_bytes, quantise
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytest.importorskip("torchao")
KL = ("algorithm.kl.coef=0.01",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=False)


def test_a_scorer_in_8_bits_is_close_to_one_in_full_precision_and_smaller(folder: Path) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 2)  # none, one and two images
    found, sizes = {}, {}
    for kind in ("none", "int8"):
        scorer = ReferenceScorer(tiny_config(folder, *KL, f"reference.quantisation={kind}"), ())
        scorer.load(folder)
        found[kind] = np.concatenate([row for rows in scorer.score(groups) for row in rows])
        sizes[kind] = num_weight_bytes(scorer._policy)
    error = np.abs(found["int8"] - found["none"])
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.3
    assert sizes["int8"] < 0.8 * sizes["none"], "the vocabulary's two matrices, which stay, are much of a tiny model"


def test_rows_are_rounded_to_127_steps_of_their_largest_value(folder: Path) -> None:
    """The definition: w is within half a step of what it was, the step being max |w| / 127 of its row (symmetric)."""
    model, plain = (load_policy_model(tiny_config(folder).policy, torch.float32) for _ in range(2))
    quantise(model, "int8")
    weights = dict(plain.named_parameters())
    num_rounded = 0
    for name, parameter in model.named_parameters():
        if type(parameter.data) is torch.Tensor:
            torch.testing.assert_close(parameter, weights[name], atol=0, rtol=0)
            continue
        num_rounded += 1
        step = weights[name].abs().amax(dim=1, keepdim=True) / 127
        assert ((parameter.dequantize() - weights[name]).abs() <= 0.51 * step + 1e-9).all(), name
    assert num_rounded >= 10
    assert type(model.get_output_embeddings().weight.data) is torch.Tensor
