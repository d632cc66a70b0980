"""Random rows of offline jobs for the learner's tests, and configurations of the jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from learner_data import group, image, prompt

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig

JOBS = {
    "sft": (),
    "dpo": (),
    "ipo": ("offline.dpo.loss=ipo",),
    "dpo_adapters": ("policy.lora.rank=4", "policy.lora.alpha=16.0", "reference.place=learner_ranks"),
    "reward_model": (),
    "regression": ("offline.reward_model.loss=regression",),
}


SMALL = (
    "policy=tiny_qwen2_5_vl", "learner.activation_checkpointing=none", "learner=single",
    "resources.learner.num_workers=1", "offline.max_tokens=256", "offline.batch_size=16", "evaluation.num_prompts=40",
    "evaluation.interval_steps=0", "learner.warmup_steps=0", "metrics.ray=false", "metrics.tensorboard=false",
    "metrics.progress=false",
)  # fmt: skip


def offline_config(preset: str, *overrides: str) -> RunConfig:
    """A small run of `experiment=PRESET` in one process."""
    return load_config(overridden([f"experiment={preset}", *SMALL], overrides))


def config_of(folder: Path, job: str, *overrides: str) -> RunConfig:
    preset = {"ipo": "dpo", "dpo_adapters": "dpo", "regression": "reward_model"}.get(job, job)
    words = (f"policy.model={folder}", "data.path=x", "learner.learning_rate=0.001", *JOBS[job])
    return offline_config(preset, *words, *overrides)


def rows(tokenizer, job: str, num: int = 6, seed: int = 0) -> list[ScoredGroup]:
    """Text and images in turn; answers of several lengths, some tokens of which are not trained."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(num):
        asked = prompt(tokenizer, f"{seed}/{n}/row", [[], [image(n)], [image(n), image(n + 1, 2, 4)]][n % 3])
        answers = [
            rng.integers(0, 250, size=rng.integers(2, 9)) for _ in range(1 if job in ("sft", "regression") else 2)
        ]
        labels = [float(rng.normal())] if job == "regression" else [1.0, 0.0][: len(answers)]
        scored = group(asked, [a.tolist() for a in answers], labels)
        trajectories = tuple(
            replace(t, action_mask=np.arange(t.num_steps) != 1, behavior_logprobs=np.zeros(t.num_steps, np.float32))
            for t in scored.group.trajectories
        )
        whole = replace(scored.group, trajectories=trajectories)
        references = [rng.normal(-5, 1, size=t.num_steps).astype(np.float32) for t in trajectories]
        made.append(replace(scored, group=whole, reference_logprobs=references if job in ("dpo", "ipo") else None))
    return made
