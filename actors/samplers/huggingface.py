"""Samplers in the process of their actor, and the one of transformers' generate(): the parity oracle."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation import LogitsProcessorList

from mobula.actors.processors.text.chat_template import decode_response
from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.served import ServedAdapter, ServedAdapters, ServedVersion
from mobula.cluster.errors import RolloutError, WeightSyncError
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import NOTHING, Attempt, Emit, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.seeds import derived_seed
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.changes import Base
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack_all
from mobula.learner.policies.adapters import changed_weights, choose_adapter, load_adapter
from mobula.learner.policies.batch import joined
from mobula.learner.policies.families import family_of
from mobula.learner.policies.families.base import ImageFamily
from mobula.learner.policies.head import PLAIN, target_logprobs
from mobula.learner.policies.loading import DTYPES, as_stored, checkpoint_names, ignore_sampling_defaults, load_model


class StopStrings:
    """Ends a response with the token that completes a stop string, which may begin in an earlier attempt."""

    def __init__(self, model: str, strings: Sequence[str], hidden: Collection[int] = ()) -> None:
        """`model` is the checkpoint of the tokenizer, which is loaded only with `strings`. Ids in `hidden` are removed
        from the text."""
        self._model = model
        self._strings = tuple(strings)
        self._hidden = frozenset(hidden)

    @property
    def are_on(self) -> bool:
        return bool(self._strings)

    def cut(self, sequence: SampledSequence) -> SampledSequence:
        """Returns the response up to the token that completes a stop string; unchanged without a stop string."""
        if not self._strings:
            return sequence
        assert isinstance(sequence.actions, TokenActions), "only tokens have a text"
        ids = sequence.actions.token_ids
        if not self._has_one(ids):
            return sequence
        length = 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda num: self._has_one(ids[:num]))
        return replace(sequence.until(length), finish_reason=FinishReason.STOP_STRING)

    def _has_one(self, ids: np.ndarray) -> bool:
        text = decode_response(_tokenizer(self._model), ids, self._hidden)
        return any(string in text for string in self._strings)


@cache
def _tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


@dataclass(frozen=True)
class GroupPart:
    """One request of an attempt: `settings.num_samples` siblings that continue `prompt`; `name` is unique."""

    prompt: Prompt
    settings: SamplingSettings
    siblings: Sequence[int]
    name: str


@dataclass(eq=False)
class GroupProgress:
    """Divides a group into requests, collects the tokens of its siblings, and reports them in chunks. When a sibling
    has `chunk_tokens` unreported tokens, the chunks of all siblings are reported together: one report per chunk, and a
    sibling loses at most `chunk_tokens - 1` tokens with its actor. The finished group is returned, not reported."""

    prompt: Prompt
    settings: SamplingSettings
    attempt: Attempt
    emit: Emit
    _: KW_ONLY
    chunk_tokens: int
    stop_strings: StopStrings

    def __post_init__(self) -> None:
        self.siblings: list[SampledSequence] = list(self.attempt.siblings) or [NOTHING] * self.settings.num_samples
        self.is_cancelled = False
        self._request_id = self.attempt.request_id
        self._reported = list(self.siblings)

    @classmethod
    def of(
        cls, engine: EngineSettings, prompt: Prompt, settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> GroupProgress:
        stop_strings = StopStrings(engine.model, settings.stop_strings, engine.hidden_ids)
        return cls(prompt, settings, attempt, emit, chunk_tokens=engine.sampler.chunk_tokens, stop_strings=stop_strings)

    def opening(self) -> GroupPart | None:
        """The request for the first tokens of empty siblings, if those have a temperature of their own (FIRE)."""
        empty = self._empty()
        if not (self._has_opening and empty):
            return None
        temperature = self.settings.first_token_temperature
        own = replace(self.settings, num_samples=len(empty), temperature=temperature, max_tokens=1)
        return GroupPart(self.prompt, own, empty, f"{self._request_id}#first")

    def parts(self) -> list[GroupPart]:
        """The requests after the opening: one for a new group, else one for each unfinished sibling."""
        if not self.attempt.siblings and not self._has_opening:
            return [GroupPart(self.prompt, self.settings, range(len(self.siblings)), self._request_id)]
        if self._has_opening and (empty := self._empty()):
            raise RolloutError(f"the engine ended request {self._request_id} without a first token of siblings {empty}")
        return [self._rest(sibling) for sibling in self.unfinished()]

    def add(self, sibling: int, piece: SampledSequence) -> None:
        """Appends `piece` to `sibling`, without tokens after a stop string."""
        known = self.siblings[sibling]
        is_first = self._has_opening and known.num_tokens == 0
        if is_first and piece.finish_reason is FinishReason.LENGTH and self.settings.max_tokens > 1:
            piece = replace(piece, finish_reason=None)  # the limit of the opening
        if not (known.is_finished and self.stop_strings.are_on):
            self.siblings[sibling] = self.stop_strings.cut(known.followed_by(piece))

    def unfinished(self) -> list[int]:
        return [index for index, sibling in enumerate(self.siblings) if not sibling.is_finished]

    def report(self) -> None:
        """Emits the new chunks of all siblings if a sibling has a full chunk."""
        if not self.unfinished():
            return
        if any(now.num_tokens - reported.num_tokens >= self.chunk_tokens for now, reported in self._pairs()):
            chunks = list(self._new_chunks())
            self._reported = list(self.siblings)
            self.emit(chunks, tuple(self.siblings))

    def finished(self) -> list[SampledSequence]:
        if unfinished := self.unfinished():
            raise RolloutError(f"the engine ended request {self._request_id} without an end of siblings {unfinished}")
        return self.siblings

    @property
    def _has_opening(self) -> bool:
        return self.settings.first_token_temperature > 0

    def _empty(self) -> list[int]:
        return [index for index, sibling in enumerate(self.siblings) if sibling.num_tokens == 0]

    def _rest(self, sibling: int) -> GroupPart:
        # An engine cannot resume a random generator, so the rest is a new draw from the same distribution. The seed
        # depends on the position: the original seed would repeat the random numbers of the first tokens. Greedy
        # decoding continues exactly.
        so_far, settings = self.siblings[sibling], self.settings
        assert isinstance(so_far.actions, TokenActions)
        ids = np.concatenate([self.prompt.expanded_ids, so_far.actions.token_ids])  # positions of media are unchanged
        seed = derived_seed(settings.seed, f"{sibling}/{so_far.num_tokens}")
        rest = replace(settings, num_samples=1, max_tokens=settings.max_tokens - so_far.num_tokens, seed=seed)
        return GroupPart(replace(self.prompt, expanded_ids=ids), rest, [sibling], f"{self._request_id}#{sibling}")

    def _pairs(self) -> Iterator[tuple[SampledSequence, SampledSequence]]:
        """Yields (current, last reported) of each sibling."""
        return zip(self.siblings, self._reported, strict=True)

    def _new_chunks(self) -> Iterator[TokenChunk]:
        for index, (sibling, reported) in enumerate(self._pairs()):
            if sibling is not reported:
                yield TokenChunk(self._request_id, index, reported.num_tokens, sibling.since(reported.num_tokens))


class InProcessSampler(ABC):
    """Base of samplers that run one group at a time; a push waits for the running group."""

    _model: torch.nn.Module  # set by `start`, which then calls `_take_parameters`

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._device = torch.device(settings.device)
        self._turn = asyncio.Lock()
        self._num_asked = 0  # groups that run or wait
        self._num_tokens = 0  # sampled so far
        self._is_asleep = False
        self._served = ServedVersion()
        self._group: TransferGroup | None = None
        self._base = Base()  # the parameters, and the version of all of them

    def coming(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        async with self._turn:
            return await asyncio.to_thread(self._prompt_logprobs, prompt, media)

    async def probe(self) -> None:
        if not self._is_asleep and not self._turn.locked():
            async with self._turn:
                await asyncio.to_thread(self._work_a_little)

    async def sleep(self) -> None:
        async with self._turn:
            self._is_asleep = True
            self._base.tensors = {}  # they hold the memory on the device
            for module in self._placed():
                module.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    async def wake_up(self, tag: str) -> None:
        if tag == "weights":
            async with self._turn:
                for module in self._placed():
                    module.to(self._device)
                self._take_parameters()
                self._is_asleep = False

    def load(self) -> EngineLoad:
        num_running = min(self._num_asked, 1)
        waiting = self._num_asked - num_running
        return EngineLoad(0.0, num_running, waiting, num_preemptions=0, num_tokens=self._num_tokens)

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(self._settings.expected_by(manifest))

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        if self._group is not None:
            self._group.close()
        self._group = await asyncio.to_thread(TransferGroup, rendezvous, rank, self._device)

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        async with self._turn:
            await asyncio.to_thread(self._receive, manifest, bucket_bytes, version)
            self._served.set(version)
        return self._served.number

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        tensors = unpack_all(manifest, bucket_bytes, buckets)
        async with self._turn:
            await asyncio.to_thread(self._copy_weights, self._weights(manifest, tensors), version)
            self._served.set(version)

    async def weight_version(self) -> int:
        return self._served.number

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()

    @asynccontextmanager
    async def _serving(self, min_version: int) -> AsyncIterator[None]:
        """Waits for weights of `min_version` or newer, then holds the engine for one group."""
        self._num_asked += 1
        try:
            await self._served.reach(min_version)
            async with self._turn:
                yield
        finally:
            self._num_asked -= 1

    def _placed(self) -> tuple[torch.nn.Module, ...]:
        """Returns the modules in device memory while the sampler is awake."""
        return (self._model,)

    def _receive(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
        if self._group is None:
            raise WeightSyncError("this sampler is in no transfer group: call join_transfer first")
        if manifest.payload == "delta":
            self._group.receive_changes(manifest, bucket_bytes, self._base, version)
            return
        tensors = self._group.receive(manifest, bucket_bytes, keeps=False, into=self._base.tensors)
        self._copy_weights(self._weights(manifest, tensors), version)

    def _weights(
        self, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = self._settings.adapters_of(manifest)
        return tensors if adapters is None else changed_weights(tensors, adapters.base)

    @torch.no_grad()
    def _copy_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        with self._base.changing_to(version):
            for name, tensor in tensors:
                self._base.tensors[name].copy_(tensor)

    def _take_parameters(self) -> None:
        """Maps the names in a push to the weights of `_model` in their current memory."""
        names, state = checkpoint_names(self._model), self._model.state_dict()
        self._base.tensors = {
            names[name]: as_stored(self._model, names[name], tensor) for name, tensor in state.items() if name in names
        }

    @abstractmethod
    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Computes `prompt_logprobs` on a thread."""

    @abstractmethod
    def _work_a_little(self) -> None:
        """Runs one forward pass on a thread."""


CHUNK_TOKENS = 512  # prompt tokens per log-prob computation


class HuggingFaceSampler(InProcessSampler):
    """A language model that generates with transformers."""

    _model: PreTrainedModel

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._adapters = ServedAdapters(settings.sampler.adapters)

    async def start(self) -> None:
        model = await asyncio.to_thread(load_model, self._settings.model, DTYPES[self._settings.dtype], "sdpa")
        self._model = model.to(self._device).eval()  # type: ignore[arg-type]  # transformers: `to` is no method to mypy
        ignore_sampling_defaults(self._model)
        self._family = family_of(self._model.config, self._settings.model)
        self._take_parameters()

    async def sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> list[SampledSequence]:
        loop = asyncio.get_running_loop()

        def emit_here(chunks: Sequence[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
            loop.call_soon_threadsafe(emit, chunks, siblings)

        progress = GroupProgress.of(self._settings, prompt, settings, attempt, emit_here)
        with self._adapters.used(settings.adapter) as adapter:
            async with self._serving(settings.min_version):
                await _on_thread(partial(self._sample, media, progress, adapter), progress)
        num_kept = sum(sibling.num_tokens for sibling in attempt.siblings)
        self._num_tokens += sum(sibling.num_tokens for sibling in progress.siblings) - num_kept
        return progress.finished()

    async def serve(self, adapter: str, folder: Path) -> None:
        if self._adapters.has(adapter, folder):
            return
        with self._adapters.adding(adapter, folder) as added:
            async with self._turn:
                await asyncio.to_thread(load_adapter, self._model, folder, _name(added))

    async def withdraw(self, adapter: str) -> None:
        async with self._adapters.removing(adapter) as removed, self._turn:
            await asyncio.to_thread(self._model.delete_adapter, _name(removed))

    async def score_prompt(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], *, adapter: str | None, num_top: int
    ) -> PromptScores:
        with self._adapters.used(adapter) as used:
            async with self._turn:
                return await asyncio.to_thread(self._scores, prompt, media, used, num_top)

    def _sample(self, media: Sequence[ProcessedMedia], progress: GroupProgress, adapter: ServedAdapter | None) -> None:
        self._choose(adapter)
        if (opening := progress.opening()) is not None:
            self._generate(opening, media, progress)
        for part in progress.parts():
            self._generate(part, media, progress)

    @torch.no_grad()
    def _generate(self, part: GroupPart, media: Sequence[ProcessedMedia], progress: GroupProgress) -> None:
        settings = part.settings
        torch.manual_seed(settings.seed)
        is_greedy = settings.temperature == 0
        bans = [SuppressTokensLogitsProcessor(list(self._settings.banned_ids), device=str(self._device))]
        reader = _Reader(self._settings, part, self._served.number, progress)
        output = self._model.generate(  # type: ignore[operator]  # from a mixin of the subclasses
            **self._model_inputs(part.prompt, media, settings.num_samples),
            do_sample=not is_greedy,
            temperature=None if is_greedy else settings.temperature,
            top_k=0 if is_greedy else settings.top_k,
            top_p=None if is_greedy else settings.top_p,
            min_p=None if is_greedy or settings.min_p == 0 else settings.min_p,
            max_new_tokens=settings.max_tokens,
            eos_token_id=[*self._settings.stop_ids, *settings.stop_token_ids],
            pad_token_id=self._settings.pad_id,
            logits_processor=LogitsProcessorList(bans if self._settings.banned_ids else []),
            stopping_criteria=StoppingCriteriaList([reader]),
            output_scores=True,
            return_dict_in_generate=True,
        )
        reader.read(output.sequences, output.scores)

    @torch.no_grad()
    def _work_a_little(self) -> None:
        ids = torch.tensor([[self._settings.pad_id]], device=self._device)
        self._model(input_ids=ids, attention_mask=torch.ones_like(ids))

    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        return self._scores(prompt, media, None, 0).logprobs

    @torch.no_grad()
    def _scores(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], adapter: ServedAdapter | None, num_top: int
    ) -> PromptScores:
        self._choose(adapter)
        inputs = self._model_inputs(prompt, media, 1)
        logits, targets = self._model(**inputs).logits[0, :-1], inputs["input_ids"][0, 1:]  # [P - 1, V], [P - 1]
        found, top = [], []
        # In parts: float32 log-probs of all tokens of a long prompt would take more memory than the model.
        for some, ids in zip(logits.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            found.append(target_logprobs(some, ids, PLAIN))
            if num_top:
                best = some.float().log_softmax(-1).topk(num_top)  # [C, k]
                rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                top += [list(zip(*row, strict=True)) for row in rows]
        return PromptScores(torch.cat(found).cpu().numpy() if found else np.empty(0, dtype=np.float32), top)

    def _choose(self, adapter: ServedAdapter | None) -> None:
        """Selects the weights of the next forward passes; the caller holds the engine."""
        if self._settings.sampler.adapters.are_on:
            choose_adapter(self._model, None if adapter is None else _name(adapter))

    def _model_inputs(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], num_copies: int
    ) -> Mapping[str, torch.Tensor]:
        ids = torch.from_numpy(prompt.expanded_ids).long().expand(num_copies, -1)  # [n, P]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if media:
            is_placeholder = torch.zeros_like(ids, dtype=torch.bool)
            for span in prompt.media_spans:
                is_placeholder[:, span.start : span.end] = True
            assert isinstance(self._family, ImageFamily), "sounds are sampled with vLLM"
            is_placeholder &= ids == self._family.placeholder_id(self._model.config)
            arrays = {key: joined([m.inputs[key] for m in media] * num_copies) for key in media[0].inputs}
            copied = {key: torch.tensor(array) for key, array in arrays.items()}
            inputs |= self._family.generate_inputs(self._model, is_placeholder.long()) | self._family.forward_inputs(
                copied
            )
        return {key: value.to(self._device) for key, value in inputs.items()}


async def _on_thread(sample: Callable[[], None], progress: GroupProgress) -> None:
    """Runs `sample` on a thread; if the call is cancelled, the thread ends first."""
    work = asyncio.ensure_future(asyncio.to_thread(sample))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        progress.is_cancelled = True  # ends the thread, which uses the model and torch's generator until then
        await asyncio.wait([work])
        raise


def _name(adapter: ServedAdapter) -> str:
    """Returns the adapter's name in PEFT, which allows no dots."""
    return f"served-{adapter.number}"


class _Reader(StoppingCriteria):
    """Reports sampled tokens of generate() every `chunk_tokens` steps, or every step if there are stop strings."""

    def __init__(self, settings: EngineSettings, part: GroupPart, version: int, progress: GroupProgress) -> None:
        self._settings = settings
        self._num_prompt_tokens = part.prompt.num_tokens
        self._sampling = part.settings
        self._siblings = part.siblings  # by row
        self._version = version
        self._progress = progress
        self._num_read = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self._progress.is_cancelled:
            return torch.ones(len(self._siblings), dtype=torch.bool, device=input_ids.device)
        if self._sampling.stop_strings or len(scores) % self._settings.sampler.chunk_tokens == 0:
            self.read(input_ids, scores)
        goes_on = set(self._progress.unfinished())
        return torch.tensor([sibling not in goes_on for sibling in self._siblings], device=input_ids.device)

    def read(self, input_ids: torch.Tensor, scores: Sequence[torch.Tensor]) -> None:
        """Reads new tokens from `input_ids` [n, P + T] and `scores`, T times [n, V] after bans and temperature."""
        start, self._num_read = self._num_read, len(scores)
        if start == len(scores):
            return
        tokens = input_ids[:, self._num_prompt_tokens + start :]  # [n, new]
        logits = torch.stack(list(scores[start:]), dim=1).float()  # [n, new, V]
        logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # [n, new]
        goes_on = set(self._progress.unfinished())
        for n, row in enumerate(zip(tokens.cpu().numpy(), logprobs.cpu().numpy(), strict=True)):
            if self._siblings[n] in goes_on:
                kept = KeptSets.of(logits[n].isfinite().cpu().numpy()) if self._sampling.keeps_sets else None
                self._progress.add(self._siblings[n], self._piece(*row, kept))
        self._progress.report()

    def _piece(self, tokens: np.ndarray, logprobs: np.ndarray, kept: KeptSets | None) -> SampledSequence:
        """Removes padding: a response ends with the first stop token."""
        stops = np.flatnonzero(np.isin(tokens, (*self._settings.stop_ids, *self._sampling.stop_token_ids)))
        length = int(stops[0]) + 1 if stops.size else int(tokens.shape[0])
        at_limit = FinishReason.LENGTH if self._num_read == self._sampling.max_tokens else None
        return SampledSequence(
            TokenActions(tokens[:length].astype(np.int32), None if kept is None else kept.between(0, length)),
            logprobs[:length].astype(np.float32),
            (WeightSpan(self._version, 0, length),),
            FinishReason.STOP if stops.size else at_limit,
        )
