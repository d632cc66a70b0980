"""Batches of a token policy: rows of tokens, right-padded, with images placed by recorded spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.learner.policies.base import NO_TOKENS
from mobula.learner.policies.device_copies import on_device

PADDING_ID = 0  # any id will do: attention is causal and padding is on the right, so nothing ever looks at it
# what M-RoPE positions depend on beside the places of images and videos
POSITION_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""They stay on the host: shapes follow from them, for which the host would wait for the device."""
HOST = torch.device("cpu")
IMAGE, VIDEO, AUDIO = "image", "video", "audio"  # modalities of a token policy


@dataclass(frozen=True)
class TokenSequence:
    """One row. `token_ids[num_context:]` are scored, each given all before it; `num_context` is at least 1."""

    token_ids: np.ndarray  # int [S]
    num_context: int
    media: tuple[MediaHandle, ...]
    media_spans: tuple[MediaSpan, ...]
    kept: KeptSets | None = None  # the tokens among which each of the first targets was sampled; None: among all

    @classmethod
    def of_response(cls, prompt: Prompt, token_ids: np.ndarray, kept: KeptSets | None = None) -> TokenSequence:
        """A prompt and what was answered; the answer is scored."""
        tokens = np.concatenate([prompt.expanded_ids, token_ids])
        return cls(tokens, prompt.num_tokens, prompt.media, prompt.media_spans, kept)

    @classmethod
    def of_actions(cls, prompt: Prompt, actions: TokenActions) -> TokenSequence:
        """A prompt and the tokens behind it, with the media of later turns; all behind the prompt is scored."""
        row, num = cls.of_response(prompt, actions.token_ids, actions.kept), prompt.num_tokens
        if not actions.media:
            return row
        spans = (MediaSpan(s.start + num, s.end + num) for s in actions.media_spans)
        return replace(row, media=(*row.media, *actions.media), media_spans=(*row.media_spans, *spans))

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> TokenSequence:
        """A prompt alone; all but its first token is scored."""
        return cls(prompt.expanded_ids, 1, prompt.media, prompt.media_spans)

    def with_end(self) -> TokenSequence:
        """The row with a padding token after its last one, which is scored among all tokens."""
        return replace(self, token_ids=np.append(self.token_ids, PADDING_ID), kept=None)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_targets(self) -> int:
        return self.num_tokens - self.num_context

    @property
    def num_media_tokens(self) -> int:
        return sum(span.end - span.start for span in self.media_spans)


@dataclass(frozen=True)
class MediaBatch:
    """The unique images, videos or sounds of a batch, and the order in which it holds them, row by row."""

    inputs: dict[str, Tensor]  # forward() argument -> all unique ones along axis 0; empty without any. On the device,
    # but for `POSITION_INPUTS`
    num_parts: tuple[int, ...]  # of each unique one (patches or tiles): its share of axis 0 of its pixels
    order: tuple[int, ...]  # the unique one of each recorded span, by row and place
    spans: tuple[tuple[int, int, int], ...]  # row, start and end of one span of each unique one


@dataclass(frozen=True)
class PositionLayout:
    """The inputs of M-RoPE positions, on the host. Rows whose media have equal sizes and places share one layout."""

    rows: Tensor  # int64 [L]: one row of each layout
    images: Tensor  # int64 [K]: the unique images of these rows, in order
    videos: Tensor  # int64 [V]: their unique videos, in order
    row_layouts: Tensor  # int64 [B]


@dataclass(frozen=True)
class RowPlaces:
    """The places of B padded rows when they lie behind one another without padding."""

    lengths: tuple[int, ...]  # B
    index: Tensor  # int64 [num_tokens]: of their tokens among the B * S of the padded rows
    ends: Tensor  # int32 [B + 1]: 0 and the cumulative lengths


@dataclass(frozen=True)
class TokenBatch:
    """B rows of at most S tokens, of which at most T a row are scored. Padding is on the right."""

    input_ids: Tensor  # int64 [B, S]
    row_lengths: tuple[int, ...]  # B: tokens of the rows without padding
    host_ids: np.ndarray  # int64 [B, S]: `input_ids` on the host
    in_media: np.ndarray  # bool [B, S], on the host: within a recorded span
    in_video: np.ndarray  # bool [B, S], on the host: within that of a video
    targets: Tensor  # int64 [B, T]
    target_mask: Tensor  # bool [B, T]: False behind a row's last target
    places: RowPlaces
    host_target_places: np.ndarray  # int64 [N], on the host: of the states before the N targets in packed rows
    target_places: Tensor  # int64 [N]: the same
    hidden_rows: Tensor  # int64 [N]: where the N targets are predicted, in the order of `target_mask`
    hidden_columns: Tensor  # int64 [N]
    target_columns: Tensor  # int64 [N]: where they are in their rows of [B, T]
    kept_ids: Tensor  # int64 [M]: the kept sets of the N targets, one after the other
    kept_rows: Tensor  # int64 [M]: the target of each of them
    kept_ends: np.ndarray  # int64 [N]: where each set ends; an empty one stands for all tokens
    media: MediaBatch  # images
    videos: MediaBatch
    audios: MediaBatch
    layout: PositionLayout

    def padded(self, values: Tensor) -> Tensor:
        """[N] of the targets -> [B, T], 0 or False behind a row's last target.

        By index: with a mask both passes would wait for the device to count its elements.
        """
        places = (self.hidden_rows, self.target_columns)
        return values.new_zeros(self.target_mask.shape).index_put(places, values)


def collate(sequences: Sequence[TokenSequence], reader: MediaReader, device: torch.device) -> TokenBatch:
    """Pad rows and resolve their media; each unique image is read and placed once."""
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
    lengths = np.array([s.num_tokens for s in sequences])
    target_places = (lengths.cumsum() - lengths)[rows] + columns
    in_rows = np.arange(input_ids.shape[1]) < lengths[:, None]
    in_media, in_video = np.zeros((2, *input_ids.shape), dtype=bool)
    for row, sequence in enumerate(sequences):
        for handle, span in _placed(sequence):
            # By position, never by token id: text may hold the id of a placeholder, too.
            in_media[row, span.start : span.end] = True
            in_video[row, span.start : span.end] = handle.modality == VIDEO
    # Siblings share their images: each is read once a micro-batch.
    unique = list({handle.key: handle for s in sequences for handle in s.media}.values())
    media = {h.key: m for h, m in zip(unique, reader.read(unique), strict=True)} if unique else {}
    return TokenBatch(
        input_ids=_tensor(input_ids, device),
        row_lengths=tuple(lengths.tolist()),
        host_ids=input_ids,
        in_media=in_media,
        in_video=in_video,
        targets=_tensor(targets, device),
        target_mask=_tensor(target_mask, device),
        places=RowPlaces(
            lengths=tuple(lengths.tolist()),
            index=_tensor(np.flatnonzero(in_rows), device),
            ends=_tensor(np.append(0, lengths.cumsum()).astype(np.int32), device),
        ),
        host_target_places=target_places,
        target_places=_tensor(target_places, device),
        hidden_rows=_tensor(rows, device),
        hidden_columns=_tensor(columns, device),
        target_columns=_tensor(steps, device),
        kept_ids=_tensor(np.concatenate(kept_ids or [np.empty(0)]).astype(np.int64), device),
        kept_rows=_tensor(np.repeat(np.arange(len(counts)), counts), device),
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


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Tensors of several images along axis 0; other axes are filled up with zeros behind the shorter ones.

    One alone is not copied: it lies in the object store, which is read-only.
    """
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
            n: _tensor(_own(joined([m.inputs[n] for m in own.values()])), HOST if n in POSITION_INPUTS else device)
            for n in names
        },
        num_parts=tuple(next(iter(m.inputs.values())).shape[0] for m in own.values()),
        order=tuple(indices[handle.key] for _, handle, _ in placed if handle.key in own),
        spans=tuple(spans[key] for key in own),
    )


def _layout(sequences: Sequence[TokenSequence], media: dict[str, ProcessedMedia]) -> PositionLayout:
    indices: dict[str, int] = {}  # among those of its kind
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


def _text(sequence: TokenSequence, handle: MediaHandle, span: MediaSpan) -> bytes:
    """The tokens of a video, whose times are text of any length between its placeholders."""
    return sequence.token_ids[span.start : span.end].tobytes() if handle.modality == VIDEO else b""


def _placed(sequence: TokenSequence) -> list[tuple[MediaHandle, MediaSpan]]:
    return list(zip(sequence.media, sequence.media_spans, strict=True))


def _own(array: np.ndarray) -> np.ndarray:
    """The array, copied if it must not be written to."""
    return np.require(array, requirements="W")


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return on_device(array, device)
