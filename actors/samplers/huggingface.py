"""Sampling with transformers' own generate(): the parity oracle, and the sampler where vLLM cannot be installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, SuppressTokensLogitsProcessor
from transformers.generation import LogitsProcessorList

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.in_process import GroupPart, GroupProgress, InProcessSampler
from mobula.actors.samplers.served import ServedAdapter, ServedAdapters
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.learner.policies.adapters import choose_adapter, load_adapter
from mobula.learner.policies.batch import joined
from mobula.learner.policies.families import family_of
from mobula.learner.policies.families.base import ImageFamily
from mobula.learner.policies.head import PLAIN, target_logprobs
from mobula.learner.policies.loading import DTYPES, ignore_sampling_defaults, load_model

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
        stop_ids = (*self._settings.stop_ids, *self._sampling.stop_token_ids)
        stops = np.flatnonzero(np.isin(tokens, stop_ids))
        length = int(stops[0]) + 1 if stops.size else int(tokens.shape[0])
        at_limit = FinishReason.LENGTH if self._num_read == self._sampling.max_tokens else None
        return SampledSequence(
            TokenActions(tokens[:length].astype(np.int32), None if kept is None else kept.between(0, length)),
            logprobs[:length].astype(np.float32),
            (WeightSpan(self._version, 0, length),),
            FinishReason.STOP if stops.size else at_limit,
        )
