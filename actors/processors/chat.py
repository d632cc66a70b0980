"""ChatProcessor: dataset rows to prompts and token ids to text, with the checkpoint's chat template and processor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from mobula.actors.datasets.conversations import Conversation
from mobula.actors.datasets.media import fetch_together, web_files
from mobula.actors.datasets.rows import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Row, Turn
from mobula.actors.processors.media import LoadedMedium
from mobula.actors.processors.modality import ImageModality, MediaModel, Modality, SoundModality, VideoModality
from mobula.actors.processors.text.answers import Tokens, tokens_of
from mobula.actors.processors.text.chat_template import (
    ChatTemplate,
    Fields,
    decode_response,
    end_token_ids,
    give_template,
    inlined,
    pad_token_id,
    reserved_tokens,
    template_variables,
)
from mobula.cluster.errors import PromptError
from mobula.cluster.records.markup import BREAK, is_verbatim, literal, needed_breaks, plain, without_special
from mobula.cluster.records.media import MediaHandle, MediaKeeper, MediaSpan
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import DataConfig
from mobula.configs.schema.rollout import SamplerConfig
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import AudioFamily, Family, ImageFamily

NUM_CACHED_QUESTIONS = 4096
MEDIA_PLACEHOLDERS = re.compile(f"({IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}|{AUDIO_PLACEHOLDER})")

HasMedia = Row | Conversation
Measures = Sequence[Sequence[Any]]
"""Measures of a row's images, videos and sounds, which determine the number of tokens."""
LoadedMedia = Sequence[Sequence[LoadedMedium[Any, Any]]]
"""Images, videos and sounds of a row, not decoded."""


@dataclass(frozen=True)
class _Layout:
    """A prompt's tokens, compact (one placeholder an image) and expanded (one id an embedding)."""

    text: str
    compact_ids: np.ndarray  # int32 [P_compact]
    expanded_ids: np.ndarray  # int32 [P]
    spans: tuple[MediaSpan, ...]
    order: np.ndarray  # int64 [M]: index of each span's medium among images, videos, then sounds of the row


class ChatProcessor:
    """Turns questions into tokens and media into tensors.

    Text is rendered and tokenised once, with one placeholder for each image. The placeholders are then expanded, so
    compact and expanded ids agree by construction, and equal the output of the model's processor for the same text and
    images. `media` stores processed media by content: equal files are decoded once. With `keep_files` the encoded
    files are stored as well, for reward functions. Engine, learner and reward functions get the same sampled frames of
    a video.

    A text-only model has a tokenizer instead of a processor, and takes prompts without media.
    """

    @classmethod
    def of(cls, config: RunConfig, media: MediaKeeper, *, keep_files: bool = False) -> Self:
        """The processor of a run; `keep_files` keeps encoded files even if no reward function needs them."""
        return cls(
            config.policy.model,
            config.data,
            config.sampler,
            media,
            keep_files=keep_files or config.rewards.needs_images or config.plays_rows,
            device=config.resources.device,
            suffix=config.question_suffix,
        )

    def __init__(
        self,
        model: str,
        data: DataConfig,
        sampler: SamplerConfig,
        media: MediaKeeper,
        *,
        keep_files: bool,
        device: str = "cpu",
        suffix: str = "",
    ) -> None:
        """`device` is `resources.device`, on which the engines run; `suffix` is appended to every question."""
        self._data = data
        self._suffix = suffix
        self._family = family_at(model)
        without_images = self._family.without_images_on(device, sampler.kind)
        self.takes_images = not without_images
        self._takes_parts = self.takes_images or isinstance(self._family, AudioFamily)
        renderer = _load(self._family, model, data) if self._takes_parts else _load_tokenizer(model)
        self.renderer: ProcessorMixin | PreTrainedTokenizerBase = renderer
        self.tokenizer: PreTrainedTokenizerBase = (
            renderer.tokenizer if isinstance(renderer, ProcessorMixin) else renderer
        )
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"policy.model={model} has a {type(self.tokenizer).__name__}, which tells no positions of tokens in a "
                "text: convert its tokenizer to a tokenizer.json, or choose another checkpoint"
            )
        give_template(renderer, model)
        self.template = ChatTemplate(renderer, takes_parts=self._takes_parts, template_kwargs=data.template_kwargs)
        self.media_token_ids = self._family.media_token_ids(self.tokenizer)
        self.eos_token_ids = end_token_ids(model, self.tokenizer)
        *self._answer_head, tail = self.template.around_answer()
        written_end = self.first_end(tail)
        if written_end is not None:
            self.eos_token_ids = tuple(dict.fromkeys((written_end[1], *self.eos_token_ids)))
        added_ids = [*self.tokenizer.added_tokens_decoder, *self.eos_token_ids]
        self.template_token_ids = tuple(i for i in dict.fromkeys(added_ids) if i not in self.media_token_ids)
        self.pad_token_id = pad_token_id(self.tokenizer, self.eos_token_ids)
        self._hidden = frozenset((*self.eos_token_ids, self.pad_token_id, *self.media_token_ids))
        limits = {"video": sampler.max_videos_per_prompt, "audio": sampler.max_audios_per_prompt}
        media_types = [kind for kind, limit in {"image": self.takes_images, **limits}.items() if limit]
        self._reserved = reserved_tokens(self.tokenizer, self._hidden, self.template.written(media_types))
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join([self._reserved.pattern, *map(re.escape, added)]))
        for key, text in (("prompt_suffix", self._suffix), ("system_prompt", self._data.system_prompt)):
            if MEDIA_PLACEHOLDERS.search(text) or self._reserved.search(text):
                raise ValueError(
                    f"data.{key} is {text!r}: remove {IMAGE_PLACEHOLDER}, {VIDEO_PLACEHOLDER}, {AUDIO_PLACEHOLDER} and "
                    "special tokens from it, media stand in the question and turns are made by the chat template"
                )
        self._encode = lru_cache(maxsize=NUM_CACHED_QUESTIONS)(self._render_and_tokenize)
        self.fingerprint = _fingerprint(renderer, self.tokenizer)
        config = self._model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        parts = MediaModel(model, self._family, renderer, config, self.fingerprint, data, media, keep_files)
        self.images = ImageModality(parts, sampler.max_images_per_prompt, without_images)
        self.videos = VideoModality(parts, sampler.max_videos_per_prompt)
        self.sounds = SoundModality(parts, sampler.max_audios_per_prompt)

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        self._check_row(row)
        loaded = self.load_media(row)
        measures = measures_of(loaded)
        layout = self._lay_out(row, measures)
        stored = self.store_media(loaded)
        return Prompt(
            prompt_id=prompt_id,
            sample_id=row.sample_id,
            text=layout.text,
            compact_ids=layout.compact_ids,
            expanded_ids=layout.expanded_ids,
            media=tuple(stored[number] for number in layout.order),
            media_spans=layout.spans,
            references=row.references,
            metadata={**row.metadata, **self.images.sizes(measures[0])},
        )

    def prompt_text(self, row: Row) -> str:
        """The text of the row's prompt, with one placeholder a medium. Reads no media."""
        return self._encode(row.history, row.question, row.template)[0]

    def check(self, row: Row) -> int:
        """Returns the prompt's length in tokens, from the text and the headers of the media. Decodes nothing. Rows with
        web files: counts the text alone; `prepare` downloads the files and checks the total."""
        self._check_row(row)
        if web_files((*row.images, *row.videos, *row.audios)):
            _, compact_ids = self._encode(row.history, row.question, row.template)
            self._check_length(row, len(compact_ids), 0)
            return len(compact_ids)
        return int(self._lay_out(row, self.measure_media(row)).expanded_ids.shape[0])

    def num_media(self, row: HasMedia) -> int:
        return len(row.images) + len(row.videos) + len(row.audios)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a response without end tokens, padding and media tokens."""
        return decode_response(self.tokenizer, token_ids, self._hidden)

    def encode_answer(self, text: str) -> np.ndarray:
        """Returns int32 [T]: the tokens of `text` in the whole text behind a generation prompt, and an end token. A
        token that would hold characters of the generation prompt, whose tokens are given, is divided."""
        text = literal(text)  # an answer holds no media
        self.refuse_special_tokens(text)
        opened, space = self._answer_head
        text = self.prepared(text if text.startswith(space) else space + text)
        given, ids = self.tokenize(opened), self.tokenize(opened + text)
        if ids[: len(given)].tolist() != given.tolist():
            tokens = self.tokens(opened + BREAK + text)
            ids, given = tokens.ids, tokens.ids[: tokens.num_before(len(opened))]
        return np.append(ids[len(given) :], np.int32(self.eos_token_ids[0]))

    def inlined(self, turns: Sequence[Turn], template: str, num_context: int) -> list[Turn]:
        """Returns the turns with their fields in their texts (`chat_template.inlined`); `template` is of the row."""

        def shown(turns: Sequence[Turn], is_open: bool, template: str = template) -> str:
            texts = [(turn.role, turn.text) for turn in turns]
            return self.render(texts, is_open=is_open, template=template, fields=[turn.fields for turn in turns])

        variables = template_variables(template)
        for name in variables:
            without = json.dumps({"chat_template_kwargs": {key: v for key, v in variables.items() if key != name}})
            is_read = re.search(rf"\b{re.escape(name)}\b", self.template.source)
            if not is_read or (name == "tools" and shown(turns, False, without) == shown(turns, False)):
                raise PromptError(
                    f"the chat template of policy.model does not show `{name}` of the row: use another template, or "
                    f"leave it out with data.ignored_fields=[{name}]"
                )
        return inlined(turns, shown, num_context)

    def render(
        self, turns: Sequence[tuple[str, str]], *, is_open: bool, template: str = "", fields: Sequence[Fields] = ()
    ) -> str:
        """Applies the chat template to (role, text) turns; `is_open` adds the generation prompt.

        Args: template: of the row. fields: of each turn.
        """

        def parts(text: str) -> list[dict[str, str]]:
            return _content(text) if self._takes_parts else [{"type": "text", "text": text}]

        messages = [(role, parts(text)) for role, text in turns]
        return self.template.render(messages, is_open=is_open, variables=template_variables(template), fields=fields)

    def tokenize(self, text: str) -> np.ndarray:
        """Returns int32 [T]: the ids of rendered text, one placeholder an image."""
        text = self.prepared(text)
        if BREAK in text:
            return self.tokens(text).ids
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def prepared(self, text: str) -> str:
        """Rendered text, or a part of it, as the tokenizer takes it."""
        if self.takes_images and isinstance(self._family, ImageFamily):
            text = self._family.spaced(text, self.tokenizer)
        return needed_breaks(text, self._special) if BREAK in text else text

    def tokens(self, text: str) -> Tokens:
        """Tokenises prepared text once. Raises: PromptError: as `tokens_of`."""
        return tokens_of(self.tokenizer, text)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table; more than tokens if the table is padded."""
        return int(self._model_config.get_text_config().vocab_size)

    def tokens_beyond_embeddings(self) -> dict[str, int]:
        """Tokens without an embedding, in the order of ids."""
        by_id = sorted((i, token) for token, i in self.tokenizer.get_vocab().items())
        return {token: i for i, token in by_id if i >= self.num_embeddings}

    def special_ids(self) -> dict[str, tuple[int, ...]]:
        """Special token ids by their name in a checkpoint's configuration."""
        placeholder = () if self.images.placeholder_id is None else (self.images.placeholder_id,)
        return {"eos_token_id": self.eos_token_ids, "pad_token_id": (self.pad_token_id,), "image_token_id": placeholder}

    def _ends(self) -> list[tuple[str, int]]:
        ends = [(self.tokenizer.convert_ids_to_tokens(i), i) for i in self.eos_token_ids]
        return [(text, i) for text, i in ends if isinstance(text, str) and text]

    def first_end(self, rendered: str) -> tuple[str, int] | None:
        """Text and id of the first end token in `rendered`, or None."""
        written = [end for end in self._ends() if end[0] in rendered]
        return min(written, key=lambda end: rendered.index(end[0]), default=None)

    def end_text(self) -> str:
        """The text of the first end token. Raises: PromptError: the tokenizer reads other tokens from it."""
        end = self.eos_token_ids[0]
        text = str(self.tokenizer.convert_ids_to_tokens(end))
        if self.tokenize(text).tolist() != [end]:
            raise PromptError(
                f"the chat template of policy.model ends no answer, and {text!r} cannot: change the template"
            )
        return text

    def end_of_turn(self, rendered: str) -> tuple[str, int] | None:
        """Text and id of the end token at the start of `rendered`, or None."""
        return next((end for end in self._ends() if rendered.startswith(end[0])), None)

    def _media_of(self, row: HasMedia) -> Iterator[tuple[Modality[Any, Any], Sequence[Any]]]:
        """Each modality with the row's sources, in the order of stored media."""
        yield from ((self.images, row.images), (self.videos, row.videos), (self.sounds, row.audios))

    def check_media(self, row: HasMedia) -> None:
        for modality, sources in self._media_of(row):
            modality.check(sources, row.sample_id)

    def measure_media(self, row: HasMedia) -> Measures:
        return [[modality.measure(source) for source in sources] for modality, sources in self._media_of(row)]

    def load_media(self, row: HasMedia) -> LoadedMedia:
        """Downloads and reads the row's files."""
        fetch_together((*row.images, *row.videos, *row.audios))
        return [[modality.load(source) for source in sources] for modality, sources in self._media_of(row)]

    def store_media(self, loaded: LoadedMedia) -> list[MediaHandle]:
        """Processes and stores the media; returns handles of images, videos, then sounds."""
        modalities: list[Modality[Any, Any]] = [self.images, self.videos, self.sounds]
        return [modality.store(one) for modality, media in zip(modalities, loaded, strict=True) for one in media]

    def media_expansions(
        self, compact_ids: np.ndarray, row: HasMedia, measures: Measures
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Returns, in the order of the text: the positions of placeholders in `compact_ids`, the replacement ids of
        each, and the index of each medium among images, videos, then sounds of the row."""
        positions, expansions = [], list[np.ndarray]()
        for (modality, sources), measured in zip(self._media_of(row), measures, strict=True):
            if sources or modality is self.images:  # an image's placeholder without an image is an error
                places, ids = modality.expansions(compact_ids, sources, measured, row.sample_id)
                positions.append(places)
                expansions += ids
        places = np.concatenate(positions)
        order = np.argsort(places)
        return places[order], [expansions[index] for index in order], order

    def _check_row(self, row: Row) -> None:
        self.check_media(row)
        self.refuse_special_tokens(literal(row.solution))  # supervised steps encode it

    def _lay_out(self, row: Row, measures: Measures) -> _Layout:
        text, compact_ids = self._encode(row.history, row.question, row.template)
        positions, expansions, order = self.media_expansions(compact_ids, row, measures)
        expanded_ids, spans = expand(compact_ids, positions, expansions)
        self._check_length(row, len(expanded_ids), sum(map(len, expansions)))
        return _Layout(text, compact_ids, expanded_ids, spans, order)

    def _check_length(self, row: Row, num_tokens: int, num_of_media: int) -> None:
        if num_tokens > self._data.max_prompt_tokens:
            raise PromptError(
                f"{row.sample_id} has {num_tokens} tokens ({num_of_media} of them images, videos and sounds), "
                f"data.max_prompt_tokens is {self._data.max_prompt_tokens}: raise it, or lower data.max_pixels, "
                "data.video.max_tokens or data.audio.max_seconds"
            )

    def _render_and_tokenize(self, history: Sequence[Turn], question: str, template: str) -> tuple[str, np.ndarray]:
        """The chat prompt as text and as ids, one placeholder an image. A system turn of the row replaces
        `data.system_prompt`."""
        raw_turns = self.inlined([*history, Turn("user", question + self._suffix)], template, len(history) + 1)
        turns = [(turn.role, self.checked_text(turn.text)) for turn in raw_turns]
        if self._data.system_prompt and turns[0][0] != "system":
            turns.insert(0, ("system", self._data.system_prompt))
        text = self.render(turns, is_open=True, template=template)
        ids = self.tokenize(text)
        ids.flags.writeable = False  # shared by all prompts of this question
        return plain(text), ids

    def refuse_special_tokens(self, text: str) -> None:
        """Raises: PromptError: the text contains a token that is reserved for the chat template."""
        if token := self._reserved.search(text):
            raise PromptError(
                f"the text {text[:80]!r} contains the special token {token.group()!r}, which only the chat template "
                "may write: remove it from the row"
            )

    def checked_text(self, text: str) -> str:
        """Returns the text of a turn. In a verbatim text, special tokens are marked as plain text."""
        if is_verbatim(text):
            text = without_special(text.removeprefix(BREAK), self._special)
        self.refuse_imitations(text)
        return text

    def refuse_imitations(self, text: str) -> None:
        """As `refuse_special_tokens`, but allows media placeholders, which are special tokens of some families."""
        for part in MEDIA_PLACEHOLDERS.split(text):
            if not MEDIA_PLACEHOLDERS.fullmatch(part):
                self.refuse_special_tokens(part)


def measures_of(loaded: LoadedMedia) -> Measures:
    return [[medium.measure for medium in media] for media in loaded]


def expand(
    compact_ids: np.ndarray, positions: np.ndarray, expansions: Sequence[np.ndarray]
) -> tuple[np.ndarray, tuple[MediaSpan, ...]]:
    """Replaces the placeholder at `positions[i]` by `expansions[i]`; returns the ids and the span of each expansion.

    Example:
        >>> expand(np.array([1, 9, 2]), np.array([1]), [np.array([9, 9, 9])])
        (array([1, 9, 9, 9, 2]), (MediaSpan(start=1, end=4),))
    """
    repeats = np.ones(len(compact_ids), dtype=np.int64)
    repeats[positions] = [len(ids) for ids in expansions]
    ends = np.cumsum(repeats)[positions]
    spans = tuple(MediaSpan(int(end) - len(ids), int(end)) for end, ids in zip(ends, expansions, strict=True))
    expanded = np.repeat(compact_ids, repeats)
    for span, ids in zip(spans, expansions, strict=True):
        expanded[span.start : span.end] = ids
    return expanded, spans


def _content(question: str) -> list[dict[str, str]]:
    kinds = {
        IMAGE_PLACEHOLDER: {"type": "image"},
        VIDEO_PLACEHOLDER: {"type": "video"},
        AUDIO_PLACEHOLDER: {"type": "audio"},
    }
    pieces = (piece for piece in MEDIA_PLACEHOLDERS.split(question) if piece)
    return [kinds.get(piece, {"type": "text", "text": piece}) for piece in pieces]


def _load(family: Family, model: str, data: DataConfig) -> ProcessorMixin:
    try:
        options = family.processor_options(model, data) if isinstance(family, ImageFamily) else {}
        processor = AutoProcessor.from_pretrained(model, **options, trust_remote_code=False)
    except Exception as error:  # the type depends on the damaged file
        raise ValueError(
            f"policy.model={model} has no processor that loads ({type(error).__name__}: {error}): "
            "download it again, its processor or tokenizer files are damaged"
        ) from error
    parts = processor.get_attributes() if isinstance(processor, ProcessorMixin) else ()
    if isinstance(family, ImageFamily) and "image_processor" not in parts:
        raise ValueError(
            f"policy.model={model} is of a vision-language type but has no image processor: download it again with its "
            "preprocessor_config.json"
        )
    if isinstance(family, AudioFamily) and "feature_extractor" not in parts:
        raise ValueError(
            f"policy.model={model} is of a type that hears but has no feature extractor: download it again with its "
            "preprocessor_config.json"
        )
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if isinstance(family, AudioFamily):
        _refuse_unfit_tokenizer(processor, model, processor.audio_token, family.audio_placeholder_id(config))
    if not isinstance(family, ImageFamily):
        return processor
    if family.has_pixel_budget:
        size = processor.image_processor.size
        if (size.shortest_edge, size.longest_edge) != (data.min_pixels, data.max_pixels):
            raise ValueError(
                f"{type(processor.image_processor).__name__} of policy.model={model} does not take data.min_pixels and "
                "data.max_pixels: choose another checkpoint of its family"
            )
    _refuse_unfit_tokenizer(processor, model, processor.image_token, family.compact_placeholder_id(config))
    family.refuse_unfit(processor, config)
    return processor


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the type depends on the damaged file
        raise ValueError(
            f"policy.model={model} has no tokenizer that loads ({type(error).__name__}: {error}): download it again"
        ) from error


def _refuse_unfit_tokenizer(processor: ProcessorMixin, model: str, placeholder: str, expected: int) -> None:
    """Refuses a checkpoint without tokenizer files: transformers would silently build another tokenizer."""
    ids = processor.tokenizer(placeholder, add_special_tokens=False).input_ids
    if ids != [expected]:
        raise ValueError(
            f"policy.model={model} has a tokenizer that makes {ids} of the placeholder "
            f"{placeholder!r}, which is the one token {expected} in its config.json: download or write the "
            "checkpoint again, its tokenizer is missing or another model's"
        )


def _fingerprint(processor: ProcessorMixin | PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> str:
    settings = {
        "processor": type(processor).__name__,
        "images": processor.image_processor.to_dict() if hasattr(processor, "image_processor") else None,
        "videos": processor.video_processor.to_dict() if hasattr(processor, "video_processor") else None,
        "audios": processor.feature_extractor.to_dict() if hasattr(processor, "feature_extractor") else None,
        "tokenizer": type(tokenizer).__name__,
        "vocabulary": len(tokenizer),
        "chat_template": processor.chat_template,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
