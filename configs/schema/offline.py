"""Offline jobs: supervised fine-tuning, reward models and preference optimisation on rows of a data set."""

from __future__ import annotations

from typing import Annotated, Literal

from mobula.configs.schema.base import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class RewardModelConfig(Section):
    """How `offline.job=reward_model` trains a score head on the policy's backbone."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` reads rows with a chosen and a rejected answer; `regression` rows with an answer and a score."""
    margin: NonNegativeFloat = 0.0
    """By how much `bradley_terry` asks the chosen answer's score to be above the other one; 0 is the plain loss."""


class DPOConfig(Section):
    """How `offline.job=dpo` trains on pairs of a chosen and a rejected answer."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the logistic loss of DPO; `ipo`: the squared distance of the log-ratio from 1 / (2 beta)."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the initial policy."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped; read by `sigmoid`."""


class OfflineConfig(Section):
    """Training on rows of a data set in place of rollouts; docs/offline_training.md has the row formats."""

    job: Literal["none", "sft", "reward_model", "dpo"] = "none"
    """`none` is RL. `sft`: cross-entropy on the assistant's tokens; `reward_model`: a score of an answer; `dpo`: direct
    preference optimisation. A job reads `learner`, `policy`, `data` and this section; of `algorithm` it reads nothing.
    """
    batch_size: PositiveInt = 32
    """Rows of one step: conversations, pairs or scored answers."""
    max_tokens: PositiveInt = 4096
    """A row with a longer conversation (vision tokens included) is skipped and counted, never cut."""
    train_template_text: bool = False
    """Train also what the chat template writes between the generation prompt and an answer, such as an empty thought;
    else the loss covers answers and the tokens that end them."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Parameters of `reward_model`."""
    dpo: DPOConfig = DPOConfig()
    """Parameters of `dpo`."""

    @property
    def is_on(self) -> bool:
        return self.job != "none"

    @property
    def rows(self) -> Literal["conversation", "pair", "scored"]:
        """The kind of row that the job trains on."""
        if self.job == "sft":
            return "conversation"
        is_regression = self.job == "reward_model" and self.reward_model.loss == "regression"
        return "scored" if is_regression else "pair"
