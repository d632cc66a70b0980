"""An environment of verifiers: its agent program calls the model, and each of its calls is a turn of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from actors.environments.adapters.agent_endpoint import AgentEndpoint, Call, Talk
from actors.environments.base import (
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Observation,
    Reset,
    Step,
    split_of,
)
from actors.environments.programs.verifiers_process import Outcome, VerifiersProcess


class Verifiers:
    """`env` is verifiers' own configuration of an environment, which its Python at `python` loads once a process.

    An episode is a rollout of one of the first `max_tasks` tasks of the taskset. The last `num_test` of them are for
    the test split, the `num_validation` before them for validation. The first call of the agent program is the first
    observation; what a later call adds behind the answer is the next one. The rewards of the rubric are those of the
    last turn. A rollout that verifiers ends for its own limits is truncated and keeps its rewards.

    Raises:
        ValueError: verifiers or the environment cannot be loaded, or there are too few tasks.
        EpisodeError: `program_failed`: the rollout has no reward; `conversation_branched`: a call does not continue the
            one before.

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
        self.spec = EnvironmentSpec(max_turns=max_turns, is_deterministic=is_deterministic)
        self._process = VerifiersProcess.shared(python, env, import_path=import_path, max_tasks=max_tasks)
        num_train = self._process.num_tasks - num_validation - num_test
        if num_train < 1:
            raise ValueError(
                f"the taskset has {self._process.num_tasks} tasks, of which environment.options.num_validation="
                f"{num_validation} and num_test={num_test} leave none to train on: lower them"
            )
        self._splits = (
            range(num_train),
            range(num_train, num_train + num_validation),
            range(num_train + num_validation, self._process.num_tasks),
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
            raise EpisodeError("no_task", f"seed {seed} is of a split for which no task of the taskset was set aside")
        self._talk = self._endpoint.open()
        self._episode, outcome = self._process.play(tasks[place % len(tasks)], self._talk.url, {})
        outcome.add_done_callback(self._talk.events.put)
        found = self._next()
        if not isinstance(found, Call):
            raise EpisodeError("program_failed", _error(found) or "the rollout ended before its first call")
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
            return Step((), found["rewards"], not is_truncated, is_truncated, {"num_turns": found["num_turns"]})
        if self._seen[: len(seen)] != seen or len(self._seen) == len(seen):
            raise EpisodeError(
                "conversation_branched",
                "a call of the program does not continue the one before, so it is no turn of the same trajectory: use "
                "an agent that appends to one conversation, and give other agents a client of their own",
            )
        return Step(self._seen[len(seen) :], 0.0, False, False, {})

    def close(self) -> None:
        """Verifiers stays for the other episodes of this process, and ends with it."""
        self._abandon()
        self._endpoint.close()

    def _next(self) -> Call | Outcome:
        """The next call, or what came of the rollout. The host's deadline ends the wait: it closes the environment.

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
            self._process.cancel(self._episode)
            self._talk.close()
            self._talk.events.put(None)
        self._talk = self._call = None


def _error(outcome: Outcome) -> str:
    return str(outcome.get("error", ""))
