"""`mobula serve-policy`: a policy without a cluster, its conversations, and the server in front of them."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from mobula.actors.datasets.media import EncodedFile
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import (
    Action,
    EpisodeError,
    Message,
    Step,
    answer_of,
    events_of,
    message_of,
    observation_hash,
    row_text,
)
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.episodes import Episode, ObservationBudget
from mobula.actors.samplers import build_sampler
from mobula.cluster.errors import MobulaError, PreflightError, PromptError, SkippedSample
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, Reward, ScoredGroup, Trajectory, TrajectoryGroup
from mobula.cluster.records.trajectory import Response as SampledResponse
from mobula.cluster.replay.trajectory_log import IMAGES_FOLDER, TrajectoryLog
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.serving import Address, RequestGate, run_server
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.deploy.host.run_folder import file_access
from mobula.deploy.wiring.preparation import prepare_base, require_model
from mobula.deploy.wiring.roles import engine_settings, sampling_settings

MEDIA_IN_MEMORY = 64


@dataclass(frozen=True)
class PolicyAnswer:
    """`is_continued`: the prompt is the exact tokens of an earlier call, and what followed."""

    prompt: Prompt
    sampled: SampledSequence
    text: str
    is_continued: bool = False

    @property
    def token_ids(self) -> list[int]:
        assert isinstance(self.sampled.actions, TokenActions)
        return self.sampled.actions.token_ids.tolist()


class LocalPolicy:
    """Renders whole conversations with the chat template and samples with the engine of `sampler.kind`."""

    def __init__(self, config: RunConfig, *, keep_files: bool = False) -> None:
        if config.sampler.denoises:
            raise PreflightError(
                f"sampler={config.sampler.kind} answers with images, not with text: use sampler=huggingface or vllm"
            )
        require_model(config)
        prepared = prepare_base(config, lambda processed: processed, keep_files=keep_files)
        assert isinstance(prepared.processor, ChatProcessor), "flow models are refused above"
        self.config, self.chat = config, prepared.processor
        self._sampler = build_sampler(config.sampler.kind, engine_settings(prepared, 0))
        self._media = MediaReader(timeout_s=config.timeouts.object_s, max_items=MEDIA_IN_MEMORY)
        self._num_asked = 0

    async def start(self) -> None:
        await self._sampler.start()

    async def close(self) -> None:
        await self._sampler.close()

    def prompt(self, messages: Sequence[Message], name: str) -> Prompt:
        """The conversation as a prompt; its last message is put as the user's."""
        *history, question = messages
        images = [image for message in messages for image in message.images]
        row = Row(
            sample_id=name,
            question=row_text(question),
            answer="",
            solution="",
            images=tuple(EncodedFile(content, f"{name}, image {n}") for n, content in enumerate(images, 1)),
            history=tuple(Turn(message.role, row_text(message)) for message in history),
        )
        return self.chat.prepare(row, name)

    async def sample(self, prompt: Prompt, settings: SamplingSettings) -> PolicyAnswer:
        self._num_asked += 1
        media = self._media.read(prompt.media)
        with self._sampler.coming():
            [sampled] = await self._sampler.sample(
                prompt, media, settings, Attempt(f"{prompt.prompt_id}/{self._num_asked}"), lambda chunks, siblings: None
            )
        assert isinstance(sampled.actions, TokenActions)
        return PolicyAnswer(prompt, sampled, self.chat.decode(sampled.actions.token_ids))

    async def answer(self, messages: Sequence[Message], settings: SamplingSettings) -> PolicyAnswer:
        return await self.sample(self.prompt(messages, f"conversation-{self._num_asked}"), settings)


ASSISTANT = "assistant"
TIMEOUT_S = 60.0  # of the log's fetch, which finds everything in this process


class UnknownSessionError(MobulaError):
    """No session of this name is open."""


@dataclass
class _Branch:
    """A conversation up to an answer. `is_leaf` until a later call continues it."""

    start: Prompt
    episode: Episode
    is_leaf: bool = True


@dataclass
class _Session:
    task: str
    branches: dict[str, _Branch] = field(default_factory=dict)  # by the hash of the messages, answer included


class Conversations:
    """Answers calls, and makes trajectories of sessions that end with a reward.

    A call whose messages are those of an earlier call of its session, its answer as it was given, and new messages is
    sampled behind the tokens of that call: nothing is tokenised again, and it becomes a later turn of one trajectory.
    Any other call begins a trajectory of its own. Sessions of one task that begin with the same tokens are siblings of
    one group, which is written to `trajectories/` below `folder` when there are `num_siblings`, and at the end. Its
    image files are written to `images/`, under their keys.
    """

    def __init__(self, policy: LocalPolicy, folder: Path | None, *, num_siblings: int) -> None:
        config = policy.config
        self._policy = policy
        self._budget = ObservationBudget(
            config.environment, policy.chat, model=config.policy.model, max_images=config.sampler.max_images_per_prompt
        )
        self._sessions: dict[str, _Session] = {}
        self._log = TrajectoryLog(folder / "trajectories", timeout_s=TIMEOUT_S) if folder is not None else None
        self._images = folder / IMAGES_FOLDER if folder is not None else None
        self._step = max(self._log.steps(), default=0) if self._log is not None else 0
        self._num_siblings = num_siblings
        self._waiting: dict[str, list[tuple[Prompt, Trajectory, Reward]]] = defaultdict(list)  # by group

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, session: str, task: str) -> None:
        """Raises: ValueError: it is open already."""
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already: take another name")
        self._sessions[session] = _Session(task)

    async def complete(
        self, session: str | None, messages: Sequence[Message], settings: SamplingSettings
    ) -> PolicyAnswer:
        """Answer the last message; without a session nothing is kept."""
        held = self._session(session) if session is not None else None
        branch = self._continued(held, messages) if held is not None else None
        is_continued = branch is not None
        if branch is None:
            branch = _Branch(self._policy.prompt(messages, f"{session or 'call'}/{_digest(messages)[:12]}"), Episode())
        prompt = branch.episode.prompt(branch.start, f"{branch.start.prompt_id}/{len(branch.episode.turns)}")
        answer = await self._policy.sample(prompt, settings)
        begin = branch.episode.num_steps
        branch.episode.add_turn(answer.sampled)
        branch.episode.note_step(begin, Action(answer.text), Step((), 0.0, False, False, {}))
        if held is not None:
            held.branches[_digest([*messages, Message(ASSISTANT, answer.text)])] = branch
        return replace(answer, is_continued=is_continued)

    def finish(self, session: str, reward: Reward | None) -> int:
        """End a session; the number of trajectories that came of it. Without a reward there are none."""
        held = self._session(session)
        del self._sessions[session]
        if reward is None:
            return 0
        leaves = [branch for branch in held.branches.values() if branch.is_leaf]
        for number, branch in enumerate(leaves):
            group = f"{held.task}/{_start_of(branch.start)}"
            self._waiting[group].append((branch.start, _trajectory(f"{session}#{number}", branch, reward), reward))
            if len(self._waiting[group]) >= self._num_siblings:
                self._write([group])
        return len(leaves)

    def close(self) -> None:
        """Write the groups that have fewer siblings than they were to have."""
        self._write(list(self._waiting))

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            raise UnknownSessionError(f"there is no open session {name!r}: open it with POST /v1/sessions")
        return self._sessions[name]

    def _continued(self, held: _Session, messages: Sequence[Message]) -> _Branch | None:
        """A branch whose messages these continue, with the new ones appended; None if there is none."""
        answers = [index for index, message in enumerate(messages) if message.role == ASSISTANT]
        if not answers or answers[-1] + 1 == len(messages):
            return None
        before, after = messages[: answers[-1] + 1], tuple(messages[answers[-1] + 1 :])
        branch = held.branches.get(_digest(before))
        if branch is None:
            return None
        episode = _copied(branch.episode)
        if not self._budget.admit(episode, branch.start, after):
            raise PromptError(
                "the conversation is longer than environment.max_tokens behind its first prompt, or has more images "
                "than sampler.max_images_per_prompt: raise them, or begin another conversation"
            )
        branch.is_leaf = False
        return _Branch(branch.start, episode)

    def _write(self, groups: Sequence[str]) -> None:
        scored = []
        for name in groups:
            rows = self._waiting.pop(name)
            prompt = replace(rows[0][0], prompt_id=name)
            siblings = tuple(replace(row, trajectory_id=f"{name}#{n}") for n, (_, row, _) in enumerate(rows))
            group = TrajectoryGroup(prompt, siblings)
            scored.append(ScoredGroup(group.summary(), group, tuple(reward for _, _, reward in rows)))
        if scored and self._log is not None:
            self._write_images(scored)
            self._step += 1
            self._log.append(self._step, scored)

    def _write_images(self, groups: Sequence[ScoredGroup]) -> None:
        assert self._images is not None, "groups are written"
        self._images.mkdir(parents=True, exist_ok=True)
        for scored in groups:
            for trajectory in scored.group.trajectories:
                for handle in (*scored.group.prompt.media, *trajectory.actions.media):
                    if handle.reference.files and not (self._images / handle.key).exists():
                        (self._images / handle.key).write_bytes(handle.reference.files[0])


def _digest(messages: Sequence[Message]) -> str:
    return observation_hash(tuple(messages))


def _start_of(prompt: Prompt) -> str:
    """Equal for prompts of equal tokens and images."""
    keys = ",".join(handle.key for handle in prompt.media)
    return hashlib.sha256(prompt.expanded_ids.tobytes() + keys.encode()).hexdigest()[:16]


def _copied(episode: Episode) -> Episode:
    values = {part.name: getattr(episode, part.name) for part in fields(episode)}
    lists: dict[str, Any] = {name: [*value] for name, value in values.items() if isinstance(value, list)}
    return replace(episode, **lists)


def _trajectory(name: str, branch: _Branch, reward: Reward) -> Trajectory:
    episode = branch.episode
    turns = list(episode.turns)
    turns[-1] = replace(turns[-1], rewards=dict(reward.components) or {"reward": reward.value})
    mask = np.array(episode.mask, dtype=bool)
    text = "\n".join(turn.action for turn in turns)
    return Trajectory(
        trajectory_id=name,
        actions=episode.actions,
        behavior_logprobs=np.array(episode.logprobs, dtype=np.float32),
        action_mask=mask,
        weight_spans=tuple(episode.weight_spans),
        finish_reason=FinishReason.TERMINATED,
        response=SampledResponse(text, int(mask.sum()), False, turns=tuple(turns)),
    )


MAX_REQUEST_BYTES = 64 << 20
READ_S = 60.0
MAX_SEED = 2**31 - 1
Session = Annotated[str | None, Header(alias="X-Mobula-Session")]


class ChatMessage(BaseModel):
    """One message; images are parts of type image_url with a data: URL."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(BaseModel):
    """Fields of a chat completion request that are read; values that are not supported are refused."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(gt=0)] = None
    max_completion_tokens: Annotated[int | None, Field(gt=0)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    stop: str | list[str] | None = None
    n: Literal[1] = 1
    stream: bool = False
    tools: None = None
    user: str | None = None


class SessionBody(BaseModel):
    """A session; those of one task are siblings where they begin alike."""

    model_config = ConfigDict(extra="forbid")

    session: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    task: Annotated[str, Field(max_length=200)] = "task"


class FinishBody(BaseModel):
    """The reward of a session; a session without a reward is not recorded."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float | None, Field(allow_inf_nan=False)] = None
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


def serve(
    config: RunConfig, address: Address, capture: Path | None, num_siblings: int, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives the URL."""
    listener = address.listen()
    with file_access(config, *([capture] if capture else [])):
        policy = LocalPolicy(config, keep_files=capture is not None)
        conversations = Conversations(policy, capture, num_siblings=num_siblings)
        app = RequestGate(make_app(policy, conversations), address, MAX_REQUEST_BYTES, READ_S)
        grace_s = math.ceil(config.timeouts.rollout_s)
        run_server(app, listener, grace_s=grace_s, announce=lambda url: announce(f"{url}/v1"))


def make_app(policy: LocalPolicy, conversations: Conversations) -> FastAPI:
    """The endpoint as an ASGI application; it loads the engine when it starts."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await policy.start()
        yield
        conversations.close()
        await policy.close()

    app = FastAPI(title="Mobula policy", lifespan=life, docs_url=None, redoc_url=None)
    model = policy.config.policy.model

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(f"{'.'.join(map(str, d['loc'][1:]))}: {d['msg']}" for d in error.errors())
        return _error(422, problems, "invalid_request_error")

    @app.post("/v1/chat/completions")
    async def complete(body: ChatBody, session: Session = None) -> Response:
        try:
            messages = [message_of(message.role, message.content) for message in body.messages]
            name = session or body.user
            settings = settings_of(policy.config, body, is_kept=name is not None)
            answer = await conversations.complete(name, messages, settings)
        except UnknownSessionError as error:
            return _error(404, str(error), "unknown_session")
        except (SkippedSample, EpisodeError, ValueError) as error:
            return _error(400, str(error), "invalid_request_error")
        reply = _reply(policy, answer)
        if body.stream:
            return StreamingResponse(events_of(reply), media_type="text/event-stream")
        return JSONResponse(reply)

    @app.post("/v1/sessions")
    async def open_session(body: SessionBody) -> Response:
        session = body.session or uuid4().hex
        try:
            conversations.open(session, body.task)
        except ValueError as error:
            return _error(409, str(error), "session_exists")
        return JSONResponse({"session": session})

    @app.post("/v1/sessions/{session}/finish")
    async def finish(session: str, body: FinishBody) -> Response:
        reward = None if body.reward is None else Reward(body.reward, body.components)
        try:
            return JSONResponse({"trajectories": conversations.finish(session, reward)})
        except UnknownSessionError as error:
            return _error(404, str(error), "unknown_session")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "mobula"}]})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "sessions": conversations.num_sessions})

    return app


def settings_of(config: RunConfig, body: ChatBody, *, is_kept: bool) -> SamplingSettings:
    """The settings of the request, else those of `sampler`; `is_kept`: the call becomes a trajectory."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    own = sampling_settings(config)
    settings = replace(
        own,
        num_samples=1,
        temperature=own.temperature if body.temperature is None else body.temperature,
        max_tokens=body.max_completion_tokens or body.max_tokens or own.max_tokens,
        seed=uuid4().int % MAX_SEED if body.seed is None else body.seed,
        top_p=own.top_p if body.top_p is None else body.top_p,
        top_k=own.top_k if body.top_k is None else body.top_k,
        stop_strings=stop or own.stop_strings,
    )
    is_cut = settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0
    if is_kept and is_cut and config.sampler.kind is SamplerKind.VLLM and settings.top_k == 0:
        raise ValueError(
            f"top_p={settings.top_p:g} cuts the distribution, and sampler.kind=vllm reports what it keeps, which a "
            "trajectory needs, only where their number has a bound: send top_k as well, start the server with "
            "sampler=huggingface, or call without a session"
        )
    return replace(settings, keeps_sets=is_kept and is_cut)


def _reply(policy: LocalPolicy, answer: PolicyAnswer) -> dict[str, Any]:
    """OpenAI's form; `prompt_token_ids` and `token_ids` are ours, named as vLLM names them."""
    prompt_ids, token_ids = answer.prompt.expanded_ids.tolist(), answer.token_ids
    tokens = [policy.chat.decode([token]) for token in token_ids]
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, answer.sampled.logprobs.tolist(), strict=True)
    ]
    is_cut = answer.sampled.finish_reason is FinishReason.LENGTH
    reply = answer_of(policy.config.policy.model, answer.text, is_cut=is_cut)
    [choice] = reply["choices"]
    choice |= {"logprobs": {"content": content}, "token_ids": token_ids}
    num_tokens = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
    return {
        **reply,
        "usage": {**num_tokens, "total_tokens": len(prompt_ids) + len(token_ids)},
        "prompt_token_ids": prompt_ids,
        "is_continued": answer.is_continued,
    }


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
