"""Schema of offline jobs: supervised fine-tuning, reward models and preference optimisation on dataset rows."""

from __future__ import annotations

from typing import Annotated, Literal

from mobula.configs.schema.base import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Section


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


class OfflineConfig(Section):
    """Training on dataset rows instead of rollouts; docs/offline_training.md has the row formats."""

    job: Literal["none", "sft", "reward_model", "dpo"] = "none"
    """`none` is RL. `sft`: cross-entropy on the assistant's tokens; `reward_model`: a score of an answer; `dpo`: direct
    preference optimisation. A job reads `learner`, `policy`, `data` and this section, and not `algorithm`."""
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

    @property
    def is_on(self) -> bool:
        return self.job != "none"

    @property
    def rows(self) -> Literal["conversation", "pair", "scored"]:
        """The job's kind of row."""
        if self.job == "sft":
            return "conversation"
        is_regression = self.job == "reward_model" and self.reward_model.loss == "regression"
        return "scored" if is_regression else "pair"
