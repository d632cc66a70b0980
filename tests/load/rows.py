"""The load matrix: every pair of values of two factors is in at least one row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import Any

FACTORS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (8, 128, 1024),
    "prompt_tokens": (20, 600, 3000),
    "budget": ("split", "ample"),
    "kv": ("full", "ample"),
    "siblings": (1, 8, 64),
    "in_flight": (1, 64, 256),
    "staleness": (0, 1, 4),
    "kv_cache": ("recompute", "keep"),
    "payload": ("weights", "adapters"),
    "engines": (1, 2),
    "core": ("thread", "process"),
}
SPLIT_BUDGETS = {20: 16, 600: 128, 3000: 512}  # tokens an engine step, fewer than a prompt has
LONGEST_PROMPTS = {20: 64, 600: 768, 3000: 3072}
MANY_STEPS, FEW_STEPS = 50, 6
TOKENS_OF_A_RUN = 600_000  # that the learner processes at most, if that leaves FEW_STEPS
KV_BYTES_PER_TOKEN, BLOCK = 1024, 32  # of the tiny model in float32


@dataclass(frozen=True)
class Row:
    """One run. `in_flight` counts prompts; `split` and `full` are a token budget below a prompt and a KV cache that
    holds a fraction of what is in flight."""

    max_tokens: int
    prompt_tokens: int
    budget: str
    kv: str
    siblings: int
    in_flight: int
    staleness: int
    kv_cache: str
    payload: str
    engines: int
    core: str
    most_steps: int = MANY_STEPS

    def __str__(self) -> str:
        return "-".join(f"{getattr(self, name)}" for name in FACTORS)

    @property
    def keeps_old_kv(self) -> bool:
        """Whether a response goes on after a push on keys and values of the weights before it."""
        return self.kv_cache == "keep" and self.staleness > 0

    @property
    def prompts_per_step(self) -> int:
        """So many that the staleness bound lets `in_flight` prompts run at once."""
        return ceil(self.in_flight / (self.staleness + 1))

    @property
    def num_steps(self) -> int:
        """As many as TOKENS_OF_A_RUN allow."""
        length = self.prompt_tokens + min(self.max_tokens, 150)
        tokens_per_step = self.prompts_per_step * self.siblings * length
        return max(FEW_STEPS, min(self.most_steps, TOKENS_OF_A_RUN // tokens_per_step))

    @property
    def max_num_seqs(self) -> int:
        return min(128, self.max_num_batched_tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        return SPLIT_BUDGETS[self.prompt_tokens] if self.budget == "split" else 8192

    @property
    def max_model_len(self) -> int:
        return ceil((LONGEST_PROMPTS[self.prompt_tokens] + self.max_tokens) / BLOCK) * BLOCK

    @property
    def kv_cache_bytes(self) -> int:
        if self.kv == "ample":
            return 1 << 29
        num_tokens = max(self.max_model_len + 4 * BLOCK, 2 * self.prompt_tokens + 2 * self.max_tokens)
        return num_tokens * KV_BYTES_PER_TOKEN

    def words(self) -> list[str]:
        """What the run is started with."""
        adapters = ["policy.lora.rank=4"] if self.payload == "adapters" else []
        return [
            "resources=laptop_overlapped",
            "learner=single",
            "warm_start=none",
            f"resources.rollout.num_workers={self.engines}",
            f"sampler.max_tokens={self.max_tokens}",
            f"sampler.max_model_len={self.max_model_len}",
            f"sampler.vllm.max_num_batched_tokens={self.max_num_batched_tokens}",
            f"sampler.vllm.max_num_seqs={self.max_num_seqs}",
            f"sampler.vllm.kv_cache_bytes={self.kv_cache_bytes}",
            f"sampler.vllm.block_size={BLOCK}",
            "sampler.max_images_per_prompt=11",
            f"data.max_prompt_tokens={LONGEST_PROMPTS[self.prompt_tokens]}",
            "data.max_pixels=262144",
            f"algorithm.samples_per_prompt={self.siblings}",
            f"algorithm.prompts_per_step={self.prompts_per_step}",
            f"algorithm.max_concurrent_groups={self.in_flight}",
            f"algorithm.max_staleness={self.staleness}",
            f"algorithm.advantage={'reinforce' if self.siblings == 1 else 'grpo'}",
            "algorithm.drop_uniform_groups=false",
            "algorithm.kl.coef=0",
            f"weight_sync.kv_cache={self.kv_cache}",
            f"weight_sync.payload={self.payload}",
            "weight_sync.canary_interval=1",
            *adapters,
            f"num_steps={self.num_steps}",
        ]


ROWS = tuple(
    Row(*values)
    for values in (
        (8, 20, "split", "ample", 1, 1, 0, "keep", "weights", 2, "thread"),
        (8, 20, "split", "full", 64, 1, 1, "recompute", "weights", 1, "thread"),
        (8, 600, "split", "full", 8, 1, 1, "keep", "adapters", 2, "thread"),
        (1024, 600, "ample", "full", 8, 1, 4, "recompute", "adapters", 1, "process"),
        (128, 20, "ample", "full", 1, 64, 1, "recompute", "weights", 1, "thread"),
        (1024, 600, "split", "ample", 1, 64, 4, "keep", "weights", 2, "process"),
        (8, 20, "ample", "ample", 8, 64, 0, "recompute", "weights", 2, "thread"),
        (128, 20, "split", "ample", 1, 256, 4, "keep", "weights", 1, "thread"),
        (128, 3000, "split", "ample", 8, 1, 1, "keep", "adapters", 2, "process"),
        (8, 20, "ample", "ample", 64, 64, 4, "recompute", "adapters", 1, "process"),
        (1024, 20, "ample", "ample", 1, 256, 1, "recompute", "adapters", 2, "thread"),
        (128, 600, "split", "full", 64, 1, 0, "recompute", "adapters", 2, "process"),
        (8, 600, "ample", "full", 1, 256, 4, "keep", "adapters", 1, "thread"),
        (8, 20, "ample", "full", 8, 256, 0, "keep", "weights", 2, "process"),
        (8, 3000, "ample", "ample", 1, 64, 4, "recompute", "adapters", 1, "process"),
        (8, 20, "split", "ample", 64, 256, 4, "recompute", "adapters", 1, "thread"),
        (1024, 3000, "ample", "full", 64, 1, 0, "keep", "weights", 1, "thread"),
        (8, 3000, "split", "ample", 1, 256, 4, "recompute", "adapters", 2, "thread"),
    )
)
CHOSEN = (2, 4, 7)  # of ROWS, in short for every run of the suite: a fifth of them


assert (*FACTORS, "most_steps") == tuple(field.name for field in fields(Row))
