"""The RL algorithm as values: advantages, policy losses, corrections, KL, shaping."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mobula.configs.schema.base import Section, UserCode

NonNegativeFloat = Annotated[float, Field(ge=0)]
ClipLow = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]

VALUED = ("gae", "turn_gae")
"""Advantages that read the values of a critic."""
TURNWISE = ("return_to_go", "turn_gae")
"""Advantages that credit each turn of an episode with later rewards."""
PREDICTIVE = ("grpo_guard", "nft")
"""Losses of flow models, which read predictions in addition to log-probs."""
STEP_WIDE = ("reinforce", "reinforce_batch", "reinforce_pp", *VALUED)
"""Advantages that do not compare a response with the other siblings."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gdpo")
"""Advantages that are standardised over the whole step by definition."""


class KLConfig(Section):
    """The KL divergence from the reference policy, as a term of the loss or of the reward."""

    coef: NonNegativeFloat = 0.01
    """Weight of the KL term; 0 turns the reference off."""
    estimator: Literal["k1", "k2", "k3", "k3_importance"] | UserCode = "k3"
    """Schulman's estimators; k3 is unbiased and never negative, `k3_importance` also for tokens of older weights."""
    estimator_options: dict[str, Any] = {}
    """Arguments of `estimator`, if it is user code."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss, with a gradient; `reward`: subtracted from the reward of each token."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: constant `coef`; `adaptive`: raised while the KL is above `target`, lowered while it is below."""
    target: PositiveFloat = 0.05
    """The KL that `adaptive` aims at, in nat a token."""
    horizon: PositiveFloat = 10000.0
    """Time constant of `adaptive`, in responses: the larger, the slower."""
    token_cap: NonNegativeFloat = 0.0
    """Largest magnitude of a token's KL; 0 for no bound."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores each token that the policy samples."""

    teacher: str = ""
    """A checkpoint with the vocabulary of `policy.model`: a local folder or a hub name. The reference scorers serve it.
    Empty for none."""
    teachers: dict[str, str] = {}
    """Label of a row (`rewards.label_key`) -> checkpoint that replaces `teacher` for rows of this label, with the same
    vocabulary. Every scorer holds all teachers."""
    place: Literal["advantage", "loss"] = "advantage"
    """`advantage`: the log-ratio of teacher and policy is added to the advantage of each token; `loss`: the reverse KL
    is a term of the loss, with a gradient."""
    coef: NonNegativeFloat = 0.0
    """Weight of the teacher; 0 disables distillation."""
    reward_weight: NonNegativeFloat = 0.0
    """Factor of the advantages from rewards while a teacher is used; 0 for the teacher alone."""
    token_cap: NonNegativeFloat = 0.0
    """Largest magnitude of the log-ratio of a token; 0 for no bound."""

    @property
    def is_on(self) -> bool:
        return self.coef > 0


class SupervisedConfig(Section):
    """Supervised rows during RL: the loss of every optimizer step of the policy includes their cross-entropy, as in
    InstructGPT's PPO-ptx."""

    path: str = ""
    """Folder of `train.jsonl`, with rows as for `mobula sft`. Empty for none."""
    coef: NonNegativeFloat = 0.0
    """Weight of the mean cross-entropy of the assistant's tokens; 0 disables the term."""
    batch_size: PositiveInt = 32
    """Rows of one optimizer step: for each minibatch of each epoch."""
    max_tokens: PositiveInt = 4096
    """A row with a longer conversation (vision tokens included) is skipped and counted, never truncated."""

    @property
    def is_on(self) -> bool:
        return self.coef > 0


class OverAgeConfig(Section):
    """Tokens sampled more than `max_staleness` versions before the step that trains them."""

    action: Literal["mask", "reweight", "drop"] = "mask"
    """`mask`: no loss; `reweight`: truncated importance weights instead of a clipped ratio; `drop`: the whole group is
    not trained, which favours short responses. A group without trained tokens is always dropped."""
    reweighted_versions: PositiveInt = 4
    """Versions beyond `max_staleness` that `reweight` trains; older tokens are masked."""
    weight_cap: PositiveFloat = 2.0
    """Largest importance weight of `reweight`."""


class ClipConfig(Section):
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow
    """Lower half of the clip range; 1 for no lower bound."""
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
    """Weight of the divergence of the policy from the old policy; 0 is off."""


class GMPOConfig(Section):
    """The log-ratio of each token is clipped before the geometric mean is taken."""

    clip_low: NonNegativeFloat = 0.4
    """The log-ratio is at least -clip_low for negative advantages."""
    clip_high: NonNegativeFloat = 0.4
    """The log-ratio is at most clip_high for positive advantages."""


class SAPOConfig(Section):
    """The temperatures of SAPO's gate."""

    temperature_positive: PositiveFloat = 1.0
    """For tokens with a positive advantage; the larger, the faster the gradient decreases away from a ratio of 1."""
    temperature_negative: PositiveFloat = 1.05
    """For the other tokens."""


class NFTConfig(Section):
    """DiffusionNFT."""

    beta: PositiveFloat = 1.0
    """Distance of the implicit positive and negative policies from the sampling policy (beta of the paper)."""
    max_advantage: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude; at the bound an image counts as entirely positive or negative."""
    num_draws: PositiveInt = 2
    """Noise levels that each image is trained at."""
    decay_rate: NonNegativeFloat = 0.0
    """The sampling policy is a slow copy of the weights: slow = d * slow + (1 - d) * trained after step v, with
    d = min(max_decay, decay_rate * v)."""
    max_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Upper bound of the decay d; 0 samples with the trained weights."""


class LossesConfig(Section):
    """Parameters of each policy loss; `algorithm.loss` selects one. `reinforce` has none."""

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
    # No lower bound, as in the paper; the upper bound is from arXiv:2510.13786.
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
    """Largest weight: `tis_token` and `tis_sequence` truncate larger weights, `mis` rejects them."""


class IcePopConfig(Section):
    """The range of weights that IcePop keeps."""

    low: NonNegativeFloat = 0.5
    """Tokens with a smaller weight are rejected."""
    high: PositiveFloat = 5.0
    """Tokens with a larger weight are rejected."""


class CorrectionsConfig(Section):
    """Parameters of each correction; `algorithm.correction` selects one. `none` and `decoupled` have none."""

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
    """Share of a minibatch's tokens that the policy loss trains, by highest entropy before the step; 1 trains all. The
    other tokens still count in means."""


class CriticConfig(Section):
    """A critic: a copy of the initial policy that predicts the return of each token. The other keys of `learner`
    (schedule, decay, clipping, micro-batches), `policy.freeze` and `policy.lora` apply to it as well.
    """

    place: Literal["none", "learner_ranks", "own_ranks"] = "none"
    """Processes that train the critic. `none`: no critic; `learner_ranks`: the ranks of the policy, before the policy
    in every step; `own_ranks`: the workers of `resources.critic`, in parallel with the policy. The backend is the same.
    """
    optimizer: Literal["adamw", "adamw_8bit", "muon"] | UserCode = "adamw"
    """The critic's optimizer, with separate state."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of `optimizer`, if it is user code."""
    learning_rate: PositiveFloat = 9e-6
    """The critic's learning rate, at the peak of `learner.schedule`."""
    value_clip: NonNegativeFloat = 0.2
    """Values are clipped to this distance from the value before the step; 0 for no bound."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the run that train the critic and not the policy."""

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
    formulas. The reward component `overlong`, which penalises overlong responses, comes before them."""

    repetition_penalty: NonNegativeFloat = 0.0
    """Weight of the share of a response's n-grams that repeat an earlier one; 0 is off."""
    repetition_ngram: Annotated[int, Field(ge=2)] = 4
    """Tokens in one n-gram."""
    length_penalty: NonNegativeFloat = 0.0
    """Weight of a reward for short responses within the group; 0 is off."""
    function: Literal["none"] | UserCode = "none"
    """User function that changes the rewards of a step, after these penalties."""
    function_options: dict[str, Any] = {}
    """Arguments of `function`, if it is user code."""
    running_moments: Literal["none", "scale", "standardise"] = "none"
    """Divide rewards by the standard deviation of all rewards so far (`scale`), and subtract their mean before
    (`standardise`)."""
    reward_clip: NonNegativeFloat = 0.0
    """Rewards are clipped to this magnitude; 0 for no bound."""
    whiten: bool = False
    """Standardise advantages over all trained tokens of the step."""
    advantage_clip: NonNegativeFloat = 0.0
    """Advantages are clipped to this magnitude; 0 for no bound."""


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
    """Estimator of the advantage; docs/algorithms.md has the formulas. `grpo`: (r - mean) / std within the group;
    `grpo_global_std`: with the std of the step (Flow-GRPO); `rloo`: r - mean of the other siblings; `prompt_stats`:
    (r - mean) / std over recent steps of the prompt, with `_global_std` the std of the step; `reinforce`: r;
    `reinforce_pp`: (r - mean) / std of the step; `gae`: of each token, from the values of `critic`; `turn_gae`: of each
    turn of an episode, from the values of `critic`; `return_to_go`: the return after a turn, minus the mean return of
    the other siblings."""
    advantage_options: dict[str, Any] = {}
    """Arguments of `advantage`, if it is user code."""
    std: Literal["population", "unbiased"] = "unbiased"
    """Standard deviations of `advantage` and `shaping.whiten` divide by n (`population`) or n - 1 (`unbiased`)."""
    pass_k: PositiveInt = 4
    """The k of `pass_at_k`."""
    prompt_history_steps: Annotated[int, Field(ge=0)] = 0
    """Earlier steps in the statistics of `prompt_stats` and `prompt_stats_global_std`: rewards of the same row of the
    data, sampled with any weights; 0 for the current step only."""
    solved_reward: float = 1.0
    """A response with at least this reward is solved, for `pass_at_k` and `shaping.length_penalty`."""
    gamma: Share = 1.0
    """Discount of a reward for each token between the credited token and the reward; 1 for none."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of later temporal differences in `gae` and `turn_gae`: 1 gives the return minus the value, 0 the next
    difference only."""
    bootstrap_truncated: bool = True
    """Add the critic's value of the last state to the return of a response or episode that was truncated at the limit.
    Set false if the limit is part of the task: with a bootstrapped value and no cost of time, a policy learns to avoid
    terminal states instead of reaching the goal."""
    turn_discount: Share = 1.0
    """Discount of a reward for each turn between the credited turn and the reward, in `turn_gae` and `return_to_go`; 1
    for none."""
    critic: CriticConfig = CriticConfig()
    """The critic of `gae` and `turn_gae`."""
    prompts_per_step: PositiveInt = 16
    """Groups in one step (B)."""
    samples_per_prompt: PositiveInt = 8
    """Siblings in one group (n)."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Weight versions that a trained token may be behind; 0 is synchronous on-policy training."""
    stragglers: Literal["wait", "overtake"] = "wait"
    """`wait`: a step waits for a slow group that would become over-age; `overtake`: the step takes other finished
    groups."""
    over_age: OverAgeConfig = OverAgeConfig()
    """Handling of tokens over `max_staleness`: of overtaken groups, and tokens sampled before a fault."""
    max_concurrent_groups: PositiveInt = 32
    """Most groups in flight."""
    num_epochs: PositiveInt = 1
    """Passes over a step's groups; minibatches are shuffled from the second pass on."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass over a step's groups."""
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
    """Arguments of `loss`, if it is user code."""
    losses: LossesConfig = LossesConfig()
    """Parameters of each policy loss."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_token_norm", "constant"] | UserCode = (
        "token_mean"
    )
    """`token_mean`: equal weight for every trained token; `sequence_mean`: equal weight for every response;
    `sequence_sum_token_norm`: the sum over tokens, divided by `loss_norm` and the number of responses; `constant`: the
    sum over tokens, divided by `loss_norm`."""
    loss_aggregation_options: dict[str, Any] = {}
    """Arguments of `loss_aggregation`, if it is user code."""
    loss_norm: PositiveFloat = 1024.0
    """The constant of `sequence_sum_token_norm` (Dr. GRPO: the longest response) and `constant`."""
    old_logprobs: Literal["engine", "recomputed", "interpolated"] = "engine"
    """Denominator of the ratio. `engine`: the engine's log-probs of the sampling policy; `recomputed`: log-probs of the
    weights before the step, from a forward pass before the first minibatch; `interpolated`: an approximation of
    `recomputed` by the age of each token."""
    correction: Literal["none", "decoupled", "tis_token", "tis_sequence", "icepop", "mis"] | UserCode = "none"
    """Importance weights between the policy of `old_logprobs` and the sampling policy."""
    correction_options: dict[str, Any] = {}
    """Arguments of `correction`, if it is user code."""
    corrections: CorrectionsConfig = CorrectionsConfig()
    """Parameters of each correction."""
    kl: KLConfig = KLConfig()
    """The KL divergence from the reference policy."""
    distillation: DistillationConfig = DistillationConfig()
    """A teacher, in addition to rewards or instead of them."""
    supervised: SupervisedConfig = SupervisedConfig()
    """Supervised rows during RL."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus and selection of tokens by entropy."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to rewards and advantages."""
    overlong_filter: bool = False
    """Exclude responses that hit `sampler.max_tokens` from the loss; they still count in means and in the statistics of
    the group."""
    drop_uniform_groups: bool = False
    """Reject groups with equal rewards (they have no gradient) and sample other groups."""
    uniform_by: Literal["accuracy", "reward"] = "accuracy"
    """Read with `drop_uniform_groups`. `accuracy` also rejects groups whose responses have equal values of
    `rewards.accuracy_component`, such as all right or all wrong (arXiv:2503.14476, equation 11), so that a length
    penalty alone trains no group. `reward` compares the total reward only. A response without the component counts by
    its reward."""

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in STEP_WIDE

    @property
    def max_trained_age(self) -> int:
        """Most versions that a token with a loss may be behind."""
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
        """Whether advantages depend on log-probs of tokens, in addition to rewards and masks."""
        has_kl = self.kl.coef > 0 and self.kl.place == "reward"
        return has_kl or (self.distillation.is_on and self.distillation.place == "advantage")

    @property
    def training_roles(self) -> tuple[str, ...]:
        """The roles with ranks of a trained model."""
        return ("learner", "critic") if self.critic.has_own_ranks else ("learner",)

    @property
    def supervised_rows_per_step(self) -> int:
        """Rows of `supervised` in one step."""
        return self.num_epochs * self.num_minibatches * self.supervised.batch_size if self.supervised.is_on else 0

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the learner scores a step's tokens before training on them."""
        return self.old_logprobs == "recomputed" or self.entropy.top_share < 1 or self.needs_old_predictions

    @property
    def needs_old_predictions(self) -> bool:
        """Whether the loss reads predictions of the weights before the step."""
        return self.loss in PREDICTIVE

    @property
    def slow_copy(self) -> NFTConfig | None:
        """The parameters of the slow copy of the weights that samples; None without a slow copy."""
        nft = self.losses.nft
        return nft if self.loss == "nft" and nft.max_decay > 0 else None

    @property
    def has_likelihood(self) -> bool:
        """Whether the loss reads log-probs of sampled actions."""
        return self.loss != "nft"
