"""Reward functions of the user and of environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.cluster.user_code import load
from mobula.rewards.contract import Outcome, RewardRequest, Score, TimedOutError
from mobula.rewards.functions.parsing.extraction import check_number
from mobula.rewards.isolation.foreign import PARAMETERS, described
from mobula.rewards.isolation.process import Isolated, call_each
from mobula.rewards.tools import Tools

CALL = (
    "a reward function is called as function(request, **options) and reads request.prompt_text, request.response.text, "
    "request.references and request.metadata"
)

BATCH = "requests"  # the name of the first parameter of a function that scores a batch
EXAMPLE = RewardRequest(Response("", 0, is_truncated=False), (), {}, "")
OF_OTHER_TRAINERS = ("completions", "prompts", "responses", "data_source", "solution_str", "solution_strs")


class Plugin:
    """Calls `function(request, **options)`, which may be an `async def` and returns a finite number, a mapping with
    `score`, or a `Score`. A function whose first parameter is `requests` is given the responses of a batch, and returns
    a list.

    If the function hangs, raises, exits or crashes, the response has no score, and a hung or dead process is replaced.
    Module state of the function lives in each process separately and is lost with the process.
    """

    def __init__(self, tools: Tools, target: str, options: Mapping[str, Any], *, takes_batch: bool = False) -> None:
        self._takes_batch = takes_batch
        self._isolated = tools.isolated
        self._target = target
        self._options = dict(options)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome | Any]:
        """Calls the function concurrently, one call per process; once if it scores a batch."""
        if self._takes_batch:
            scores = self._isolated.call_batch(self._target, requests, **self._options)
            if not isinstance(scores, list | tuple):
                raise RewardError(f"{self._target} takes requests and returned {type(scores).__name__}: return a list")
            return list(scores)
        calls = [(request,) for request in requests]
        return call_each(self._isolated, self._target, calls, lambda result: result, **self._options)


def parameters(target: str) -> list[tuple[str, str, bool]]:
    """Describes the parameters of a function. Runs isolated, because it imports the target."""
    return described(load(target))


def users_signature(target: str, isolated: Isolated) -> inspect.Signature:
    """Returns the signature of a user's function, imported in the isolated processes because it may hang or crash."""
    try:
        isolated.load(target, EXAMPLE)
        given = isolated.call(PARAMETERS, target)
    except TimedOutError as error:
        raise ValueError(
            f"reward function {target!r} is not there in time ({error}): raise timeouts.start_s"
        ) from error
    except RewardError as error:
        is_file = target.rpartition(":")[0].endswith(".py")
        action = "fix the file" if is_file else "put it on the PYTHONPATH, or name a function"
        raise ValueError(f"reward function {target!r} cannot be imported ({error}): {action}") from error
    takes = f"reward function {target!r} takes ({', '.join(name for name, _, _ in given)})"
    if not given or given[0][1] in ("KEYWORD_ONLY", "VAR_KEYWORD"):
        raise ValueError(f"{takes} and no request: {CALL}")
    if any(kind == "POSITIONAL_ONLY" and not has_default for _, kind, has_default in given[1:]):
        raise ValueError(f"{takes}, of which options are given by keyword: {CALL}")
    if given[0][0] in OF_OTHER_TRAINERS:
        raise ValueError(f"{takes}, as functions of other trainers do: {CALL}")
    none = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if has_default else none)
            for name, kind, has_default in given
        ]
    )


class EnvironmentReward:
    """sum over turns k of discount^k r_k."""

    def __init__(self, tools: Tools, *, discount: float) -> None:
        check_number("discount", discount, low=0, high=1)
        self._discount = discount

    def __call__(self, request: RewardRequest) -> Score:
        response = request.response
        if not response.turns:
            raise RewardError("the response is no episode: set environment=OPTION, or leave this component out")
        parts: dict[str, float] = {}
        for number, turn in enumerate(response.turns):
            for name, value in turn.rewards.items():
                parts[name] = parts.get(name, 0.0) + self._discount**number * value
        return Score(sum(parts.values()), f"{len(response.turns)} turns", parts)
