"""Resolves sounds in dataset rows: files (as for images), and arrays of samples with a sampling rate."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from mobula.actors.datasets.images import EncodedFile, ImageError, ImageInputs, ImageSource, array_of, is_absent

Audio = ImageSource
"""A path below the data root, or the encoded bytes of a file."""

ARRAY_KEYS = ("array", "samples")  # keys of samples in a mapping
RATE_KEYS = ("sampling_rate", "sample_rate")
FILE_KEYS = ("audio", "audio_url", "input_audio")  # keys of a sound in any form
MAX_CHANNELS = 32
WAV_FLOAT = 3  # format code of float samples


class AudioInputs(ImageInputs):
    """Resolves the sounds of rows."""

    def resolve_audios(self, value: Any, name: str) -> tuple[Audio, ...]:
        """Resolves a value to sounds, in order: None gives none, a list (nested at most once) several.

        Samples are a mapping `{"array": float [N], [N, channels] or [channels, N], "sampling_rate": 16000}`, as in
        Hugging Face's `datasets`, or a pair `(array, rate)`. An array without a rate is refused.

        Raises:
            ImageError: a value is no sound, or a path is missing or leads out of the root.
            MediaError: a web URL is not allowed or cannot be fetched.
        """
        values = list(each_sound(value))
        names = [name] if len(values) == 1 else [f"{name}, sound {number}" for number in range(1, len(values) + 1)]
        return tuple(self._audio(item, item_name) for item, item_name in zip(values, names, strict=True))

    def _audio(self, value: Any, name: str) -> Audio:
        if isinstance(value, Mapping):
            return self._from_audio_mapping(value, name)
        if _is_pair(value):
            return EncodedFile(encode_wav(*value), name)
        if hasattr(value, "__array__") or isinstance(value, list | tuple | Real):
            raise ImageError(
                "bad_audio", "samples without a rate are no sound: write {'array': SAMPLES, 'sampling_rate': 16000}"
            )
        return self._one(value, name)

    def _from_audio_mapping(self, value: Mapping[str, Any], name: str) -> Audio:
        samples = next((value[key] for key in ARRAY_KEYS if value.get(key) is not None), None)
        if samples is not None:
            rate = next((value[key] for key in RATE_KEYS if value.get(key) is not None), None)
            return EncodedFile(encode_wav(samples, rate), name)
        nested = next((value[key] for key in FILE_KEYS if value.get(key) is not None), None)
        if nested is not None:
            return self._audio(nested, name)
        data = value.get("data")  # OpenAI's parts: {"data": BASE64, "format": "wav"}
        if isinstance(data, str):
            return self._one(f"data:audio/{value.get('format', 'wav')};base64,{data}", name)
        return self._from_mapping(value, name)


def each_sound(value: Any) -> Iterator[Any]:
    """Yields the sounds of a value: none, a single sound, a list, or a list of lists."""
    for item in value if isinstance(value, list | tuple) and not _is_pair(value) else [value]:
        for inner in item if isinstance(item, list | tuple) and not _is_pair(item) else [item]:
            if not is_absent(inner):
                yield inner


def _is_pair(value: Any) -> bool:
    """Whether the value is a pair of samples and rate."""
    is_two = isinstance(value, list | tuple) and len(value) == 2
    return is_two and hasattr(value[0], "__array__") and isinstance(_plain(value[1]), Real)


def _plain(rate: Any) -> Any:
    """Converts a scalar of numpy or torch to Python."""
    return rate.item() if hasattr(rate, "item") and np.ndim(rate) == 0 else rate


def encode_wav(samples: Any, rate: Any) -> bytes:
    """Encodes samples as a WAV file of float32; integers are scaled to [-1, 1]. The shorter axis is the channels.

    Raises:
        ImageError: `samples` or `rate` is invalid.
    """
    rate = _plain(rate)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1 << 31 or rate != int(rate):
        raise ImageError("bad_audio", f"`sampling_rate` is {rate!r}: write how many samples a second there are")
    array = array_of(samples)
    if array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T
    if array.ndim not in (1, 2) or array.dtype.kind not in "fi" or (array.ndim == 2 and array.shape[1] > MAX_CHANNELS):
        raise ImageError(
            "bad_audio",
            f"an array of {array.dtype} {list(array.shape)} is no sound: give numbers [N] or [N, channels]",
        )
    if array.dtype.kind == "i":
        array = array / float(np.iinfo(array.dtype).max + 1)
    channels = 1 if array.ndim == 1 else array.shape[1]
    data = np.ascontiguousarray(array, dtype="<f4").tobytes()
    width = 4 * channels
    form = struct.pack("<HHIIHH", WAV_FLOAT, channels, int(rate), int(rate) * width, width, 32)
    head = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data
