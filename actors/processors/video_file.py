"""Whole video files to be stored: a file as it is, frames as a file that loses nothing of them."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path

from mobula.actors.datasets.videos import FrameList, Video
from mobula.actors.datasets.writers.base import VideoFile
from mobula.actors.processors.image import decode_image, open_bounded, read_image
from mobula.actors.processors.video import VideoLimits, check_video, decode_video, load_video, require_av
from mobula.cluster.errors import MediaError

EXTENSIONS = (".mp4", ".mkv", ".avi", ".mov", ".webm", ".mpeg", ".mpg", ".ogv", ".flv", ".gif")
MAX_DENOMINATOR = 1000  # of a frame rate


def whole_video(video: Video, limits: VideoLimits) -> VideoFile:
    """The video as one file; frames become a lossless FFV1 stream in Matroska, at their own rate.

    Raises:
        MediaError: the video cannot be used.
    """
    decode_video(load_video(video, limits), limits)
    if isinstance(video, FrameList):
        return VideoFile(_encoded(video, limits), f"{Path(str(video)).name}.mkv", "mkv")
    with open_bounded(video, limits.video.max_file_bytes, "data.video.max_file_bytes") as file:
        content = file.read()
    extension = Path(str(video)).suffix.lower()
    return VideoFile(content, Path(str(video)).name, (extension if extension in EXTENSIONS else ".mp4")[1:])


def _encoded(frames: FrameList, limits: VideoLimits) -> bytes:
    av, clip = require_av(), check_video(frames, limits)
    rate = Fraction(frames.frame_rate or limits.video.frame_rate).limit_denominator(MAX_DENOMINATOR)
    written = BytesIO()
    with av.open(written, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "bgr0"
        stream.codec_context.time_base = 1 / rate
        for number, source in enumerate(frames.frames):
            picture = decode_image(read_image(source, limits.frame), source, limits.frame)
            if picture.size != (clip.width, clip.height):
                raise MediaError(f"{frames} has frames of several sizes: make them one size")
            frame = av.VideoFrame.from_image(picture)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return written.getvalue()
