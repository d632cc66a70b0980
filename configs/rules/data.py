"""Rules of data, environments and rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError

from mobula.configs.overrides import without_name
from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.data import WITHOUT_FILES_OF_ROWS, DataKind
from mobula.configs.schema.rewards import RewardsConfig
from mobula.configs.schema.run import RunConfig


def _mixture_has_sources(config: RunConfig) -> str | None:
    data, sources = config.data, config.data.mixture.sources
    if data.kind is DataKind.MIXTURE and not sources:
        return "data.kind=mixture has no data.mixture.sources: name at least one, e.g. as docs/data.md does"
    unfit = [name for name, source in sources.items() if source.kind in (DataKind.MIXTURE, DataKind.ENVIRONMENT)]
    if unfit:
        return (
            f"data.mixture.sources.{unfit[0]}.kind={sources[unfit[0]].kind} is no reader: use jsonl, json, parquet, "
            "huggingface or webdataset"
        )
    return None


def _options_of_rows_have_a_reader(config: RunConfig) -> str | None:
    """`data.columns` is exempt, because experiments set it for their datasets."""
    data = config.data
    if data.kind not in WITHOUT_FILES_OF_ROWS:
        return None
    for name, value in (("label", data.label), ("media_path", data.media_path), ("splits", data.splits)):
        if value:
            is_mixture = data.kind is DataKind.MIXTURE
            instead = f"set data.mixture.sources.NAME.{name}" if is_mixture else "leave it empty"
            return f"data.{name}={value} is not read with data.kind={data.kind}: {instead}"
    return None


DATA_RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: c.data.min_pixels > c.data.max_pixels,
        "data.min_pixels={data.min_pixels} is more than data.max_pixels={data.max_pixels}: lower data.min_pixels or "
        "raise data.max_pixels",
    ),
    _mixture_has_sources,
    _options_of_rows_have_a_reader,
)


def _episodes_fit(config: RunConfig) -> str | None:
    environment = config.environment
    if not environment.is_on:
        return None
    longest = config.data.max_prompt_tokens + environment.max_tokens
    if longest > config.sampler.max_model_len:
        return (
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + environment.max_tokens={environment.max_tokens} "
            f"= {longest} is more than sampler.max_model_len={config.sampler.max_model_len}: set "
            f"sampler.max_model_len={longest} or lower one of the two"
        )
    if config.question_suffix and not config.plays_rows:
        return (
            f"data.prompt_suffix={config.data.prompt_suffix!r} is put behind questions, and environment.name="
            f"{environment.name} makes whole prompts: set data.prompt_suffix=''"
        )
    sampler = config.sampler
    if sampler.first_token_temperature > 0 or sampler.stop_strings:
        return (
            f"environment.name={environment.name} samples every turn at one temperature until its end: set "
            "sampler.first_token_temperature=0 sampler.stop_strings=[]"
        )
    return None


def _stages_are_a_curriculum(config: RunConfig) -> str | None:
    curriculum = config.environment.curriculum
    if curriculum.is_on == (len(curriculum.stages) > 1):
        return None
    if curriculum.is_on:
        return (
            f"environment.curriculum.kind={curriculum.kind} has {len(curriculum.stages)} stages to open: give 2 or "
            "more in environment.curriculum.stages, or set environment.curriculum.kind=none"
        )
    return (
        f"environment.curriculum.stages has {len(curriculum.stages)} stages and environment.curriculum.kind=none opens "
        "none: set environment.curriculum.kind=success, or leave the stages out"
    )


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: c.environment.is_on and c.offline.is_on,
        "environment.name={environment.name} is of RL, but offline.job={offline.job}: set offline.job=none, or "
        "environment=none",
    ),
    RuleRow(
        lambda c: c.data.kind is DataKind.ENVIRONMENT and not c.environment.is_on,
        "data.kind=environment needs an environment: set environment=OPTION, or another data.kind",
    ),
    _episodes_fit,
    _stages_are_a_curriculum,
    RuleRow(
        lambda c: c.plays_rows and c.environment.curriculum.is_on,
        "environment.curriculum.kind={environment.curriculum.kind} is of options of a reset, and the environment plays "
        "rows of data.kind={data.kind}: set data.curriculum, or environment.curriculum.kind=none",
    ),
    RuleRow(
        lambda c: (
            c.environment.is_on
            and c.environment.host == "remote"
            and not c.environment.url.startswith(("http://", "https://"))
        ),
        "environment.host=remote asks a server, and environment.url={environment.url!r} is none: set it to the URL "
        "that `mobula serve-environment` prints",
    ),
)


def reward_contradictions(rewards: RewardsConfig) -> tuple[str, ...]:
    """Contradictions within the section `rewards`, each with the next action."""
    return tuple(_flaws(rewards)) or tuple(_circles(rewards))


def _flaws(rewards: RewardsConfig) -> Iterator[str]:
    for component in rewards.components:
        if component.function.endswith(".py"):
            yield f"rewards.components[{component.name}].function {without_name(component.function)}"
        if component.requirements and component.python:
            yield f"rewards.components[{component.name}] has requirements and python: give one of them"
        if (component.requirements or component.python) and ":" not in component.function:
            yield (
                f"rewards.components[{component.name}].function={component.function} is built in and has the packages "
                "of Mobula: leave requirements and python out, or name your own FILE.py:function"
            )
    if not rewards.recipes and all(component.weight == 0 or not component.trained for component in rewards.components):
        yield (
            f"rewards.components has {len(rewards.components)} parts and none is trained with a weight, so every "
            "reward is 0: give at least one part with trained=true a weight other than 0, e.g. rewards=math_answer"
        )
    idle = [name for name, weight in rewards.judge_weights.items() if weight == 0]
    if idle:
        yield (
            f"rewards.components has {', '.join(idle)} with trained=false and weight=0, so the judge's sum lacks it: "
            "give it a weight, e.g. 1, or set trained=true to measure it without a judge"
        )
    repeated = [name for name, count in Counter(c.name for c in rewards.components).items() if count > 1]
    if repeated:
        yield (
            f"rewards.components names {', '.join(repeated)} more than once: metrics and reports tell parts apart by "
            "name, so give each rewards.components.INDEX.name its own"
        )
    accuracy, names = rewards.accuracy_component, [component.name for component in rewards.components]
    if accuracy not in names:
        yield (
            f"rewards.accuracy_component={accuracy} is no part of the reward: "
            f"set it to one of {', '.join(names) or 'rewards.components, which is empty'}"
        )
    elif not any(accuracy in recipe.components for recipe in rewards.active_recipes.values()):
        yield (
            f"no recipe of rewards.recipes has {accuracy}, whose mean is the accuracy: add it to one, with weight 0 if "
            "it is not to count, or change rewards.accuracy_component"
        )
    if not repeated:
        for label in rewards.recipes:
            yield from _recipe_flaws(rewards, label)


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
