"""Credit: computes the advantage of each token from the rewards of a step, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.user_code import chosen
from mobula.configs.schema import AlgorithmConfig, KLConfig, RunConfig
from mobula.configs.schema.algorithm import TURNWISE, ShapingConfig
from mobula.configs.schema.rewards import ENVIRONMENT, for_label
from mobula.learner.algorithms.advantages import (
    ADVANTAGES,
    AdvantageFunction,
    AdvantageOptions,
    GroupStatistics,
    PromptHistory,
    RunningMoments,
    StepRewards,
    whitened,
)
from mobula.learner.algorithms.kl import (
    AdaptiveCoefficient,
    FixedCoefficient,
    KLCoefficient,
    capped,
    kl_estimator,
    teacher_advantage,
)
from mobula.learner.algorithms.shaping import credit_by_token, length_rewards, repeated_share, token_rewards
from mobula.learner.algorithms.token_advantages import (
    TOKEN_ADVANTAGES,
    TURN_ADVANTAGES,
    StepTurns,
    TokenAdvantage,
    TokenValues,
    TurnAdvantage,
    explained_variance,
    turns_of,
)
from mobula.learner.batch import LearnerItem, filled

NUM_MEASURED_TURNS = 16  # first turns of an episode with a reward metric

Groups = list[list[LearnerItem]]


@dataclass(frozen=True)
class Credited:
    groups: Groups
    metrics: dict[str, float]


class Credit:
    """Assigns advantages. Every rank gets the whole step, so statistics are global without communication.

    The order; each operation runs once and only if its key is set:

    1. penalties on the reward: repetition, length, and `shaping.function`
    2. running moments, 3. reward clip
    4. advantage of each response (`algorithm.advantage`), or of each turn of an episode (`return_to_go`)
    5. return of each token: discount, and the KL if `algorithm.kl.place=reward`; with a critic the advantage of each
       token, from its reward and the values. The environment's reward for a turn counts at the end of that turn, and
       the rest of the reward at the end of the response
    6. distillation where `algorithm.distillation.teacher` is set: the returns times `reward_weight`, and the teacher's
       advantage where `place=advantage`
    7. whitening over the step's trained tokens, 8. advantage clip
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.algorithm
        self._label_of = config.rewards.label_of
        self._weights = {label: config.rewards.weights_in(r) for label, r in config.rewards.active_recipes.items()}
        self._components = [component.name for component in config.rewards.components]
        self._paid = [n for n, c in enumerate(config.rewards.components) if c.function == ENVIRONMENT]
        self._spread = _spread(config.algorithm)
        self._kl = kl_estimator(config.algorithm.kl)
        self._reshape = _reshape(config.algorithm.shaping)
        self._moments = RunningMoments()
        self._history = PromptHistory(config.algorithm.prompt_history_steps)
        self.kl = _coefficient(config.algorithm.kl)
        self.kl_scale = 1.0  # of the coefficient; the guard may raise it

    @property
    def kl_coef(self) -> float:
        return self.kl.value * self.kl_scale

    def assign(self, groups: Groups) -> Credited:
        """Assigns an advantage to every item. Updates the running moments and the history: call it once per step."""
        items = [item for group in groups for item in group]
        rewards = self._step_rewards(items)
        shaped, clip_fraction = self._shaped(items, rewards)
        shaped_rewards = replace(rewards, values=shaped)
        step = _Step(items, shaped_rewards, self._earned(items, shaped_rewards), list(map(self._costs, items)))
        items = self._spread(step)
        self._remember(items, shaped, rewards.included)
        values = _measure_values(items) if self._config.critic.is_on else {}
        advantages, advantage_clip_fraction = self._finished(items, [self._with_teacher(item) for item in items])
        credited = iter(replace(item, advantages=a) for item, a in zip(items, advantages, strict=True))
        included = rewards.included
        metrics = {
            "uniform_groups": float(GroupStatistics.of(shaped_rewards).is_constant().sum()),
            "shaped_reward_mean": shaped[included].mean().item() if included.any() else 0.0,
            "reward_clip_fraction": clip_fraction,
            "advantage_clip_fraction": advantage_clip_fraction,
            "kl_coef": self.kl_coef,
            **values,
            **_measure_turns(items),
        }
        return Credited([[next(credited) for _ in group] for group in groups], metrics)

    def state(self) -> dict[str, Any]:
        """Returns the state for a resume, JSON-serialisable."""
        return {"moments": self._moments.state(), "kl_coef": self.kl.value, "prompt_history": self._history.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`. A fixed coefficient keeps its configured value."""
        self._moments.load(state["moments"])
        self._history.load(state.get("prompt_history", ()))  # empty if the saved run kept none
        if self._config.kl.controller == "adaptive":
            self.kl.value = state["kl_coef"]

    def _step_rewards(self, items: Sequence[LearnerItem]) -> StepRewards:
        names, rewards = self._components, [item.reward for item in items]
        weights = [for_label(self._weights, self._label_of(item.metadata)) or {} for item in items]
        prompts = list(dict.fromkeys(item.sample_id for item in items))
        indices = {prompt: n for n, prompt in enumerate(prompts)}
        return StepRewards(
            values=torch.tensor([0.0 if r is None else r.value for r in rewards], dtype=torch.float64),
            included=torch.tensor([r is not None for r in rewards]),
            group_ids=torch.tensor([item.group for item in items]),
            lengths=torch.tensor([item.num_trained for item in items]),
            components=torch.tensor(
                [[0.0 if r is None else r.components.get(n, 0.0) for n in names] for r in rewards], dtype=torch.float64
            ),
            weights=torch.tensor([[w.get(n, 0.0) for n in names] for w in weights], dtype=torch.float64),
            prompt_ids=torch.tensor([indices[item.sample_id] for item in items]),
            earlier=self._history.of(prompts),
        )

    def _remember(self, items: Sequence[LearnerItem], shaped: Tensor, included: Tensor) -> None:
        known = included.nonzero().flatten().tolist()
        self._history.add([items[n].sample_id for n in known], shaped[known].tolist())

    def _shaped(self, items: Sequence[LearnerItem], rewards: StepRewards) -> tuple[Tensor, float]:
        """Returns the shaped rewards [N], and the share that the clip changed."""
        shaping = self._config.shaping
        values = rewards.values.double()
        is_solved = values >= self._config.solved_reward
        if shaping.repetition_penalty > 0:
            shares = [repeated_share(item.response_ids.tolist(), shaping.repetition_ngram) for item in items]
            values = values - shaping.repetition_penalty * torch.tensor(shares, dtype=torch.float64)
        if shaping.length_penalty > 0:
            lengths = length_rewards(rewards.lengths, is_solved, rewards.included, rewards.group_ids)
            values = values + shaping.length_penalty * lengths
        values = self._reshape(values, rewards)
        if shaping.running_moments != "none":
            self._moments.add(values[rewards.included])
            mean = self._moments.mean if shaping.running_moments == "standardise" else 0.0
            values = (values - mean) / self._moments.scale
        if shaping.reward_clip == 0:
            return values, 0.0
        is_out = (values.abs() > shaping.reward_clip) & rewards.included
        held = values.clamp(-shaping.reward_clip, shaping.reward_clip)
        return held, is_out.sum().item() / max(int(rewards.included.sum()), 1)

    def _earned(self, items: Sequence[LearnerItem], rewards: StepRewards) -> list[np.ndarray]:
        """Returns the reward of each turn for each response, float64 [turns]; a response of one turn has one entry."""
        weights = rewards.weights[:, self._paid]
        paid = (weights * rewards.components[:, self._paid]).sum(dim=1).tolist()
        return [
            _by_turn(item, value, weight, part)
            for item, value, weight, part in zip(
                items, rewards.values.tolist(), weights.sum(dim=1).tolist(), paid, strict=True
            )
        ]

    def _costs(self, item: LearnerItem) -> np.ndarray:
        """float [T]: the KL penalty subtracted from the reward of each token."""
        kl = self._config.kl
        if kl.place == "loss" or kl.coef == 0:
            return np.zeros(len(item.loss_mask), dtype=np.float32)
        if item.reference_logprobs is None:
            raise ValueError(missing_reference(self._config))
        policy, reference = (torch.from_numpy(a) for a in (item.behavior_logprobs, item.reference_logprobs))
        return self.kl_coef * capped(self._kl(policy, reference, policy), kl.token_cap).numpy()

    def _with_teacher(self, item: LearnerItem) -> np.ndarray:
        """The item's advantages times `reward_weight`, plus the teacher's if `place=advantage`, float32 [T]."""
        distillation = self._config.distillation
        if not distillation.is_on:
            return item.advantages
        weighed = distillation.reward_weight * item.advantages
        if distillation.place == "loss":
            return weighed
        if item.reference_logprobs is None:
            raise ValueError(missing_reference(self._config))
        behavior, teacher = (torch.from_numpy(a) for a in (item.behavior_logprobs, item.reference_logprobs))
        advantages = teacher_advantage(behavior, teacher, distillation.token_cap).numpy()
        return weighed + np.where(item.loss_mask, distillation.coef * advantages, 0.0).astype(np.float32)

    def _finished(self, items: Sequence[LearnerItem], returns: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """Whitened and clipped advantages, and the share of trained tokens that the clip changed."""
        shaping = self._config.shaping
        mask = torch.from_numpy(np.concatenate([item.loss_mask for item in items]))
        values = torch.from_numpy(np.concatenate(returns))
        if shaping.whiten:
            values = whitened(values, mask, self._config.std).float()
        fraction = 0.0
        if shaping.advantage_clip > 0:
            is_out = (values.abs() > shaping.advantage_clip) & mask
            fraction = is_out.sum().item() / max(int(mask.sum()), 1)
            values = values.clamp(-shaping.advantage_clip, shaping.advantage_clip)
        ends = np.cumsum([len(item.loss_mask) for item in items])
        return np.split(values.numpy(), ends[:-1]), fraction


def missing_reference(config: AlgorithmConfig) -> str:
    """Next action for groups without scores of the reference, or of the teacher that replaces it."""
    if config.distillation.is_on:
        return (
            f"algorithm.distillation.teacher={config.distillation.teacher} but these groups carry no log-probs of it: "
            "set resources.reference.num_workers=1, or leave the teacher out"
        )
    return (
        f"algorithm.kl.coef={config.kl.coef:g} but these groups carry no reference log-probs: "
        "set resources.reference.num_workers=1, or algorithm.kl.coef=0"
    )


def _coefficient(config: KLConfig) -> KLCoefficient:
    if config.controller == "fixed":
        return FixedCoefficient(config.coef)
    return AdaptiveCoefficient(config.coef, target=config.target, horizon=config.horizon)


@dataclass(frozen=True)
class _Step:
    """The responses of a step, and what advantages follow from."""

    items: Sequence[LearnerItem]
    rewards: StepRewards
    earned: Sequence[np.ndarray]  # float64 [turns] of each: the reward of each turn
    costs: Sequence[np.ndarray]  # float [T] of each


Spread = Callable[[_Step], list[LearnerItem]]  # a step -> its items with the advantages of their tokens


def _spread(config: AlgorithmConfig) -> Spread:
    if config.critic.is_on:
        return partial(_by_values, TOKEN_ADVANTAGES[config.advantage], config)
    if config.advantage in TURN_ADVANTAGES:
        return partial(_by_turn_advantage, TURN_ADVANTAGES[config.advantage], config)
    given = ("rewards", "options")
    formula = chosen(ADVANTAGES, config.advantage, "algorithm.advantage", given, config.advantage_options)
    return partial(_by_return, formula, config)


def _reshape(config: ShapingConfig) -> Callable[[Tensor, StepRewards], Tensor]:
    """Returns the user's function for rewards [N] after the penalties, or the identity."""
    unchanged: dict[str, Callable[[Tensor, StepRewards], Tensor]] = {"none": lambda values, rewards: values}
    given = ("values", "rewards")
    return chosen(unchanged, config.function, "algorithm.shaping.function", given, config.function_options)


def _by_return(formula: AdvantageFunction, config: AlgorithmConfig, step: _Step) -> list[LearnerItem]:
    options = AdvantageOptions(config.std, config.pass_k, config.solved_reward)
    return [
        replace(item, advantages=credit_by_token(advantage, cost, item.loss_mask, config.gamma))
        for item, advantage, cost in zip(step.items, formula(step.rewards, options).tolist(), step.costs, strict=True)
    ]


def _by_turn_advantage(formula: TurnAdvantage, config: AlgorithmConfig, step: _Step) -> list[LearnerItem]:
    """One advantage for each turn, minus the costs of a token and later tokens."""
    num_turns = np.array([len(turns) for turns in step.earned])
    padded = np.stack([np.pad(turns, (0, num_turns.max() - len(turns))) for turns in step.earned])
    turns = StepTurns(padded, num_turns, step.rewards.included.numpy(), step.rewards.group_ids.numpy())
    credited = []
    for item, advantages, cost in zip(step.items, formula(turns, config.turn_discount), step.costs, strict=True):
        tokens = credit_by_token(0.0, cost, item.loss_mask, gamma=1.0)
        for (start, end), advantage in zip(turns_of(item.loss_mask), advantages, strict=False):  # others are masked
            tokens[start:end] += np.float32(advantage)
        credited.append(replace(item, advantages=tokens))
    return credited


def _by_values(formula: TokenAdvantage, config: AlgorithmConfig, step: _Step) -> list[LearnerItem]:
    discount = config.turn_discount if config.advantage in TURNWISE else config.gamma
    credited = []
    for item, turns, cost in zip(step.items, step.earned, step.costs, strict=True):
        assert item.values is not None, "the critic scores a step before its advantages are computed"
        paid = token_rewards(0.0, cost, item.loss_mask)
        for (_, end), reward in zip(turns_of(item.loss_mask), turns, strict=False):
            paid[end - 1] += reward
        goes_on = item.is_truncated and config.bootstrap_truncated
        credit = formula(TokenValues(paid, item.values, item.loss_mask, goes_on), discount, config.gae_lambda)
        arrays = (credit.advantages.astype(np.float32), credit.returns.astype(np.float32))
        credited.append(replace(item, advantages=arrays[0], returns=arrays[1]))
    return credited


def _by_turn(item: LearnerItem, value: float, weight: float, paid: float) -> np.ndarray:
    """Returns the reward of each turn: `weight` times the environment's reward for the turn; the last turn also gets
    the rest of `value`, without the environment's part `paid`."""
    num_turns = max(len(turns_of(item.loss_mask)), 1)  # a response without a reward has no trained token
    earned = np.zeros(num_turns)
    if item.turn_rewards and item.reward is not None:
        assert len(item.turn_rewards) == num_turns, "tokens of an environment stand between two turns"
        earned += weight * np.array(item.turn_rewards)
        value -= paid
    earned[-1] += value
    return earned


def _measure_turns(items: Sequence[LearnerItem]) -> dict[str, float]:
    episodes = [item.turn_rewards for item in items if item.turn_rewards and item.reward is not None]
    if not episodes:
        return {}
    longest = min(max(map(len, episodes)), NUM_MEASURED_TURNS)
    paid = {
        f"turn_reward_{k + 1}": float(np.mean([turns[k] if k < len(turns) else 0.0 for turns in episodes]))
        for k in range(longest)
    }
    return {"turns_mean": float(np.mean([len(turns) for turns in episodes])), **paid}


def _measure_values(items: Sequence[LearnerItem]) -> dict[str, float]:
    values = np.concatenate([filled(item.values)[:-1][item.loss_mask] for item in items])
    returns = np.concatenate([filled(item.returns)[item.loss_mask] for item in items])
    return {
        "explained_variance": explained_variance(values, returns),
        "value_mean": float(values.mean()) if values.size else 0.0,
        "return_mean": float(returns.mean()) if returns.size else 0.0,
    }
