"""Schema of rewards: named components, where they run, and the recipes that combine them into one number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, TypeVar

from mobula.configs.schema.base import Field, NonNegativeInt, PositiveInt, Section

T = TypeVar("T")

SHARED_SERVICE = "reward"
"""The workers of `resources.reward`, where components run that need no workers of their own."""
DEFAULT_RECIPE = "default"
"""The recipe of responses whose label has none of its own."""


class RewardComponent(Section):
    """One named, weighted part of the reward."""

    name: str
    """Its name in metrics and reports."""
    function: str
    """A built-in function (docs/algorithms.md lists them), or a user's own: `module:function` or `FILE.py:function`."""
    weight: float
    """Its weight in the sum, where no recipe gives it another. 0 measures it without rewarding it."""
    options: dict[str, Any]
    """Arguments of the function."""
    service: str
    """Which workers run it: `reward` is those of `resources.reward`, any other name a key of
    `resources.reward_services`."""
    needs_pictures: bool
    """Pass it the prompt's pictures as encoded files; otherwise it gets text and metadata only."""
    retries: NonNegativeInt
    """How often a response is scored again after a failure."""
    cache_entries: NonNegativeInt
    """Scores that one worker remembers by content (response, prompt, references, metadata, pictures); 0 for none."""

    @property
    def reads_box(self) -> bool:
        """Whether its options look for a box."""
        found = (self.options.get("require_boxed"), self.options.get("extract"), self.options.get("preset"))
        return found[0] is True or "boxed" in found[1:]


class Gate(Section):
    """A condition between two components of a recipe."""

    component: str
    """The component that runs only if the condition holds; otherwise its value is 0."""
    needs: str
    """The component whose value is compared."""
    at_least: float
    """The least value of `needs`."""


class Recipe(Section):
    """How components are combined into the reward of rows of one label."""

    components: tuple[str, ...]
    """The components that run on responses to these rows."""
    weights: dict[str, float]
    """Component -> weight, where it is not the component's own."""
    gates: tuple[Gate, ...]
    """Conditions; a component with several runs if all hold."""
    normalise: bool
    """Divide the sum by the sum of the absolute weights of all components of the recipe, run or not."""


class RewardPoolConfig(Section):
    """Batching and queueing of groups for the workers of each service."""

    max_batch_groups: PositiveInt
    """Most groups sent to a worker in one call; a model scores them as one batch."""
    batches_in_flight: PositiveInt
    """Calls in flight for each worker: one in computation, the others queued behind it."""
    max_queued_groups: PositiveInt
    """Groups that may be queued for one service; further callers wait until there is room."""


def for_label(by_label: Mapping[str, T], label: str) -> T | None:
    """The entry of a label, or else that of the default recipe; None if there is neither."""
    return by_label.get(label, by_label.get(DEFAULT_RECIPE))


class RewardsConfig(Section):
    """The reward: components, and recipes over them."""

    components: tuple[RewardComponent, ...]
    """All components, from which recipes choose."""
    recipes: dict[str, Recipe]
    """Label -> recipe; `default` is for labels without one. No recipe at all: the weighted sum of all components."""
    label_key: str
    """The key of a row's metadata that holds its label; a row without it is `default`."""
    accuracy_component: str
    """The component whose mean is reported as accuracy, over the responses whose recipe has it."""
    on_failure: Literal["exclude", "stop"]
    """A response that cannot be scored: take it out of its group, or stop the run. It never counts as 0."""
    processes: Annotated[int, Field(ge=1)]
    """Processes in which one worker runs what may hang (computer algebra, a user's functions), each with a deadline."""
    pool: RewardPoolConfig
    """Batching and queueing of groups for the workers."""

    @property
    def active_recipes(self) -> dict[str, Recipe]:
        """The recipes, or the one that no recipe at all stands for."""
        everything = Recipe(components=tuple(c.name for c in self.components), weights={}, gates=(), normalise=False)
        return self.recipes or {DEFAULT_RECIPE: everything}

    def label_of(self, metadata: Mapping[str, Any]) -> str:
        """The label that a row's metadata holds."""
        return str(metadata.get(self.label_key, DEFAULT_RECIPE))

    @property
    def services(self) -> tuple[str, ...]:
        """The services that the components name, in the order in which they do."""
        return tuple(dict.fromkeys(component.service for component in self.components))

    @property
    def needs_pictures(self) -> bool:
        """Whether some component looks at the prompt's pictures."""
        return any(component.needs_pictures for component in self.components)

    @property
    def reads_box(self) -> bool:
        """Whether some part of the reward looks for the answer, or for the form, in a box."""
        return any(
            self.weight(recipe, component.name) != 0 and component.reads_box
            for recipe in self.active_recipes.values()
            for component in self.components
            if component.name in recipe.components
        )

    def weight(self, recipe: Recipe, component: str) -> float:
        """The weight of a component in a recipe."""
        own = next(c.weight for c in self.components if c.name == component)
        return recipe.weights.get(component, own)

    def weights_in(self, recipe: Recipe) -> dict[str, float]:
        """Component -> weight, of those that a recipe has."""
        return {name: self.weight(recipe, name) for name in recipe.components}

    def service_stages(self) -> tuple[tuple[str, ...], ...]:
        """Services in the order in which gates have them asked; those of one stage side by side.

        Raises:
            CycleError: gates make services wait for each other.
        """
        service = {component.name: component.service for component in self.components}
        sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(self.services, ()))
        for gate in (gate for recipe in self.active_recipes.values() for gate in recipe.gates):
            if service[gate.component] != service[gate.needs]:
                sorter.add(service[gate.component], service[gate.needs])
        sorter.prepare()
        stages = []
        while sorter.is_active():
            stages.append(sorter.get_ready())
            sorter.done(*stages[-1])
        return tuple(stages)

    def gate_order(self) -> tuple[str, ...]:
        """The components, each behind those that its gates look at in any recipe.

        Raises:
            CycleError: the gates go round in a circle.
        """
        sorter: TopologicalSorter[str] = TopologicalSorter({component.name: () for component in self.components})
        for gate in (gate for recipe in self.active_recipes.values() for gate in recipe.gates):
            sorter.add(gate.component, gate.needs)
        return tuple(sorter.static_order())


def reward_contradictions(rewards: RewardsConfig) -> tuple[str, ...]:
    """Everything on which the reward's own parts disagree, each with the next action."""
    found = [message for rule in _RULES if (message := rule(rewards)) is not None]
    if _names_differ(rewards) is None:
        found += [message for label in rewards.recipes for message in _recipe_flaws(rewards, label)]
    return tuple(found or _circles(rewards))


def _names_differ(rewards: RewardsConfig) -> str | None:
    repeated = [name for name, count in Counter(c.name for c in rewards.components).items() if count > 1]
    if not repeated:
        return None
    return (
        f"rewards.components names {', '.join(repeated)} more than once: metrics and reports tell parts apart by name, "
        "so give each rewards.components.INDEX.name its own"
    )


def _has_signal(rewards: RewardsConfig) -> str | None:
    if rewards.recipes or any(component.weight != 0 for component in rewards.components):
        return None
    return (
        f"rewards.components has {len(rewards.components)} parts and none has a weight, so every reward is 0: "
        "give at least one part a weight other than 0, e.g. rewards=math_answer"
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


_RULES: Sequence[Callable[[RewardsConfig], str | None]] = (_has_signal, _names_differ, _accuracy_is_scored)


def _circles(rewards: RewardsConfig) -> Iterator[str]:
    """Gates that wait for each other; asked once all names are known."""
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
    if any(gate.component == rewards.accuracy_component for gate in recipe.gates):
        yield (
            f"{key}.gates has one for {rewards.accuracy_component}, but the accuracy is of all responses of a label: "
            "remove it"
        )
    if all(rewards.weight(recipe, name) == 0 for name in recipe.components):
        yield f"{key} gives no component a weight, so every reward would be 0: set {key}.weights.COMPONENT=1"
