"""Bytes of activations, logits and generation steps.

The counts hold for transformers' blocks with fused attention (RMSNorm in float32, gated MLP); a test compares them with
the tensors saved by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.learner.policies.shapes import AnyShape, ImageShape, ModelShape, TowerShape

FLOAT32 = 4
MLP_TENSORS = 4  # gate, its activation, up, their product
PATCH_CHANNELS = 6  # three colours of two frames: a still image is shown twice
WINDOW_COPIES = 3  # of the vision attention's width: queries, keys and values together, and the windows' outputs
HEAD_COPIES = 3  # float32 tensors as large as the logits: scaled logits, log-probs, and one for the entropy


@dataclass(frozen=True)
class Microbatch:
    rows: int  # of the longest length
    tokens: int  # padded, or of each prompt once; this rank's, where ranks share the tokens of rows
    targets: int  # tokens whose log-probs are computed
    patches: int  # of all images and videos that the vision tower encodes

    @classmethod
    def of(cls, config: RunConfig, shape: AnyShape, num_sharing: int = 1) -> Microbatch:
        """Shorter rows fill it up to `learner.tokens_per_microbatch`. An image is encoded once a micro-batch; the
        siblings of a group share their images, and with `share_prompts` a prompt.

        `num_sharing` ranks share the tokens of rows; each of them encodes all images.
        """
        learner, siblings, step = config.learner, config.algorithm.samples_per_prompt, step_rows(config)
        if isinstance(shape, ImageShape):
            rows = max(1, min(step, learner.tokens_per_microbatch // shape.row_tokens))
            return cls(rows, rows * shape.row_tokens, 0, 0)
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


def training_bytes(config: RunConfig, shape: AnyShape, batch: Microbatch) -> tuple[int, int]:
    """Bytes on the device and in host memory that one forward and backward pass of `batch` keeps, logits left out."""
    if isinstance(shape, ImageShape):
        kept = shape.kept if config.learner.activation_checkpointing == "none" else shape.kept_inputs
        return kept * max(batch.rows, shape.least_rows), 0
    is_autocast = config.learner.backend != "fsdp2" and config.resources.dtype != "float32"
    text, vision, stored = shape.text, shape.vision, DTYPE_BYTES[config.resources.dtype]
    block = _block(text, stored, is_autocast)
    if any(spec.name.endswith("q_norm.weight") for spec in shape.manifest.tensors):
        block += (text.num_heads + text.num_kv_heads) * text.head_dim * (FLOAT32 + stored)
    towers = [(text, batch.tokens, block)]
    if vision is not None:
        block = _block(vision, stored, is_autocast) + WINDOW_COPIES * vision.hidden * stored
        towers.append((vision, batch.patches, block))
    device = host = 0
    value = FLOAT32 if is_autocast else stored
    mode = config.learner.activation_checkpointing
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


def logits_bytes(config: RunConfig, shape: AnyShape, targets: int) -> int:
    """Returns the bytes of logits, log-probs and entropy terms of `targets`, all float32 [targets, vocabulary]; the
    backward pass recomputes a chunk's logits."""
    vocab = shape.vocab if isinstance(shape, ModelShape) else 0
    return min(targets, config.learner.logprob_chunk_tokens) * vocab * (1 + HEAD_COPIES) * FLOAT32


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


def _block(tower: TowerShape, value: int, is_autocast: bool) -> int:
    """Two norms (input in float32, normalised value, output), attention with its row sums, the MLP."""
    norms = 2 * tower.hidden * (3 * FLOAT32 + value if is_autocast else FLOAT32 + 2 * value)
    attention = tower.attention_width * value + tower.num_heads * FLOAT32
    return norms + attention + MLP_TENSORS * tower.intermediate * value


def sequence_bytes(config: RunConfig, shape: ModelShape, length: int) -> int:
    """Bytes of KV cache with which a vLLM engine takes one sequence of `length` tokens.

    Every layer keeps whole blocks: all tokens, those of its window and of one engine step, or one block with a state.
    vLLM sets one more block apart, and makes blocks so long that a state fits into one.
    """
    vllm, cache = config.sampler.vllm, shape.cache
    token = max(1, cache.width // config.resources.rollout.tensor_parallel) * DTYPE_BYTES[config.resources.dtype]
    block = vllm.block_size
    if cache.num_states:
        state = cache.state_width * DTYPE_BYTES[config.resources.dtype]
        block *= ceil(state / (block * token))
    whole = ceil(length / block)
    windowed = ceil(min(cache.window + vllm.max_num_batched_tokens, length) / block)
    kinds = [n for n in (cache.num_full, cache.num_windowed, cache.num_states) if n]
    blocks = cache.num_full * whole + cache.num_windowed * windowed + cache.num_states + min(kinds)
    return blocks * block * token


def refuse_small_cache(config: RunConfig, shape: AnyShape) -> None:
    """Checks that the KV cache holds one sequence of the longest length; vLLM checks it when its model is loaded."""
    sampler, vllm = config.sampler, config.sampler.vllm
    if isinstance(shape, ImageShape) or sampler.kind is not SamplerKind.VLLM:
        return
    if config.offline.is_on or vllm.kv_cache_bytes == 0:
        return  # a cache that follows from the plan holds one
    needed = sequence_bytes(config, shape, sampler.max_model_len)
    if vllm.kv_cache_bytes >= needed:
        return
    shorter = range(0, sampler.max_model_len, vllm.block_size)
    length = max(n for n in shorter if n == 0 or sequence_bytes(config, shape, n) <= vllm.kv_cache_bytes)
    shorten = f", or sampler.max_model_len={length} or less" if length else ""
    raise PreflightError(
        f"sampler.vllm.kv_cache_bytes={vllm.kv_cache_bytes} holds no sequence of sampler.max_model_len="
        f"{sampler.max_model_len} tokens of policy.model={config.policy.model} in {config.resources.dtype}, which "
        f"takes {needed} bytes: set sampler.vllm.kv_cache_bytes={needed} or more, several times this for as many "
        f"sequences at a time{shorten}"
    )
