"""VLLMSampler: samples with vLLM's AsyncLLM, tokens in and out, one request per group, with continuous batching.

The engine gets the expanded prompt ids and the image tensors that the learner trains on, so nothing is tokenised or
processed twice, and engine and learner cannot disagree about an image.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.huggingface import GroupPart, GroupProgress
from mobula.actors.samplers.served import RunningRequests, ServedAdapters, ServedVersion
from mobula.actors.samplers.vllm.arguments import LoadLogger, OutputReader, engine_args, prompt_scores, sampling_params
from mobula.actors.samplers.vllm.patches import (
    InProcessClient,
    core_failure,
    engine_in_its_own_process,
    in_process_engine,
    keep_sampled_logprobs_alone,
)
from mobula.actors.samplers.vllm.weights import load_adapter, lora_request
from mobula.cluster.errors import EngineDiedError, MobulaError, RolloutError, WeightSyncError
from mobula.cluster.failures import Failure
from mobula.cluster.records.media import MediaSpan, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.learner.policies.families import family_of
from mobula.learner.policies.families.base import AudioFamily, ImageFamily, VideoFamily

_logger = logging.getLogger(__name__)

LAST_TO_WAKE = "kv_cache"
FINAL = RequestOutputKind.FINAL_ONLY
ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "output_kind": FINAL}
CORE_WATCH_S = 0.5  # how often the core is checked
MAX_LAYOUTS = 1024  # cached layouts of the images of a prompt
DRAIN_S = 0.05  # after a push arrives, for responses that end soon: their KV cache would be computed again
MAX_BYTES_BESIDE = 1 << 30  # largest push that is received in host memory while the engine samples


class VLLMSampler:
    """A `Sampler` with one vLLM engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._load = LoadLogger()
        self._adapters = ServedAdapters(settings.sampler.adapters)
        self._is_asleep = False
        self._served = ServedVersion()
        self._in_flight = RunningRequests()
        self._is_replacing = False
        self._num_replaced = 0
        self._num_tokens = 0  # sampled so far
        self._watching: asyncio.Task[None] | None = None  # None before `start`
        self._failure: Failure | None = None  # of the core, cached by `_cause`

    async def start(self) -> None:
        if current_platform.device_type != self._settings.device:
            raise ValueError(
                f"vLLM computes on {current_platform.device_type or 'no device'} here, and resources.device="
                f"{self._settings.device}: install vLLM for that device (the cpu or the gpu extra), or use a preset "
                "for the device that is there"
            )
        if self._settings.device == "cpu":
            keep_sampled_logprobs_alone()
        # A single image is not copied.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        start = in_process_engine if self._settings.device == "cpu" else engine_in_its_own_process
        loggers = [lambda config, index: self._load] if self._settings.reports_load else None
        try:
            self._engine = start(engine_args(self._settings), stat_loggers=loggers)
        except (ValueError, MobulaError):  # vLLM refuses settings with ValueError
            raise
        except Exception as error:
            _logger.exception("the engine failed to start")
            raise EngineDiedError("the engine failed to start", Failure.of(error)) from error
        if self._engine.model_config.is_multimodal_model:
            processor = MULTIMODAL_REGISTRY.create_processor(self._engine.model_config)
            self._fields_of = processor._get_mm_fields_config
            self._model = self._engine.model_config.hf_config
            self._family = family_of(self._model, self._settings.model)
            self._placeholder_ids: dict[str, int] = {}  # empty for families of text only
            if isinstance(self._family, ImageFamily):
                self._placeholder_ids["image"] = self._family.placeholder_id(self._model)
            if isinstance(self._family, VideoFamily):
                self._placeholder_ids["video"] = self._family.video_placeholder_id(self._model)
            if isinstance(self._family, AudioFamily):
                self._placeholder_ids["audio"] = self._family.audio_placeholder_id(self._model)
        self._fields_by_layout: dict[Any, Any] = {}
        self._watching = asyncio.create_task(self._watch(), name="watch the engine's core")
        await self._engine.update_weight_version("-1")  # no sampling before the first push

    def coming(self) -> AbstractContextManager[None]:
        core = self._engine.engine_core
        return core.coming() if isinstance(core, InProcessClient) else nullcontext()

    async def sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> list[SampledSequence]:
        if self._is_asleep:
            raise RolloutError(f"prompt {prompt.prompt_id} was asked of an engine that sleeps: its weights may be dead")
        progress = GroupProgress.of(self._settings, prompt, settings, attempt, emit)
        if (opening := progress.opening()) is not None:
            await self._sample(opening, media, progress)
        await run_all(*(self._sample(part, media, progress) for part in progress.parts()))
        return progress.finished()

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        return (await self.score_prompt(prompt, media, adapter=None, num_top=0)).logprobs

    async def score_prompt(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], *, adapter: str | None, num_top: int
    ) -> PromptScores:
        if self._settings.device != "cpu" and (names := self._adapters.with_output_layer()):
            raise ValueError(
                f"vLLM on GPUs computes no prompt log-probs while adapters of the output layer are served "
                f"({', '.join(names)}): withdraw them, or train adapters without the output layer"
            )
        params = SamplingParams(**ONE_TOKEN, prompt_logprobs=num_top)
        final, inputs, name = None, self._engine_input(prompt, media), f"probe-{uuid.uuid4().hex}"
        with self._failing(f"prompt {prompt.prompt_id}"), self._adapters.used(adapter) as used:
            async for output in self._engine.generate(inputs, params, name, lora_request=lora_request(used)):
                final = output
        if final is None:
            raise RolloutError(f"the engine ended prompt {prompt.prompt_id} without an output")
        return prompt_scores(final, num_top)

    async def serve(self, adapter: str, folder: Path) -> None:
        if self._adapters.has(adapter, folder):
            return
        with self._adapters.adding(adapter, folder) as added, self._failing(f"to load adapter {adapter}"):
            await load_adapter(self._engine, added)

    async def withdraw(self, adapter: str) -> None:
        async with self._adapters.removing(adapter) as removed:
            with self._failing(f"to unload adapter {adapter}"):
                await self._engine.remove_lora(removed.number)

    async def probe(self) -> None:
        if self._is_asleep:
            return
        prompt, name = tokens_input([self._settings.pad_id]), f"probe-{uuid.uuid4().hex}"
        request = self._engine.generate(prompt, SamplingParams(**ONE_TOKEN), name)
        with self._failing("the probe"):
            async for _ in request:
                pass

    async def sleep(self) -> None:
        self._is_asleep = True
        if self._can_sleep:
            await self._engine.sleep(self._settings.sleep_level)

    async def wake_up(self, tag: str) -> None:
        if self._is_asleep and self._can_sleep:  # an engine that was restarted is awake
            await self._engine.wake_up([tag])
        self._is_asleep = self._is_asleep and tag != LAST_TO_WAKE

    @property
    def _can_sleep(self) -> bool:
        """Whether the engine can free memory; in host memory it cannot."""
        return self._settings.sleep_level > 0 and self._settings.device == "cuda"

    def load(self) -> EngineLoad:
        reported = replace(self._load.load(), num_tokens=self._num_tokens)
        core = None if self._watching is None else self._engine.engine_core
        return core.measured(reported) if isinstance(core, InProcessClient) else reported

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(self._settings.expected_by(manifest))

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        info = {"rendezvous": rendezvous.to_wire(), "rank": rank}
        with self._named(f"join transfer epoch {rendezvous.epoch}"):
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(info))

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        with self._named(f"receive version {version}"):
            update, core = self._update(manifest, bucket_bytes, version), self._engine.engine_core
            needs_memory = manifest.payload != "delta"  # which the engine holds anyway
            if isinstance(core, InProcessClient) and not (needs_memory and manifest.num_bytes > MAX_BYTES_BESIDE):
                receive = core.transfer_engine.receive
                update["tensors"] = await asyncio.to_thread(lambda: list(receive(manifest, bucket_bytes, version)))
                await self._in_flight.drained(DRAIN_S)
            return await self._replace_weights(update, version)

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        packed = await asyncio.to_thread(lambda: [bucket.tobytes() for bucket in buckets])
        update = self._update(manifest, bucket_bytes, version) | {"buckets": packed}
        with self._named(f"load version {version}"):
            await self._replace_weights(update, version)

    async def weight_version(self) -> int:
        return int(await self._engine.get_weight_version())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._engine.shutdown()

    async def _watch(self) -> None:
        """Fails the calls that wait for a dead core; vLLM fails only the requests of a dead process."""
        while not self._engine.errored:
            await asyncio.sleep(CORE_WATCH_S)
        for call in self._engine.engine_core.utility_results.values():
            if not call.done():
                call.set_exception(EngineDeadError())

    def _update(self, manifest: Manifest, bucket_bytes: int, version: int) -> dict[str, Any]:
        """Returns the arguments of a push for the engine process, as plain values."""
        adapters = self._settings.adapters_of(manifest)
        takes_all = adapters is None and not self._settings.has_unpushed
        extra = {} if adapters is None else {"adapters": asdict(adapters.base)}
        wire = {"manifest": manifest.to_wire(), "bucket_bytes": bucket_bytes, "version": version}
        return wire | {"takes_all": takes_all} | extra

    async def _replace_weights(self, update: dict[str, Any], version: int) -> int:
        """Pauses, reloads, sets the version, drops every cache of the old weights and resumes. Returns the version."""
        # `clear_cache` preempts running requests, so that their KV is computed again; otherwise they keep it and do not
        # share it with later requests (`_cache_salt`). Images are always embedded again. Requests that arrive during
        # the pause wait in the engine for the new weights. After a failed reload the engine stays paused: the weights
        # are partly old and partly new.
        self._is_replacing = True
        self._load.expect_push()
        # `pause_generation` also sleeps 20 ms, for the order of events in a log.
        clear_cache = not self._settings.keeps_kv_cache
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        self._num_replaced += 1
        self._is_replacing = False
        self._served.set(version)
        # The core runs calls in order; separate awaits would add a round trip per call.
        await asyncio.gather(
            self._engine.start_weight_update(), self._engine.update_weights(WeightTransferUpdateRequest(update))
        )
        await asyncio.gather(
            self._engine.finish_weight_update(weight_version=str(version)),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
            self._engine.reset_prefix_cache(),
        )
        named = await self.weight_version()  # while paused: a running engine answers only between steps
        await self._engine.resume_generation()
        return named

    def _cache_salt(self) -> str | None:
        """Returns a salt; requests with equal salts share the KV of equal prefixes."""
        # If pushes keep KV, only requests between the same two pushes share it. The weights of a request during a push
        # are unknown, so it shares no KV.
        if not self._settings.keeps_kv_cache:
            return None
        return uuid.uuid4().hex if self._is_replacing else str(self._num_replaced)

    async def _sample(self, part: GroupPart, media: Sequence[ProcessedMedia], progress: GroupProgress) -> None:
        settings = part.settings
        params = sampling_params(self._settings, settings)
        reader = OutputReader(self._engine, part.name, keeps_sets=settings.keeps_sets)
        with self._failing(f"prompt {part.prompt.prompt_id}"):
            await self._served.reach(settings.min_version)
            inputs = self._engine_input(part.prompt, media)
            with self._in_flight.one_more(), self._adapters.used(settings.adapter) as adapter:
                async for output in self._engine.generate(
                    inputs, params, part.name, lora_request=lora_request(adapter), priority=settings.priority
                ):
                    for index, piece in reader.read(output):
                        progress.add(part.siblings[index], piece)
                        self._num_tokens += piece.num_tokens
                    progress.report()

    def _engine_input(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> Any:
        ids = prompt.expanded_ids.tolist()
        salt = self._cache_salt()
        if not media:
            return tokens_input(ids, cache_salt=salt)
        places = list(zip(media, prompt.media, prompt.media_spans, strict=True))
        kinds = {kind: [item for item in places if item[0].modality == kind] for kind in self._placeholder_ids}
        kinds = {kind: found for kind, found in kinds.items() if found}
        arrays: dict[str, np.ndarray | list[np.ndarray]] = {}
        for kind, found in kinds.items():
            inputs = [medium.inputs for medium, _, _ in found]
            if kind == "audio":
                assert isinstance(self._family, AudioFamily)
                arrays |= self._family.audio_engine_inputs(self._model, inputs)
            else:
                assert isinstance(self._family, ImageFamily)
                arrays |= self._family.engine_inputs(self._model, inputs)
        features = BatchFeature({key: _tensors(array) for key, array in arrays.items()})
        return mm_input(
            ids,
            MultiModalKwargsItems.from_hf_inputs(features, self._fields(features, arrays)),
            mm_hashes={kind: [handle.key for _, handle, _ in found] for kind, found in kinds.items()},
            mm_placeholders={
                kind: [self._placeholder(prompt, span, kind) for _, _, span in found] for kind, found in kinds.items()
            },
            cache_salt=salt,
        )

    def _placeholder(self, prompt: Prompt, span: MediaSpan, kind: str) -> PlaceholderRange:
        """Returns the span of a medium, with a mask of its placeholder ids, which embeddings replace."""
        is_embed = torch.from_numpy(prompt.expanded_ids[span.start : span.end] == self._placeholder_ids[kind])
        return PlaceholderRange(span.start, span.end - span.start, None if is_embed.all() else is_embed)

    def _fields(self, features: BatchFeature, arrays: Mapping[str, np.ndarray | list[np.ndarray]]) -> Any:
        """Returns vLLM's split of the tensors of a prompt into images."""
        # The result depends on shapes and integers, not on pixels. It is cached because it is the slowest part of
        # building an input.
        layout = tuple((name, _layout_of(array)) for name, array in arrays.items())
        if layout not in self._fields_by_layout:
            if len(self._fields_by_layout) >= MAX_LAYOUTS:
                self._fields_by_layout.clear()
            self._fields_by_layout[layout] = self._fields_of(features, {})
        return self._fields_by_layout[layout]

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Converts errors of vLLM's core, bare Exceptions, to weight-sync errors with the name of the call."""
        # A dead core raises `EngineDiedError` instead, because a retried push would fail.
        try:
            yield
        except EngineDeadError as error:
            raise EngineDiedError(f"the engine is dead and cannot {what}", self._cause()) from error
        except Exception as error:
            raise WeightSyncError(f"the engine could not {what}: {error}") from error

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Converts the death of the core, or an aborted request, to an error; the caller retries on another engine."""
        try:
            yield
        except EngineDeadError as error:
            raise EngineDiedError(f"the engine failed {what}", self._cause()) from error
        except EngineGenerateError as error:
            raise RolloutError(f"the engine failed {what}: {error!r}") from error

    def _cause(self) -> Failure:
        if self._failure is None:
            core = self._engine.engine_core
            if isinstance(core, InProcessClient):
                self._failure = Failure.of(core.failure or EngineDeadError())
            else:
                self._failure = core_failure(self._engine)
            _logger.error("the engine's core ended: %s\n%s", self._failure, self._failure.traceback)
        return self._failure


def _tensors(array: np.ndarray | list[np.ndarray]) -> torch.Tensor | list[torch.Tensor]:
    return [torch.from_numpy(one) for one in array] if isinstance(array, list) else torch.from_numpy(array)


def _layout_of(array: np.ndarray | list[np.ndarray]) -> tuple[Any, ...]:
    """Returns shapes and integers of a value, recursively for a list."""
    if isinstance(array, list):
        return tuple(map(_layout_of, array))
    return array.shape, None if array.dtype.kind == "f" else array.tobytes()
