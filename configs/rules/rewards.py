"""Rules of the reward's components and recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError

from mobula.configs.schema.rewards import RewardsConfig


def reward_contradictions(rewards: RewardsConfig) -> tuple[str, ...]:
    """Contradictions within the section `rewards`, each with the next action."""
    contradictions = [message for rule in _RULES if (message := rule(rewards)) is not None]
    if _names_differ(rewards) is None:
        contradictions += [message for label in rewards.recipes for message in _recipe_flaws(rewards, label)]
    return tuple(contradictions or _circles(rewards))


def _names_differ(rewards: RewardsConfig) -> str | None:
    repeated = [name for name, count in Counter(c.name for c in rewards.components).items() if count > 1]
    if not repeated:
        return None
    return (
        f"rewards.components names {', '.join(repeated)} more than once: metrics and reports tell parts apart by name, "
        "so give each rewards.components.INDEX.name its own"
    )


def _has_signal(rewards: RewardsConfig) -> str | None:
    if rewards.recipes or any(component.weight != 0 and component.trained for component in rewards.components):
        return None
    return (
        f"rewards.components has {len(rewards.components)} parts and none is trained with a weight, so every reward is "
        "0: give at least one part with trained=true a weight other than 0, e.g. rewards=math_answer"
    )


def _judges_have_weights(rewards: RewardsConfig) -> str | None:
    idle = [name for name, weight in rewards.judge_weights.items() if weight == 0]
    if not idle:
        return None
    return (
        f"rewards.components has {', '.join(idle)} with trained=false and weight=0, so the judge's sum lacks it: "
        "give it a weight, e.g. 1, or set trained=true to measure it without a judge"
    )


def _accuracy_is_scored(rewards: RewardsConfig) -> str | None:
    name, names = rewards.accuracy_component, [component.name for component in rewards.components]
    if name not in names:
        return (
            f"rewards.accuracy_component={name} is no part of the reward: "
            f"set it to one of {', '.join(names) or 'rewards.components, which is empty'}"
        )
    if not any(name in recipe.components for recipe in rewards.active_recipes.values()):
        return (
            f"no recipe of rewards.recipes has {name}, whose mean is the accuracy: add it to one, with weight 0 if it "
            "is not to count, or change rewards.accuracy_component"
        )
    return None


_RULES: Sequence[Callable[[RewardsConfig], str | None]] = (
    _has_signal,
    _judges_have_weights,
    _names_differ,
    _accuracy_is_scored,
)


def _circles(rewards: RewardsConfig) -> Iterator[str]:
    """Cycles of gates; called once all names are known."""
    for order, action in (
        (rewards.gate_order, "remove one of them"),
        (rewards.service_stages, "have one service run both components"),
    ):
        try:
            order()
        except CycleError as error:
            yield f"the gates of rewards.recipes go round in a circle ({' <- '.join(error.args[1])}): {action}"
            return


def _recipe_flaws(rewards: RewardsConfig, label: str) -> Iterator[str]:
    """Errors of one recipe."""
    recipe, key = rewards.recipes[label], f"rewards.recipes.{label}"
    known = [component.name for component in rewards.components]
    unknown = [name for name in recipe.components if name not in known]
    if unknown:
        yield f"{key}.components names {', '.join(unknown)}: use {', '.join(known)}, or add to rewards.components"
        return
    named = {*recipe.weights, *(g.component for g in recipe.gates), *(g.needs for g in recipe.gates)}
    outside = sorted(named - set(recipe.components))
    if outside:
        yield f"{key}: weights and gates name {', '.join(outside)}, which its components do not: add them there"
    judges = rewards.judge_weights
    misused = sorted({*judges} & {*recipe.weights, *(gate.needs for gate in recipe.gates)})
    if misused:
        yield (
            f"{key} weighs or needs {', '.join(misused)}, whose trained=false makes it an independent judge: remove it "
            "from weights and gates.needs; its weight is rewards.components.INDEX.weight"
        )
    if any(gate.component == rewards.accuracy_component for gate in recipe.gates):
        yield (
            f"{key}.gates has one for {rewards.accuracy_component}, but the accuracy is of all responses of a label: "
            "remove it"
        )
    if all(rewards.weight(recipe, name) == 0 for name in recipe.components):
        yield f"{key} gives no component a weight, so every reward would be 0: set {key}.weights.COMPONENT=1"
