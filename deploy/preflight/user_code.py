"""Checks user code before a role starts: imports it and compares its parameters with the configured options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mobula.actors.datasets.formats.records import format_of
from mobula.actors.datasets.readers import READERS, reader_of
from mobula.actors.processors.worker import processor_maker
from mobula.actors.samplers import sampler_maker
from mobula.cluster.metrics.sinks.trackers import tracker
from mobula.cluster.user_code import chosen, is_user_code
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import DataConfig
from mobula.deploy.preflight.findings import refusing
from mobula.learner.credit import Credit
from mobula.learner.objective import PolicyObjective
from mobula.learner.optim import optimizer_maker
from mobula.rewards.functions import check_users_function
from mobula.rewards.isolation.environments import python_of
from mobula.rewards.tools import Tools


def check_user_code(config: RunConfig) -> None:
    """Finds code that is missing, raises, takes other arguments, or whose options are unknown, missing or not read.

    An environment is checked by its first reset, which runs where the episodes do.
    """
    with refusing():
        _check_reward_functions(config)
        if not config.offline.is_on:
            PolicyObjective(config.algorithm)
            Credit(config)
        optimizer_maker(config.learner)
        sampler_maker(config.sampler.kind, config.sampler.kind_options)
        processor_maker(config)
        data_writer(config.data)
        for source in (config.data, *config.data.mixture.sources.values()):
            if is_user_code(source.kind) or source.kind in READERS:
                reader_of(source, config.data.kind_options)
            format_of(source, config.data.row_format_options)
        for name in config.metrics.trackers:
            if is_user_code(name):
                tracker(name)


def data_writer(config: DataConfig) -> Callable[[Path], object]:
    """The function that `data.writer` names, with `data.writer_options`."""
    return chosen({"none": lambda folder: None}, config.writer, "data.writer", ("folder",), config.writer_options)


def _check_reward_functions(config: RunConfig) -> None:
    users = [component for component in config.rewards.components if is_user_code(component.function)]
    if config.offline.is_on or not users:
        return
    start_s = config.timeouts.start_s
    tools = Tools.timed(1, start_s, start_s, "cpu", "float32")
    try:
        for component in users:
            own = tools.of_python(python_of(component, config.rewards, start_s))
            check_users_function(component.function, component.options, own.isolated)
    except ValueError as error:
        raise ValueError(f"rewards.components[{component.name}]: {error}") from error
    finally:
        tools.close()
