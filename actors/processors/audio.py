"""Sounds of a prompt: tracks, features and placeholders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any

import numpy as np
from PIL import Image

from mobula.actors.datasets.clips import Audio
from mobula.actors.processors.image import LoadedMedium, open_bounded
from mobula.cluster.errors import MediaError
from mobula.configs.schema.data import AudioConfig

# FFmpeg demuxer -> file extension. Playlists are left out: FFmpeg would open the files that they name.
AUDIO_TRACK_EXTENSIONS = {"mov,mp4,m4a,3gp,3g2,mj2": "m4a", "matroska,webm": "mka", "aac": "aac"}
CONTAINERS = ",".join(AUDIO_TRACK_EXTENSIONS)
MP3 = "mp3"
NUM_HEAD = 2048  # bytes of an MP3 file that hold the header of its first frame


class Track:
    """The first audio track of a file. The length is counted by decoding: headers lack it, or have an estimate."""

    def __init__(self, file: IO[bytes], source: Audio, containers: str, max_seconds: float) -> None:
        """`containers` are FFmpeg's names of the accepted formats."""
        try:
            import av
        except ImportError as error:
            raise MediaError(
                f"{source} is no sound that soundfile reads; others need PyAV ({error}): install mobula[audio]"
            ) from error
        self._av = av
        self._file = file
        self._source = source
        self._containers = containers
        self._max_seconds = max_seconds
        self._frames: int | None = None
        self._rate = 0
        self.extension = MP3

    @property
    def frames(self) -> int:
        """Samples of each channel. Decodes the sound on first use; the samples are not kept."""
        if self._frames is None:
            self._frames = sum(len(block) for block in self._blocks())
        return self._frames

    @property
    def rate(self) -> int:
        """Samples a second."""
        return self._rate if self.frames else 1

    def read(self) -> np.ndarray:
        """float32 [frames, channels]."""
        blocks = list(self._blocks())
        self._frames = sum(map(len, blocks))
        return np.concatenate(blocks) if blocks else np.zeros((0, 1), dtype=np.float32)

    def _blocks(self) -> Iterator[np.ndarray]:
        """float32 [N, channels] each."""
        self._file.seek(0)
        options = {"format_whitelist": self._containers, "protocol_whitelist": "none"}
        try:
            with self._av.open(self._file, options=options, metadata_errors="ignore") as container:
                if not container.streams.audio:
                    raise MediaError(f"{self._source} has no sound: replace the file or remove its row")
                self.extension = AUDIO_TRACK_EXTENSIONS.get(container.format.name, MP3)
                yield from self._decoded(container, container.streams.audio[0])
        except (self._av.FFmpegError, ValueError) as error:
            raise MediaError(
                f"{self._source} is corrupt or no sound ({error}): replace the file or remove its row"
            ) from error

    def _decoded(self, container: Any, stream: Any) -> Iterator[np.ndarray]:
        stream.codec_context.thread_count = 1  # the worker pool decodes several files in parallel
        to_float = self._av.AudioResampler(format="fltp")
        num_packets, num_samples, first = 0, 0, None
        for packet in container.demux(stream):
            num_packets += packet.size > 0
            for frame in packet.decode():
                first = first or (frame.sample_rate, frame.layout.name)
                if (frame.sample_rate, frame.layout.name) != first:
                    raise ValueError("its rate or its channels change")
                self._rate = frame.sample_rate
                for floats in to_float.resample(frame):
                    block = floats.to_ndarray().T  # [N, channels]
                    num_samples += len(block)
                    if num_samples > self._max_seconds * self._rate:
                        raise MediaError(
                            f"{self._source} lasts longer than data.audio.max_seconds={self._max_seconds:g}: cut the "
                            "sound or raise the limit"
                        )
                    yield block
        if num_packets < stream.frames:  # 0 if the header has no count
            raise MediaError(
                f"{self._source} has {num_packets:,} of the {stream.frames:,} packets that its header names: replace "
                "the file or remove its row"
            )


def has_count(file: IO[bytes]) -> bool:
    """Whether the header of an MP3 file has the number of frames. Without it, libsndfile estimates the length."""
    file.seek(0)
    head = file.read(10)
    tag = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=False))  # length of ID3
    file.seek(10 + tag if head[:3] == b"ID3" else 0)
    first = file.read(NUM_HEAD)
    file.seek(0)
    for mark in (b"Xing", b"Info"):
        start = first.find(mark)
        if start >= 0 and first[start + 7 : start + 8] and first[start + 7] & 1:
            return True
    return b"VBRI" in first


AUDIO_EXTENSIONS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg", "AIFF": "aiff"}
FORMATS = tuple(AUDIO_EXTENSIONS)  # libsndfile formats that are accepted
UNKNOWN_SIZE = 0x7FFF0000  # a WAV file written into a pipe has this size or more in the header


@dataclass(frozen=True)
class AudioLimits:
    """Limits of an audio clip, and the sampling rate that it is resampled to."""

    audio: AudioConfig
    rate: int  # samples a second of the model's input
    max_samples: int  # longest input of the model, at `rate`


@dataclass(frozen=True)
class FileSound:
    """A sound that soundfile reads, as `Track`; `file` is a `soundfile.SoundFile`."""

    file: Any

    @property
    def frames(self) -> int:
        return self.file.frames

    @property
    def rate(self) -> int:
        return self.file.samplerate

    @property
    def extension(self) -> str:
        return AUDIO_EXTENSIONS[self.file.format]

    def read(self) -> np.ndarray:
        return self.file.read(dtype="float32", always_2d=True)


Sound = FileSound | Track


def check_audio(source: Audio, limits: AudioLimits) -> int:
    """Returns the number of samples after resampling; for checks of a whole dataset. Reads the header alone. Files
    without a length in the header are decoded (`audio_track`)."""
    with open_bounded(source, limits.audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        with _opened(file, source, limits.audio) as sound:
            return _num_samples(sound, source, limits)


def load_audio(source: Audio, limits: AudioLimits) -> LoadedMedium[Audio, int]:
    with open_bounded(source, limits.audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        content = file.read()
    with _opened(BytesIO(content), source, limits.audio) as sound:
        return LoadedMedium(source, _num_samples(sound, source, limits), (content,))


def decode_audio(audio: LoadedMedium[Audio, int], limits: AudioLimits) -> np.ndarray:
    """Returns float32 [num_samples] in [-1, 1]: the mean of the channels, resampled to `limits.rate`."""
    with _opened(BytesIO(audio.contents[0]), audio.source, limits.audio) as sound:
        samples = sound.read()  # [N, channels]
        expected, rate = sound.frames, sound.rate
    if len(samples) != expected:
        raise MediaError(
            f"{audio.source} has {len(samples):,} of the {expected:,} samples that its header names: replace the file "
            "or remove its row"
        )
    if not np.isfinite(samples).all():
        raise MediaError(f"{audio.source} has samples that are no numbers: replace the file or remove its row")
    mono = samples.mean(axis=1)
    if rate != limits.rate:
        from scipy.signal import resample_poly  # slow import, not needed at the model's own rate

        mono = resample_poly(mono, limits.rate, rate).astype(np.float32)
    assert len(mono) == audio.measure, "`_num_samples` predicts the length after resampling"
    return mono


def whole_audio(source: Audio, audio: AudioConfig) -> tuple[bytes, str]:
    """Returns the content and extension of a sound file. Decodes the sound once as a check."""
    with open_bounded(source, audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        content = file.read()
    with _opened(BytesIO(content), source, audio) as sound:
        limits = AudioLimits(audio, sound.rate, sound.frames)
        loaded = LoadedMedium(source, _num_samples(sound, source, limits), (content,))
        extension = sound.extension
    decode_audio(loaded, limits)
    return content, extension


def draw_sound(samples: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Draws the loudness of `samples`, float32 [N], over time; for reports."""
    width, height = size
    edges = np.linspace(0, len(samples), width + 1).astype(int)[:-1]
    peaks = np.maximum.reduceat(np.abs(samples), edges)  # [width]
    rows = np.abs(np.arange(height) - (height - 1) / 2)[:, None]
    return Image.fromarray(np.where(rows <= peaks * height / 2 + 0.5, 60, 255).astype(np.uint8))


def require_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise ValueError(
            "sampler.max_audios_per_prompt asks for sounds, which need soundfile: install mobula[audio], or set it to 0"
        ) from error
    return soundfile


def _num_samples(sound: Sound, source: Audio, limits: AudioLimits) -> int:
    seconds = sound.frames / sound.rate
    if seconds > limits.audio.max_seconds:
        raise MediaError(
            f"{source} lasts {seconds:,.1f} s, data.audio.max_seconds is {limits.audio.max_seconds:g}: cut the sound "
            "or raise the limit"
        )
    if sound.frames == 0:
        raise MediaError(f"{source} has 0 samples: replace the file or remove its row")
    num_samples = -(-sound.frames * limits.rate // sound.rate)  # rounded up, as `resample_poly` does
    if num_samples > limits.max_samples:
        raise MediaError(
            f"{source} lasts {seconds:,.1f} s, and policy.model reads {limits.max_samples / limits.rate:g} s of one "
            "sound: cut the sound into several"
        )
    return num_samples


@contextmanager
def _opened(file: IO[bytes], source: Audio, audio: AudioConfig) -> Iterator[Sound]:
    soundfile = require_soundfile()
    _refuse_cut(file, source)
    unread = (soundfile.SoundFileError, RuntimeError, TypeError)
    try:
        with soundfile.SoundFile(file) as sound:
            kind = sound.format
    except unread:
        kind = ""
    if kind == "" or (kind == "MP3" and not has_count(file)):
        yield Track(file, source, MP3 if kind else CONTAINERS, audio.max_seconds)
        return
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            if sound.format not in FORMATS:
                raise MediaError(f"{source} is a {sound.format} file: convert it to one of {', '.join(FORMATS)}")
            yield FileSound(sound)
    except unread as error:
        raise MediaError(f"{source} is corrupt or no sound ({error}): replace the file or remove its row") from error


def _refuse_cut(file: IO[bytes], source: Audio) -> None:
    """Refuses a WAV or AIFF file that was cut off: libsndfile would read the samples that are left without an error."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    form, chunk = file.read(12), b""
    order = {b"RIFF": "little", b"RIFX": "big", b"FORM": "big"}.get(form[:4])
    start, size = 12, 0
    while order is not None and chunk not in (b"data", b"SSND") and start + 8 <= end:
        file.seek(start)
        chunk, size = file.read(4), int.from_bytes(file.read(4), "big" if order == "big" else "little")
        start += 8 + size + size % 2
    file.seek(0)
    present = end - (start - size - size % 2)
    if chunk in (b"data", b"SSND") and present < size < UNKNOWN_SIZE:
        raise MediaError(
            f"{source} has {present:,} of the {size:,} bytes of samples that its header names: replace the file or "
            "remove its row"
        )
