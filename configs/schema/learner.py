"""The optimizer, how it is distributed, and the warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mobula.configs.schema.base import Field, PositiveFloat, PositiveInt, Section, UserCode

NonNegativeFloat = Annotated[float, Field(ge=0)]


class LearnerConfig(Section):
    """The optimizer and how it is distributed."""

    backend: Literal["fsdp2", "deepspeed", "single"]
    """Library that shards parameters, gradients and optimizer state over the learner ranks; `single` shards nothing."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] | UserCode = "adamw"
    """`adamw_8bit` is AdamW with moments of a byte each, from the extra `quantised`; `muon` is Muon for hidden matrices
    and AdamW for everything else."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of `optimizer`, where it is your own code."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the policy's weights, of their gradients between micro-batches and of AdamW's moments: bfloat16 halves
    all three. Gradients are summed over ranks in float32, and updates are rounded stochastically, so that small ones
    are kept in the mean. Lost are 16 of the 24 bits of every weight. Adapters (`policy.lora`) and critics stay float32.
    """
    learning_rate: PositiveFloat
    """The optimizer's learning rate in RL. Where nothing sets it: 1e-6 for weights, 1e-5 for adapters (`policy.lora`).
    """
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the rise, over `num_steps`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's square."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's term beside the root of the squared gradient; larger, and rounding moves small gradients less."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay of the gradient's mean."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay, with each optimizer step, of an average of the weights that is kept beside them, in checkpoints too;
    `mobula export --ema` writes it. 0 keeps none."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped to this."""
    tokens_per_microbatch: PositiveInt = 8192
    """Tokens in one forward and backward pass of one rank, or of the ranks of `sequence_parallel` together; without
    `packing`, padding counts."""
    sequence_parallel: PositiveInt = 1
    """Neighbouring ranks that share the tokens of the same rows, so that each keeps activations of its part alone. It
    divides the attention heads of `policy.model`; 1 splits no row."""
    packing: bool = False
    """Compute rows of different lengths without padding; each attends to itself alone. `policy.attention=eager` does
    not take it."""
    image_token_cost: NonNegativeFloat = 0.4
    """Cost of encoding one token of an image, in tokens of the decoder; ranks get equal sums of both. About 4 times
    the vision tower's parameters over the decoder's."""
    attention_token_cost: NonNegativeFloat = 2.0e-5
    """Cost of a token's attention for each token of its row, in tokens of the decoder without attention; ranks get
    equal sums. About 1 / (12 * hidden size) of `policy.model`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time: a chunk takes a few times this many times the vocabulary in float32. The
    backward pass computes them again."""
    activation_checkpointing: Literal["none", "blocks", "blocks_offloaded"] = "none"
    """`blocks` keeps the input of each text and vision block alone and computes the rest again in the backward pass;
    `blocks_offloaded` keeps these inputs in host memory, which needs a GPU to make sense."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept in host memory between its uses; needs a GPU. Optimizer state, with the step taken on the CPU, or
    parameters too. FSDP2 offloads both or none; DeepSpeed offloads parameters at ZeRO stage 3."""
    zero_stage: Literal[2, 3] = 2
    """State that DeepSpeed shards: 2 is gradients and optimizer state, 3 parameters too. FSDP2 always shards all three.
    """


class WarmStartConfig(Section):
    """Supervised steps before RL, for a policy that would get no reward otherwise. A flow model is taught the images
    that rows name (`target_images`), by flow matching; its accuracy is the share of the velocities' squares that it
    predicts."""

    num_steps: Annotated[int, Field(ge=0)]
    """Longest warm start; 0 skips it."""
    num_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of the train split that it learns from, chosen by the seed, distinct answers in turn; 0 takes all."""
    batch_size: PositiveInt = 64
    """Rows in one step."""
    learning_rate: PositiveFloat
    """The optimizer's learning rate in the warm start, at the peak of `schedule`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate over `num_steps`: `cosine` rises over the first 30 and falls to a tenth."""
    target_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Stop early once greedy accuracy on the validation split reaches this."""
    check_interval: PositiveInt = 10
    """Steps between two accuracy checks."""
    max_checks_rows: PositiveInt = 100
    """Rows of the validation split in one check."""
    text_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the images of a flow model that are taught with the negative prompt in place of their own, which
    trains the unconditional prediction of classifier-free guidance; needs `sampler.flow.guidance` above 1."""
