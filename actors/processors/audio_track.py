"""Decodes with FFmpeg where libsndfile cannot: AAC, audio tracks of MP4 and Matroska files, MP3 without a count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from mobula.actors.datasets.audios import Audio
from mobula.cluster.errors import MediaError

# FFmpeg demuxer -> file extension. Playlists are left out: FFmpeg would open the files that they name.
EXTENSIONS = {"mov,mp4,m4a,3gp,3g2,mj2": "m4a", "matroska,webm": "mka", "aac": "aac"}
CONTAINERS = ",".join(EXTENSIONS)
MP3 = "mp3"
NUM_HEAD = 2048  # bytes of an MP3 file that hold the header of its first frame


class Track:
    """The first audio track of a file. The length is counted by decoding: headers lack it, or have an estimate."""

    def __init__(self, file: IO[bytes], source: Audio, containers: str, max_seconds: float) -> None:
        """`containers` are FFmpeg's names of the accepted formats.

        Raises:
            MediaError: PyAV is not installed.
        """
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
        """float32 [frames, channels].

        Raises:
            MediaError: the file is corrupt, has fewer packets than the header names, or is longer than `max_seconds`.
        """
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
                self.extension = EXTENSIONS.get(container.format.name, MP3)
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
