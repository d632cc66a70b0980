"""A user's reward function, `module:function` or `path/to/file.py:function`: it runs in an isolated process only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.cluster.user_code import load
from mobula.rewards.contract import Outcome, RewardRequest, TimedOutError
from mobula.rewards.isolation.calls import call_each
from mobula.rewards.isolation.process import Isolated
from mobula.rewards.tools import Tools

_PARAMETERS = "mobula.rewards.functions.plugin:parameters"
CALL = (
    "a reward function is called as function(request, **options) and reads request.prompt_text, request.response.text, "
    "request.references and request.metadata"
)
EXAMPLE = RewardRequest(Response("", 0, is_truncated=False), (), {}, "")
OF_OTHER_TRAINERS = ("completions", "prompts", "responses", "data_source", "solution_str", "solution_strs")


class Plugin:
    """Called as `function(request, **options)`, which may be an `async def`; it returns a finite number, a mapping with
    `score`, or a `Score`.

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
    function = load(target)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    if inspect.isclass(function):
        raise TypeError("it is a class, not a function: name a function, or an instance that can be called")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it yields values: return one number")
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, p.default is not p.empty) for p in found]


def users_signature(target: str, isolated: Isolated) -> inspect.Signature:
    """The signature of a user's function, which is imported in the isolated processes alone: it may hang, and crash.

    Raises:
        ValueError: there is no such function, its module or file does not run, or it does not take a request.
    """
    try:
        isolated.load(target, EXAMPLE)
        found = isolated.call(_PARAMETERS, target)
    except TimedOutError as error:
        raise ValueError(
            f"reward function {target!r} is not there in time ({error}): raise timeouts.start_s"
        ) from error
    except RewardError as error:
        is_file = target.rpartition(":")[0].endswith(".py")
        action = "fix the file" if is_file else "put it on the PYTHONPATH, or name a function"
        raise ValueError(f"reward function {target!r} cannot be imported ({error}): {action}") from error
    _check_request(target, found)
    none = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if has_default else none)
            for name, kind, has_default in found
        ]
    )


def _check_request(target: str, parameters: Sequence[tuple[str, str, bool]]) -> None:
    """Whether the first parameter takes the request."""
    takes = f"reward function {target!r} takes ({', '.join(name for name, _, _ in parameters)})"
    if not parameters or parameters[0][1] in ("KEYWORD_ONLY", "VAR_KEYWORD"):
        raise ValueError(f"{takes} and no request: {CALL}")
    if any(kind == "POSITIONAL_ONLY" and not has_default for _, kind, has_default in parameters[1:]):
        raise ValueError(f"{takes}, of which options are given by keyword: {CALL}")
    if parameters[0][0] in OF_OTHER_TRAINERS:
        raise ValueError(f"{takes}, as functions of other trainers do: {CALL}")
