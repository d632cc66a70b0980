"""Chooses the processor of a run by job and kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import ImageTokenProcessor
from mobula.cluster.records.media import MediaKeeper
from mobula.cluster.user_code import chosen
from mobula.configs.schema import RunConfig

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor
    from mobula.actors.processors.image_pairs import ImagePairProcessor


def make_processor(
    config: RunConfig, media: MediaKeeper
) -> ChatProcessor | ConversationProcessor | FlowProcessor | ImagePairProcessor | ImageTokenProcessor:
    """Builds the processor that turns rows into prompts (offline jobs: into groups). Media are stored in `media`.

    Raises:
        ValueError: the model, the checkpoint's processor or a text of the configuration is unfit.
    """
    if config.sampler.is_flow:
        from mobula.actors.processors.flow import FlowProcessor  # imports diffusers
        from mobula.actors.processors.image_pairs import ImagePairProcessor

        flow = FlowProcessor.of(config, media)
        return ImagePairProcessor(flow) if config.offline.is_on else flow
    if config.sampler.draws_tokens:
        return ImageTokenProcessor(config.policy.model, config.data, config.sampler, config.question_suffix)
    chat = processor_maker(config)(config, media)
    if not config.offline.is_on:
        return chat
    return ConversationProcessor(
        chat,
        system_prompt=config.data.system_prompt,
        max_tokens=config.offline.max_tokens,
        has_tail=config.offline.job == "reward_model",
        trains_template=config.offline.train_template_text,
    )


def processor_maker(config: RunConfig) -> Callable[[RunConfig, MediaKeeper], ChatProcessor]:
    """Returns the factory of the processor that `data.processor` names.

    Raises:
        ValueError: a factory of the user does not accept `data.processor_options`.
    """
    given = ("config", "media")
    return chosen(
        {"chat": ChatProcessor.of}, config.data.processor, "data.processor", given, config.data.processor_options
    )
