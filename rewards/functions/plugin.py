"""A user's reward function, `module:function` or `path/to/file.py:function`: it runs in an isolated process only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import RewardError
from rewards.contract import Outcome, RewardRequest
from rewards.isolation.calls import call_each
from rewards.isolation.child import resolve
from rewards.isolation.process import Isolated
from rewards.tools import Tools

_PARAMETERS = "rewards.functions.plugin:parameters"


class Plugin:
    """Called as `function(request, **options)`; it returns a finite number or a `Score`.

    It may hang, raise, exit or crash: that costs the response its score and the process its life. What it keeps in its
    module is kept per process, and lost with it.
    """

    def __init__(self, tools: Tools, target: str, options: Mapping[str, Any]) -> None:
        self._isolated = tools.isolated
        self._target = target
        self._options = dict(options)

    def __call__(self, request: RewardRequest) -> Any:
        return self._isolated.call(self._target, request, **self._options)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome | Any]:
        """Side by side, as many as there are processes."""
        calls = [(request,) for request in requests]
        return call_each(self._isolated, self._target, calls, lambda result: result, **self._options)


def parameters(target: str) -> list[tuple[str, str, bool]]:
    """Name, kind (as `inspect.Parameter.kind` is called) and whether there is a default, of each parameter.

    It imports the target: called in an isolated process.
    """
    function = resolve(target)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, p.default is not p.empty) for p in found]


def signature_of_file(target: str, isolated: Isolated) -> inspect.Signature:
    """The signature of a function in a file, which runs in the isolated process: it may hang, and crash.

    Raises:
        ValueError: the file has no such function, or does not run.
    """
    try:
        found = isolated.call(_PARAMETERS, target)
    except RewardError as error:
        raise ValueError(f"reward function {target!r} cannot be had from its file ({error})") from error
    none = inspect.Parameter.empty
    return inspect.Signature(
        inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if has_default else none)
        for name, kind, has_default in found
    )
