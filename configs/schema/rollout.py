"""Schema of policy and sampler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mobula.configs.schema.base import NOT_EMPTY, Section, UserCode


class LoRAConfig(Section):
    """Low-rank adapters, trained instead of the weights. Source: arXiv:2106.09685."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of every adapter: a weight is W + alpha / rank * B @ A, and only A and B are trained. 0 trains the weights.
    Adapters need a higher learning rate: with a rank above 0 presets set `learner.learning_rate` ten times as high."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapters' scale."""
    target_modules: tuple[str, ...] = ("language",)
    """Linear layers with an adapter. Either a part of the model (`language`, `vision`, `connector`): all linear layers
    of the part except the output layer. Or the last part of a layer's name, e.g. `q_proj`: all layers of this name.
    Layers in `policy.freeze` get no adapter."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of B @ A; unused without adapters."""
        return self.alpha / max(self.rank, 1)


class PolicyConfig(Section):
    """The trained network."""

    model: Annotated[str, NOT_EMPTY]
    """A checkpoint in the Hugging Face layout: a local folder or a hub name."""
    tiny: Annotated[str, NOT_EMPTY]
    """If `model` is a folder that does not exist yet, write this model there first: a model with random weights, by
    the name in `mobula init-model` without `tiny-`; or released weights from the packages of the extra `pretrained`:
    `smollm2-135m`, also with a random vision tower (`policy=` lists both). `none` writes nothing."""
    tiny_tied_embeddings: bool = False
    """Whether the model with random weights ties output and input embeddings."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of learner and reference. With `sdpa` on a GPU, packed rows and windows of vision towers
    use torch's variable-length kernel. `flash_attention_2` and `flash_attention_3` need the packages `flash_attn` and
    `flash_attn_interface`, which no extra installs."""
    dropout: bool = False
    """Whether the learner keeps the dropout of the checkpoint's config.json. Without dropout the learner computes the
    log-probs that were sampled; with dropout, ratios of on-policy tokens differ from 1."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: by the start of their name in the checkpoint, e.g. `visual.`, or a part of the
    model: `vision` (the tower), `connector`, `language`. Of a flow model with two transformers (Wan 2.2),
    `transformer.` or `transformer_2.`."""
    lora: LoRAConfig = LoRAConfig()
    """Adapters instead of full training."""
    quantisation: Literal["none", "nf4", "int8"] = "none"
    """Bits of the frozen weights below adapters, in the learner: `nf4` 4 (by torchao, the extra `quantised`), `int8` 8.
    Engines and reference have the dequantised weights, so all compute with the same numbers."""
    quantisation_modules: tuple[str, ...] = ("language",)
    """Linear layers that `quantisation` holds in few bits: parts or names as in `lora.target_modules`. Embeddings, the
    output layer and norms are never among them."""


class ScorersConfig(Section):
    """Reference scorers."""

    quantisation: Literal["none", "int8", "int4"] = "none"
    """Bits of the weights of linear layers, except the output layer, by torchao (the extra `quantised`). `int8`: a
    scale for each row; `int4`: a scale for 128 values, only with resources.device=cuda and resources.dtype=bfloat16."""


class ReferenceConfig(Section):
    """The frozen policy, or the teacher that replaces it."""

    place: Literal["scorers", "learner_ranks"] = "scorers"
    """Processes that compute the reference. `scorers`: the workers of `resources.reference`; `learner_ranks`: the
    learner with adapters off, for `policy.lora` without a warm start, where this equals the initial policy."""
    scorers: ScorersConfig = ScorersConfig()
    """Read with `place=scorers`."""


class SamplerKind(StrEnum):
    VLLM = "vllm"
    HUGGINGFACE = "huggingface"
    FLOW = "flow"
    IMAGE_TOKENS = "image_tokens"
    IMAGE_PATCHES = "image_patches"


class VLLMConfig(Section):
    """Sizes of an engine of vLLM."""

    max_num_seqs: Annotated[int, Field(ge=0)] = 128
    """Sequences that one engine decodes concurrently. 0, on GPUs: as many sequences of the longest length as fit into
    the KV cache, at most the responses that the run requests concurrently."""
    max_num_batched_tokens: PositiveInt = 4096
    """Most tokens in one engine step."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """KV cache of one engine, on each GPU. 0, on GPUs: the memory that `mobula plan` shows as free."""
    gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU's memory for an engine, which must be free at the start. 0: the share that the plan books for the
    engine."""
    enforce_eager: bool = True
    """Skip graph capture and compilation."""
    block_size: PositiveInt = 32
    """Tokens in one KV cache block."""


class ServedAdaptersConfig(Section):
    """Adapters (LoRA) that an engine serves in addition to the base model, for the training service."""

    max_served: Annotated[int, Field(ge=0)] = 0
    """Most adapters that one engine holds in host memory. 0 serves the base model alone."""
    max_in_batch: PositiveInt = 8
    """Most adapters in one engine step; requests of further adapters wait. vLLM reserves device memory for as many
    adapters of rank `max_rank`. `sampler=huggingface` runs one adapter at a time."""
    max_rank: Literal[8, 16, 32, 64, 128, 256, 512] = 32
    """Highest rank of an adapter."""

    @property
    def are_on(self) -> bool:
        return self.max_served > 0


class FlowConfig(Section):
    """Denoising of a flow model, or of each continuous token of an image (`sampler.kind=image_patches`). Learner and
    sampler compute the same steps."""

    height: PositiveInt = 512
    """Height of an image or frame, in pixels."""
    width: PositiveInt = 512
    """Width of an image or frame, in pixels."""
    num_frames: PositiveInt = 1
    """Frames of a video; 1 for image models."""
    num_steps: PositiveInt = 10
    """Denoising steps of an image."""
    evaluation_steps: Annotated[int, Field(ge=0)] = 0
    """Denoising steps of an image at temperature 0, as in evaluations; 0 takes `num_steps`."""
    guidance: Annotated[float, Field(ge=1)] = 4.5
    """Scale of classifier-free guidance, in the sampler and in the learner; 1 for none. Same as `guidance_scale` (or
    `true_cfg_scale`) of the model's pipeline; models with guidance as an input compute no negative prompt."""
    negative_prompt: str = ""
    """The negative prompt of classifier-free guidance."""
    max_text_tokens: PositiveInt = 128
    """Most tokens of a prompt in the longest text encoder; longer prompts are truncated."""
    num_images: Annotated[int, Field(ge=0)] = 0
    """Condition images of each prompt, for models that edit images. Rows with another number are skipped. Images are
    read within the limits of `data`, and scaled to `width` and `height`."""
    strength: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the denoising steps that are computed, from the condition image with noise on, for models that start
    from an image (Stable Diffusion 3); 1 starts from noise. The first step is `num_steps * (1 - strength)`."""
    kernel: Literal["flow_grpo", "sde", "dance", "cps", "langevin", "vrl", "ddim"] = "flow_grpo"
    """The stochastic step, see docs/algorithms.md; `ddim` follows the ODE throughout, for losses that need no
    likelihood; `vrl`, with `sampler.kind=image_patches`, adds noise in the last step and sums log-probs over numbers.
    """
    noise_level: PositiveFloat = 0.7
    """Amount of noise that a stochastic step adds."""
    window_start: Annotated[int, Field(ge=0)] = 0
    """The first stochastic step; earlier steps follow the ODE and are not trained."""
    window_end: PositiveInt = 9
    """The step after the last stochastic step."""
    window_size: Annotated[int, Field(ge=0)] = 0
    """Stochastic steps of a group: the size of a window within [window_start, window_end); all other steps follow the
    ODE. 0 takes the whole range."""
    window_order: Literal["random", "progressive"] = "random"
    """Position of the window. `random`: drawn for each group; `progressive`: starts at `window_start` and moves on."""
    window_interval: PositiveInt = 1
    """Weight versions between two moves of a `progressive` window."""
    latents: Literal["float32", "float16", "bfloat16"] = "float32"
    """The type that latents are rounded to before scoring, and transferred in."""
    batch_size: Annotated[int, Field(ge=0)] = 0
    """Most images that one sampler generates in a batch: of one prompt, or of several that wait and fit into it as a
    whole. 0 for all siblings of one prompt."""
    divergence: Literal["exact", "per_time"] = "per_time"
    """The KL divergence of a step: `exact` of the two Gaussians; `per_time` divided by the length of the step, as in
    Flow-GRPO."""


def first_step(num_steps: int, strength: float) -> int:
    """The first computed step of a schedule. Source: `get_timesteps` of diffusers' image-to-image pipelines."""
    return int(max(num_steps - num_steps * strength, 0))


class ImageTokensConfig(Section):
    """Generation of images token by token."""

    batch_size: Annotated[int, Field(ge=0)] = 0
    """Images of a prompt that one sampler generates in a batch; 0 for all siblings."""
    guidance: Annotated[float, Field(ge=1)] = 5.0
    """Scale of classifier-free guidance on the logits, in the sampler and in the learner; 1 for none."""


class ImagePatchesConfig(Section):
    """Generation of images as continuous tokens: an autoregressive decoder with a flow head. `sampler.flow` has the
    denoising of each token, and the number of images in a batch."""

    shift: PositiveFloat = 1.0
    """Shift s of the head's times: t / (s - (s - 1) t). Same as `timesteps_shift` of the model's pipeline."""
    last_step: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Length of the last step in time. 0: times are evenly spaced, as in version 1.1 of the released model.
    Version 1 has 0.04, and its last step is deterministic: set `sampler.flow.window_end` to `num_steps` - 1."""
    normalise: bool = False
    """Layer norm without parameters on each token. Same as `use_norm` of the model's pipeline."""


class SamplerConfig(Section):
    """Sampling of responses. Learner and engine use the same distribution."""

    shared_kinds = {"flow": (SamplerKind.IMAGE_PATCHES.value,)}

    kind: SamplerKind | UserCode
    """The engine: `vllm`; `huggingface` for machines without vLLM; `flow` for flow models; `image_tokens` for models
    that generate images token by token, with transformers; `image_patches` for those with continuous tokens."""
    kind_options: dict[str, Any] = {}
    """Arguments of `kind`, if it is user code."""
    temperature: Annotated[float, Field(ge=0.001)] = 1.0
    """Divides the logits, in the engine and in the learner."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens with this total probability; 1 for all. With `top_p`, `top_k` or `min_p`,
    responses carry the set of kept tokens, and the learner's softmax is over this set."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many likeliest tokens; 0 for all. vLLM needs it to report the kept tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability; 0 for all."""
    first_token_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of a response's first token in training (FIRE: higher than `temperature`), in the engine and in the
    learner; 0 takes `temperature`. Source: arXiv:2410.21236."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these texts, with finish reason `stop_string`. The text
    stays in the response."""
    max_tokens: PositiveInt = 256
    """Longest response."""
    max_model_len: PositiveInt = 1024
    """Longest prompt and response together."""
    max_images_per_prompt: PositiveInt = 2
    """Most images in one prompt."""
    max_videos_per_prompt: Annotated[int, Field(ge=0)] = 0
    """Most videos in one prompt; 0 refuses rows with videos, and engines reserve no memory for them."""
    max_audios_per_prompt: Annotated[int, Field(ge=0)] = 0
    """Most audio clips in one prompt; 0 refuses rows with audio, and engines reserve no memory for it."""
    chunk_tokens: PositiveInt = 64
    """A rollout actor reports progress of a response every so many tokens; if the actor dies, fewer tokens are lost."""
    adapters: ServedAdaptersConfig = ServedAdaptersConfig()
    """Adapters that an engine serves in addition to the base model."""
    vllm: VLLMConfig = VLLMConfig()
    """Sizes of an engine of vLLM."""
    flow: FlowConfig = FlowConfig()
    """Denoising of a flow model."""
    image_tokens: ImageTokensConfig = ImageTokensConfig()
    """Generation of images token by token."""
    image_patches: ImagePatchesConfig = ImagePatchesConfig()
    """Generation of images as continuous tokens."""

    @property
    def is_cut(self) -> bool:
        """Whether sampling is restricted to a subset of tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_flow(self) -> bool:
        return self.kind is SamplerKind.FLOW

    @property
    def draws_tokens(self) -> bool:
        """Whether an autoregressive model makes images."""
        return self.kind is SamplerKind.IMAGE_TOKENS or self.draws_patches

    @property
    def draws_patches(self) -> bool:
        """Whether the tokens of an image are continuous, and denoised by a flow head."""
        return self.kind is SamplerKind.IMAGE_PATCHES

    @property
    def makes_images(self) -> bool:
        """Whether responses are images or videos."""
        return self.is_flow or self.draws_tokens

    @property
    def denoises(self) -> bool:
        """Whether actions are denoising steps, as `flow` configures them."""
        return self.is_flow or self.draws_patches

    @property
    def max_media_per_prompt(self) -> int:
        """Most images, videos and sounds in one prompt."""
        return self.max_images_per_prompt + self.max_videos_per_prompt + self.max_audios_per_prompt
