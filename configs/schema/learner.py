"""How the policy is made better: algorithm, learner, warm start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.schema.base import Section

NonNegativeFloat = Annotated[float, Field(ge=0)]


class KLConfig(Section):
    """Distance to the reference policy, as a term of the loss."""

    coef: NonNegativeFloat
    """Weight of the KL term; 0 turns the reference off."""
    estimator: Literal["k1", "k2", "k3"]
    """Schulman's estimators; k3 is unbiased and never negative."""


class OverAgeConfig(Section):
    """Tokens that are more than `max_staleness` versions behind when their step trains."""

    action: Literal["mask", "reweight", "drop"]
    """`mask`: no loss; `reweight`: truncated importance weights instead of a clipped ratio; `drop`: their whole group
    is not trained, which favours short responses. A group with nothing left to train is dropped in any case."""
    reweighted_versions: PositiveInt
    """`reweight` goes so many versions beyond `max_staleness`; what is still older is masked."""
    weight_cap: PositiveFloat
    """Largest importance weight of `reweight`."""


class AlgorithmConfig(Section):
    """The RL algorithm, as values."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"]
    """`grpo`: (r - mean) / (std + eps) within the group; `dr_grpo`: r - mean; `rloo`: r - mean of the others;
    `reinforce`: r."""
    prompts_per_step: PositiveInt
    """Groups in one step (B)."""
    samples_per_prompt: PositiveInt
    """Siblings in one group (n)."""
    max_staleness: Annotated[int, Field(ge=0)]
    """Versions a trained token may be behind; 0 is synchronous on-policy training."""
    stragglers: Literal["wait", "overtake"]
    """A step that would leave a slow group over-age waits for it, or is filled with others that are finished."""
    over_age: OverAgeConfig
    """What becomes of tokens that are further behind: of overtaken groups, or sampled before a fault."""
    max_concurrent_groups: PositiveInt
    """Groups in flight at most."""
    num_minibatches: PositiveInt
    """Optimizer steps that one step's groups are split into."""
    clip_low: NonNegativeFloat
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: NonNegativeFloat
    """Upper half of the clip range; larger than `clip_low` lets unlikely tokens grow more."""
    loss_aggregation: Literal["token_mean", "sequence_mean"]
    """`token_mean`: every trained token weighs the same; `sequence_mean`: every response does."""
    kl: KLConfig
    """Distance to the reference policy."""
    drop_uniform_groups: bool
    """Reject groups whose rewards are all equal (they carry no gradient) and sample others instead."""

    @property
    def is_group_relative(self) -> bool:
        return self.advantage != "reinforce"

    @property
    def max_trained_age(self) -> int:
        """Versions that a token may be behind and still have a loss."""
        beyond = self.over_age.reweighted_versions if self.over_age.action == "reweight" else 0
        return self.max_staleness + beyond


class LearnerConfig(Section):
    """The optimizer and how it is distributed."""

    backend: Literal["fsdp2", "deepspeed", "single"]
    """What shards parameters, gradients and optimizer state over the learner ranks; `single` shards nothing."""
    learning_rate: PositiveFloat
    """AdamW's learning rate in RL."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"]
    """Course of the learning rate after the rise, over `num_steps`."""
    weight_decay: NonNegativeFloat
    """AdamW's decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)]
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)]
    """AdamW's decay of the gradient's square."""
    adam_eps: PositiveFloat
    """AdamW's term beside the root of the squared gradient; larger, and rounding moves small gradients less."""
    max_grad_norm: PositiveFloat
    """Global gradient norm is clipped to this."""
    tokens_per_microbatch: PositiveInt
    """Padded tokens in one forward and backward pass of one rank."""
    zero_stage: Literal[2, 3]
    """What DeepSpeed shards: 2 is gradients and optimizer state, 3 parameters too. FSDP2 always shards all three."""


class WarmStartConfig(Section):
    """Supervised steps before RL, so that RL has something to do."""

    num_steps: Annotated[int, Field(ge=0)]
    """Longest warm start; 0 skips it."""
    num_rows: Annotated[int, Field(ge=0)]
    """Rows of the train split that it learns from, chosen by the seed, distinct answers in turn; 0 takes all."""
    batch_size: PositiveInt
    """Rows in one step."""
    learning_rate: PositiveFloat
    """AdamW's learning rate in the warm start."""
    target_accuracy: Annotated[float, Field(ge=0, le=1)]
    """Stop early once greedy accuracy on the validation split reaches this."""
    check_interval: PositiveInt
    """Steps between two accuracy checks."""
    max_checks_rows: PositiveInt
    """Rows of the validation split in one check."""
