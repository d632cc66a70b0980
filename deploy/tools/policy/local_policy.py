"""LocalPolicy: `policy.model` with an engine in this process, for one conversation or a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import Message, row_text
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers import build_sampler
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.checks import find_mismatches
from mobula.deploy.preflight.findings import refuse
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.deploy.wiring.preparation import Prepared, ensure_model, require_model
from mobula.deploy.wiring.rollouts import engine_settings
from mobula.learner.policies.checkpoint.stored import stored_model

MEDIA_IN_MEMORY = 64


@dataclass(frozen=True)
class PolicyAnswer:
    """The policy's answer to a prompt."""

    prompt: Prompt
    sampled: SampledSequence
    text: str

    @property
    def token_ids(self) -> list[int]:
        assert isinstance(self.sampled.actions, TokenActions)
        return self.sampled.actions.token_ids.tolist()


class LocalPolicy:
    """Renders whole conversations with the chat template and samples with the engine of `sampler.kind`.

    Raises:
        PreflightError: the model is not there, or is a flow model.
    """

    def __init__(self, config: RunConfig, *, keep_files: bool = False) -> None:
        """`keep_files` keeps the files of images, to capture them."""
        if config.sampler.is_flow:
            raise PreflightError("sampler=flow answers with images, not with text: use sampler=huggingface or vllm")
        require_model(config)
        folder = ensure_model(config)
        media = MediaStore(lambda processed: processed, config.data.media_cache_bytes)
        self.config = config
        self.chat = ChatProcessor(
            config.policy.model,
            config.data,
            config.sampler,
            media,
            keep_files=keep_files,
            device=config.resources.device,
            suffix=config.question_suffix,
        )
        stored = stored_model(folder)
        checkpoint = stored.in_dtype(config.resources.dtype)
        refuse(find_mismatches(config, LoadedModel(folder, checkpoint, self.chat, stored)))
        prepared = Prepared(config, folder, checkpoint, self.chat, media, {})
        self._sampler = build_sampler(config.sampler.kind, engine_settings(prepared, 0))
        self._media = MediaReader(timeout_s=config.timeouts.object_s, max_items=MEDIA_IN_MEMORY)
        self._num_asked = 0

    async def start(self) -> None:
        """Load the engine."""
        await self._sampler.start()

    async def close(self) -> None:
        await self._sampler.close()

    def prompt(self, messages: Sequence[Message], name: str) -> Prompt:
        """The conversation as a prompt; its last message is put as the user's.

        Raises:
            SkippedSample: it is too long, an image is unfit, or a text holds special tokens.
        """
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
        """One answer to a prompt."""
        self._num_asked += 1
        media = self._media.read(prompt.media)
        with self._sampler.coming():
            [sampled] = await self._sampler.sample(
                prompt, media, settings, Attempt(f"{prompt.prompt_id}/{self._num_asked}"), lambda chunks, siblings: None
            )
        assert isinstance(sampled.actions, TokenActions)
        return PolicyAnswer(prompt, sampled, self.chat.decode(sampled.actions.token_ids))

    async def answer(self, messages: Sequence[Message], settings: SamplingSettings) -> PolicyAnswer:
        """One answer to a conversation.

        Raises:
            SkippedSample: it cannot be put to the model.
        """
        return await self.sample(self.prompt(messages, f"conversation-{self._num_asked}"), settings)
