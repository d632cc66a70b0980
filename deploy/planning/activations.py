"""Estimates the bytes of activations, logits and generation steps.

The counts hold for transformers' blocks with fused attention (RMSNorm in float32, gated MLP); a test compares them with
the tensors saved by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mobula.cluster.weight_sync.manifest import DTYPE_BYTES
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.learner.policies.shapes import ModelShape, TowerShape

FLOAT32 = 4
MLP_TENSORS = 4  # gate, its activation, up, their product
PATCH_CHANNELS = 6  # three colours of two frames: a still image is shown twice
WINDOW_COPIES = 3  # of the vision attention's width: queries, keys and values together, and the windows' outputs
HEAD_COPIES = 3  # float32 tensors as large as the logits: scaled logits, log-probs, and one for the entropy


@dataclass(frozen=True)
class Microbatch:
    """The largest micro-batch of one learner rank."""

    rows: int  # of the longest length
    tokens: int  # padded, or of each prompt once; this rank's, where ranks share the tokens of rows
    targets: int  # tokens whose log-probs are computed
    patches: int  # of all images and videos that the vision tower encodes

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape, num_sharing: int = 1) -> Microbatch:
        """Shorter rows fill it up to `learner.tokens_per_microbatch`. An image is encoded once a micro-batch; the
        siblings of a group share their images, and with `share_prompts` a prompt.

        `num_sharing` ranks share the tokens of rows; each of them encodes all images.
        """
        learner, siblings, step = config.learner, config.algorithm.samples_per_prompt, step_rows(config)
        length = min(config.data.max_prompt_tokens + config.sampler.max_tokens, config.sampler.max_model_len)
        answer = min(config.sampler.max_tokens, length)
        prompt, per_prompt = length - answer, siblings if learner.shares_prompts else 1
        num_whole, rest = divmod(learner.tokens_per_microbatch, prompt + per_prompt * answer)
        rows = min(step, max(1, num_whole * per_prompt + max(0, rest - prompt) // answer))
        most = ceil(step / per_prompt) * prompt + step * answer
        num_tokens = min(most, max(length, learner.tokens_per_microbatch))
        groups = ceil(rows / siblings)
        if learner.shares_prompts:  # prompts with short responses leave space for other prompts
            groups = max(1, min(ceil(step / siblings), num_tokens // max(1, prompt)))
        patches = 0 if shape.vision is None else groups * media_patches(config, shape)
        tokens = ceil(num_tokens / num_sharing)
        return cls(rows, tokens, tokens if learner.shares_prompts else min(tokens, rows * answer), patches)


def media_patches(config: RunConfig, shape: ModelShape) -> int:
    """Returns the maximum number of vision patches of one prompt; a video patch spans two frames."""
    image_patches = ceil(config.data.max_pixels / shape.pixels_per_patch)
    video = config.data.video
    frames = ceil(video.max_frames / 2) * ceil(video.max_frame_pixels / shape.pixels_per_patch)
    return config.sampler.max_images_per_prompt * image_patches + config.sampler.max_videos_per_prompt * frames


def step_rows(config: RunConfig) -> int:
    """Returns the number of responses per rank and optimizer step; in the training service, of rows per request."""
    if config.sampler.adapters.are_on or config.training_service.weights == "full":
        return config.training_service.max_rows
    algorithm = config.algorithm
    rows = algorithm.prompts_per_step * algorithm.samples_per_prompt / algorithm.num_minibatches
    return ceil(rows * config.learner.sequence_parallel / config.resources.learner.num_workers)


def checkpointing(config: RunConfig) -> str:
    """Activations that the learner keeps of a block: `none` recomputes nothing, `blocks` keeps a block's input,
    `blocks_offloaded` keeps it in host memory."""
    return config.learner.activation_checkpointing


def logprob_rows(config: RunConfig, targets: int) -> int:
    """Returns the number of targets with logits in memory at once; the backward pass recomputes a chunk's logits."""
    return min(targets, config.learner.logprob_chunk_tokens)


def training_bytes(config: RunConfig, shape: ModelShape, batch: Microbatch) -> tuple[int, int]:
    """Bytes on the device and in host memory that one forward and backward pass of `batch` keeps, logits left out."""
    is_autocast = config.learner.backend != "fsdp2" and config.resources.dtype != "float32"
    towers = [(shape.text, batch.tokens, _text_block(shape, config.resources.dtype, is_autocast))]
    if shape.vision is not None:
        towers.append((shape.vision, batch.patches, _vision_block(shape.vision, config.resources.dtype, is_autocast)))
    device = host = 0
    value = FLOAT32 if is_autocast else DTYPE_BYTES[config.resources.dtype]
    mode = checkpointing(config)
    for tower, tokens, block in towers:
        inputs = tokens * tower.num_layers * tower.hidden * value
        if mode == "none":
            device += tokens * tower.num_layers * block
        else:
            device += tokens * block + (inputs if mode == "blocks" else 0)
            host += inputs if mode == "blocks_offloaded" else 0
        device += tokens * 2 * (tower.hidden + tower.intermediate) * value if mode == "none" else 0
    pixels = batch.patches * shape.pixels_per_patch * PATCH_CHANNELS * FLOAT32
    return device + pixels, host


def scoring_bytes(config: RunConfig, shape: ModelShape, batch: Microbatch) -> int:
    """Bytes of one forward pass without gradients, logits left out: one block at a time."""
    value = DTYPE_BYTES[config.resources.dtype]
    towers = [(shape.text, batch.tokens)] + ([] if shape.vision is None else [(shape.vision, batch.patches)])
    widest = max(tokens * (3 * t.hidden + t.attention_width + 3 * t.intermediate) * value for t, tokens in towers)
    return widest + batch.patches * shape.pixels_per_patch * PATCH_CHANNELS * FLOAT32


def logits_bytes(config: RunConfig, shape: ModelShape, targets: int) -> int:
    """Returns the bytes of logits, log-probs and entropy terms of `targets`, all float32 [targets, vocabulary]."""
    return logprob_rows(config, targets) * shape.vocab * (1 + HEAD_COPIES) * FLOAT32


def engine_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns the bytes of one engine step without weights and KV cache: the widest block, and float32 sampling."""
    value = DTYPE_BYTES[config.resources.dtype]
    sampler, siblings = config.sampler, config.algorithm.samples_per_prompt
    is_vllm = sampler.kind is SamplerKind.VLLM
    tokens = sampler.vllm.max_num_batched_tokens if is_vllm else siblings * config.data.max_prompt_tokens
    num_seqs = sampler.vllm.max_num_seqs if is_vllm else siblings
    text = shape.text
    widest = tokens * (3 * text.hidden + text.attention_width + 3 * text.intermediate) * value
    if shape.vision is not None:
        vision = shape.vision
        patches = media_patches(config, shape)
        widest = max(widest, patches * (3 * vision.hidden + vision.attention_width + 3 * vision.intermediate) * value)
    return widest + num_seqs * shape.vocab * HEAD_COPIES * FLOAT32


def _text_block(shape: ModelShape, dtype: str, is_autocast: bool) -> int:
    """Bytes that one block of the language model keeps for one token."""
    text, value = shape.text, DTYPE_BYTES[dtype]
    has_head_norms = any(spec.name.endswith("q_norm.weight") for spec in shape.manifest.tensors)
    head_norms = (text.num_heads + text.num_kv_heads) * text.head_dim * (FLOAT32 + value) if has_head_norms else 0
    return _block(text, value, is_autocast) + head_norms


def _vision_block(vision: TowerShape, dtype: str, is_autocast: bool) -> int:
    value = DTYPE_BYTES[dtype]
    return _block(vision, value, is_autocast) + WINDOW_COPIES * vision.hidden * value


def _block(tower: TowerShape, value: int, is_autocast: bool) -> int:
    """Two norms (input in float32, normalised value, output), attention with its row sums, the MLP."""
    norms = 2 * tower.hidden * (3 * FLOAT32 + value if is_autocast else FLOAT32 + 2 * value)
    attention = tower.attention_width * value + tower.num_heads * FLOAT32
    return norms + attention + MLP_TENSORS * tower.intermediate * value
