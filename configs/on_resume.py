"""Declares for every configuration key, or its section, whether a resumed run may change it.

The longest declared prefix of a key counts, so a key may differ from its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class OnResume(StrEnum):
    """Effect of another value on a resume."""

    REFUSED = "refused"  # the checkpoint's state or the order of rows depends on the key
    NAMED = "named"  # training changes from this step on: logged
    FREE = "free"  # affects placement, speed or output only


DECLARED: Mapping[OnResume, tuple[str, ...]] = {
    OnResume.REFUSED: (
        "seed",
        "policy.model",
        "policy.tiny",
        "policy.tiny_tied_embeddings",
        "policy.freeze",
        "policy.lora.rank",
        "policy.quantisation",  # the base under the trained adapters
        "policy.quantisation_modules",
        "policy.lora.alpha",  # scales the trained adapters
        "policy.lora.target_modules",
        "data.writer",
        "data.writer_options",
        "data.kind",
        "data.path",
        "data.huggingface",
        "data.splits",
        "data.row_format",
        "data.kind_options",
        "data.row_format_options",
        "data.processor",
        "data.processor_options",
        "data.mixture",
        "data.curriculum",
        "data.shuffle_bytes",
        "data.max_checked_rows",
        "data.validation_fraction",
        "environment.name",
        "environment.num_train",
        "environment.curriculum.stages",
        "learner.backend",
        "learner.optimizer",
        "learner.master_dtype",
        "learner.ema_decay",
        "learner.zero_stage",
        "resources.dtype",
        "resources.learner.num_workers",  # only for ZeRO: other backends read a checkpoint on any number of ranks
        "algorithm.critic.place",
        "algorithm.critic.optimizer",
        "algorithm.distillation.teacher",
        "algorithm.distillation.teachers",
        "algorithm.supervised.path",
        "algorithm.supervised.max_tokens",
        "offline.job",
    ),
    OnResume.NAMED: (
        "num_steps",
        "policy.attention",
        "policy.dropout",
        "data",
        "environment",
        "learner.learning_rate",
        "learner.warmup_steps",
        "learner.schedule",
        "learner.weight_decay",
        "learner.beta1",
        "learner.beta2",
        "learner.adam_eps",
        "learner.muon_momentum",
        "learner.optimizer_options",
        "learner.max_grad_norm",
        "algorithm",
        "guard",
        "rewards",
        "offline",
        "sampler",
    ),
    OnResume.FREE: (
        "seeds",
        "name",
        "folder",
        "folder_access",
        "audit",
        "resume",
        "reproduce",
        "max_rollout_retries",
        "data.cache_path",
        "data.download_timeout_s",
        "data.media_cache_bytes",
        "environment.host",
        "environment.ray_num_cpus",
        "environment.url",
        "environment.token_env",
        "environment.max_concurrent",
        "environment.start_timeout_s",
        "environment.reset_timeout_s",
        "environment.step_timeout_s",
        "environment.retries",
        "learner.tokens_per_microbatch",
        "learner.packing",
        "learner.share_prompts",
        "learner.sequence_parallel",
        "learner.image_token_cost",
        "learner.attention_token_cost",
        "learner.logprob_chunk_tokens",
        "learner.activation_checkpointing",
        "learner.offload",
        "algorithm.max_concurrent_groups",
        "sampler.adapters",
        "sampler.chunk_tokens",
        "sampler.vllm",
        "sampler.flow.batch_size",
        "sampler.image_tokens.batch_size",
        "checkpoints",
        "evaluation",
        "metrics",
        "reference",
        "replay",
        "resources",
        "supervision",
        "timeouts",
        "tracing",
        "training_service",
        "warm_start",  # version 0 exists already
        "weight_sync",
    ),
}
BY_NAME: Mapping[str, OnResume] = {name: kind for kind, names in DECLARED.items() for name in names}


def on_resume(key: str) -> OnResume | None:
    """The effect of another value of a dotted key; None if neither the key nor a section of it is declared."""
    parts = key.split(".")
    heads = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((BY_NAME[head] for head in heads if head in BY_NAME), None)
