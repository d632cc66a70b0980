"""The RL algorithm as values: advantages, policy losses, corrections, KL, shaping."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mobula.configs.schema.base import Field, PositiveFloat, PositiveInt, Section, UserCode

NonNegativeFloat = Annotated[float, Field(ge=0)]
ClipLow = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]

VALUED = ("gae", "turn_gae")
"""Advantages that read the values of a critic."""
TURNWISE = ("return_to_go", "turn_gae")
"""Advantages that credit each turn of an episode with what followed it."""
PREDICTIVE = ("grpo_guard", "nft")
"""Losses that read more than log-probs of a policy, and that flow models alone have."""
STEP_WIDE = ("reinforce", "reinforce_batch", "reinforce_pp", *VALUED)
"""Advantages that do not compare a response with its siblings."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gdpo")
"""Advantages that are standardised over the whole step already."""


class KLConfig(Section):
    """The KL divergence from the reference policy, as a term of the loss or of the reward."""

    coef: NonNegativeFloat = 0.01
    """Weight of the KL term; 0 turns the reference off."""
    estimator: Literal["k1", "k2", "k3", "k3_importance"] | UserCode = "k3"
    """Schulman's estimators; k3 is unbiased and never negative, `k3_importance` also for tokens of older weights."""
    estimator_options: dict[str, Any] = {}
    """Arguments of `estimator`, where it is your own code."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss, with a gradient; `reward`: subtracted from the reward of each token."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: `coef` throughout; `adaptive`: raised where the KL is above `target`, lowered where it is below."""
    target: PositiveFloat = 0.05
    """The KL, in nat a token, that `adaptive` aims at."""
    horizon: PositiveFloat = 10000.0
    """Responses over which `adaptive` moves: the larger, the slower."""
    token_cap: NonNegativeFloat = 0.0
    """Largest magnitude of one token's KL; 0 sets no bound."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores each token that the policy samples."""

    teacher: str = ""
    """A checkpoint whose tokenizer has the vocabulary of `policy.model`: a local folder or a hub name. The reference
    scorers serve it. Empty for none."""
    teachers: dict[str, str] = {}
    """Label of a row (`rewards.label_key`) -> the checkpoint that teaches rows of this label in the place of `teacher`,
    with the same vocabulary. Every scorer holds all of them."""
    place: Literal["advantage", "loss"] = "advantage"
    """`advantage`: the log-ratio of teacher and policy is added to the advantage of each token; `loss`: the reverse KL
    is a term of the loss, with a gradient."""
    coef: NonNegativeFloat = 0.0
    """Weight of the teacher; 0 for none, and the other keys are then not read."""
    reward_weight: NonNegativeFloat = 0.0
    """The advantages that follow from rewards are multiplied by this beside a teacher; 0 leaves the teacher alone."""
    token_cap: NonNegativeFloat = 0.0
    """Largest magnitude of the log-ratio of one token; 0 sets no bound."""

    @property
    def is_on(self) -> bool:
        return self.coef > 0


class SupervisedConfig(Section):
    """Rows of a data set beside RL: their cross-entropy is a term of the loss of every optimizer step of the policy, as
    in InstructGPT's PPO-ptx."""

    path: str = ""
    """Folder of `train.jsonl`, whose rows are those of `mobula sft`. Empty for none."""
    coef: NonNegativeFloat = 0.0
    """Weight of the mean cross-entropy of the assistant's tokens; 0 for none, and the other keys are then not read."""
    batch_size: PositiveInt = 32
    """Rows of one optimizer step: of each minibatch of each epoch."""
    max_tokens: PositiveInt = 4096
    """A row with a longer conversation (vision tokens included) is skipped and counted, never cut."""

    @property
    def is_on(self) -> bool:
        return self.coef > 0


class OverAgeConfig(Section):
    """Tokens that are more than `max_staleness` versions behind when their step trains."""

    action: Literal["mask", "reweight", "drop"] = "mask"
    """`mask`: no loss; `reweight`: truncated importance weights instead of a clipped ratio; `drop`: their whole group
    is not trained, which favours short responses. A group with nothing left to train is dropped in any case."""
    reweighted_versions: PositiveInt = 4
    """`reweight` goes so many versions beyond `max_staleness`; what is still older is masked."""
    weight_cap: PositiveFloat = 2.0
    """Largest importance weight of `reweight`."""


class ClipConfig(Section):
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow
    """Lower half of the clip range; 1 sets no lower bound."""
    clip_high: NonNegativeFloat
    """Upper half of the clip range; larger than `clip_low` lets unlikely tokens grow more (clip-higher)."""


class DualClipConfig(Section):
    """The clip of `ppo_clip`, and a bound on the loss of tokens with a negative advantage."""

    clip_low: ClipLow = 0.2
    """Lower half of the clip range."""
    clip_high: NonNegativeFloat = 0.2
    """Upper half of the clip range."""
    bound: Annotated[float, Field(gt=1)] = 3.0
    """The loss of a token with a negative advantage A is at most -bound * A."""


class CPGConfig(Section):
    """The log-ratio is clipped to [log(1 - clip_low), log(1 + clip_high)]."""

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower half of the clip range."""
    clip_high: NonNegativeFloat = 0.2
    """Upper half of the clip range."""
    drift: NonNegativeFloat = 0.0
    """Weight of the divergence of the policy from the old one; 0 is off."""


class GMPOConfig(Section):
    """The log-ratio of each token is clipped before the geometric mean is taken."""

    clip_low: NonNegativeFloat = 0.4
    """The log-ratio is at least -clip_low where the advantage is negative."""
    clip_high: NonNegativeFloat = 0.4
    """The log-ratio is at most clip_high where the advantage is positive."""


class SAPOConfig(Section):
    """The temperatures of SAPO's gate."""

    temperature_positive: PositiveFloat = 1.0
    """For tokens with a positive advantage; the larger, the faster the gradient falls off beside a ratio of 1."""
    temperature_negative: PositiveFloat = 1.05
    """For the other tokens."""


class NFTConfig(Section):
    """DiffusionNFT. Its advantages are held within `max_advantage` of 0."""

    beta: PositiveFloat = 1.0
    """Distance of the implicit positive and negative policies from the policy that sampled (beta of the paper)."""
    max_advantage: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude, at which an image counts as entirely positive or negative."""
    num_draws: PositiveInt = 2
    """Noise levels at which one image is trained."""
    decay_rate: NonNegativeFloat = 0.0
    """The policy that samples is a slow copy: slow = d * slow + (1 - d) * trained after step v, d = min(max_decay,
    decay_rate * v)."""
    max_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Upper bound of the decay d; 0 samples with the trained weights themselves."""


class LossesConfig(Section):
    """Parameters of each policy loss; those of `algorithm.loss` are read. `reinforce` has none."""

    ppo_clip: ClipConfig = ClipConfig(clip_low=0.2, clip_high=0.2)
    """The clipped ratio of PPO."""
    dual_clip: DualClipConfig = DualClipConfig()
    """PPO with a second clip."""
    cpg: CPGConfig = CPGConfig()
    """The clipped log-ratio of CPGD."""
    gspo: ClipConfig = ClipConfig(clip_low=3e-4, clip_high=4e-4)
    """One clipped ratio for the whole response."""
    gspo_token: ClipConfig = ClipConfig(clip_low=3e-4, clip_high=4e-4)
    """GSPO's ratio with the gradient of each token."""
    gmpo: GMPOConfig = GMPOConfig()
    """The geometric mean of clipped ratios."""
    # No lower bound, as in the paper; the upper one is that of arXiv:2510.13786.
    cispo: ClipConfig = ClipConfig(clip_low=1.0, clip_high=4.0)
    """REINFORCE weighted by a clipped constant ratio."""
    sapo: SAPOConfig = SAPOConfig()
    """A smooth gate."""
    grpo_guard: ClipConfig = ClipConfig(clip_low=2e-6, clip_high=2e-6)
    """The clip range of the normalised ratio of denoising steps of GRPO-Guard."""
    nft: NFTConfig = NFTConfig()
    """DiffusionNFT, without a likelihood."""


class CapConfig(Section):
    """A bound on an importance weight."""

    cap: PositiveFloat = 2.0
    """Largest weight; `tis_token` and `tis_sequence` truncate to it, `mis` rejects what is above it."""


class IcePopConfig(Section):
    """The weights that IcePop keeps."""

    low: NonNegativeFloat = 0.5
    """A token of a smaller weight is rejected."""
    high: PositiveFloat = 5.0
    """A token of a larger weight is rejected."""


class CorrectionsConfig(Section):
    """Parameters of each correction; those of `algorithm.correction` are read. `none` and `decoupled` have none."""

    tis_token: CapConfig = CapConfig()
    """Truncated importance sampling by token."""
    tis_sequence: CapConfig = CapConfig()
    """Truncated importance sampling by response."""
    icepop: IcePopConfig = IcePopConfig()
    """Rejection of tokens."""
    mis: CapConfig = CapConfig()
    """Rejection of responses."""


class EntropyConfig(Section):
    """The entropy of the policy's token distribution."""

    bonus: NonNegativeFloat = 0.0
    """Weight of the mean entropy, which is subtracted from the loss; 0 is off."""
    top_share: Share = 1.0
    """Share of a minibatch's trained tokens, those of highest entropy before the step, that the policy loss trains;
    1 trains all. A token left out still counts where a mean is taken."""


class CriticConfig(Section):
    """A critic: a copy of the policy that RL begins with, which predicts the return of each token. Keys of `learner`
    that are not set here (schedule, decay, clipping, micro-batches) and `policy.freeze` and `policy.lora` hold for it
    too.
    """

    place: Literal["none", "learner_ranks", "own_ranks"] = "none"
    """Where the critic is trained. `none`: there is no critic; `learner_ranks`: on the ranks of the policy, before it
    in every step; `own_ranks`: on the workers of `resources.critic`, at the same time as the policy. The backend is the
    same."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] | UserCode = "adamw"
    """The critic's optimizer, with a state of its own."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of `optimizer`, where it is your own code."""
    learning_rate: PositiveFloat = 9e-6
    """The critic's learning rate, at the peak of `learner.schedule`."""
    value_clip: NonNegativeFloat = 0.2
    """A value counts as clipped where it is further than this from the value before the step; 0 sets no bound."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the run, in which the critic alone is trained and the policy stays as it is."""

    @property
    def is_on(self) -> bool:
        return self.place != "none"

    @property
    def has_own_ranks(self) -> bool:
        return self.place == "own_ranks"

    def is_alone(self, version: int) -> bool:
        """Whether the step that makes `version` trains the critic alone."""
        return self.is_on and version <= self.warmup_steps


class ShapingConfig(Section):
    """Changes to rewards and advantages, each applied once, in the order of these keys; docs/algorithms.md has the
    formulas. Overlong responses are penalised by the reward component `overlong`, which comes before all of them."""

    repetition_penalty: NonNegativeFloat = 0.0
    """Weight of the share of a response's n-grams that repeat an earlier one; 0 is off."""
    repetition_ngram: Annotated[int, Field(ge=2)] = 4
    """Tokens in one n-gram."""
    length_penalty: NonNegativeFloat = 0.0
    """Weight of a reward for short responses within the group; 0 is off."""
    function: Literal["none"] | UserCode = "none"
    """Your own change to the rewards of a step, after these penalties."""
    function_options: dict[str, Any] = {}
    """Arguments of `function`, where it is your own code."""
    running_moments: Literal["none", "scale", "standardise"] = "none"
    """Divide rewards by the standard deviation of all rewards so far (`scale`), and subtract their mean before
    (`standardise`)."""
    reward_clip: NonNegativeFloat = 0.0
    """Rewards are held within this distance of 0; 0 sets no bound."""
    whiten: bool = False
    """Standardise advantages over all trained tokens of the step."""
    advantage_clip: NonNegativeFloat = 0.0
    """Advantages are held within this distance of 0; 0 sets no bound."""


class AlgorithmConfig(Section):
    """The RL algorithm, as values."""

    advantage: (
        Literal[
            "grpo",
            "grpo_global_std",
            "dr_grpo",
            "rloo",
            "reinforce",
            "reinforce_batch",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "opo",
            "cpgd",
            "cpgd_clip_filter",
            "gdpo",
            "pass_at_k",
            "prompt_stats",
            "prompt_stats_global_std",
            "gae",
            "turn_gae",
            "return_to_go",
        ]
        | UserCode
    )
    """How a response's advantage follows from rewards: docs/algorithms.md has the formulas. `grpo`: (r - mean) / std
    within the group; `grpo_global_std`: the same mean, and the std of the step (Flow-GRPO); `rloo`: r - mean of the
    others; `prompt_stats`: (r - mean) / std of what the prompt had lately, and with `_global_std` the std of the step;
    `reinforce`: r; `reinforce_pp`: (r - mean) / std of the step; `gae`: of each token, from the values of `critic`;
    `turn_gae`: of each turn of an episode, from the same; `return_to_go`: what followed a turn less what followed it in
    the other siblings."""
    advantage_options: dict[str, Any] = {}
    """Arguments of `advantage`, where it is your own code."""
    std: Literal["population", "unbiased"] = "unbiased"
    """Whether standard deviations of `advantage` and `shaping.whiten` divide by n or by n - 1."""
    pass_k: PositiveInt = 4
    """The k of `pass_at_k`."""
    prompt_history_steps: Annotated[int, Field(ge=0)] = 0
    """Steps before this one whose rewards of the same row of the data count in the statistics of `prompt_stats` and
    `prompt_stats_global_std`, whichever weights sampled them; 0 is the step alone."""
    solved_reward: float = 1.0
    """A response with at least this reward is solved, for `pass_at_k` and `shaping.length_penalty`."""
    gamma: Share = 1.0
    """Discount of a reward by the number of tokens between it and the token that is credited; 1 is none."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of later temporal differences in `gae` and `turn_gae`: 1 is the return less the value, 0 the next
    difference alone."""
    bootstrap_truncated: bool = True
    """Add the critic's value of the last state to the return of a response or an episode that was cut at its limit.
    With false the return ends there, which suits a limit that is part of the task: without a cost of time, a policy
    that gets the value of its last state learns to avoid terminal states rather than to reach the goal."""
    turn_discount: Share = 1.0
    """Discount of a reward by the number of turns between it and the turn that is credited, in `turn_gae` and
    `return_to_go`; 1 is none."""
    critic: CriticConfig = CriticConfig()
    """The critic of `gae` and `turn_gae`."""
    prompts_per_step: PositiveInt = 16
    """Groups in one step (B)."""
    samples_per_prompt: PositiveInt = 8
    """Siblings in one group (n)."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Versions a trained token may be behind; 0 is synchronous on-policy training."""
    stragglers: Literal["wait", "overtake"] = "wait"
    """`wait`: a step waits for a slow group that would become over-age otherwise; `overtake`: the step is filled with
    other groups that are finished."""
    over_age: OverAgeConfig = OverAgeConfig()
    """Handling of older tokens: those of overtaken groups, and those sampled before a fault."""
    max_concurrent_groups: PositiveInt = 32
    """Groups in flight at most."""
    num_epochs: PositiveInt = 1
    """Times that a step's groups are trained; from the second on, minibatches are drawn in another order."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps that one step's groups are split into, in each epoch."""
    loss: (
        Literal[
            "ppo_clip",
            "dual_clip",
            "cpg",
            "gspo",
            "gspo_token",
            "gmpo",
            "cispo",
            "sapo",
            "reinforce",
            "grpo_guard",
            "nft",
        ]
        | UserCode
    ) = "ppo_clip"
    """The policy loss: docs/algorithms.md has the formulas. `grpo_guard` and `nft` are for flow models alone."""
    loss_options: dict[str, Any] = {}
    """Arguments of `loss`, where it is your own code."""
    losses: LossesConfig = LossesConfig()
    """Parameters of each policy loss."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_token_norm", "constant"] | UserCode = (
        "token_mean"
    )
    """`token_mean`: every trained token weighs the same; `sequence_mean`: every response does;
    `sequence_sum_token_norm`: the sum over tokens divided by `loss_norm` and the number of responses; `constant`: the
    sum divided by `loss_norm` alone."""
    loss_aggregation_options: dict[str, Any] = {}
    """Arguments of `loss_aggregation`, where it is your own code."""
    loss_norm: PositiveFloat = 1024.0
    """The constant of `sequence_sum_token_norm` (Dr. GRPO: the longest response) and `constant`."""
    old_logprobs: Literal["engine", "recomputed", "interpolated"] = "engine"
    """The policy that the ratio is taken to. `engine`: the one that sampled, by the engine's log-probs; `recomputed`:
    the weights that the step trains from, in a forward pass before the first minibatch; `interpolated`: the same,
    approximated by the age of each token."""
    correction: Literal["none", "decoupled", "tis_token", "tis_sequence", "icepop", "mis"] | UserCode = "none"
    """Weights for the difference between the policy of `old_logprobs` and the one that sampled."""
    correction_options: dict[str, Any] = {}
    """Arguments of `correction`, where it is your own code."""
    corrections: CorrectionsConfig = CorrectionsConfig()
    """Parameters of each correction."""
    kl: KLConfig = KLConfig()
    """The KL divergence from the reference policy."""
    distillation: DistillationConfig = DistillationConfig()
    """A teacher beside rewards, or in their place."""
    supervised: SupervisedConfig = SupervisedConfig()
    """Supervised rows beside a step's groups."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus and selection of tokens by entropy."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to rewards and advantages."""
    overlong_filter: bool = False
    """Responses that hit `sampler.max_tokens` leave the loss; they still count in their group's statistics and where a
    mean is taken."""
    drop_uniform_groups: bool = False
    """Reject groups whose rewards are all equal (they carry no gradient) and sample others instead."""

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in STEP_WIDE

    @property
    def max_trained_age(self) -> int:
        """Versions that a token may be behind and still have a loss."""
        beyond = self.over_age.reweighted_versions if self.over_age.action == "reweight" else 0
        return self.max_staleness + beyond

    @property
    def loss_parameters(self) -> dict[str, Any]:
        """The parameters of `loss`."""
        return self.losses.model_dump().get(self.loss, {})

    @property
    def correction_parameters(self) -> dict[str, Any]:
        """The parameters of `correction`."""
        return self.corrections.model_dump().get(self.correction, {})

    @property
    def credit_reads_logprobs(self) -> bool:
        """Whether advantages depend on the log-probs of each token, and not on rewards and masks alone."""
        has_kl = self.kl.coef > 0 and self.kl.place == "reward"
        return has_kl or (self.distillation.is_on and self.distillation.place == "advantage")

    @property
    def training_roles(self) -> tuple[str, ...]:
        """The roles whose workers are ranks of a model that is trained."""
        return ("learner", "critic") if self.critic.has_own_ranks else ("learner",)

    @property
    def supervised_rows_per_step(self) -> int:
        """Supervised rows beside one step's groups."""
        return self.num_epochs * self.num_minibatches * self.supervised.batch_size if self.supervised.is_on else 0

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the learner scores a step's tokens before it trains on them."""
        return self.old_logprobs == "recomputed" or self.entropy.top_share < 1 or self.needs_old_predictions

    @property
    def needs_old_predictions(self) -> bool:
        """Whether the loss compares with what the weights that a step trains from predicted."""
        return self.loss in PREDICTIVE

    @property
    def slow_copy(self) -> NFTConfig | None:
        """The parameters of the slow copy of the weights that samples in their place; None without one."""
        found = self.losses.nft
        return found if self.loss == "nft" and found.max_decay > 0 else None

    @property
    def has_likelihood(self) -> bool:
        """Whether the loss reads log-probs of what was sampled."""
        return self.loss != "nft"
