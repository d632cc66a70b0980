"""Schema of the guard against reward hacking: signs, their test, and the actions of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from mobula.configs.schema.base import Field, NonNegativeFloat, PositiveInt, Section

SignName = Literal["judge", "length", "repetition", "language", "format"]
ActionName = Literal["none", "warn", "raise_kl", "rollback", "stop"]


class GuardLimits(Section):
    """Limits of the drift of responses since the first window; 0 switches a sign off."""

    length: NonNegativeFloat = 0.0
    """Most ratio of the mean length to that of the first window, or of that to the mean length, e.g. 2."""
    repetition: NonNegativeFloat = 0.0
    """Most rise of the share of repeated n-grams of words, e.g. 0.2."""
    language: NonNegativeFloat = 0.0
    """Most rise of the share of letters outside the most frequent script of a response, e.g. 0.1."""
    format: NonNegativeFloat = 0.0
    """Most fall of the mean of the components with function `format`, e.g. 0.2."""


class GuardConfig(Section):
    """Guard against reward hacking. Without a component with trained=false and without limits it does nothing."""

    action: ActionName = "warn"
    """What an alarm does: `warn` logs it, `raise_kl` multiplies algorithm.kl.coef, `rollback` loads the newest
    checkpoint from before the divergence and continues with new prompts, `stop` ends the run with exit code 3."""
    actions: dict[SignName, ActionName] = {}
    """Sign -> action, to override `action`. The sign `judge` compares the trained reward with the judge."""
    window_steps: PositiveInt = 5
    """Steps of a window; each complete window is compared with the earlier ones. A held-out evaluation is a window."""
    false_alarm_rate: Annotated[float, Field(gt=0, le=0.5)] = 0.01
    """Bound on the share of runs in which a sign gives a false alarm, however long they are."""
    min_effect: NonNegativeFloat = 0.1
    """Least rise of the reward and fall of the judge that count, in standard deviations of group means."""
    limits: GuardLimits = GuardLimits()
    """Signs of drift."""
    repetition_ngram: PositiveInt = 4
    """Words of an n-gram."""
    text_groups: PositiveInt = 8
    """Groups of a step whose texts are read, with limits of repetition or language."""
    kl_factor: Annotated[float, Field(gt=1)] = 2.0
    """Factor of one raise of the KL coefficient."""
    max_actions: PositiveInt = 3
    """Most raises of the KL coefficient, or rollbacks, in a run; the next alarm stops it."""

    def action_of(self, sign: str) -> ActionName:
        """The action of a sign."""
        return next((action for name, action in self.actions.items() if name == sign), self.action)
