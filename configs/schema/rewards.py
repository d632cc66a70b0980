"""Schema of rewards: named components, where they run, and the recipes that combine them into one number."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from typing import Annotated, Any, Literal, TypeVar

from mobula.configs.schema.base import Field, NonNegativeInt, PositiveInt, Section

T = TypeVar("T")

SHARED_SERVICE = "reward"
"""The workers of `resources.reward`, where components run that need no workers of their own."""
DEFAULT_RECIPE = "default"
"""The recipe of responses whose label has none of its own."""
ENVIRONMENT = "environment"
"""The function that reads the reward of an environment."""


class RewardComponent(Section):
    """One named, weighted part of the reward."""

    name: str
    """Its name in metrics and reports."""
    function: str
    """A built-in function (docs/algorithms.md lists them), or a user's own: `module:function` or `FILE.py:function`."""
    weight: float
    """Its weight in the sum, where no recipe gives it another. 0 measures it without rewarding it."""
    options: dict[str, Any] = {}
    """Arguments of the function."""
    service: str = SHARED_SERVICE
    """Which workers run it: `reward` is those of `resources.reward`, any other name a key of
    `resources.reward_services`."""
    needs_images: bool = False
    """Pass it the prompt's images as encoded files; otherwise it gets text and metadata only."""
    retries: NonNegativeInt = 0
    """How often a response is scored again after a failure."""
    cache_entries: NonNegativeInt = 0
    """Scores that one worker remembers by content (response, prompt, references, metadata, images); 0 for none."""

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
    weights: dict[str, float] = {}
    """Component -> weight, where it is not the component's own."""
    gates: tuple[Gate, ...] = ()
    """Conditions; a component with several runs if all hold."""
    normalise: bool = False
    """Divide the sum by the sum of the absolute weights of all components of the recipe, run or not."""


class RewardPoolConfig(Section):
    """Batching and queueing of groups for the workers of each service."""

    max_batch_groups: PositiveInt = 4
    """Most groups sent to a worker in one call; a model scores them as one batch."""
    batches_in_flight: PositiveInt = 2
    """Calls in flight for each worker: one in computation, the others queued behind it."""
    max_queued_groups: PositiveInt = 256
    """Groups that may be queued for one service; further callers wait until there is room."""


def for_label(by_label: Mapping[str, T], label: str) -> T | None:
    """The entry of a label, or else that of the default recipe; None if there is neither."""
    return by_label.get(label, by_label.get(DEFAULT_RECIPE))


class RewardsConfig(Section):
    """The reward: components, and recipes over them."""

    components: tuple[RewardComponent, ...]
    """All components, from which recipes choose."""
    recipes: dict[str, Recipe] = {}
    """Label -> recipe; `default` is for labels without one. No recipe at all: the weighted sum of all components."""
    label_key: str = "label"
    """The key of a row's metadata that holds its label; a row without it is `default`."""
    accuracy_component: str
    """The component whose mean is reported as accuracy, over the responses whose recipe has it."""
    on_failure: Literal["exclude", "stop"] = "exclude"
    """A response that cannot be scored: take it out of its group, or stop the run. It never counts as 0."""
    processes: Annotated[int, Field(ge=1)] = 1
    """Processes in which one worker runs what may hang (computer algebra, a user's functions), each with a deadline."""
    pool: RewardPoolConfig = RewardPoolConfig()
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
    def needs_images(self) -> bool:
        """Whether some component looks at the prompt's images."""
        return any(component.needs_images for component in self.components)

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
