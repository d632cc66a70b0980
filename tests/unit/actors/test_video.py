"""Videos: frames and times of files, folders, lists and arrays, how frames are taken, and what is refused unread."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from clips import noise_frames, write_clip

from mobula.actors.datasets.media import FrameList
from mobula.actors.processors.media import check_video, decode_video, load_video, sampled
from mobula.cluster.errors import MediaError
from mobula.configs.load import load_config
from mobula.configs.schema import DataConfig

FRAMES = noise_frames(8, (48, 32))


@cache
def limits(*words: str) -> DataConfig:
    return load_config(["experiment=digits", *words]).data


def test_a_file_gives_the_frames_at_their_times(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mkv", FRAMES, rate=4)
    found = load_video(clip, limits())
    assert found.measure == check_video(clip, limits())
    assert (found.measure.width, found.measure.height, found.measure.duration_s) == (48, 32, 2.0)
    expected = np.linspace(0, 7, 4).round().astype(int)  # 2 s at 2 frames a second
    assert found.measure.timestamps == tuple((expected / 4).tolist())
    assert np.array_equal(decode_video(found, limits()), np.stack([np.asarray(FRAMES[i]) for i in expected]))


def test_frames_of_compressed_files_with_reordered_packets_are_the_same_places(tmp_path: Path) -> None:
    shades = [frame.point(lambda _, level=30 * n: level) for n, frame in enumerate(FRAMES)]
    clip = write_clip(tmp_path / "clip.mp4", shades, rate=4, codec="mpeg4")
    found = decode_video(load_video(clip, limits("data.video.fps=4")), limits())
    assert found.shape == (8, 32, 48, 3)
    assert np.abs(found.mean(axis=(1, 2, 3)) - 30 * np.arange(8)).max() < 6


def test_a_trimmed_file_shows_what_its_edit_list_leaves(tmp_path: Path) -> None:
    """Its first frames have negative times: they are needed to decode the others, and are not shown."""
    shades = [np.full((32, 48, 3), 20 * n, dtype=np.uint8) for n in range(12)]
    clip = tmp_path / "clip.mp4"
    with av.open(str(clip), "w", options={"avoid_negative_ts": "disabled"}) as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        frames = [av.VideoFrame.from_ndarray(shade, format="rgb24") for shade in shades]
        for packet in [packet for frame in (*frames, None) for packet in stream.encode(frame)]:
            cut = int(0.75 / packet.time_base)
            packet.pts, packet.dts = packet.pts - cut, packet.dts - cut
            container.mux(packet)
    found = load_video(clip, limits("data.video.fps=4"))
    assert found.measure == check_video(clip, limits("data.video.fps=4"))
    assert found.measure.timestamps == tuple((np.arange(9) / 4).tolist())
    shown = decode_video(found, limits("data.video.fps=4")).mean(axis=(1, 2, 3))
    assert np.abs(shown - 20 * np.arange(3, 12)).max() < 6


def test_a_folder_a_list_and_a_moving_gif_are_videos(tmp_path: Path) -> None:
    for number, frame in enumerate(FRAMES):
        frame.save(tmp_path / f"{number}.png")
    listed = FrameList(tuple(sorted(tmp_path.glob("*.png"))), 4.0, "frames")
    found = load_video(listed, limits())
    assert found.measure.timestamps == (0.0, 0.5, 1.25, 1.75)
    assert np.array_equal(decode_video(found, limits())[1], np.asarray(FRAMES[2]))
    FRAMES[0].save(tmp_path / "a.gif", save_all=True, append_images=FRAMES[1:], duration=250, loop=0)
    gif = load_video(tmp_path / "a.gif", limits())
    assert (len(gif.measure.timestamps), gif.measure.duration_s) == (4, 2.0)
    assert decode_video(gif, limits()).shape == (4, 32, 48, 3)


@pytest.mark.parametrize(
    ("num", "rate", "words", "expected"),
    [
        (100, 25, [], 8),  # 4 s, 2 a second
        (100, 25, ["data.video.max_frames=3"], 3),
        (100, 100, [], 4),  # a short one gives min_frames, ...
        (3, 100, [], 3),  # ... but no frame twice
        (1, 1, [], 1),
    ],
)
def test_frames_are_taken_by_rate_within_bounds(num: int, rate: float, words: list[str], expected: int) -> None:
    times = np.arange(num) / rate
    found = sampled(times, num / rate, limits(*words).video)
    assert len(found) == expected == len(set(found.tolist()))
    assert found[0] == 0 and (len(found) == 1 or found[-1] == num - 1)


def test_frames_of_uneven_times_are_taken_at_equal_distances_in_time() -> None:
    times = np.array([0.0, 0.1, 0.2, 0.3, 3.0, 6.0])
    assert sampled(times, 6.1, limits("data.video.fps=0.5", "data.video.min_frames=1").video).tolist() == [0, 4, 5]


def test_what_cannot_be_used_is_one_named_error(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mkv", FRAMES, rate=4)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nclip.mkv\n#EXT-X-ENDLIST\n")
    long = write_clip(tmp_path / "long.mkv", FRAMES[:2], rate=4)
    content = bytearray(long.read_bytes())
    place = content.index(b"\x44\x89\x88") + 3  # Matroska's duration, a float of 8 bytes, in milliseconds
    content[place : place + 8] = np.array(10 * 3600 * 1000, dtype=">f8").tobytes()
    long.write_bytes(content)
    cases = {
        tmp_path / "none.mp4": ("missing", []),
        tmp_path / "empty.mp4": ("is empty", []),
        tmp_path / "text.mp4": ("corrupt or no video", []),
        tmp_path / "list.m3u8": ("corrupt or no video", []),
        long: ("lasts 36,000 s, data.video.max_seconds is 3600", []),
        clip: ("8 frames or more|6 frames or more, data.video.max_file_frames is 5", ["data.video.max_file_frames=5"]),
    }
    for path, (message, words) in cases.items():
        for read in (check_video, load_video):
            with pytest.raises(MediaError, match=message):
                read(path, limits(*words))
    for words, message in (
        (["data.video.max_file_bytes=100"], "data.video.max_file_bytes is 100"),
        (["data.video.max_decoded_pixels=1000"], "data.video.max_decoded_pixels is 1,000"),
    ):
        with pytest.raises(MediaError, match=message):
            load_video(clip, limits(*words))
    mixed = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, frame in zip(mixed, (FRAMES[0], FRAMES[1].resize((10, 10))), strict=True):
        frame.save(path)
    with pytest.raises(MediaError, match="frames of 2 sizes"):
        check_video(FrameList(tuple(mixed), 2.0, "mixed"), limits())


def test_damaged_frames_and_cut_files_are_refused(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mkv", FRAMES, rate=4, codec="mpeg4")
    content = bytearray(clip.read_bytes())
    with av.open(str(clip)) as container:
        packet = bytes([packet for packet in container.demux() if packet.size][3])
    start, num = content.index(packet) + len(packet) // 3, len(packet) // 6
    content[start : start + num] = b"\xff" * num
    clip.write_bytes(content)
    with pytest.raises(MediaError, match="corrupt"):
        decode_video(load_video(clip, limits("data.video.fps=4")), limits())
    short = write_clip(tmp_path / "short.mp4", FRAMES, rate=4, codec="mpeg4", movflags="faststart")
    short.write_bytes(short.read_bytes()[:-400])
    with pytest.raises(MediaError, match="of the 8 frames that its header names"):
        check_video(short, limits())
