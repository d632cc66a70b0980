"""Schema of the learner (optimizer, distributed training) and the warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mobula.configs.schema.base import Field, PositiveFloat, PositiveInt, Section, UserCode

NonNegativeFloat = Annotated[float, Field(ge=0)]


class LearnerConfig(Section):
    """Optimizer and distributed training."""

    backend: Literal["fsdp2", "deepspeed", "single"]
    """Library that shards parameters, gradients and optimizer state over the learner ranks; `single` shards nothing."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] | UserCode = "adamw"
    """`adamw_8bit` is AdamW with 8-bit moments, from the extra `quantised`; `muon` is Muon for hidden matrices and
    AdamW for everything else."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of `optimizer`, if it is user code."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the policy's weights, of accumulated gradients and of AdamW's moments; bfloat16 halves the memory of all
    three and drops 16 of the 24 bits of every weight. Gradients are summed over ranks in float32, and updates are
    rounded stochastically, which keeps small updates on average. Adapters (`policy.lora`) and critics stay float32."""
    learning_rate: PositiveFloat
    """The optimizer's learning rate in RL. By default 1e-6 for weights, 1e-5 for adapters (`policy.lora`)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up, over `num_steps`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's square."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's epsilon; larger values reduce the effect of rounding on parameters with small gradients."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay of the gradient's mean."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay per optimizer step of an exponential moving average of the weights, which is part of checkpoints;
    `mobula export --ema` writes it. 0 for none."""
    max_grad_norm: PositiveFloat = 1.0
    """The global gradient norm is clipped to this."""
    tokens_per_microbatch: PositiveInt = 8192
    """Tokens in one forward and backward pass of one rank, or of `sequence_parallel` ranks together; with padded rows
    padding counts, and with `share_prompts` a prompt counts once for its responses."""
    sequence_parallel: PositiveInt = 1
    """Adjacent ranks that split the tokens of the same rows, so that a rank stores only the activations of its part.
    Must divide the attention heads of `policy.model`; 1 splits no row."""
    packing: Literal["auto", True, False] = "auto"
    """Compute rows of different lengths without padding; each row attends to itself only. `auto`: wherever model,
    teachers, sampler and `policy.attention` allow it, else padded rows, with a line in the log; `true` refuses the run
    there."""
    share_prompts: bool = True
    """Without padding: compute a prompt, or another beginning that several rows of a forward and backward pass have in
    common, once. Turned off, with a line in the log, where the model or `policy.attention` cannot share it."""
    image_token_cost: NonNegativeFloat = 0.4
    """Cost of encoding one image token, in tokens of the decoder, for balancing ranks. About 4 times the ratio of
    parameters of vision tower and decoder."""
    attention_token_cost: NonNegativeFloat = 2.0e-5
    """Cost of a token's attention per token of the row, in tokens of the decoder without attention, for balancing
    ranks. About 1 / (12 * hidden size) of `policy.model`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are computed at once: a chunk takes a few times this number times the vocabulary in float32.
    The backward pass computes them again."""
    activation_checkpointing: Literal["none", "blocks", "blocks_offloaded"] = "none"
    """`blocks` stores the input of each text and vision block and computes the rest again in the backward pass;
    `blocks_offloaded` stores these inputs in host memory, which is useful only with a GPU."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State in host memory between uses; needs a GPU. `optimizer`: optimizer state, with the step on the CPU;
    `parameters`: parameters as well. FSDP2 offloads both or none; DeepSpeed offloads parameters at ZeRO stage 3."""
    zero_stage: Literal[2, 3] = 2
    """State that DeepSpeed shards: 2 for gradients and optimizer state, 3 for parameters as well. FSDP2 always shards
    all three."""

    @property
    def packs(self) -> bool:
        """Whether the decoder computes rows without padding; ranks that split tokens always do. A run decides
        `packing=auto` before roles start (`mobula.deploy.preflight.decisions`); undecided, rows are packed."""
        return self.packing is not False or self.sequence_parallel > 1

    @property
    def shares_prompts(self) -> bool:
        return self.packs and self.share_prompts


class WarmStartConfig(Section):
    """Supervised steps before RL, for a policy without reward at the start. A flow model learns the images of
    `target_images` of each row by flow matching; the accuracy is the explained share of squared velocities."""

    num_steps: Annotated[int, Field(ge=0)]
    """Most steps of the warm start; 0 skips it."""
    num_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of the train split to learn from, chosen by the seed, with distinct answers in turn; 0 for all."""
    batch_size: PositiveInt = 64
    """Rows in one step."""
    learning_rate: PositiveFloat
    """The optimizer's learning rate in the warm start, at the peak of `schedule`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate over `num_steps`: `cosine` rises over the first 30 and falls to a tenth."""
    target_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Stop early once greedy accuracy on the validation split reaches this."""
    check_interval: PositiveInt = 10
    """Steps between two accuracy checks."""
    max_checks_rows: PositiveInt = 100
    """Rows of the validation split in one check."""
    text_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of images of a flow model that are trained with the negative prompt instead of the row's prompt, which
    trains the unconditional prediction of classifier-free guidance; needs `sampler.flow.guidance` above 1."""
