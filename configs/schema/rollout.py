"""What is asked and who answers: policy, data, sampler."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
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
    tiny: Literal["none", "qwen2.5-vl"]
    """If `model` is a folder that does not exist yet, write this random-weight model there first."""
    tiny_tied_embeddings: bool
    """Whether the tiny model ties its output to its input embeddings."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation of learner and reference."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass to save memory."""
    freeze: tuple[str, ...]
    """Parameters whose checkpoint name starts with one of these are not trained, e.g. `visual.`."""
    lora: LoRAConfig
    """Adapters in place of full training."""


class DataKind(StrEnum):
    JSONL = "jsonl"
    CHAT = "chat"
    DIGITS = "digits"
    DIGIT_SUM = "digit_sum"
    DIGIT_LIST = "digit_list"


class DataConfig(Section):
    """The prompts: a folder with train.jsonl, validation.jsonl and test.jsonl."""

    kind: DataKind
    """`jsonl` reads questions from a folder that is there, `chat` conversations for offline jobs; the digit tasks write
    theirs first if it is missing."""
    path: Annotated[Path, NOT_EMPTY]
    """The folder."""
    prompt_suffix: str
    """Text that is put behind every question."""
    system_prompt: str
    """System turn of every prompt; empty for none."""
    max_prompt_tokens: PositiveInt
    """A longer prompt (vision tokens included) is skipped and counted, never cut."""
    min_pixels: PositiveInt
    """Smaller pictures are scaled up to this many pixels by the model's image processor."""
    max_pixels: PositiveInt
    """Larger pictures are scaled down to this many pixels by the model's image processor."""
    max_image_bytes: PositiveInt
    """A larger file is refused before it is read."""
    max_decoded_pixels: PositiveInt
    """A picture that would decode to more pixels is refused before it is decoded (decompression bombs)."""
    media_cache_bytes: PositiveInt
    """Byte budget of processed pictures that are kept for later epochs."""
    max_skipped_fraction: Annotated[float, Field(ge=0, le=1)]
    """If a larger share of a split is unusable the run refuses to start."""


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
