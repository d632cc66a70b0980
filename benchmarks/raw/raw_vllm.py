"""vLLM as anyone would use it: `LLM.generate` on tokens and PIL images, alone in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from benchmarks.harness.apart import Peer, apart
from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.network import LOOPBACK
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.configs.schema import RunConfig
from mobula.deploy.host.session import engine_environment
from mobula.deploy.wiring.preparation import Prepared
from mobula.deploy.wiring.roles import engine_settings, sampling_settings

PROCESSOR_CACHE_GB = 4.0  # vLLM's own default


@dataclass(frozen=True)
class RawPrompt:
    """A prompt without anything of ours."""

    compact_ids: list[int]
    expanded_ids: list[int]  # only to see that the engine makes the same of it
    images: tuple[str, ...]  # files

    @classmethod
    def of(cls, prompt: Prompt) -> RawPrompt:
        files = tuple(handle.source for handle in prompt.media)
        return cls(prompt.compact_ids.tolist(), prompt.expanded_ids.tolist(), files)


@dataclass(frozen=True)
class GenerateJob:
    """Sample all prompts in one call. `is_processed`: their images are processed before the clock starts."""

    prompts: Sequence[RawPrompt]
    settings: Sequence[SamplingSettings]  # by prompt
    is_processed: bool


@dataclass(frozen=True)
class Generated:
    """When it ran, on the clock that all processes of a machine share, and what it sampled."""

    started_s: float
    ended_s: float
    responses: list[list[np.ndarray]]  # int32 [T], by prompt and sibling

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


def settings_of(config: RunConfig, prompts: Sequence[Prompt]) -> list[SamplingSettings]:
    """How a run samples each of its prompts, with the seed that the prompt has in it."""
    settings = sampling_settings(config)
    return [settings.for_prompt(prompt.prompt_id) for prompt in prompts]


def raw_engine(prepared: Prepared, worker: PlacedWorker) -> AbstractContextManager[Peer[GenerateJob, Generated]]:
    """An engine with the settings, environment and cores of the rollout actor `worker`."""
    env = {
        "OMP_NUM_THREADS": str(worker.num_threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        **engine_environment(prepared.config, worker),
    }
    settings = engine_settings(prepared, worker.index)
    return apart(_build, settings, cores=worker.cores, env=env)


def _build(settings: EngineSettings) -> Callable[[GenerateJob], Generated]:
    """The engine, asked as ours is, with its arguments and vLLM's default cache of processed images, as it comes:
    without what `mobula.actors.samplers` adds to a worker.
    """
    from vllm import LLM, EngineArgs, SamplingParams

    from mobula.actors.samplers.vllm.arguments import engine_args, sampling_params

    args = engine_args(settings)
    args = replace(
        args,
        mm_processor_cache_gb=PROCESSOR_CACHE_GB,
        worker_extension_cls="",
        load_format="auto",
        weight_transfer_config=None,
    )
    llm = LLM(**{field.name: getattr(args, field.name) for field in fields(EngineArgs)})

    def generate(job: GenerateJob) -> Generated:
        prompts = [_with_images(prompt) for prompt in job.prompts]
        params = [sampling_params(settings, own) for own in job.settings]
        llm.reset_mm_cache()
        if job.is_processed:
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter()
        for prompt, output in zip(job.prompts, outputs, strict=True):
            if output.prompt_token_ids != prompt.expanded_ids:
                raise ValueError(f"the raw engine was given another prompt than ours: {output.prompt_token_ids}")
        tokens = [[np.asarray(c.token_ids, dtype=np.int32) for c in output.outputs] for output in outputs]
        return Generated(started, ended, tokens)

    return generate


def _with_images(prompt: RawPrompt) -> dict[str, Any]:
    from PIL import Image

    images = [Image.open(path).convert("RGB") for path in prompt.images]
    media = {"multi_modal_data": {"image": images}} if images else {}
    return {"prompt_token_ids": prompt.compact_ids, **media}
