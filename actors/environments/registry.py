"""The environments by name, and how a name and its options become an environment."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from mobula.actors.environments.base import Environment

ENVIRONMENTS: Mapping[str, str] = {  # name -> its class, imported when it is asked for
    "calculator": "mobula.actors.environments.tasks.calculator:Calculator",
    "gymnasium": "mobula.actors.environments.adapters.gymnasium_adapter:GymnasiumEnvironment",
    "miniwob": "mobula.actors.environments.tasks.miniwob.task:MiniWoB",
    "openenv": "mobula.actors.environments.adapters.openenv:OpenEnv",
    "pixel_maze": "mobula.actors.environments.tasks.pixel_maze:PixelMaze",
    "program": "mobula.actors.environments.adapters.program:Program",
    "reasoning_gym": "mobula.actors.environments.adapters.reasoning_gym_adapter:ReasoningGym",
    "textarena": "mobula.actors.environments.adapters.textarena_adapter:TextArena",
    "trl": "mobula.actors.environments.adapters.trl_class:TRLClass",
    "verifiers": "mobula.actors.environments.adapters.verifiers_environment:Verifiers",
    "vagen": "mobula.actors.environments.adapters.vagen_class:VAGENClass",
}
EXTRAS: Mapping[str, str] = {  # name -> the extra that installs what it needs
    "gymnasium": "environments",
    "miniwob": "miniwob",
    "pixel_maze": "environments",
    "reasoning_gym": "reasoning_gym",
    "textarena": "textarena",
}


def build_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment of `name`, a built-in one or `module:Class`, made with `options`.

    Raises:
        ValueError: there is none of this name, a library is missing, or an option is unknown or unfit.
    """
    target = ENVIRONMENTS.get(name, name)
    if ":" not in target:
        raise ValueError(
            f"environment.name={name!r} is unknown: use {', '.join(ENVIRONMENTS)}, or module:Class of your own"
        )
    module, _, attribute = target.partition(":")
    try:
        made_by = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise _not_installed(name, error) from error
    except AttributeError as error:
        raise ValueError(f"environment.name={name}: {module} has no {attribute}: name a class of it") from error
    try:
        inspect.signature(made_by).bind(**options)
    except TypeError as error:
        raise ValueError(f"environment.options of {name}: {error}; it takes {inspect.signature(made_by)}") from error
    try:
        return made_by(**options)
    except ModuleNotFoundError as error:  # what is looked up when it is made
        raise _not_installed(name, error) from error


def _not_installed(name: str, error: ModuleNotFoundError) -> ValueError:
    hint = f"pip install 'mobula[{EXTRAS[name]}]'" if name in EXTRAS else "put it on the PYTHONPATH"
    return ValueError(f"environment.name={name} needs {error.name!r}, which is not installed: {hint}")
