"""Keys of the learner and of offline jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mobula.configs.schema.base import Section, UserCode


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
    The backward pass computes those of all chunks but one again."""
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


class RewardModelConfig(Section):
    """Training of a score head on the policy's backbone, with `offline.job=reward_model`."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` reads rows with a chosen and a rejected answer; `regression` rows with an answer and a score."""
    margin: NonNegativeFloat = 0.0
    """Margin of `bradley_terry` between the scores of chosen and rejected answer; 0 for the plain loss."""


class DPOConfig(Section):
    """Training on pairs of a chosen and a rejected answer, with `offline.job=dpo`."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the logistic loss of DPO; `ipo`: the squared distance of the log-ratio from 1 / (2 beta)."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the initial policy."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped; read by `sigmoid`."""


class KTOConfig(Section):
    """Training on single answers with a label, with `offline.job=kto`."""

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the initial policy."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of the loss of answers with the label true; the two weights balance rows of unequal numbers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of the loss of answers with the label false."""


class OfflineConfig(Section):
    """Training on dataset rows instead of rollouts; docs/offline_training.md has the row formats."""

    job: Literal["none", "sft", "reward_model", "dpo", "kto"] = "none"
    """`none` is RL. `sft`: cross-entropy on the assistant's tokens; `reward_model`: a score of an answer; `dpo`: direct
    preference optimisation; `kto`: the same from single answers with a label. A job reads `learner`, `policy`, `data`
    and this section, and not `algorithm`."""
    batch_size: PositiveInt = 32
    """Rows of one step: conversations, pairs or scored answers."""
    max_tokens: PositiveInt = 4096
    """A row with a longer conversation (vision tokens included) is skipped and counted, never truncated."""
    train_template_text: bool = False
    """Include the chat template's text between generation prompt and answer, such as an empty thought, in the loss.
    Otherwise the loss covers answers and their end tokens."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Parameters of `reward_model`."""
    dpo: DPOConfig = DPOConfig()
    """Parameters of `dpo`."""
    kto: KTOConfig = KTOConfig()
    """Parameters of `kto`."""

    @property
    def is_on(self) -> bool:
        return self.job != "none"

    @property
    def rows(self) -> Literal["conversation", "pair", "scored", "labelled"]:
        """The job's kind of row."""
        if self.job == "sft":
            return "conversation"
        if self.job == "kto":
            return "labelled"
        is_regression = self.job == "reward_model" and self.reward_model.loss == "regression"
        return "scored" if is_regression else "pair"
