"""Batches of a token policy: right-padded rows of tokens, with media at recorded spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import count

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.learner.policies.attention.packed import RowPlaces, SharedPrefix, shared_prefixes
from mobula.learner.policies.base import NO_TOKENS, on_device

PADDING_ID = 0  # any id: attention is causal and padding is on the right, so no token attends to it
# Inputs of M-RoPE positions, in addition to the spans of images and videos.
POSITION_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Kept on the host: shapes depend on them, and reading them from the device would synchronise."""
HOST = torch.device("cpu")
IMAGE, VIDEO, AUDIO = "image", "video", "audio"  # modalities of a token policy


@dataclass(frozen=True)
class TokenSequence:
    """One row. `token_ids[num_context:]` are scored, each given all earlier tokens; `num_context` is at least 1."""

    token_ids: np.ndarray  # int [S]
    num_context: int
    media: tuple[MediaHandle, ...]
    media_spans: tuple[MediaSpan, ...]
    kept: KeptSets | None = None  # for each of the first targets, the set of tokens it was sampled from; None: all
    variant: int = 0  # of the weights that compute the row; rows of different variants share no prefix

    @classmethod
    def of_response(cls, prompt: Prompt, token_ids: np.ndarray, kept: KeptSets | None = None) -> TokenSequence:
        """A prompt and a response; the response is scored."""
        tokens = np.concatenate([prompt.expanded_ids, token_ids])
        return cls(tokens, prompt.num_tokens, prompt.media, prompt.media_spans, kept)

    @classmethod
    def of_actions(cls, prompt: Prompt, actions: TokenActions) -> TokenSequence:
        """A prompt and actions, with media of later turns; all tokens after the prompt are scored."""
        row, num = cls.of_response(prompt, actions.token_ids, actions.kept), prompt.num_tokens
        if not actions.media:
            return row
        spans = (MediaSpan(s.start + num, s.end + num) for s in actions.media_spans)
        return replace(row, media=(*row.media, *actions.media), media_spans=(*row.media_spans, *spans))

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> TokenSequence:
        """A prompt; all tokens but the first are scored."""
        return cls(prompt.expanded_ids, 1, prompt.media, prompt.media_spans)

    def prefix_key(self, num_tokens: int) -> int:
        """A hash of the row's first tokens and of its media."""
        digest = blake2b(self.token_ids[:num_tokens].astype(np.int32).tobytes(), digest_size=8)
        for handle in self.media:
            digest.update(handle.key.encode())
        return int.from_bytes(digest.digest())

    def with_end(self) -> TokenSequence:
        """The row with a padding token appended, which is scored with the full softmax."""
        return replace(self, token_ids=np.append(self.token_ids, PADDING_ID), kept=None)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_targets(self) -> int:
        return self.num_tokens - self.num_context

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_context

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.num_targets,)

    @property
    def num_media_tokens(self) -> int:
        return sum(span.end - span.start for span in self.media_spans)


@dataclass(frozen=True)
class MediaBatch:
    """The unique images, videos or sounds of a batch, and their order in the rows."""

    inputs: dict[str, Tensor]  # argument of forward() -> all unique media along axis 0; empty without media. On the
    # device, except `POSITION_INPUTS`.
    num_parts: tuple[int, ...]  # for each unique medium: number of patches or tiles, its size along axis 0
    order: tuple[int, ...]  # for each recorded span, by row and position: index of the unique medium
    spans: tuple[tuple[int, int, int], ...]  # for each unique medium: row, start and end of one span


@dataclass(frozen=True)
class PositionLayout:
    """The inputs of M-RoPE positions, on the host. Rows with media of equal sizes and spans share one layout."""

    rows: Tensor  # int64 [L]: one row of each layout
    images: Tensor  # int64 [K]: the unique images of these rows, in order
    videos: Tensor  # int64 [V]: the unique videos of these rows, in order
    row_layouts: Tensor  # int64 [B]: layout of each row


@dataclass(frozen=True)
class TokenBatch:
    """B right-padded rows of at most S tokens and at most T targets."""

    input_ids: Tensor  # int64 [B, S]
    row_lengths: tuple[int, ...]  # B: tokens of the rows without padding
    host_ids: np.ndarray  # int64 [B, S]: `input_ids` on the host
    in_media: np.ndarray  # bool [B, S], on the host: within a recorded span
    in_video: np.ndarray  # bool [B, S], on the host: within the span of a video
    targets: Tensor  # int64 [B, T]
    target_mask: Tensor  # bool [B, T]: False after a row's last target
    prefixes: dict[int, SharedPrefix]  # row -> the prefix that it shares, in the order of `shared_prefixes`
    before_targets: tuple[np.ndarray, np.ndarray]  # int64 [N] each, on the host: `hidden_rows`, `hidden_columns`
    hidden_rows: Tensor  # int64 [N]: row of the state that predicts each target, in the order of `target_mask`
    hidden_columns: Tensor  # int64 [N]: column of this state
    target_columns: Tensor  # int64 [N]: column of each target in [B, T]
    kept_ids: Tensor  # int64 [M]: the kept sets of the N targets, concatenated
    kept_rows: Tensor  # int64 [M]: index of the target
    kept_ends: np.ndarray  # int64 [N]: end of each set; an empty set means all tokens
    media: MediaBatch  # images
    videos: MediaBatch
    audios: MediaBatch
    layout: PositionLayout

    @cached_property
    def places(self) -> RowPlaces:
        """The tokens of each row behind one another."""
        return self._places({})

    @cached_property
    def shared_places(self) -> RowPlaces:
        """The same, with each shared prefix once."""
        return self._places(self.prefixes)

    @property
    def num_shared(self) -> int:
        """Tokens of rows that another row has too, which `shared_places` leaves out."""
        return sum(prefix.num_tokens for prefix in self.prefixes.values())

    def _places(self, prefixes: dict[int, SharedPrefix]) -> RowPlaces:
        width, device = self.host_ids.shape[1], self.input_ids.device
        return RowPlaces.of(self.row_lengths, width, self.before_targets, prefixes, device)

    def padded(self, values: Tensor) -> Tensor:
        """Scatters values of targets, [N], to [B, T], with 0 or False after a row's last target."""
        # By index: with a mask, forward and backward pass would synchronise to count the elements.
        return values.new_zeros(self.target_mask.shape).index_put((self.hidden_rows, self.target_columns), values)


def collate(sequences: Sequence[TokenSequence], reader: MediaReader, device: torch.device) -> TokenBatch:
    """Pads rows and reads their media, each unique medium once."""
    input_ids = pad_rows([s.token_ids for s in sequences], PADDING_ID, np.int64)
    targets = pad_rows([s.token_ids[s.num_context :] for s in sequences], PADDING_ID, np.int64)
    num_targets = np.array([s.num_targets for s in sequences])
    target_mask = np.arange(targets.shape[1]) < num_targets[:, None]
    rows, steps = np.nonzero(target_mask)
    # The state before a token predicts it.
    columns = steps + np.array([s.num_context - 1 for s in sequences])[rows]
    counts = pad_rows([s.kept.counts if s.kept is not None else NO_TOKENS for s in sequences], 0, np.int64)
    counts = np.pad(counts, [(0, 0), (0, targets.shape[1] - counts.shape[1])])[target_mask]
    kept_ids = [s.kept.ids for s in sequences if s.kept is not None]
    in_media, in_video = np.zeros((2, *input_ids.shape), dtype=bool)
    for row, sequence in enumerate(sequences):
        for handle, span in _placed(sequence):
            # By position, never by token id: text may contain the id of a placeholder.
            in_media[row, span.start : span.end] = True
            in_video[row, span.start : span.end] = handle.modality == VIDEO
    # Siblings share images: each is read once for a micro-batch.
    unique = list({handle.key: handle for s in sequences for handle in s.media}.values())
    media = {h.key: m for h, m in zip(unique, reader.read(unique), strict=True)} if unique else {}
    spans = [[(span.start, span.end) for span in s.media_spans] for s in sequences]
    return TokenBatch(
        input_ids=on_device(input_ids, device),
        row_lengths=tuple(s.num_tokens for s in sequences),
        host_ids=input_ids,
        in_media=in_media,
        in_video=in_video,
        targets=on_device(targets, device),
        target_mask=on_device(target_mask, device),
        prefixes=shared_prefixes(_distinct_ids(sequences), spans),
        before_targets=(rows, columns),
        hidden_rows=on_device(rows, device),
        hidden_columns=on_device(columns, device),
        target_columns=on_device(steps, device),
        kept_ids=on_device(np.concatenate(kept_ids or [np.empty(0)]).astype(np.int64), device),
        kept_rows=on_device(np.repeat(np.arange(len(counts)), counts), device),
        kept_ends=counts.cumsum(),
        media=_media_batch(sequences, media, device, IMAGE),
        videos=_media_batch(sequences, media, device, VIDEO),
        audios=_media_batch(sequences, media, device, AUDIO),
        layout=_layout(sequences, media),
    )


def pad_rows(rows: Sequence[np.ndarray], padding: float, dtype: type) -> np.ndarray:
    """Arrays [len_i] -> [B, max len], at least one column, padded on the right."""
    padded: np.ndarray = np.full((len(rows), max(1, *(len(row) for row in rows))), padding, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def column(rows: Sequence[np.ndarray], dtype: type, device: torch.device) -> Tensor:
    """`pad_rows` with zeros, on `device`."""
    return on_device(pad_rows(rows, 0, dtype), device)


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays along axis 0; other axes are zero-padded to the longest. A single array is not copied and may
    be read-only (object store)."""
    if len(arrays) == 1:
        return arrays[0]
    widest = np.max([array.shape[1:] for array in arrays], axis=0).astype(int).tolist()
    padded = [
        np.pad(array, [(0, 0), *((0, most - n) for n, most in zip(array.shape[1:], widest, strict=True))])
        if list(array.shape[1:]) != widest
        else array
        for array in arrays
    ]
    return np.concatenate(padded)


def _media_batch(
    sequences: Sequence[TokenSequence], media: dict[str, ProcessedMedia], device: torch.device, modality: str
) -> MediaBatch:
    own = {key: medium for key, medium in media.items() if medium.modality == modality}
    indices = {key: index for index, key in enumerate(own)}
    names = next(iter(own.values())).inputs.keys() if own else ()
    placed = [(row, *pair) for row, sequence in enumerate(sequences) for pair in _placed(sequence)]
    spans = {handle.key: (row, span.start, span.end) for row, handle, span in placed}
    return MediaBatch(
        inputs={
            n: on_device(_own(joined([m.inputs[n] for m in own.values()])), HOST if n in POSITION_INPUTS else device)
            for n in names
        },
        num_parts=tuple(next(iter(m.inputs.values())).shape[0] for m in own.values()),
        order=tuple(indices[handle.key] for _, handle, _ in placed if handle.key in own),
        spans=tuple(spans[key] for key in own),
    )


def _layout(sequences: Sequence[TokenSequence], media: dict[str, ProcessedMedia]) -> PositionLayout:
    indices: dict[str, int] = {}  # key -> index among media of the same kind
    numbers = {IMAGE: count(), VIDEO: count(), AUDIO: count()}
    for key, medium in media.items():
        indices[key] = next(numbers[medium.modality])
    layouts: dict[tuple[object, ...], int] = {}
    rows, row_layouts = [], []
    shown: dict[str, list[int]] = {kind: [] for kind in numbers}
    for row, sequence in enumerate(sequences):
        layout = tuple(
            (
                span.start,
                span.end,
                media[handle.key].modality,
                *_sizes(media[handle.key]),
                _text(sequence, handle, span),
            )
            for handle, span in _placed(sequence)
        )
        if layout not in layouts:
            layouts[layout] = len(layouts)
            rows.append(row)
            for handle, _ in _placed(sequence):
                shown[media[handle.key].modality].append(indices[handle.key])
        row_layouts.append(layouts[layout])
    columns = (rows, shown[IMAGE], shown[VIDEO], row_layouts)
    return PositionLayout(*(torch.from_numpy(np.array(column, dtype=np.int64)) for column in columns))


def _sizes(medium: ProcessedMedia) -> list[bytes]:
    return [medium.inputs[name].tobytes() for name in POSITION_INPUTS if name in medium.inputs]


def _distinct_ids(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """int64 [S] of each row: token ids, which of media are those of one medium and say where it begins, and which
    differ between variants."""
    numbers: dict[str, int] = {}  # of each medium
    rows = []
    for sequence in sequences:
        ids = sequence.token_ids.astype(np.int64) + (sequence.variant << 48)
        for handle, span in _placed(sequence):
            ids[span.start : span.end] += 2 * numbers.setdefault(handle.key, len(numbers) + 1) << 32
            ids[span.start] += 1 << 32
        rows.append(ids)
    return rows


def _text(sequence: TokenSequence, handle: MediaHandle, span: MediaSpan) -> bytes:
    """The tokens of a video: timestamps are text of any length between placeholders."""
    return sequence.token_ids[span.start : span.end].tobytes() if handle.modality == VIDEO else b""


def _placed(sequence: TokenSequence) -> list[tuple[MediaHandle, MediaSpan]]:
    return list(zip(sequence.media, sequence.media_spans, strict=True))


def _own(array: np.ndarray) -> np.ndarray:
    """The array, copied if it is read-only."""
    return np.require(array, requirements="W")
