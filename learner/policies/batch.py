"""What a token policy's forward takes: rows of tokens, right-padded, with their pictures found by recorded spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from cluster.records.trajectory import MediaSpan, Prompt

PADDING_ID = 0  # any id will do: attention is causal and padding is on the right, so nothing ever looks at it
TEXT, IMAGE = 0, 1  # transformers' mm_token_type_ids


@dataclass(frozen=True)
class TokenSequence:
    """One row. `token_ids[num_context:]` are scored, each given all before it; `num_context` is at least 1."""

    token_ids: np.ndarray  # int [S]
    num_context: int
    media: tuple[MediaHandle, ...]
    media_spans: tuple[MediaSpan, ...]

    @classmethod
    def of_response(cls, prompt: Prompt, token_ids: np.ndarray) -> TokenSequence:
        """A prompt and what was answered; the answer is scored."""
        tokens = np.concatenate([prompt.expanded_ids, token_ids])
        return cls(tokens, prompt.num_tokens, prompt.media, prompt.media_spans)

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> TokenSequence:
        """A prompt alone; all but its first token is scored."""
        return cls(prompt.expanded_ids, 1, prompt.media, prompt.media_spans)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_targets(self) -> int:
        return self.num_tokens - self.num_context


@dataclass(frozen=True)
class MediaBatch:
    """The unique pictures of a batch, and where they go: embedding `sources[i]` to `[rows[i], columns[i]]`."""

    inputs: dict[str, Tensor]  # forward() argument -> all unique pictures along axis 0; empty without pictures
    num_embeddings: int  # of all unique pictures together
    sources: Tensor  # int64 [M], M placeholders in the batch
    rows: Tensor  # int64 [M]
    columns: Tensor  # int64 [M]


@dataclass(frozen=True)
class PositionLayout:
    """What M-RoPE positions depend on. Rows whose pictures have equal sizes and places share one layout."""

    token_types: Tensor  # int64 [L, S]
    image_grid_thw: Tensor  # int64 [K, 3]: pictures of all layouts, in order
    row_layouts: Tensor  # int64 [B]


@dataclass(frozen=True)
class TokenBatch:
    """B rows of at most S tokens, of which at most T a row are scored. Padding is on the right."""

    input_ids: Tensor  # int64 [B, S]
    row_lengths: tuple[int, ...]  # B
    targets: Tensor  # int64 [B, T]
    target_mask: Tensor  # bool [B, T]: False behind a row's last target
    hidden_rows: Tensor  # int64 [N]: where the N targets are predicted, in the order of `target_mask`
    hidden_columns: Tensor  # int64 [N]
    media: MediaBatch
    layout: PositionLayout


def collate(sequences: Sequence[TokenSequence], reader: MediaReader, device: torch.device) -> TokenBatch:
    """Pad rows and resolve their media; each unique picture is read and placed once."""
    input_ids = pad_rows([s.token_ids for s in sequences], PADDING_ID, np.int64)
    targets = pad_rows([s.token_ids[s.num_context :] for s in sequences], PADDING_ID, np.int64)
    num_targets = np.array([s.num_targets for s in sequences])
    target_mask = np.arange(targets.shape[1]) < num_targets[:, None]
    rows, steps = np.nonzero(target_mask)
    columns = steps + np.array([s.num_context - 1 for s in sequences])[rows]
    unique = list({handle.key: handle for s in sequences for handle in s.media}.values())
    media = {h.key: m for h, m in zip(unique, reader.read(unique), strict=True)} if unique else {}
    return TokenBatch(
        input_ids=_tensor(input_ids, device),
        row_lengths=tuple(s.num_tokens for s in sequences),
        targets=_tensor(targets, device),
        target_mask=_tensor(target_mask, device),
        hidden_rows=_tensor(rows, device),
        hidden_columns=_tensor(columns, device),
        media=_media_batch(sequences, media, device),
        layout=_layout(sequences, media, input_ids.shape[1], device),
    )


def pad_rows(rows: Sequence[np.ndarray], padding: float, dtype: type) -> np.ndarray:
    """Arrays [len_i] -> [B, max len], at least one column, padded on the right."""
    padded = np.full((len(rows), max(1, *(len(row) for row in rows))), padding, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def _media_batch(
    sequences: Sequence[TokenSequence], media: dict[str, ProcessedMedia], device: torch.device
) -> MediaBatch:
    widths = {handle.key: span.end - span.start for s in sequences for handle, span in _placed(s)}
    starts = dict(zip(media, np.cumsum([0, *(widths[key] for key in media)]), strict=False))
    placed = [(row, starts[handle.key], span) for row, s in enumerate(sequences) for handle, span in _placed(s)]
    sources = [np.arange(start, start + span.end - span.start) for _, start, span in placed]
    rows = [np.full(span.end - span.start, row) for row, _, span in placed]
    columns = [np.arange(span.start, span.end) for _, _, span in placed]
    names = next(iter(media.values())).inputs.keys() if media else ()
    return MediaBatch(
        inputs={n: _tensor(np.concatenate([m.inputs[n] for m in media.values()]), device) for n in names},
        num_embeddings=sum(widths.values()),
        sources=_tensor(_joined(sources), device),
        rows=_tensor(_joined(rows), device),
        columns=_tensor(_joined(columns), device),
    )


def _layout(
    sequences: Sequence[TokenSequence], media: dict[str, ProcessedMedia], width: int, device: torch.device
) -> PositionLayout:
    layouts: dict[tuple[tuple[int, ...], ...], int] = {}
    row_layouts = []
    for sequence in sequences:
        key = tuple(
            (span.start, span.end, *(int(n) for n in media[handle.key].inputs["image_grid_thw"].reshape(3)))
            for handle, span in _placed(sequence)
        )
        row_layouts.append(layouts.setdefault(key, len(layouts)))
    token_types = np.full((len(layouts), width), TEXT, dtype=np.int64)
    for key, row in layouts.items():
        for start, end, *_ in key:
            token_types[row, start:end] = IMAGE
    grids = np.array([grid for key in layouts for _, _, *grid in key], dtype=np.int64).reshape(-1, 3)
    return PositionLayout(
        _tensor(token_types, device), _tensor(grids, device), _tensor(np.array(row_layouts, dtype=np.int64), device)
    )


def _placed(sequence: TokenSequence) -> list[tuple[MediaHandle, MediaSpan]]:
    return list(zip(sequence.media, sequence.media_spans, strict=True))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
