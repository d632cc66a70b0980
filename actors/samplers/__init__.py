"""Engines that sample responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from mobula.actors.samplers.base import EngineSettings, Sampler
from mobula.cluster.user_code import chosen, load

SAMPLERS: Mapping[str, str] = {  # `sampler.kind` -> class, imported on use
    "vllm": "mobula.actors.samplers.vllm.sampler:VLLMSampler",
    "huggingface": "mobula.actors.samplers.huggingface:HuggingFaceSampler",
    "flow": "mobula.actors.samplers.flow:FlowSampler",
    "image_tokens": "mobula.actors.samplers.image_tokens:ImageTokenSampler",
    "image_patches": "mobula.actors.samplers.image_patches:ImagePatchSampler",
}


def build_sampler(kind: str, settings: EngineSettings) -> Sampler:
    """Builds the sampler of `sampler.kind`; the engine is imported only if it is used."""
    return sampler_maker(kind, settings.sampler.kind_options)(settings)


def sampler_maker(kind: str, options: Mapping[str, object]) -> Callable[[EngineSettings], Sampler]:
    built_in = {name: partial(_built, target) for name, target in SAMPLERS.items()}
    return chosen(built_in, kind, "sampler.kind", ("settings",), options)


def _built(target: str, settings: EngineSettings) -> Sampler:
    return load(target)(settings)
