"""Keys of rewards and of the guard."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mobula.configs.schema.base import Section

T = TypeVar("T")
SHARED_SERVICE = "reward"
"""The workers of `resources.reward`, for components without a separate service."""


DEFAULT_RECIPE = "default"
"""The recipe of responses with a label without a recipe."""


ENVIRONMENT = "environment"
"""The function that reads the reward of an environment."""


ACCURACY = "accuracy"


class RewardComponent(Section):
    """A named, weighted part of the reward."""

    name: str
    """The component's name in metrics and reports."""
    function: str
    """A built-in function (docs/rewards.md lists them), or user code: `module:function` or `FILE.py:function`."""
    weight: float
    """The weight in the sum, unless a recipe overrides it. 0 measures the component without rewarding it."""
    trained: bool = True
    """Whether the component counts in the reward. With false it is a judge: `weight` is its weight in the judge's sum,
    with which the guard compares the reward (`guard`), and a response that it cannot score keeps its reward."""
    options: dict[str, Any] = {}
    """Arguments of the function."""
    requirements: str = ""
    """A requirements file of pip. The user's function then runs in an environment with these packages alone, installed
    once on each node by uv; requests have the fields of `RewardRequest`, without its methods. Empty: Mobula's."""
    python: str = ""
    """In place of `requirements`: a Python that every node has."""
    service: str = SHARED_SERVICE
    """The workers that run the component: `reward` for `resources.reward`, or a key of `resources.reward_services`."""
    needs_images: bool = False
    """Pass the prompt's images as encoded files, in addition to text and metadata."""
    retries: NonNegativeInt = 0
    """Retries for a response after a failure."""
    cache_entries: NonNegativeInt = 0
    """Size of a worker's cache of scores by content (response, prompt, references, metadata, images); 0 for none."""

    @property
    def reads_box(self) -> bool:
        """Whether the options require a box."""
        sources = (self.options.get("extract"), self.options.get("preset"))
        return self.options.get("require_boxed") is True or "boxed" in sources


class Gate(Section):
    """A condition between two components of a recipe."""

    component: str
    """The component that runs only if the condition holds; else the value is 0."""
    needs: str
    """The component of the condition."""
    at_least: float
    """The least value of `needs`."""


class Recipe(Section):
    """Combination of components into the reward of rows with one label."""

    components: tuple[str, ...]
    """The components that run on responses to these rows."""
    weights: dict[str, float] = {}
    """Component -> weight, to override the component's weight."""
    gates: tuple[Gate, ...] = ()
    """Conditions; a component with several conditions runs if all hold."""
    normalise: bool = False
    """Divide the sum by the sum of the absolute weights of all components of the recipe, run or not."""


class RewardPoolConfig(Section):
    """Batching and queueing of groups for the workers of each service."""

    max_batch_groups: PositiveInt = 4
    """Most groups sent to a worker in one call; a model scores them as one batch."""
    batches_in_flight: PositiveInt = 2
    """Calls in flight for each worker: one computes, the others are queued."""
    max_queued_groups: PositiveInt = 256
    """Most queued groups of a service; further callers wait."""


def for_label(by_label: Mapping[str, T], label: str) -> T | None:
    """The entry of a label, else of the default recipe; None if there is neither."""
    return by_label.get(label, by_label.get(DEFAULT_RECIPE))


class RewardsConfig(Section):
    """The reward: components, and recipes that combine them."""

    components: tuple[RewardComponent, ...]
    """All components."""
    recipes: dict[str, Recipe] = {}
    """Label -> recipe; `default` is for labels without a recipe. Without recipes: the weighted sum of all components.
    """
    label_key: str = "label"
    """The key of the label in a row's metadata; a row without it has the label `default`."""
    accuracy_component: str
    """The component reported as accuracy: the mean over responses with a recipe that includes it."""
    on_failure: Literal["exclude", "stop"] = "exclude"
    """A response that cannot be scored: exclude it from the group, or stop the run. It never counts as 0."""
    processes: Annotated[int, Field(ge=1)] = 1
    """Subprocesses of a worker for functions that may hang (patterns, user functions), with a timeout."""
    environments_path: Path = Path("~/.cache/mobula/environments")
    """The folder of environments of `requirements`, by a digest of the file and of Python's version."""
    judged_interval: NonNegativeInt = 1
    """Components with `trained: false` score every so many-th training prompt, and all held-out prompts; 0: only
    held-out prompts."""
    pool: RewardPoolConfig = RewardPoolConfig()
    """Batching and queueing of groups for the workers."""

    @property
    def own_measure(self) -> str:
        """The name of `accuracy_component` if it is the user's function; else empty."""
        function = next((c.function for c in self.components if c.name == self.accuracy_component), "")
        if ":" not in function or function.startswith("examples/"):
            return ""
        return self.accuracy_component if self.accuracy_component != ACCURACY else function.rpartition(":")[2]

    @property
    def active_recipes(self) -> dict[str, Recipe]:
        """The recipes, or without any a default recipe of all components."""
        everything = Recipe(components=tuple(c.name for c in self.components), weights={}, gates=(), normalise=False)
        return self.recipes or {DEFAULT_RECIPE: everything}

    def label_of(self, metadata: Mapping[str, Any]) -> str:
        """The label in a row's metadata."""
        return str(metadata.get(self.label_key, DEFAULT_RECIPE))

    @property
    def services(self) -> tuple[str, ...]:
        """The services of the components, in order."""
        return tuple(dict.fromkeys(component.service for component in self.components))

    @property
    def needs_images(self) -> bool:
        """Whether a component reads the prompt's images."""
        return any(component.needs_images for component in self.components)

    @property
    def reads_box(self) -> bool:
        """Whether a judge, or a component with a weight other than 0, requires a box."""
        return any(
            component.reads_box and (not component.trained or self.weight(recipe, component.name) != 0)
            for recipe in self.active_recipes.values()
            for component in self.components
            if component.name in recipe.components
        )

    @property
    def judge_weights(self) -> dict[str, float]:
        """Component -> weight in the judge's sum, for components that are not trained."""
        return {component.name: component.weight for component in self.components if not component.trained}

    def weight(self, recipe: Recipe, component: str) -> float:
        """The weight of a component in a recipe; 0 for a judge."""
        chosen = next(c for c in self.components if c.name == component)
        return recipe.weights.get(component, chosen.weight) if chosen.trained else 0.0

    def weights_in(self, recipe: Recipe) -> dict[str, float]:
        """Component -> weight, for the components of a recipe."""
        return {name: self.weight(recipe, name) for name in recipe.components}

    def service_stages(self) -> tuple[tuple[str, ...], ...]:
        """Services in the order of their gates; services of one stage run in parallel."""
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
        """The components in topological order of the gates of all recipes."""
        sorter: TopologicalSorter[str] = TopologicalSorter({component.name: () for component in self.components})
        for gate in (gate for recipe in self.active_recipes.values() for gate in recipe.gates):
            sorter.add(gate.component, gate.needs)
        return tuple(sorter.static_order())


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
