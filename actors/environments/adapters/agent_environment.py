"""AgentEnvironment: an agent program calls the model, and each of its calls is a turn of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mobula.actors.environments.adapters.agent_endpoint import AgentEndpoint, Call, Talk
from mobula.actors.environments.base import (
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Observation,
    Reset,
    Step,
    split_of,
)
from mobula.actors.environments.programs.base import AgentPrograms, Outcome


class AgentEnvironment:
    """An episode is one play of a task by a program of `programs`.

    The last `num_test` tasks are for the test split, the `num_validation` before them for validation. The first call of
    the program is the first observation; what a later call adds behind the answer is the next one. The rewards of the
    program are those of the last turn. A program that ends for its own limits is truncated and keeps its rewards.

    Raises:
        ValueError: there are too few tasks.
        EpisodeError: `program_failed`: the program gave no reward; `conversation_branched`: a call does not continue
            the one before.
    """

    def __init__(
        self,
        programs: AgentPrograms,
        *,
        max_turns: int,
        num_validation: int,
        num_test: int,
        is_deterministic: bool,
    ) -> None:
        self.spec = EnvironmentSpec(max_turns=max_turns, is_deterministic=is_deterministic)
        self._programs = programs
        num_train = programs.num_tasks - num_validation - num_test
        if num_train < 1:
            raise ValueError(
                f"there are {programs.num_tasks} tasks, of which environment.options.num_validation={num_validation} "
                f"and num_test={num_test} leave none to train on: lower them"
            )
        self._splits = (
            range(num_train),
            range(num_train, num_train + num_validation),
            range(num_train + num_validation, programs.num_tasks),
        )
        self._endpoint = AgentEndpoint()
        self._talk: Talk | None = None
        self._episode = ""
        self._seen: Observation = ()
        self._call: Call | None = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._abandon()
        number, place = split_of(seed)
        tasks = self._splits[min(number, len(self._splits) - 1)]
        if not tasks:
            raise EpisodeError("no_task", f"seed {seed} is of a split for which no task was set aside")
        self._talk = self._endpoint.open()
        self._episode, outcome = self._programs.play(tasks[place % len(tasks)], self._talk.url)
        outcome.add_done_callback(self._talk.events.put)
        found = self._next()
        if not isinstance(found, Call):
            raise EpisodeError("program_failed", _error(found) or "the program ended before its first call")
        return Reset(self._seen, {})

    def step(self, action: Action) -> Step:
        assert self._call is not None, "step() follows a call"
        seen = (*self._seen, Message("assistant", action.text))
        self._call.answer(action.text, is_cut=action.is_truncated)
        found = self._next()
        if not isinstance(found, Call):
            if error := _error(found):
                raise EpisodeError("program_failed", error)
            is_truncated = bool(found["is_truncated"])
            return Step((), found["rewards"], not is_truncated, is_truncated, {})
        if self._seen[: len(seen)] != seen or len(self._seen) == len(seen):
            raise EpisodeError(
                "conversation_branched",
                "a call of the program does not continue the one before, so it is no turn of the same trajectory: use "
                "an agent that appends to one conversation, and give other agents a client of their own",
            )
        return Step(self._seen[len(seen) :], 0.0, False, False, {})

    def close(self) -> None:
        """`programs` stay for the other episodes of this process."""
        self._abandon()
        self._endpoint.close()

    def _next(self) -> Call | Outcome:
        """The next call, or what came of the program. The host's deadline ends the wait: it closes the environment.

        Raises:
            EpisodeError: the environment is closed.
        """
        assert self._talk is not None
        found: Call | Future[Outcome] | None = self._talk.events.get()
        if found is None:
            raise EpisodeError("abandoned", "the environment was closed while its program ran")
        if isinstance(found, Call):
            self._call, self._seen = found, found.messages
            return found
        self._call = None
        return found.result()

    def _abandon(self) -> None:
        """An episode that goes on is ended, and its program gets no further answer."""
        if self._talk is not None:
            self._programs.cancel(self._episode)
            self._talk.close()
            self._talk.events.put(None)
        self._talk = self._call = None


def _error(outcome: Outcome) -> str:
    return str(outcome.get("error", ""))
