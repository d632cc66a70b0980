"""The works that are compared, by name."""

from __future__ import annotations

from benchmarks.peers.works.flow import flow_grpo, sampling
from benchmarks.peers.works.grpo import grpo, learned, long_tail
from benchmarks.peers.works.offline import dpo, sft
from benchmarks.peers.works.work import IN_PAIRS, IN_TURNS, PAIRS, TURNS

DIGITS = ("experiment=digits", "sampler.max_tokens=8")
LONGER = ("experiment=digits", "sampler.max_tokens=128")
SUMS = ("experiment=sums", "sampler.max_tokens=32")

WORKS = {
    work.name: work
    for work in (
        grpo("trl_grpo_digits_8", DIGITS, num_steps=30, synchronous=PAIRS, targets=(1.4, 1.05), other=IN_PAIRS),
        grpo("trl_grpo_digits_128", LONGER, num_steps=15, synchronous=PAIRS, targets=(1.4, 1.2), other=IN_PAIRS),
        long_tail("trl_grpo_long_tail", num_steps=15, synchronous=PAIRS),
        grpo("trl_grpo_sums", SUMS, num_steps=5, synchronous=TURNS, targets=(1.5, 1.0), other=IN_TURNS),
        learned("trl_grpo_digits_learned", num_steps=150, synchronous=PAIRS),
        grpo(
            "ms_swift_grpo_digits_8",
            DIGITS,
            num_steps=20,
            synchronous=PAIRS,
            targets=(1.5, 1.0),
            other=IN_PAIRS,
            peer="ms_swift",
        ),
        sft("trl_sft", "trl", "tiny_qwen2_5", num_packs=5, num_rows=34, num_steps=50),
        sft("trl_sft_smollm2", "trl", "smollm2", num_packs=2, num_rows=11, num_steps=10),
        sft("llamafactory_sft", "llamafactory", "tiny_qwen2_5", num_packs=5, num_rows=34, num_steps=50, target=0.95),
        sft("llamafactory_sft_smollm2", "llamafactory", "smollm2", num_packs=2, num_rows=11, num_steps=10, target=1.1),
        sampling("diffusers_sampling", num_steps=60),
        flow_grpo("flow_grpo_glyphs", num_steps=15),
        dpo("trl_dpo_images", num_rows=400, num_pairs=16, num_steps=60),
    )
}
