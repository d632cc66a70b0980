"""Measures families: `python -m benchmarks.conformance.measure FOLDER NAME ...` writes FOLDER/NAME/report.json.

One engine and one learner in this process, with a tiny checkpoint of the family; `NAME+tied` has tied embeddings.
The engine samples every prompt and scores it; after each push of perturbed weights both must have moved, and together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader, MediaStore, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.tolerance import Gap
from mobula.configs.load import load_config
from mobula.configs.overrides import SMALL_EXAMPLE
from mobula.configs.schema import RunConfig
from mobula.configs.schema.rollout import SamplerKind
from mobula.deploy.checks.gpu_check.roles import set_engine_environment
from mobula.deploy.checks.parity import (
    FRAME_RATE,
    MOST_VIDEOS,
    NUM_FRAMES,
    SIZES,
    SOUND_LENGTHS,
    SOUND_RATE,
    Case,
    cases,
)
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.deploy.wiring.preparation import Prepared
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.backends.native import SingleBackend
from mobula.learner.policies.adapters import factors_of, is_factor, save_adapters
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.checkpoint import load_policy_model, save_policy, stored_model
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.audio import Qwen25Omni
from mobula.learner.policies.families.base import AudioFamily, Family, ImageFamily, VideoFamily
from mobula.learner.policies.families.vision_models import Glm4v
from mobula.learner.policies.head import PLAIN, Distribution
from mobula.learner.policies.loading import DTYPES, load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.weight_publisher import WeightPublisher

ALL = "all weights"
REPORT = "report.json"
NUM_SAMPLES = 2
MAX_TOKENS = 8
NOISE = 0.05  # that is added to weights before a push
RANK = 4  # of adapters
TIED = "+tied"
KV_CACHE_BYTES = 1 << 27


@dataclass
class Report:
    """Measurements of one family."""

    name: str
    model_type: str
    is_tied: bool
    num_parameters: int
    dtype: str = "float32"  # in which engine and learner compute
    same_ids: dict[str, bool] = field(default_factory=dict)  # case -> the engine expands the prompt as we do
    gaps: dict[str, Gap] = field(default_factory=dict)  # case -> prompt and sampled tokens
    pushes: dict[str, Gap] = field(default_factory=dict)  # part -> over all cases, after a push
    moved: dict[str, float] = field(default_factory=dict)  # part -> largest change of the engine's log-probs by it
    adapters: Gap | None = None  # over all cases, after a push of a learner with adapters
    adapters_load: bool = False  # PEFT makes of the exported adapters what the push carried
    export_loads: bool = False  # transformers loads the export, with equal weights under the checkpoint's names


class Measurement:
    """Holds an engine and a learner of the checkpoint in `folder`/model."""

    def __init__(self, name: str, folder: Path, *, is_tied: bool) -> None:
        self._folder = folder
        self.model = write_tiny(name, folder / "model", seed=1, tie_word_embeddings=is_tied)
        self.config = _config(self.model)
        self.family = family_at(str(self.model))
        store = MediaStore(lambda media: media, self.config.data.media_cache_bytes)
        self.processor = ChatProcessor(str(self.model), self.config.data, self.config.sampler, store, keep_files=False)
        self.cases = cases(self.processor, folder)
        checkpoint = stored_model(self.model).in_dtype(self.config.resources.dtype)
        self.prepared = Prepared(self.config, self.model, checkpoint, self.processor, store, splits={})
        self._cpu = torch.device("cpu")
        self._dtype = DTYPES[self.config.resources.dtype]
        self._reader = MediaReader(timeout_s=1, max_items=len(SIZES) + len(NUM_FRAMES) + len(SOUND_LENGTHS))
        self._learn(self.config)
        self._distribution = Distribution(self.config.sampler.temperature, self.processor.media_token_ids)
        self._version = -1

    def _learn(self, config: RunConfig) -> None:
        """Replaces the learner by a new one with the checkpoint's weights."""
        model = self._network = load_policy_model(config.policy, torch.float32)
        self.is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self._weights = PolicyWeights(model, config)
        self._backend = SingleBackend(self._cpu, self._dtype, config.learner)
        self._policy = self._backend.wrap(TokenPolicy(model, config.learner))
        self._publisher = WeightPublisher(
            self._weights.manifest,
            partial(self._weights.pushed, self._backend),
            rank=0,
            device=self._cpu,
            transport=config.resources.transport,
            timeout_s=config.weight_sync.timeout_s,
        )

    async def run(self, report: Report) -> None:
        from mobula.actors.samplers.vllm.sampler import VLLMSampler  # reads the environment when it is imported

        self.sampler = VLLMSampler(engine_settings(self.prepared, 0))
        await self.sampler.start()
        try:
            await self._push()
            report.gaps = {name: Gap.of(await self._differences(case)) for name, case in self.cases.items()}
            for name, case in self.cases.items():
                if self._can_expand(case):
                    report.same_ids[name] = self._same_ids(case)
            parts = self.family.parts if takes_media(self.family) else {}
            for part, starts in {**parts, ALL: ("",)}.items():
                before = await self._scores()
                self._perturb(starts, seed=len(report.pushes))
                await self._push()
                report.moved[part] = float(np.abs(await self._scores() - before).max())
                differences = [await self._differences(case) for case in self.cases.values()]
                report.pushes[part] = Gap.of(np.concatenate(differences))
            report.export_loads = self._export_loads()
            await self._measure_adapters(report)
        finally:
            await self.sampler.close()

    async def _measure_adapters(self, report: Report) -> None:
        """Measures a learner with adapters; its pushes carry merged weights."""
        config = _config(self.model, f"policy.lora.rank={RANK}")
        self._learn(config)
        generator = torch.Generator().manual_seed(len(report.pushes))
        with torch.no_grad():
            for name, factor in self._policy.named_parameters():
                if is_factor(name):
                    factor.add_(torch.randn(factor.shape, generator=generator) * NOISE)
        await self._push()
        differences = [await self._differences(case) for case in self.cases.values()]
        report.adapters = Gap.of(np.concatenate(differences))
        report.adapters_load = self._adapters_load(config)

    def _adapters_load(self, config: RunConfig) -> bool:
        """Compares the weights that PEFT merges from the exported adapters with the pushed weights."""
        from peft import PeftModel

        out = self._folder / "adapters"
        save_adapters(out, factors_of(self._network.state_dict()), config.policy.lora, str(self.model))
        plain = load_model(str(self.model), torch.float32, self.config.policy.attention)
        loaded = dict(PeftModel.from_pretrained(plain, out).merge_and_unload().named_parameters())
        ours = dict(self._weights.plain_state(self._backend))
        return all(torch.allclose(parameter, ours[name], atol=1e-6) for name, parameter in loaded.items())

    async def _push(self) -> None:
        self._version += 1
        bucket_bytes = self.config.weight_sync.bucket_bytes
        buckets = self._publisher.export(bucket_bytes)
        await self.sampler.load_weights(self._publisher.manifest, bucket_bytes, buckets, self._version)

    def _perturb(self, starts: tuple[str, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self._weights.merged(self._backend):
            if name.startswith(starts):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * NOISE)

    async def _scores(self) -> np.ndarray:
        """Returns the engine's log-probs of all prompts."""
        logprobs = [await self.sampler.prompt_logprobs(c.prompt, _media(c)) for c in self.cases.values()]
        return np.concatenate(logprobs)

    async def _differences(self, case: Case) -> np.ndarray:
        """Returns |engine - learner| log-probs of the prompt's tokens and of sampled tokens."""
        scored = await self.sampler.prompt_logprobs(case.prompt, _media(case))
        expected = self._ours([TokenSequence.of_prompt(case.prompt)], PLAIN)[0]
        settings = SamplingSettings(NUM_SAMPLES, self.config.sampler.temperature, MAX_TOKENS, seed=self._version)
        attempt = Attempt(uuid.uuid4().hex, ())
        sampled = await self.sampler.sample(case.prompt, _media(case), settings, attempt, lambda *_: None)
        actions = [response.actions for response in sampled if isinstance(response.actions, TokenActions)]
        rows = [TokenSequence.of_response(case.prompt, taken.token_ids) for taken in actions]
        ours = self._ours(rows, self._distribution)
        differences = [np.abs(row[: len(s.logprobs)] - s.logprobs) for row, s in zip(ours, sampled, strict=True)]
        return np.concatenate([np.abs(scored - expected), *differences])

    def _ours(self, rows: Sequence[TokenSequence], distribution: Distribution) -> np.ndarray:
        """The learner's log-probs, float32 [B, T]."""
        with self._backend.inference():
            return self._policy(collate(rows, self._reader, self._cpu), distribution).logprobs.numpy()

    def _can_expand(self, case: Case) -> bool:
        """Whether the engine's own processing accepts the prompt."""
        return not isinstance(self.family, Glm4v) or len(case.videos) <= 1

    def _same_ids(self, case: Case) -> bool:
        media: dict[str, list[Any]] = {}
        options: dict[str, Any] = {}
        if case.images and isinstance(self.family, ImageFamily):
            options |= self.family.processor_options(str(self.model), self.config.data)
            media["image"] = list(case.images)
        if case.videos and isinstance(self.family, VideoFamily):
            if isinstance(self.family, Qwen25Omni):  # else the bounds in the processor's code, which are larger
                limits = self.config.data.video
                options |= {"min_pixels": limits.min_frame_pixels, "max_pixels": limits.max_frame_pixels}
            media["video"] = [_video(frames) for frames in case.videos]
        if case.sounds:
            media["audio"] = [(samples, SOUND_RATE) for samples in case.sounds]
        if not media:
            return True
        return self._expanded_by_engine(case.prompt, media, options) == case.prompt.expanded_ids.tolist()

    def _expanded_by_engine(self, prompt: Prompt, media: dict[str, list[Any]], options: dict[str, Any]) -> list[int]:
        """The expanded ids of a compact prompt from vLLM's processor, with our video placeholders.

        `media` has images (`image`), videos (`video`, each frames and metadata) and audio clips (`audio`, each samples
        and rate); `options` are settings of the image processor.
        """
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        from mobula.actors.samplers.vllm.arguments import engine_args

        model = engine_args(engine_settings(self.prepared, 0)).create_model_config()
        processor = MULTIMODAL_REGISTRY.create_processor(model)
        items = processor.info.parse_mm_data(media)
        inputs = ProcessorInputs(prompt.compact_ids.tolist(), items, hf_processor_mm_kwargs=options)
        ids = list(processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"])
        if not isinstance(self.family, VideoFamily) or not self.family.engine_video_token:
            return ids
        theirs = processor.info.get_tokenizer().convert_tokens_to_ids(self.family.engine_video_token)
        ours = self.family.video_placeholder_id(model.hf_config)
        return [ours if token == theirs else token for token in ids]

    def _export_loads(self) -> bool:
        out = self._folder / "export"
        state = dict(self._weights.plain_state(self._backend))
        save_policy(self._network, str(self.model), out, state, state.items())
        loaded = dict(load_model(str(out), torch.float32, self.config.policy.attention).named_parameters())
        ours = dict(self._network.named_parameters())
        shapes = [_shapes(folder / "model.safetensors") for folder in (self.model, out)]
        return shapes[0] == shapes[1] and all(torch.equal(loaded[name], ours[name]) for name in loaded)


def measure(variant: str, folder: Path) -> Report:
    """Measure the family of a tiny model, NAME or NAME+tied, in this process; `folder` must be new.

    The environment of this process is changed for the engine.
    """
    name, is_tied = variant.removesuffix(TIED), variant.endswith(TIED)
    measurement = Measurement(name, folder, is_tied=is_tied)
    set_engine_environment(measurement.config)
    os.environ["OMP_NUM_THREADS"] = "1"
    model_type = json.loads((measurement.model / "config.json").read_text())["model_type"]
    value = DTYPES[measurement.config.resources.dtype].itemsize
    num_parameters = sum(spec.num_bytes // value for spec in measurement.prepared.checkpoint.tensors)
    report = Report(name, model_type, measurement.is_tied, num_parameters, measurement.config.resources.dtype)
    asyncio.run(measurement.run(report))
    return report


def read_report(file: Path) -> Report:
    """Reads the report that `main` wrote."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    for key in ("gaps", "pushes"):
        fields[key] = {name: Gap(**gap) for name, gap in fields[key].items()}
    fields["adapters"] = None if fields.get("adapters") is None else Gap(**fields["adapters"])
    return Report(**fields)


def takes_media(family: Family) -> bool:
    """Whether the parts of a family are pushed one by one; families that train on text alone on CPU are excluded."""
    return not family.without_images_on("cpu", SamplerKind.VLLM) or isinstance(family, AudioFamily)


def _config(model: Path, *overrides: str) -> RunConfig:
    family = family_at(str(model))
    config = load_config(
        [
            f"experiment={SMALL_EXAMPLE}",
            f"policy.model={model}",
            "policy.tiny=none",
            "learner=single",
            "resources.learner.num_workers=1",
            f"resources.dtype={family.engine_dtypes_on_cpu[0]}",
            "sampler.max_images_per_prompt=3",
            f"sampler.max_videos_per_prompt={MOST_VIDEOS * isinstance(family, VideoFamily)}",
            f"sampler.max_audios_per_prompt={len(SOUND_LENGTHS) * isinstance(family, AudioFamily)}",
            f"sampler.vllm.kv_cache_bytes={KV_CACHE_BYTES}",
            "sampler.vllm.max_num_seqs=16",
            "data.max_prompt_tokens=512",
            "sampler.max_model_len=1024",
            *overrides,
        ]
    )
    return with_row_layout(config)


def _media(case: Case) -> list[ProcessedMedia]:
    return [handle.reference for handle in case.prompt.media]


def _video(frames: Sequence[Image.Image]) -> tuple[np.ndarray, dict[str, Any]]:
    """A video as the engine's own processing takes it."""
    num = len(frames)
    times = {"fps": FRAME_RATE, "frames_indices": list(range(num)), "total_num_frames": num}
    whole = {"duration": num / FRAME_RATE, "do_sample_frames": False, "video_backend": "none"}
    return np.stack([np.asarray(frame) for frame in frames]), times | whole


def _shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, framework="pt") as checkpoint:
        return {name: checkpoint.get_slice(name).get_shape() for name in checkpoint.keys()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    for name in args.names:
        folder = args.folder / name
        folder.mkdir(parents=True)
        report = measure(name, folder)
        (folder / REPORT).write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # an interpreter that ends in order is aborted by threads of the engine's libraries


if __name__ == "__main__":
    main()
