"""Engines that sample responses."""

from __future__ import annotations

from mobula.actors.samplers.base import EngineSettings, Sampler


def build_sampler(kind: str, settings: EngineSettings) -> Sampler:
    """The sampler named by `sampler.kind`; its engine is imported only when it is the one that runs."""
    if kind == "vllm":
        from mobula.actors.samplers.vllm.sampler import VLLMSampler

        return VLLMSampler(settings)
    if kind == "huggingface":
        from mobula.actors.samplers.huggingface import HuggingFaceSampler

        return HuggingFaceSampler(settings)
    if kind == "flow":
        from mobula.actors.samplers.flow import FlowSampler

        assert settings.denoising is not None, "the settings of a flow sampler say how it denoises"
        return FlowSampler(settings, settings.denoising)
    if kind == "image_tokens":
        from mobula.actors.samplers.image_tokens import ImageTokenSampler

        return ImageTokenSampler(settings, settings.image_guidance)
    raise ValueError(f"sampler.kind={kind} is unknown: use vllm, huggingface, flow or image_tokens")
