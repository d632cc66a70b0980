"""Who answers: policy and sampler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.schema.base import NOT_EMPTY, Section


class LoRAConfig(Section):
    """Low-rank adapters that are trained in place of the weights. Source: arXiv:2106.09685."""

    rank: Annotated[int, Field(ge=0)]
    """Rank of every adapter: a weight is W + alpha / rank * B @ A, and only A and B are trained. 0 trains the weights
    themselves."""
    alpha: PositiveFloat
    """Numerator of the adapters' scale."""
    target_modules: tuple[str, ...]
    """Linear layers that get an adapter, by the last part of their name, e.g. `q_proj`, wherever they stand; what
    `policy.freeze` names gets none, so `policy.freeze=[visual.]` keeps adapters out of the vision tower."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What B @ A is multiplied by; of no meaning where there are no adapters."""
        return self.alpha / max(self.rank, 1)


class PolicyConfig(Section):
    """The network that is trained."""

    model: Annotated[str, NOT_EMPTY]
    """A checkpoint in the Hugging Face layout: a local folder or a hub name."""
    tiny: Annotated[str, NOT_EMPTY]
    """If `model` is a folder that does not exist yet, write this random-weight model there first: a name of
    `mobula init-model` without `tiny-`. `none` writes nothing."""
    tiny_tied_embeddings: bool
    """Whether the tiny model ties its output to its input embeddings."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation of learner and reference."""
    freeze: tuple[str, ...]
    """Parameters whose checkpoint name starts with one of these are not trained, e.g. `visual.`; so are those of a part
    of the model's family: `vision` (the tower), `connector`, `language`."""
    lora: LoRAConfig
    """Adapters in place of full training."""


class SamplerKind(StrEnum):
    VLLM = "vllm"
    HUGGINGFACE = "huggingface"


class SamplerConfig(Section):
    """How responses are sampled. Learner and engine use the same distribution."""

    kind: SamplerKind
    """The engine: `vllm`, or `huggingface` where vLLM cannot be installed."""
    temperature: PositiveFloat
    """Divides the logits, in the engine and in the learner."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Only 1.0 keeps engine and learner on one distribution; another value is refused."""
    top_k: int
    """Only 0 (off) keeps engine and learner on one distribution; another value is refused."""
    max_tokens: PositiveInt
    """Longest response."""
    max_model_len: PositiveInt
    """Longest prompt and response together."""
    max_images_per_prompt: PositiveInt
    """Most pictures in one prompt."""
    max_videos_per_prompt: Annotated[int, Field(ge=0)]
    """Most videos in one prompt; 0 refuses rows with videos, and engines keep no memory for them."""
    max_num_seqs: PositiveInt
    """Sequences that one engine decodes at a time."""
    max_num_batched_tokens: PositiveInt
    """Tokens that one engine step processes at most."""
    chunk_tokens: PositiveInt
    """A response that is being sampled is reported every so many tokens; fewer are lost when its rollout actor dies."""
    kv_cache_bytes: PositiveInt
    """KV cache of one engine."""
    enforce_eager: bool
    """Skip graph capture and compilation."""
    block_size: PositiveInt
    """Tokens in one KV cache block."""

    @property
    def max_media_per_prompt(self) -> int:
        """Most pictures and videos in one prompt."""
        return self.max_images_per_prompt + self.max_videos_per_prompt
