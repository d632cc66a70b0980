"""ChatProcessor: dataset rows to prompts and token ids to text, with the checkpoint's chat template and processor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from typing import Protocol, Self

import numpy as np
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from mobula.actors.datasets.clips import Audio, Video, fetch_together, web_files
from mobula.actors.datasets.images import ImageSource
from mobula.actors.datasets.rows import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Row, Turn
from mobula.actors.processors.audio import (
    AudioLimits,
    LoadedAudio,
    check_audio,
    decode_audio,
    draw_sound,
    load_audio,
    require_soundfile,
)
from mobula.actors.processors.image import check_image, decode_image, measure_image, read_image
from mobula.actors.processors.text.answers import Tokens, tokens_of
from mobula.actors.processors.text.chat_template import ChatTemplate, Fields, give_template, inlined, template_variables
from mobula.actors.processors.text.special_tokens import decode_response, end_token_ids, pad_token_id, reserved_tokens
from mobula.actors.processors.video import LoadedVideo, VideoLimits, check_video, decode_video, load_video, require_av
from mobula.cluster.errors import MediaError, PromptError
from mobula.cluster.records.markup import BREAK, is_verbatim, literal, needed_breaks, plain, without_special
from mobula.cluster.records.media import (
    IMAGE_SIZES,
    SHOWN_SIZES,
    MediaHandle,
    MediaKeeper,
    MediaSpan,
    ProcessedMedia,
    content_key,
)
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import DataConfig
from mobula.configs.schema.rollout import SamplerConfig
from mobula.learner.policies.families import AUDIO_TYPES, VIDEO_TYPES, family_at, model_type_at
from mobula.learner.policies.families.base import AudioFamily, Clip, Family, ImageFamily, VideoFamily

THUMBNAIL_SIZE = (128, 128)
NUM_CACHED_QUESTIONS = 4096
NUM_CACHED_SIZES = 4096
MEDIA_PLACEHOLDERS = re.compile(f"({IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}|{AUDIO_PLACEHOLDER})")


class HasMedia(Protocol):
    """A row or conversation: text with placeholders, and a file for each placeholder."""

    @property
    def sample_id(self) -> str: ...
    @property
    def images(self) -> Sequence[ImageSource]: ...
    @property
    def videos(self) -> Sequence[Video]: ...
    @property
    def audios(self) -> Sequence[Audio]: ...


@dataclass(frozen=True)
class MeasuredMedia:
    """The properties of a row's media that determine the number of tokens."""

    sizes: Sequence[tuple[int, int]]  # (width, height) of each image
    clips: Sequence[Clip]  # sampled frames of each video
    lengths: Sequence[int]  # samples of each sound


@dataclass(frozen=True)
class LoadedMedia:
    """The bytes of a row's media, not decoded."""

    images: Sequence[bytes]
    sizes: Sequence[tuple[int, int]]  # (width, height) of each image
    videos: Sequence[LoadedVideo]
    audios: Sequence[LoadedAudio]

    @property
    def measured(self) -> MeasuredMedia:
        clips, lengths = [video.clip for video in self.videos], [audio.num_samples for audio in self.audios]
        return MeasuredMedia(self.sizes, clips, lengths)


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
    def of(cls, config: RunConfig, media: MediaKeeper) -> Self:
        """The processor of a run."""
        return cls(
            config.policy.model,
            config.data,
            config.sampler,
            media,
            keep_files=config.rewards.needs_images,
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
        self._keep_files = keep_files
        self._max_images = sampler.max_images_per_prompt
        self.max_videos = sampler.max_videos_per_prompt
        self._max_audios = sampler.max_audios_per_prompt
        self.takes_videos = self.max_videos > 0
        self.takes_audios = self._max_audios > 0
        self._media = media
        self._video_limits = VideoLimits.of(data)
        self._limits = self._video_limits.frame
        self._family = family_at(model)
        self._without_images = self._family.without_images_on(device, sampler.kind)
        self.takes_images = not self._without_images
        self._takes_parts = self.takes_images or isinstance(self._family, AudioFamily)
        renderer = _load(self._family, model, data) if self._takes_parts else _load_tokenizer(model)
        self._renderer: ProcessorMixin | PreTrainedTokenizerBase = renderer
        self._tokenizer: PreTrainedTokenizerBase = (
            renderer.tokenizer if isinstance(renderer, ProcessorMixin) else renderer
        )
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"policy.model={model} has a {type(self._tokenizer).__name__}, which tells no positions of tokens in a "
                "text: convert its tokenizer to a tokenizer.json, or choose another checkpoint"
            )
        give_template(renderer, model)
        self.template = ChatTemplate(renderer, takes_parts=self._takes_parts, template_kwargs=data.template_kwargs)
        self.media_token_ids = self._family.media_token_ids(self._tokenizer)
        self.eos_token_ids = end_token_ids(model, self._tokenizer)
        *self._answer_head, tail = self.template.around_answer()
        written_end = self.first_end(tail)
        if written_end is not None:
            self.eos_token_ids = tuple(dict.fromkeys((written_end[1], *self.eos_token_ids)))
        added_ids = [*self._tokenizer.added_tokens_decoder, *self.eos_token_ids]
        self.template_token_ids = tuple(i for i in dict.fromkeys(added_ids) if i not in self.media_token_ids)
        self.pad_token_id = pad_token_id(self._tokenizer, self.eos_token_ids)
        self._hidden = frozenset((*self.eos_token_ids, self.pad_token_id, *self.media_token_ids))
        media_types = {"image": self.takes_images, "video": self.takes_videos, "audio": self.takes_audios}
        written = self.template.written([kind for kind, is_taken in media_types.items() if is_taken])
        self._reserved = reserved_tokens(self._tokenizer, self._hidden, written)
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join([self._reserved.pattern, *map(re.escape, added)]))
        self._refuse_unfit_config()
        self._encode = lru_cache(maxsize=NUM_CACHED_QUESTIONS)(self._render_and_tokenize)
        if isinstance(self._family, ImageFamily) and isinstance(renderer, ProcessorMixin):
            self._expansion = lru_cache(maxsize=NUM_CACHED_SIZES)(partial(self._family.expansion, renderer))
            self._shown_size = lru_cache(maxsize=NUM_CACHED_SIZES)(partial(self._family.shown_size, renderer))
        if self.max_videos:
            self._refuse_videos(model)
        if self._max_audios:
            self._audio_limits = self._limits_of_audios(model, data)
        self.fingerprint = _fingerprint(renderer, self._tokenizer)
        self._video_fingerprint = f"{self.fingerprint} {data.video.model_dump_json()}"
        config = self._model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        self.image_token_id: int | None = (
            self._family.compact_placeholder_id(config) if isinstance(self._family, ImageFamily) else None
        )

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        """Builds the prompt of a row. Processes and stores the media."""
        self._check_row(row)
        loaded = self.load_media(row)
        layout = self._lay_out(row, loaded.measured)
        stored = self.store_media(row, loaded)
        return Prompt(
            prompt_id=prompt_id,
            sample_id=row.sample_id,
            text=layout.text,
            compact_ids=layout.compact_ids,
            expanded_ids=layout.expanded_ids,
            media=tuple(stored[number] for number in layout.order),
            media_spans=layout.spans,
            references=row.references,
            metadata={**row.metadata, **self._sizes(loaded.sizes)},
        )

    def prompt_text(self, row: Row) -> str:
        """The text of the row's prompt, with one placeholder a medium. Reads no media."""
        return self._encode(row.history, row.question, row.template)[0]

    def _sizes(self, sizes: Sequence[tuple[int, int]]) -> dict[str, list[list[int]]]:
        """Image sizes for reward functions: of the files, and as the model sees them."""
        if not sizes or not isinstance(self._family, ImageFamily):
            return {}
        shown = [self._shown_size(size) for size in sizes]
        of_files = {IMAGE_SIZES: [list(size) for size in sizes]}
        return of_files | ({SHOWN_SIZES: [list(size) for size in shown if size]} if all(shown) else {})

    def check(self, row: Row) -> int:
        """Returns the prompt's length in tokens, from the text and the headers of the media. Decodes nothing.

        Rows with web files: counts the text alone; `prepare` downloads the files and checks the total.
        """
        self._check_row(row)
        if web_files((*row.images, *row.videos, *row.audios)):
            _, compact_ids = self._encode(row.history, row.question, row.template)
            self._check_length(row, len(compact_ids), 0)
            return len(compact_ids)
        layout = self._lay_out(row, self.measure_media(row))
        return int(layout.expanded_ids.shape[0])

    def num_media(self, row: HasMedia) -> int:
        """Number of media in the prompt of a row."""
        return len(row.images) + len(row.videos) + len(row.audios)

    @property
    def _processor(self) -> ProcessorMixin:
        assert isinstance(self._renderer, ProcessorMixin), "a tokenizer processes no media"
        return self._renderer

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a response without end tokens, padding and media tokens."""
        return decode_response(self._tokenizer, token_ids, self._hidden)

    def encode_answer(self, text: str) -> np.ndarray:
        """Returns int32 [T]: the tokens of `text` in the whole text behind a generation prompt, and an end token.

        A token that would hold characters of the generation prompt, whose tokens are given, is divided.
        """
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
        return np.array(self._tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def prepared(self, text: str) -> str:
        """Rendered text, or a part of it, as the tokenizer takes it."""
        if self.takes_images and isinstance(self._family, ImageFamily):
            text = self._family.spaced(text, self._tokenizer)
        return needed_breaks(text, self._special) if BREAK in text else text

    def tokens(self, text: str) -> Tokens:
        """Tokenises prepared text once. Raises: PromptError: as `tokens_of`."""
        return tokens_of(self._tokenizer, text)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table; more than tokens if the table is padded."""
        return int(self._model_config.get_text_config().vocab_size)

    def tokens_beyond_embeddings(self) -> dict[str, int]:
        """Tokens without an embedding, in the order of ids."""
        by_id = sorted((i, token) for token, i in self._tokenizer.get_vocab().items())
        return {token: i for i, token in by_id if i >= self.num_embeddings}

    def special_ids(self) -> dict[str, tuple[int, ...]]:
        """Special token ids by their name in a checkpoint's configuration."""
        placeholder = () if self.image_token_id is None else (self.image_token_id,)
        return {
            "eos_token_id": self.eos_token_ids,
            "pad_token_id": (self.pad_token_id,),
            "image_token_id": placeholder,
        }

    def first_end(self, rendered: str) -> tuple[str, int] | None:
        """Text and id of the first end token in `rendered`, or None."""
        # convert_ids_to_tokens returns None for an id that the tokenizer lacks.
        ends = [(self._tokenizer.convert_ids_to_tokens(i), i) for i in self.eos_token_ids]
        written = [(text, i) for text, i in ends if isinstance(text, str) and text and text in rendered]
        return min(written, key=lambda end: rendered.index(end[0]), default=None)

    def end_text(self) -> str:
        """The text of the first end token. Raises: PromptError: the tokenizer reads other tokens from it."""
        end = self.eos_token_ids[0]
        text = str(self._tokenizer.convert_ids_to_tokens(end))
        if self.tokenize(text).tolist() != [end]:
            raise PromptError(
                f"the chat template of policy.model ends no answer, and {text!r} cannot: change the template"
            )
        return text

    def end_of_turn(self, rendered: str) -> tuple[str, int] | None:
        """Text and id of the end token at the start of `rendered`, or None."""
        ends = ((self._tokenizer.convert_ids_to_tokens(i), i) for i in self.eos_token_ids)
        return next(
            ((text, i) for text, i in ends if isinstance(text, str) and text and rendered.startswith(text)), None
        )

    def check_images(self, images: Sequence[ImageSource], name: str) -> None:
        """Checks the number of images of the row `name`."""
        if images and not self.takes_images:
            raise PromptError(
                f"{name} has {len(images)} images, and {self._without_images}: "
                "remove the row, or choose a vision-language model"
            )
        if len(images) > self._max_images:
            raise PromptError(
                f"{name} has {len(images)} images, sampler.max_images_per_prompt is {self._max_images}: "
                "raise it or remove the row"
            )

    def check_media(self, row: HasMedia) -> None:
        """Checks the number of images, videos and sounds of a row."""
        self.check_images(row.images, row.sample_id)
        if len(row.videos) > self.max_videos:
            raise PromptError(
                f"{row.sample_id} has {len(row.videos)} videos, sampler.max_videos_per_prompt is {self.max_videos}: "
                "raise it or remove the row"
            )
        if len(row.audios) > self._max_audios:
            raise PromptError(
                f"{row.sample_id} has {len(row.audios)} sounds, sampler.max_audios_per_prompt is {self._max_audios}: "
                "raise it or remove the row"
            )

    def measure_media(self, row: HasMedia) -> MeasuredMedia:
        """Measures the media from the headers of the row's files."""
        return MeasuredMedia(
            self.image_sizes(row.images),
            [check_video(video, self._video_limits) for video in row.videos],
            [check_audio(audio, self._audio_limits) for audio in row.audios],
        )

    def load_media(self, row: HasMedia) -> LoadedMedia:
        """Downloads and reads the row's files."""
        fetch_together((*row.images, *row.videos, *row.audios))
        contents, sizes = self.read_images(row.images)
        videos = [load_video(video, self._video_limits) for video in row.videos]
        return LoadedMedia(contents, sizes, videos, [load_audio(audio, self._audio_limits) for audio in row.audios])

    def store_media(self, row: HasMedia, loaded: LoadedMedia) -> list[MediaHandle]:
        """Processes and stores the media; returns handles of images, videos, then sounds."""
        stored = [self.store_image(content, path) for content, path in zip(loaded.images, row.images, strict=True)]
        for video in loaded.videos:
            key = content_key(b"".join(video.contents) + repr(video.clip).encode(), self._video_fingerprint)
            stored.append(self._media.get_or_add(key, str(video.source), partial(self._process_video, video)))
        for audio in loaded.audios:
            key = content_key(audio.content, f"{self.fingerprint} audio")
            stored.append(self._media.get_or_add(key, str(audio.source), partial(self._process_audio, audio)))
        return stored

    def image_sizes(self, images: Sequence[ImageSource]) -> list[tuple[int, int]]:
        """(width, height) of each file, from its header."""
        return [check_image(path, self._limits) for path in images]

    def read_images(self, images: Sequence[ImageSource]) -> tuple[list[bytes], list[tuple[int, int]]]:
        """Content and (width, height) of each file."""
        contents = [read_image(path, self._limits) for path in images]
        return contents, [measure_image(c, path, self._limits) for c, path in zip(contents, images, strict=True)]

    def expansions(
        self, compact_ids: np.ndarray, images: Sequence[ImageSource], sizes: Sequence[tuple[int, int]], name: str
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the positions of image placeholders in `compact_ids`, and the replacement ids of each."""
        expansions = []
        for (width, height), source in zip(sizes, images, strict=True):
            try:
                expansions.append(self._expansion((width, height)))
            except ValueError as error:
                raise MediaError(f"{source} is {width} x {height}: {error}; crop it or remove its row") from error
        positions = np.flatnonzero(compact_ids == self.image_token_id)
        if len(positions) != len(expansions):
            raise PromptError(
                f"{name} has {len(expansions)} images and its rendered text {len(positions)} placeholders: "
                f"write one {IMAGE_PLACEHOLDER} an image into the question"
            )
        return positions, expansions

    def media_expansions(
        self, compact_ids: np.ndarray, row: HasMedia, measured: MeasuredMedia
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Returns, in the order of the text: the positions of placeholders in `compact_ids`, the replacement ids of
        each, and the index of each medium among images, videos, then sounds of the row.
        """
        positions, expansions = self.expansions(compact_ids, row.images, measured.sizes, row.sample_id)
        video_positions, video_expansions = self._video_expansions(compact_ids, row, measured.clips)
        audio_positions, audio_expansions = self._audio_expansions(compact_ids, row, measured.lengths)
        positions = np.concatenate([positions, video_positions, audio_positions])
        expansions = [*expansions, *video_expansions, *audio_expansions]
        order = np.argsort(positions)
        return positions[order], [expansions[index] for index in order], order

    def _video_expansions(
        self, compact_ids: np.ndarray, row: HasMedia, clips: Sequence[Clip]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """As `expansions`, for videos."""
        if not clips or not isinstance(self._family, VideoFamily):
            return np.empty(0, dtype=np.int64), []
        expansions = []
        for clip, source in zip(clips, row.videos, strict=True):
            try:
                expansions.append(self._family.video_expansion(self._processor, clip, self._data.video))
            except ValueError as error:
                shown = f"{len(clip.timestamps)} frames of {clip.width} x {clip.height}"
                raise MediaError(f"{source} gives {shown}: {error}; change the video or remove its row") from error
        positions = np.flatnonzero(compact_ids == self._family.compact_video_placeholder_id(self._processor))
        if len(positions) != len(expansions):
            raise PromptError(
                f"{row.sample_id} has {len(expansions)} videos and its rendered text {len(positions)} placeholders: "
                "the chat template of policy.model has no place for videos, use another template"
            )
        return positions, expansions

    def _audio_expansions(
        self, compact_ids: np.ndarray, row: HasMedia, lengths: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """As `expansions`, for sounds."""
        if not lengths or not isinstance(self._family, AudioFamily):
            return np.empty(0, dtype=np.int64), []
        expansions = []
        for length, source in zip(lengths, row.audios, strict=True):
            try:
                expansions.append(self._family.audio_expansion(self._processor, length))
            except ValueError as error:
                raise MediaError(
                    f"{source} has {length} samples: {error}; change the sound or remove its row"
                ) from error
        positions = np.flatnonzero(compact_ids == self._family.audio_placeholder_id(self._model_config))
        if len(positions) != len(expansions):
            raise PromptError(
                f"{row.sample_id} has {len(expansions)} sounds and its rendered text {len(positions)} placeholders: "
                "the chat template of policy.model has no place for sounds, use another template"
            )
        return positions, expansions

    def _check_row(self, row: Row) -> None:
        self.check_media(row)
        self.refuse_special_tokens(literal(row.solution))  # supervised steps encode it

    def _lay_out(self, row: Row, measured: MeasuredMedia) -> _Layout:
        text, compact_ids = self._encode(row.history, row.question, row.template)
        positions, expansions, order = self.media_expansions(compact_ids, row, measured)
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
        `data.system_prompt`.
        """
        raw_turns = self.inlined([*history, Turn("user", question + self._suffix)], template, len(history) + 1)
        turns = [(turn.role, self.checked_text(turn.text)) for turn in raw_turns]
        if self._data.system_prompt and turns[0][0] != "system":
            turns.insert(0, ("system", self._data.system_prompt))
        text = self.render(turns, is_open=True, template=template)
        ids = self.tokenize(text)
        ids.flags.writeable = False  # shared by all prompts of this question
        return plain(text), ids

    def store_image(self, content: bytes, path: ImageSource) -> MediaHandle:
        """Handle of the processed image; equal files are processed once."""
        key = content_key(content, self.fingerprint)
        return self._media.get_or_add(key, str(path), partial(self._process, content, path))

    def _process(self, content: bytes, path: ImageSource) -> ProcessedMedia:
        assert isinstance(self._family, ImageFamily)
        image = decode_image(content, path, self._limits)
        return ProcessedMedia(
            modality="image",
            inputs=self._family.process(self._processor, image),
            thumbnail=_thumbnail(image),
            files=(content,) if self._keep_files else (),
        )

    def _process_video(self, video: LoadedVideo) -> ProcessedMedia:
        assert isinstance(self._family, VideoFamily)
        frames = decode_video(video, self._video_limits)
        images = [Image.fromarray(frame) for frame in (frames if self._keep_files else frames[:1])]
        return ProcessedMedia(
            modality="video",
            inputs=self._family.process_video(self._processor, frames, video.clip, self._data.video),
            thumbnail=_thumbnail(images[0]),
            files=tuple(map(_png, images)) if self._keep_files else (),
        )

    def _process_audio(self, audio: LoadedAudio) -> ProcessedMedia:
        assert isinstance(self._family, AudioFamily)
        samples = decode_audio(audio, self._audio_limits)
        return ProcessedMedia(
            modality="audio",
            inputs=self._family.process_audio(self._processor, samples),
            thumbnail=_png(draw_sound(samples, THUMBNAIL_SIZE)),
        )

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

    def _refuse_videos(self, model: str) -> None:
        """Raises: ValueError: the model takes no videos, or PyAV is missing."""
        if not isinstance(self._family, VideoFamily):
            raise ValueError(
                f"sampler.max_videos_per_prompt={self.max_videos} asks for videos, which are not computed for "
                f"policy.model={model} of type {model_type_at(model)}: set it to 0, or choose a checkpoint of type "
                f"{', '.join(VIDEO_TYPES)}"
            )
        require_av()

    def _limits_of_audios(self, model: str, data: DataConfig) -> AudioLimits:
        """Raises: ValueError: the model takes no sounds, or soundfile is missing."""
        if not isinstance(self._family, AudioFamily):
            raise ValueError(
                f"sampler.max_audios_per_prompt={self._max_audios} asks for sounds, which are not computed for "
                f"policy.model={model} of type {model_type_at(model)}: set it to 0, or choose a checkpoint of type "
                f"{', '.join(AUDIO_TYPES)}"
            )
        require_soundfile()
        features = self._processor.feature_extractor
        return AudioLimits(data.audio, features.sampling_rate, features.n_samples)

    def _refuse_unfit_config(self) -> None:
        for key, text in (("prompt_suffix", self._suffix), ("system_prompt", self._data.system_prompt)):
            if MEDIA_PLACEHOLDERS.search(text) or self._reserved.search(text):
                raise ValueError(
                    f"data.{key} is {text!r}: remove {IMAGE_PLACEHOLDER}, {VIDEO_PLACEHOLDER}, {AUDIO_PLACEHOLDER} and "
                    "special tokens from it, media stand in the question and turns are made by the chat template"
                )


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
    """The parts of a user turn: text, images, videos and sounds in the order of the question."""
    kinds = {
        IMAGE_PLACEHOLDER: {"type": "image"},
        VIDEO_PLACEHOLDER: {"type": "video"},
        AUDIO_PLACEHOLDER: {"type": "audio"},
    }
    pieces = (piece for piece in MEDIA_PLACEHOLDERS.split(question) if piece)
    return [kinds.get(piece, {"type": "text", "text": piece}) for piece in pieces]


def _load(family: Family, model: str, data: DataConfig) -> ProcessorMixin:
    """Loads the model's processor, with the pixel budget of `data` if the family has a budget."""
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
    """Loads the tokenizer of a text-only model."""
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
    """A hash of all settings that determine the tokens and tensors of a row."""
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


def _thumbnail(image: Image.Image) -> bytes:
    small = image.copy()
    small.thumbnail(THUMBNAIL_SIZE)
    return _png(small)


def _png(image: Image.Image) -> bytes:
    png = BytesIO()
    image.save(png, format="PNG")
    return png.getvalue()
