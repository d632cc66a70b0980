"""Log-probs, entropies and gradients that a policy has of rows, in any micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from learner_data import prompt
from transformers import AutoTokenizer

from mobula.cluster.records.actions import KeptSets
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model, recompute_blocks
from mobula.learner.policies.token import TokenPolicy

HOT = Distribution(0.7, (5, 9))
VOCABULARY = 250  # of answers


def tree(asked: Sequence[Prompt]) -> list[TokenSequence]:
    """Of each prompt three answers, one that begins like the second, and one that is the second again; not in order.

    Answers have sets of tokens that they were sampled from.
    """
    rng, rows = np.random.default_rng(0), []
    for number, one in enumerate(asked):
        answers = [rng.integers(0, VOCABULARY, size) for size in (2, 30, 1 + number)]
        answers += [np.append(answers[1][:25], rng.integers(0, VOCABULARY, 9)), answers[1]]
        rows += [TokenSequence.of_response(one, ids, kept_with(ids, rng)) for ids in answers]
    return [rows[i] for i in rng.permutation(len(rows))]


def kept_with(ids: np.ndarray, rng: np.random.Generator) -> KeptSets | None:
    """Sets for some of the tokens of an answer, or for none."""
    is_kept = rng.random((len(ids), VOCABULARY)) < 0.1
    is_kept[np.arange(len(ids)), ids] = True
    is_kept[::3] = False
    return KeptSets.of(is_kept) if len(ids) > 9 else None


def text_prompts(folder: Path) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [prompt(tokenizer, text, text=text) for text in ("Which digit is this? " * 5, "Which number?", "Hello")]


def learner_config(*overrides: str) -> LearnerConfig:
    return load_config(["experiment=digits", *overrides]).learner


def scores_of(folder: Path, batches: list[list[TokenSequence]], *overrides: str, recomputed: str = "none"):
    """Log-probs, entropies and gradients of a mean in which each token has a weight of its own."""
    config = learner_config(*overrides)
    model = load_model(str(folder), torch.float32, "sdpa").train()
    recompute_blocks(model, recomputed)
    policy = TokenPolicy(model, config)
    outputs, num_targets = [], sum(row.num_targets for batch in batches for row in batch)
    for batch in batches:
        tokens = collate(batch, MediaReader(timeout_s=1, max_items=8), torch.device("cpu"))
        output = policy(tokens, HOT, entropy_has_gradient=True)
        loss = torch.zeros(())
        for row, sequence in enumerate(batch):
            logprobs, entropy = (part[row, : sequence.num_targets] for part in (output.logprobs, output.entropy))
            weights = torch.linspace(-1, 1, len(logprobs) + 1)[1:]
            loss = loss + ((logprobs + 0.1 * entropy) * weights).sum() / num_targets
            outputs.append((logprobs.detach(), entropy.detach()))
        loss.backward()
    return outputs, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_equal(one, other, atol: float = 1e-6) -> None:
    for (logprobs, entropy), (other_logprobs, other_entropy) in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(logprobs, other_logprobs, atol=atol, rtol=1e-6)
        torch.testing.assert_close(entropy, other_entropy, atol=atol, rtol=2e-6)  # sums over the vocabulary
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=atol, rtol=0)
