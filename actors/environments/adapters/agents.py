"""Environments that are programs: each episode is a run that calls the chat endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from mobula.actors.environments.programs.processes import AgentPrograms, CommandPrograms, Outcome, VerifiersProcess


class AgentEnvironment:
    """An episode is one run of a task by `programs`.

    The last `num_test` tasks are the test split, the `num_validation` tasks before them the validation split. The first
    call of the program is the first observation; the messages that a later call adds after the answer are the next
    observation. The program's rewards are given for the last turn. A program that stops at a limit truncates the
    episode and keeps its rewards.
    """

    def __init__(
        self, programs: AgentPrograms, max_turns: int, num_validation: int, num_test: int, is_deterministic: bool
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
        split, index = split_of(seed)
        tasks = self._splits[min(split, len(self._splits) - 1)]
        if not tasks:
            raise EpisodeError("no_task", f"seed {seed} is of a split for which no task was set aside")
        self._talk = self._endpoint.open()
        self._episode, outcome = self._programs.play(tasks[index % len(tasks)], self._talk.url)
        outcome.add_done_callback(self._talk.events.put)
        event = self._next()
        if not isinstance(event, Call):
            raise EpisodeError("program_failed", _error(event) or "the program ended before its first call")
        return Reset(self._seen, {})

    def step(self, action: Action) -> Step:
        assert self._call is not None, "step() follows a call"
        seen = (*self._seen, Message("assistant", action.text))
        self._call.answer(action.text, is_cut=action.is_truncated)
        event = self._next()
        if not isinstance(event, Call):
            if error := _error(event):
                raise EpisodeError("program_failed", error)
            is_truncated = bool(event["is_truncated"])
            return Step((), event["rewards"], not is_truncated, is_truncated, {})
        if self._seen[: len(seen)] != seen or len(self._seen) == len(seen):
            raise EpisodeError(
                "conversation_branched",
                "a call of the program does not continue the one before, so it is no turn of the same trajectory: use "
                "an agent that appends to one conversation, and give other agents a client of their own",
            )
        return Step(self._seen[len(seen) :], 0.0, False, False, {})

    def close(self) -> None:
        """Ends the episode and the endpoint; `programs` is shared by the environments of this process."""
        self._abandon()
        self._endpoint.close()

    def _next(self) -> Call | Outcome:
        """Waits for the program's next call or outcome. No timeout: the host closes the environment at its timeout."""
        assert self._talk is not None
        event: Call | Future[Outcome] | None = self._talk.events.get()
        if event is None:
            raise EpisodeError("abandoned", "the environment was closed while its program ran")
        if isinstance(event, Call):
            self._call, self._seen = event, event.messages
            return event
        self._call = None
        return event.result()

    def _abandon(self) -> None:
        if self._talk is not None:
            self._programs.cancel(self._episode)
            self._talk.close()
            self._talk.events.put(None)
        self._talk = self._call = None


def _error(outcome: Outcome) -> str:
    return str(outcome.get("error", ""))


class Program(AgentEnvironment):
    """An episode is one run of `command` with one line of the JSONL file `tasks` (see `CommandPrograms`)."""

    def __init__(
        self,
        *,
        command: Sequence[str],
        tasks: str,
        max_turns: int,
        num_validation: int,
        num_test: int,
        is_deterministic: bool = False,
    ) -> None:
        super().__init__(CommandPrograms(command, tasks), max_turns, num_validation, num_test, is_deterministic)


class Verifiers(AgentEnvironment):
    """`env` is a configuration of verifiers; the Python at `python` loads it once for each process.

    An episode is a rollout of one of the first `max_tasks` tasks of the taskset, with the rewards of the rubric.
    The process of verifiers serves all episodes of this process, and ends with it.

    Source: verifiers 0.4.0, `verifiers/v1/env.py` and `clients/eval.py`.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        python: str,
        max_turns: int,
        max_tasks: int,
        num_validation: int,
        num_test: int,
        import_path: Sequence[str] = (),
        is_deterministic: bool = False,
    ) -> None:
        programs = VerifiersProcess.shared(python, env, import_path=import_path, max_tasks=max_tasks)
        super().__init__(programs, max_turns, num_validation, num_test, is_deterministic)
