"""Registry of environments, and construction of an environment from name and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mobula.actors.environments.base import Environment
from mobula.cluster.user_code import check_call, did_you_mean, is_user_code, load

ENVIRONMENTS: Mapping[str, str] = {  # name -> class, imported on use
    "gymnasium": "mobula.actors.environments.adapters.libraries:GymnasiumEnvironment",
    "openenv": "mobula.actors.environments.adapters.libraries:OpenEnv",
    "program": "mobula.actors.environments.adapters.agents:Program",
    "reasoning_gym": "mobula.actors.environments.adapters.libraries:ReasoningGym",
    "textarena": "mobula.actors.environments.adapters.libraries:TextArena",
    "tools": "mobula.actors.environments.adapters.tools:RowTools",
    "trl": "mobula.actors.environments.adapters.libraries:TRLClass",
    "verifiers": "mobula.actors.environments.adapters.agents:Verifiers",
    "vagen": "mobula.actors.environments.adapters.libraries:VAGENClass",
}
EXTRAS: Mapping[str, str] = {  # name -> extra with the dependencies
    "gymnasium": "environments",
    "reasoning_gym": "reasoning_gym",
    "textarena": "textarena",
    "tools": "mcp",
}


def build_environment(name: str, options: Mapping[str, Any]) -> Environment:
    made_by = _class_of(name)
    try:
        check_call(made_by, (), options)
    except ValueError as error:
        raise ValueError(f"environment.options of {name}: {error}") from error
    try:
        return made_by(**options)
    except ModuleNotFoundError as error:  # a library that the constructor imports
        hint = f"pip install 'mobula[{EXTRAS[name]}]'" if name in EXTRAS else "put it on the PYTHONPATH"
        raise ValueError(f"environment.name={name} needs {error.name!r}, which is not installed: {hint}") from error


def _class_of(name: str) -> Callable[..., Environment]:
    if is_user_code(name):
        try:
            return load(name)
        except ValueError as error:
            raise ValueError(f"environment.name={name}: {error}") from error
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"environment.name={name!r} is unknown{did_you_mean(name, ENVIRONMENTS)}: use {', '.join(ENVIRONMENTS)}, "
            "or your own as module:Class or path/to/file.py:Class"
        )
    return load(ENVIRONMENTS[name])
