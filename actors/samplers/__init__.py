"""Engines that sample responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mobula.actors.samplers.base import EngineSettings, Sampler
from mobula.cluster.user_code import chosen


def build_sampler(kind: str, settings: EngineSettings) -> Sampler:
    """Builds the sampler of `sampler.kind`; the engine is imported only if it is used."""
    return sampler_maker(kind, settings.options)(settings)


def sampler_maker(kind: str, options: Mapping[str, object]) -> Callable[[EngineSettings], Sampler]:
    """Returns the class of a sampler with its options."""
    return chosen(SAMPLERS, kind, "sampler.kind", ("settings",), options)


def _vllm(settings: EngineSettings) -> Sampler:
    from mobula.actors.samplers.vllm.sampler import VLLMSampler

    return VLLMSampler(settings)


def _huggingface(settings: EngineSettings) -> Sampler:
    from mobula.actors.samplers.huggingface import HuggingFaceSampler

    return HuggingFaceSampler(settings)


def _flow(settings: EngineSettings) -> Sampler:
    from mobula.actors.samplers.flow import FlowSampler

    assert settings.denoising is not None, "the settings of a flow sampler say how it denoises"
    return FlowSampler(settings, settings.denoising)


def _image_tokens(settings: EngineSettings) -> Sampler:
    from mobula.actors.samplers.image_tokens import ImageTokenSampler

    return ImageTokenSampler(settings, settings.image_guidance)


SAMPLERS: Mapping[str, Callable[[EngineSettings], Sampler]] = {
    "vllm": _vllm,
    "huggingface": _huggingface,
    "flow": _flow,
    "image_tokens": _image_tokens,
}
