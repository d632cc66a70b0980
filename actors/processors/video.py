"""Decodes videos to frames and timestamps. Size, length and number of frames are checked before decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any

import numpy as np

from mobula.actors.datasets.clips import FrameList, Video
from mobula.actors.processors.image import LoadedMedium, check_image, decode_image, open_bounded, read_image
from mobula.cluster.errors import MediaError
from mobula.configs.schema.data import DataConfig, VideoConfig
from mobula.learner.policies.families.base import Clip

# Playlists are left out: FFmpeg would open the files and web addresses that they name.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,ogg,flv,asf"
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
    with _opened(BytesIO(video.contents[0]), source) as (container, stream):
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
    with _opened(file, source) as (container, stream):
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
def _opened(file: IO[bytes], source: Video) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    av = require_av()
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
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
