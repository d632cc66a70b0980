"""Functions that `IsolatedProcess` runs in its child process: import a target, or call it."""

from __future__ import annotations

from typing import Any

from mobula.cluster import user_code
from mobula.rewards.contract import portable
from mobula.rewards.isolation.foreign import awaited, settled


def load(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Imports the target's module. Unpickling has already imported the modules of the arguments' classes."""
    return settled(lambda: user_code.load(target) and None)


def call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Calls the target, awaits a coroutine, and converts the result to plain numbers."""
    return settled(lambda: _portable(awaited(user_code.load(target)(*args, **kwargs))))


def _portable(result: Any) -> Any:
    return [portable(each) for each in result] if isinstance(result, list) else portable(result)
