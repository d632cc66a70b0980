"""LoadedModel: the parts of `policy.model` that checks read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import ImageTokenProcessor
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.learner.policies.checkpoint.stored import StoredModel

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor  # which imports diffusers
    from mobula.actors.processors.image_pairs import ImagePairProcessor


@dataclass(frozen=True)
class LoadedModel:
    """The parts of `policy.model` that are loaded before a run; checks read these and load nothing twice."""

    folder: Path  # with the files of the trained network
    checkpoint: Manifest
    processor: (
        ChatProcessor | ConversationProcessor | FlowProcessor | ImagePairProcessor | ImageTokenProcessor
    )  # by the job and the kind of model
    stored: StoredModel | None  # the tensors in its files; None of a flow model

    @property
    def chat(self) -> ChatProcessor | None:
        """The processor of text, and of media in it; None for a model that draws images."""
        if isinstance(self.processor, ConversationProcessor):
            return self.processor.chat
        return self.processor if isinstance(self.processor, ChatProcessor) else None

    @property
    def template_source(self) -> str:
        """The chat template; empty where none is rendered."""
        if isinstance(self.processor, ImageTokenProcessor):
            return self.processor.template_source
        return self.chat.template.source if self.chat else ""
