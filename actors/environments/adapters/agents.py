"""Environments that are programs: the chat endpoint that they call, and the environment of their episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from mobula.actors.environments.base import (
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Observation,
    Reset,
    Step,
    answer_of,
    events_of,
    message_of,
    split_of,
)
from mobula.actors.environments.programs.processes import AgentPrograms, CommandPrograms, Outcome, VerifiersProcess
from mobula.cluster.serving import Address, Headers, RefusalError, RequestGate, make_server, refuse, reply

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 64 << 20
MAX_CONNECTIONS = 64  # of the programs of one environment
READ_S = 60.0
CLOSE_S = 5.0
PATH = "/v1/chat/completions"
UNFIT = ("tools", "functions")  # unsupported fields of a request


@dataclass(frozen=True, eq=False)
class Call:
    messages: Observation
    model: str
    _answer: Future[dict[str, Any]] = field(default_factory=Future)

    def answer(self, text: str, *, is_cut: bool) -> None:
        self._answer.set_result(answer_of(self.model, text, is_cut=is_cut))

    def abandon(self) -> None:
        self._answer.cancel()

    async def wait(self) -> dict[str, Any] | None:
        """Returns the answer; None if the call was abandoned."""
        [done], _ = await asyncio.wait([asyncio.wrap_future(self._answer)])
        return None if done.cancelled() else done.result()


class Talk:
    """The calls to one URL, in order of arrival."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.url = f"http://{LOOPBACK}:{port}/{name}/v1"
        self.events: SimpleQueue[Any] = SimpleQueue()  # calls, and events of the owner
        self._calls: list[Call] = []
        self._is_open = True

    def put(self, call: Call) -> None:
        self._calls.append(call)
        if not self._is_open:
            call.abandon()
        self.events.put(call)

    def close(self) -> None:
        """Abandons waiting and future calls."""
        self._is_open = False
        for call in self._calls:
            call.abandon()


class AgentEndpoint:
    """Implements `Access` by the secret in the URL. Serves on a free port in one thread until it is closed."""

    is_open = False
    hosts: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._talk: Talk | None = None
        gate = RequestGate(self._serve, self, MAX_REQUEST_BYTES, READ_S)
        listener = Address(LOOPBACK, 0, None).listen()
        self._server = make_server(gate, listener, grace_s=0, max_connections=MAX_CONNECTIONS)
        self._server.config.lifespan = "off"
        self._thread = Thread(target=self._server.serve_until_stopped, daemon=True, name="agent endpoint")
        self._thread.start()

    def open(self) -> Talk:
        """Opens a new URL; calls to earlier URLs are refused."""
        self._talk = Talk(uuid4().hex, self._server.server_port)
        return self._talk

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(CLOSE_S)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises: RefusalError: the path is not that of the open episode."""
        if self._talk is None or (scope["method"], scope["path"]) != ("POST", f"/{self._talk.name}{PATH}"):
            raise RefusalError(404, "this episode is over, or the path is not /v1/chat/completions")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        talk = self._talk
        assert talk is not None, "checked before"
        try:
            content = json.loads((await receive())["body"])
            unfit = [name for name in UNFIT if content.get(name)]
            if unfit or content.get("n", 1) != 1:
                raise ValueError(f"{', '.join(unfit) or 'n above 1'} cannot be had: describe tools in the messages")
            messages = tuple(message_of(str(m["role"]), m.get("content")) for m in content["messages"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return await refuse(send, RefusalError(400, f"{type(error).__name__}: {error}"))
        call = Call(messages, str(content.get("model", "")))
        talk.put(call)
        answer = await call.wait()
        if answer is None:
            return await refuse(send, RefusalError(410, "the episode is over"))
        if content.get("stream"):
            return await reply(send, 200, b"".join(events_of(answer)), {}, "text/event-stream")
        return await reply(send, 200, json.dumps(answer).encode(), {})


class AgentEnvironment:
    """An episode is one run of a task by `programs`.

    The last `num_test` tasks are the test split, the `num_validation` tasks before them the validation split. The first
    call of the program is the first observation; the messages that a later call adds after the answer are the next
    observation. The program's rewards are given for the last turn. A program that stops at a limit truncates the
    episode and keeps its rewards.
    """

    def __init__(
        self, programs: AgentPrograms, *, max_turns: int, num_validation: int, num_test: int, is_deterministic: bool
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
        programs = CommandPrograms(command, tasks)
        super().__init__(
            programs,
            max_turns=max_turns,
            num_validation=num_validation,
            num_test=num_test,
            is_deterministic=is_deterministic,
        )


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
        super().__init__(
            programs,
            max_turns=max_turns,
            num_validation=num_validation,
            num_test=num_test,
            is_deterministic=is_deterministic,
        )
