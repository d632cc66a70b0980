"""Sound files to mono samples at the model's rate, safely: nothing is decoded before its length is in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image
from scipy.signal import resample_poly

from actors.datasets.audios import Audio
from actors.datasets.writers.base import AudioFile
from actors.processors.image import open_bounded
from cluster.errors import MediaError
from configs.schema.data import AudioConfig, DataConfig

EXTENSIONS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg", "AIFF": "aiff"}
FORMATS = tuple(EXTENSIONS)  # of libsndfile's, those that hold sound in any use today


@dataclass(frozen=True)
class AudioLimits:
    """What a sound may cost, and the rate that it is brought to."""

    audio: AudioConfig
    rate: int  # samples a second that the model reads
    max_samples: int  # at this rate that the model reads of one sound

    @classmethod
    def of(cls, data: DataConfig, rate: int, max_samples: int) -> AudioLimits:
        return cls(data.audio, rate, max_samples)


@dataclass(frozen=True)
class LoadedAudio:
    """A sound that was read and not decoded."""

    source: Audio
    content: bytes
    num_samples: int  # after resampling


def check_audio(source: Audio, limits: AudioLimits) -> int:
    """How many samples a model reads of the sound, from its header alone; for checks of a whole dataset.

    Raises:
        MediaError: the sound is missing, empty, too large, too long, or no sound.
    """
    with open_bounded(source, limits.audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        with _opened(file, source) as sound:
            return _num_samples(sound, source, limits)


def load_audio(source: Audio, limits: AudioLimits) -> LoadedAudio:
    """The sound's bytes and its length.

    Raises:
        MediaError: as `check_audio`.
    """
    with open_bounded(source, limits.audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        content = file.read()
    with _opened(BytesIO(content), source) as sound:
        return LoadedAudio(source, content, _num_samples(sound, source, limits))


def decode_audio(audio: LoadedAudio, limits: AudioLimits) -> np.ndarray:
    """float32 [num_samples] in [-1, 1]: the mean of the channels, resampled once.

    Raises:
        MediaError: the file is corrupt, or shorter than its header says.
    """
    with _opened(BytesIO(audio.content), audio.source) as sound:
        expected, rate = sound.frames, sound.samplerate
        samples = sound.read(dtype="float32", always_2d=True)  # [N, channels]
    if len(samples) != expected:
        raise MediaError(
            f"{audio.source} has {len(samples):,} of the {expected:,} samples that its header names: replace the file "
            "or remove its row"
        )
    if not np.isfinite(samples).all():
        raise MediaError(f"{audio.source} has samples that are no numbers: replace the file or remove its row")
    mono = samples.mean(axis=1)
    if rate != limits.rate:
        mono = resample_poly(mono, limits.rate, rate).astype(np.float32)
    assert len(mono) == audio.num_samples, "resampling gives as many samples as `_num_samples` says"
    return mono


def whole_audio(source: Audio, audio: AudioConfig) -> AudioFile:
    """The sound as the file that it is, decoded once to see that it can be used.

    Raises:
        MediaError: the sound cannot be used.
    """
    with open_bounded(source, audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        content = file.read()
    with _opened(BytesIO(content), source) as sound:
        own = AudioLimits(audio, sound.samplerate, sound.frames)
        loaded = LoadedAudio(source, content, _num_samples(sound, source, own))
        extension = EXTENSIONS[sound.format]
    decode_audio(loaded, own)
    return AudioFile(content, Path(str(source)).name, extension)


def draw_sound(samples: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """A picture of the loudness over time, for reports; `samples` float32 [N]."""
    width, height = size
    edges = np.linspace(0, len(samples), width + 1).astype(int)[:-1]
    peaks = np.maximum.reduceat(np.abs(samples), edges)  # [width]
    rows = np.abs(np.arange(height) - (height - 1) / 2)[:, None]
    return Image.fromarray(np.where(rows <= peaks * height / 2 + 0.5, 60, 255).astype(np.uint8))


def require_soundfile() -> Any:
    """The library that decodes sounds.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # the second where its C library is missing
        raise ValueError(
            "sampler.max_audios_per_prompt asks for sounds, which need soundfile: install mobula[audio], or set it to 0"
        ) from error
    return soundfile


def _num_samples(sound: Any, source: Audio, limits: AudioLimits) -> int:
    seconds = sound.frames / sound.samplerate
    if seconds > limits.audio.max_seconds:
        raise MediaError(
            f"{source} lasts {seconds:,.1f} s, data.audio.max_seconds is {limits.audio.max_seconds:g}: cut the sound "
            "or raise the limit"
        )
    if sound.frames == 0:
        raise MediaError(f"{source} has 0 samples: replace the file or remove its row")
    num_samples = -(-sound.frames * limits.rate // sound.samplerate)  # rounded up, as `resample_poly` does
    if num_samples > limits.max_samples:
        raise MediaError(
            f"{source} lasts {seconds:,.1f} s, and policy.model reads {limits.max_samples / limits.rate:g} s of one "
            "sound: cut the sound into several"
        )
    return num_samples


@contextmanager
def _opened(file: IO[bytes], source: Audio) -> Iterator[Any]:
    soundfile = require_soundfile()
    try:
        with soundfile.SoundFile(file) as sound:
            if sound.format not in FORMATS:
                raise MediaError(f"{source} is a {sound.format} file: convert it to one of {', '.join(FORMATS)}")
            yield sound
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise MediaError(f"{source} is corrupt or no sound ({error}): replace the file or remove its row") from error
