"""Reference scorers in 8 and 4 bits: memory of the weights, error of the log-probs, and scoring speed of each.

One text-only model of random weights scores the same rows in every way. `int4` is measured on an NVIDIA GPU alone,
where it runs: give resources=two_gpu. Random weights are the hard case for the error: nothing of them is small.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, interleave
from mobula.actors.reference.scorer import Quantisation, quantise
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import LearnerConfig, ResourcesConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import DTYPES
from mobula.learner.policies.token import TokenPolicy

ROW_TOKENS, NUM_ROWS, QUICK_ROWS = 256, 8, 2
VOCABULARY, WIDTH, NUM_BLOCKS = 4096, 512, 8
MAX_MEMORY = {"int8": 0.5, "int4": 0.4}  # of full precision's; the output layer and embeddings stay as they are
MAX_ERROR = {"int8": 0.02, "int4": 0.2}  # nat, mean |difference| of a token's log-prob
UNIT = "tokens/s"


@dataclass
class Scorer:
    """One way to hold the weights."""

    policy: TokenPolicy
    rows: list[TokenSequence]
    device: torch.device
    logprobs: np.ndarray | None = None  # float32 [B, T], of the latest round

    @torch.no_grad()
    def score(self) -> float:
        """Score all rows; returns tokens a second."""
        started = time.perf_counter()
        batch = collate(self.rows, MediaReader(timeout_s=1, max_items=1), self.device)
        self.logprobs = self.policy(batch, PLAIN).logprobs.float().cpu().numpy()
        return self.logprobs.size / (time.perf_counter() - started)

    async def __call__(self, round_number: int) -> float:
        return await asyncio.to_thread(self.score)


def _scorer(kind: Quantisation, resources: ResourcesConfig, learner: LearnerConfig, num_rows: int) -> Scorer:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    device = torch.device(resources.device)
    model = Qwen2ForCausalLM(config).to(device, DTYPES[resources.dtype]).eval()
    quantise(model, kind)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, size=(num_rows, ROW_TOKENS)).astype(np.int32)
    return Scorer(TokenPolicy(model, learner).eval(), [TokenSequence(row, 1, (), ()) for row in ids], device)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All ways in turn."""
    torch.set_num_threads(1)
    config = load_config(overridden(["experiment=digits"], overrides))
    resources, num_rows = config.resources, QUICK_ROWS if effort == QUICK else NUM_ROWS
    has_int4 = (resources.device, resources.dtype) == ("cuda", "bfloat16")
    kinds: tuple[Quantisation, ...] = ("none", "int8", "int4") if has_int4 else ("none", "int8")
    scorers = {kind: _scorer(kind, resources, config.learner, num_rows) for kind in kinds}
    found = asyncio.run(interleave(scorers, effort))
    num_bytes = {kind: num_weight_bytes(scorer.policy) for kind, scorer in scorers.items()}
    exact = scorers["none"].logprobs
    errors = {kind: np.abs(scorer.logprobs - exact) for kind, scorer in scorers.items() if kind != "none"}
    claims = [
        claim
        for kind, error in errors.items()
        for claim in (
            Claim(f"weights: {kind} / none", num_bytes[kind] / num_bytes["none"], MAX_MEMORY[kind], at_least=False),
            Claim(f"log-prob error: {kind}, mean", float(error.mean()), MAX_ERROR[kind], at_least=False),
        )
    ]
    settings = {
        "num_tokens": num_rows * ROW_TOKENS,
        "dtype": resources.dtype,
        "weight_mb": {kind: round(size / 1e6, 2) for kind, size in num_bytes.items()},
        "largest_error": {kind: round(float(error.max()), 4) for kind, error in errors.items()},
    }
    series = {kind: Measurements(f"scores with weights in {kind}", UNIT, found[kind]) for kind in kinds}
    return Findings(settings, series, tuple(claims))


def num_weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters in memory, each counted once."""
    return sum(_num_bytes(parameter.data) for parameter in model.parameters())


def _num_bytes(tensor: Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_num_bytes(getattr(tensor, name)) for name in names)
