"""Decodes images, videos and sounds within the limits of the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any, Generic, TypeVar

import numpy as np
from PIL import Image

from mobula.actors.datasets.media import Audio, EncodedFile, FrameList, ImageSource, Video, WebFile
from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import FORMATS, to_rgb, upright_size
from mobula.configs.schema.data import AudioConfig, DataConfig, VideoConfig
from mobula.learner.policies.families.base import Clip

S = TypeVar("S")
M = TypeVar("M")


@dataclass(frozen=True)
class LoadedMedium(Generic[S, M]):
    """The bytes of an image, video or sound, not decoded. `measure` determines the number of its tokens."""

    source: S
    measure: M  # (width, height) of an image, the sampled `Clip` of a video, samples of a sound after resampling
    contents: tuple[bytes, ...]  # the file; for a video that is a list of files, the files of the sampled frames
    taken: tuple[int, ...] = ()  # presentation times (PTS) of the sampled frames of a video file, in its time base


def check_image(source: ImageSource, data: DataConfig) -> tuple[int, int]:
    """Returns (width, height) of the upright image from the file's header; for checks of a whole dataset."""
    with _open_file(source, data) as file:
        return _measured(file, source, data)


def read_image(source: ImageSource, data: DataConfig) -> bytes:
    with _open_file(source, data) as file:
        return file.read()


def load_image(source: ImageSource, data: DataConfig) -> LoadedMedium[ImageSource, tuple[int, int]]:
    content = read_image(source, data)
    return LoadedMedium(source, measure_image(content, source, data), (content,))


def measure_image(content: bytes, source: ImageSource, data: DataConfig) -> tuple[int, int]:
    """Returns (width, height) of the upright image from the header in `content`, the bytes of the file `source`."""
    return _measured(BytesIO(content), source, data)


def decode_image(content: bytes, source: object, data: DataConfig) -> Image.Image:
    """Returns the image as RGB: upright by the EXIF orientation, transparency on white, the first of several frames.
    `source` is its name in errors."""
    with _open_image(BytesIO(content), source, data) as image:
        with _refusing_corrupt(source):
            image.load()
            return to_rgb(image)


def _measured(file: IO[bytes], source: ImageSource, data: DataConfig) -> tuple[int, int]:
    with _open_image(file, source, data) as image, _refusing_corrupt(source):
        return upright_size(image)


@contextmanager
def _refusing_corrupt(source: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on damaged files decoders raise errors of any type
        raise MediaError(f"{source} is corrupt ({error}): replace the file or remove its row") from error


def _open_file(source: ImageSource, data: DataConfig) -> AbstractContextManager[IO[bytes]]:
    return open_bounded(source, data.max_image_bytes, "data.max_image_bytes")


@contextmanager
def open_bounded(source: ImageSource, max_bytes: int, key: str) -> Iterator[IO[bytes]]:
    """Checks the file's size and opens it; `key` is the configuration key of `max_bytes`."""
    if isinstance(source, EncodedFile):
        _check_num_bytes(source, len(source.content), max_bytes, key)
        yield BytesIO(source.content)
        return
    path = source.local() if isinstance(source, WebFile) else source
    try:
        if not path.is_file():  # checked first: opening a named pipe would block
            raise MediaError(f"{path} is missing or no regular file: add the file or remove its row")
        with path.open("rb") as file:
            _check_num_bytes(path, os.fstat(file.fileno()).st_size, max_bytes, key)
            yield file
    except OSError as error:
        raise MediaError(f"{path} cannot be read ({error}): make it readable or remove its row") from error


def _check_num_bytes(path: ImageSource, num_bytes: int, max_bytes: int, key: str) -> None:
    if num_bytes == 0:
        raise MediaError(f"{path} is empty: replace the file or remove its row")
    if num_bytes > max_bytes:
        raise MediaError(
            f"{path} has {num_bytes:,} bytes, {key} is {max_bytes:,}: make the file smaller or raise the limit"
        )


def _open_image(file: IO[bytes], source: object, data: DataConfig) -> Image.Image:
    """Reads the header; decodes no pixels."""
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise MediaError(f"{source} is a decompression bomb ({error}): replace the file or remove its row") from error
    except Exception as error:  # on damaged headers Pillow raises errors of any type
        raise MediaError(f"{source} is no {', '.join(FORMATS)} image: replace the file or remove its row") from error
    width, height = image.size
    if not 0 < width * height <= data.max_decoded_pixels:
        raise MediaError(
            f"{source} decodes to {width} x {height} = {width * height:,} pixels, "
            f"data.max_decoded_pixels is {data.max_decoded_pixels:,}: make the image smaller or raise the limit"
        )
    return image


# Playlists are left out: FFmpeg would open the files and web addresses that they name.
VIDEO_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,ogg,flv,asf"
MICROSECONDS = 1_000_000  # unit of a container's duration


Plan = tuple[Clip, tuple[int, ...]]
"""The sampled frames, and their presentation times in a file, or indices into a list of images."""


def check_video(source: Video, data: DataConfig) -> Clip:
    """Returns the frames that would be sampled, from headers and packets alone; for checks of a whole dataset."""
    if isinstance(source, FrameList):
        return _plan_frames(source, data)[0]
    with open_bounded(source, data.video.max_file_bytes, "data.video.max_file_bytes") as file:
        return _plan_file(file, source, data)[0]


def load_video(source: Video, data: DataConfig) -> LoadedMedium[Video, Clip]:
    """Reads the video and plans the frames to sample."""
    if isinstance(source, FrameList):
        clip, taken = _plan_frames(source, data)
        return LoadedMedium(source, clip, tuple(read_image(source.frames[index], data) for index in taken))
    with open_bounded(source, data.video.max_file_bytes, "data.video.max_file_bytes") as file:
        content = file.read()
    clip, taken = _plan_file(BytesIO(content), source, data)
    return LoadedMedium(source, clip, (content,), taken)


def decode_video(video: LoadedMedium[Video, Clip], data: DataConfig) -> np.ndarray:
    """Returns uint8 [T, H, W, 3]: the frames at `video.measure.timestamps`. Rotation metadata is ignored."""
    source = video.source
    if isinstance(source, FrameList):
        images = [np.asarray(decode_image(content, source, data)) for content in video.contents]
        return _stacked(images, source, video.measure)
    wanted, frames = set(video.taken), dict[int, np.ndarray]()
    with _opened_video(BytesIO(video.contents[0]), source) as (container, stream):
        for frame in container.decode(stream):
            if frame.pts in wanted and not frame.is_corrupt:
                frames[frame.pts] = frame.to_ndarray(format="rgb24")
            if len(frames) == len(wanted):
                break
    if len(frames) < len(wanted):
        raise MediaError(
            f"{source} is corrupt ({len(wanted) - len(frames)} of {len(wanted)} frames do not decode): replace the "
            "file or remove its row"
        )
    return _stacked([frames[pts] for pts in video.taken], source, video.measure)


def sampled(times: np.ndarray, duration_s: float, video: VideoConfig) -> np.ndarray:
    """Returns int64 [T]: the indices to sample of the frames at `times`, float64 [N] (seconds, ascending). Samples
    `fps` frames a second, between `min_frames` and `max_frames`, equidistant in time from the first to the last frame;
    each frame at most once."""
    num = min(max(int(duration_s * video.fps), video.min_frames), video.max_frames, len(times))
    targets = np.linspace(times[0], times[-1], num)
    right = np.searchsorted(times, targets).clip(1, len(times) - 1) if len(times) > 1 else np.zeros(num, dtype=int)
    left = (right - 1).clip(0)
    return np.unique(np.where(targets - times[left] <= times[right] - targets, left, right))


def _plan_frames(source: FrameList, data: DataConfig) -> Plan:
    rate = source.frame_rate or data.video.frame_rate
    _check_length(source, len(source.frames) / rate, data)
    _check_number(source, len(source.frames), data)
    times = np.arange(len(source.frames)) / rate
    taken = sampled(times, len(times) / rate, data.video)
    sizes = [check_image(source.frames[index], data) for index in taken]
    if len(set(sizes)) > 1:
        raise MediaError(f"{source} has frames of {len(set(sizes))} sizes, {sizes[0]} first: make them one size")
    (width, height) = sizes[0]
    _check_pixels(source, len(taken), width, height, data)
    return Clip(width, height, tuple(times[taken].tolist()), len(times) / rate), tuple(taken.tolist())


def _plan_file(file: IO[bytes], source: Video, data: DataConfig) -> Plan:
    with _opened_video(file, source) as (container, stream):
        _check_length(source, (container.duration or 0) / MICROSECONDS, data)
        _check_number(source, stream.frames, data)
        presented, num_packets = [], 0
        for packet in container.demux(stream):
            if packet.pts is not None:
                num_packets += 1
                _check_number(source, num_packets, data)
                if not packet.is_discard:  # an edit list hides the frame; other frames are decoded from it
                    presented.append(packet.pts)
        if num_packets < stream.frames:  # 0 if the header has no count
            raise MediaError(
                f"{source} has {num_packets} of the {stream.frames} frames that its header names: replace the file or "
                "remove its row"
            )
        width, height, unit = stream.width, stream.height, stream.time_base
    if not presented or unit is None or width * height == 0:
        raise MediaError(f"{source} has no frames with a size and a time: replace the file or remove its row")
    pts = np.unique(np.array(presented))
    times = (pts - pts[0]) * float(unit)
    duration = float(times[-1]) + (float(np.median(np.diff(times))) if len(times) > 1 else 1 / data.video.frame_rate)
    _check_length(source, duration, data)
    taken = sampled(times, duration, data.video)
    _check_pixels(source, len(taken), width, height, data)
    return Clip(width, height, tuple(times[taken].tolist()), duration), tuple(pts[taken].tolist())


def _stacked(frames: list[np.ndarray], source: Video, clip: Clip) -> np.ndarray:
    """Refuses frames of another size than the header: EXIF rotation swaps width and height."""
    if any(frame.shape != (clip.height, clip.width, 3) for frame in frames):
        raise MediaError(
            f"{source} has frames of another size than {clip.width} x {clip.height}, as its header says: write it again"
        )
    return np.stack(frames)


@contextmanager
def _opened_video(file: IO[bytes], source: Video) -> Iterator[tuple[Any, Any]]:
    av = require_av()
    options = {"format_whitelist": VIDEO_CONTAINERS, "protocol_whitelist": "none"}
    try:
        with av.open(file, options=options, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise MediaError(f"{source} has no video stream: replace the file or remove its row")
            stream = container.streams.video[0]
            # A damaged frame is an error, not a frame with artefacts.
            stream.codec_context.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
            stream.codec_context.thread_count = 1  # the worker pool decodes several files in parallel
            yield container, stream
    except av.FFmpegError as error:
        raise MediaError(f"{source} is corrupt or no video ({error}): replace the file or remove its row") from error


def require_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ValueError(
            "sampler.max_videos_per_prompt asks for videos, which need PyAV: install mobula[video], or set it to 0"
        ) from error
    return av


def _check_length(source: Video, seconds: float, data: DataConfig) -> None:
    if seconds > data.video.max_seconds:
        raise MediaError(
            f"{source} lasts {seconds:,.0f} s, data.video.max_seconds is {data.video.max_seconds:g}: cut the video "
            "or raise the limit"
        )


def _check_number(source: Video, num_frames: int, data: DataConfig) -> None:
    if num_frames > data.video.max_file_frames:
        raise MediaError(
            f"{source} has {num_frames:,} frames or more, data.video.max_file_frames is "
            f"{data.video.max_file_frames:,}: cut the video or raise the limit"
        )


def _check_pixels(source: Video, num_frames: int, width: int, height: int, data: DataConfig) -> None:
    num_pixels = num_frames * width * height
    if num_pixels > data.video.max_decoded_pixels:
        raise MediaError(
            f"{source} decodes to {num_frames} frames of {width} x {height} = {num_pixels:,} pixels, "
            f"data.video.max_decoded_pixels is {data.video.max_decoded_pixels:,}: lower data.video.max_frames or "
            "raise the limit"
        )


# FFmpeg demuxer -> file extension. Playlists are left out: FFmpeg would open the files that they name.
AUDIO_TRACK_EXTENSIONS = {"mov,mp4,m4a,3gp,3g2,mj2": "m4a", "matroska,webm": "mka", "aac": "aac"}
SOUND_CONTAINERS = ",".join(AUDIO_TRACK_EXTENSIONS)
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
SOUND_FORMATS = tuple(AUDIO_EXTENSIONS)  # libsndfile formats that are accepted
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
        with _opened_sound(file, source, limits.audio) as sound:
            return _num_samples(sound, source, limits)


def load_audio(source: Audio, limits: AudioLimits) -> LoadedMedium[Audio, int]:
    with open_bounded(source, limits.audio.max_file_bytes, "data.audio.max_file_bytes") as file:
        content = file.read()
    with _opened_sound(BytesIO(content), source, limits.audio) as sound:
        return LoadedMedium(source, _num_samples(sound, source, limits), (content,))


def decode_audio(audio: LoadedMedium[Audio, int], limits: AudioLimits) -> np.ndarray:
    """Returns float32 [num_samples] in [-1, 1]: the mean of the channels, resampled to `limits.rate`."""
    with _opened_sound(BytesIO(audio.contents[0]), audio.source, limits.audio) as sound:
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
    with _opened_sound(BytesIO(content), source, audio) as sound:
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
def _opened_sound(file: IO[bytes], source: Audio, audio: AudioConfig) -> Iterator[Sound]:
    soundfile = require_soundfile()
    _refuse_cut(file, source)
    unread = (soundfile.SoundFileError, RuntimeError, TypeError)
    try:
        with soundfile.SoundFile(file) as sound:
            kind = sound.format
    except unread:
        kind = ""
    if kind == "" or (kind == "MP3" and not has_count(file)):
        yield Track(file, source, MP3 if kind else SOUND_CONTAINERS, audio.max_seconds)
        return
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            if sound.format not in SOUND_FORMATS:
                raise MediaError(f"{source} is a {sound.format} file: convert it to one of {', '.join(SOUND_FORMATS)}")
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
