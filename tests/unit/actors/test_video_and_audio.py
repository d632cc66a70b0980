"""Videos and sounds: frames and samples of files, folders, lists and arrays; what is refused is refused unread."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from clips import noise_frames, write_clip

from mobula.actors.datasets.media import Audio, AudioInputs, EncodedFile, FrameList, ImageError, encode_wav
from mobula.actors.processors.media import (
    AudioLimits,
    check_audio,
    check_video,
    decode_audio,
    decode_video,
    draw_sound,
    load_audio,
    load_video,
    sampled,
    whole_audio,
)
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


RATE = 16_000


@cache
def audio_limits(*words: str) -> AudioLimits:
    return AudioLimits(load_config(["experiment=digits", *words]).data.audio, RATE, 30 * RATE)


def heard(source: Audio) -> np.ndarray:
    return decode_audio(load_audio(source, audio_limits()), audio_limits())


def sine(length: int, rate: int, pitch: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(length) / rate)).astype(np.float32)


def written(path: Path, length: int, rate: int, channels: int = 1) -> Path:
    soundfile.write(path, np.stack([sine(length, rate)] * channels, axis=1), rate)
    return path


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (8_000, 2), (44_100, 1)])
def test_the_length_from_the_header_is_that_of_the_samples(
    tmp_path: Path, suffix: str, rate: int, channels: int
) -> None:
    file = written(tmp_path / f"a.{suffix}", 5_001, rate, channels)
    loaded = load_audio(file, audio_limits())
    samples = decode_audio(loaded, audio_limits())
    assert len(samples) == loaded.measure == check_audio(file, audio_limits())
    if suffix in ("wav", "flac"):  # the others cut sounds into blocks
        assert len(samples) == -(-5_001 * RATE // rate)
    expected = sine(len(samples), RATE)
    middle = slice(200, len(samples) - 200)
    if suffix in ("wav", "flac"):
        assert np.abs(samples - expected)[middle].max() < 0.01
    assert samples.dtype == np.float32


def add_image(container: av.container.OutputContainer) -> None:
    shown = container.add_stream("mpeg4", rate=4)
    shown.width, shown.height, shown.pix_fmt = 16, 16, "yuv420p"
    frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), dtype=np.uint8), format="rgb24")
    container.mux([*shown.encode(frame), *shown.encode()])


def encoded(path: Path, codec: str, length: int, *, with_image: bool = False, **options: str) -> Path:
    """The sine in any format of FFmpeg."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=44_100, layout="mono")
        if with_image:
            add_image(container)
        fifo = av.AudioFifo()
        frame = av.AudioFrame.from_ndarray(sine(length, 44_100)[None], format="fltp", layout="mono")
        frame.sample_rate = 44_100
        fifo.write(frame)
        while block := fifo.read(stream.codec_context.frame_size or 1152, partial=True):
            container.mux(stream.encode(block))
        container.mux(stream.encode())
    return path


def test_an_mp3_file_without_a_count_is_as_long_as_it_decodes(tmp_path: Path) -> None:
    counted = encoded(tmp_path / "a.mp3", "libmp3lame", 88_200)
    assert check_audio(counted, audio_limits()) == 2 * RATE
    file = encoded(tmp_path / "b.mp3", "libmp3lame", 88_200, write_xing="0")
    loaded = load_audio(file, audio_limits())
    samples = decode_audio(loaded, audio_limits())
    assert len(samples) == loaded.measure == check_audio(file, audio_limits())
    assert 0 <= len(samples) - 2 * RATE < 3 * 1152  # a few blocks of silence at its ends
    for path in (counted, file):
        with pytest.raises(MediaError, match=r"data\.audio\.max_seconds"):
            check_audio(path, audio_limits("data.audio.max_seconds=1"))
    cut = EncodedFile(counted.read_bytes()[:10_000], "cut.mp3")
    with pytest.raises(MediaError, match="of the 88,200 samples"):
        heard(cut)


@pytest.mark.parametrize(
    ("name", "codec", "with_image"),
    [("a.m4a", "aac", False), ("a.aac", "aac", False), ("a.mp4", "aac", True), ("a.mkv", "aac", True)],
)
def test_sounds_that_libsndfile_does_not_read_are_read_by_ffmpeg(
    tmp_path: Path, name: str, codec: str, with_image: bool
) -> None:
    options = {"movflags": "faststart"} if name.endswith(("m4a", "mp4")) else {}
    file = encoded(tmp_path / name, codec, 88_200, with_image=with_image, **options)
    loaded = load_audio(file, audio_limits())
    samples = decode_audio(loaded, audio_limits())
    assert len(samples) == loaded.measure == check_audio(file, audio_limits())
    assert abs(len(samples) - 2 * RATE) < 2_100
    pitches = np.abs(np.fft.rfft(samples[:RATE]))
    assert abs(int(pitches.argmax()) - 440) <= 1, "the tone of `sine`, in Hz"
    content, extension = whole_audio(file, audio_limits().audio)
    assert content == file.read_bytes()
    assert extension == {"mp4": "m4a", "mkv": "mka"}.get(name[2:], name[2:])
    if options:
        cut = EncodedFile(content[: len(content) // 2], "cut.m4a")
        with pytest.raises(MediaError, match="is corrupt|packets that its header names"):
            check_audio(cut, audio_limits())


def test_a_video_without_sound_is_none(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        add_image(container)
    with pytest.raises(MediaError, match="has no sound"):
        check_audio(tmp_path / "a.mp4", audio_limits())


@pytest.mark.parametrize("suffix", ["wav", "aiff"])
def test_a_cut_file_whose_header_has_more_samples_is_refused_unread(tmp_path: Path, suffix: str) -> None:
    content = written(tmp_path / f"a.{suffix}", 16_000, RATE).read_bytes()
    for share in (0.5, 0.9):
        cut = EncodedFile(content[: int(share * len(content))], f"cut.{suffix}")
        for read in (check_audio, load_audio):
            with pytest.raises(MediaError, match=r"cut\..* of the 32,0.. bytes of samples that its header names"):
                read(cut, audio_limits())


def test_a_wav_file_that_was_written_into_a_pipe_names_no_size_and_is_read(tmp_path: Path) -> None:
    content = bytearray(written(tmp_path / "a.wav", 100, RATE).read_bytes())
    for start in (4, content.index(b"data") + 4):
        content[start : start + 4] = b"\xff" * 4
    assert check_audio(EncodedFile(bytes(content), "a.wav"), audio_limits()) == 100


def test_samples_come_in_pairs_nested_lists_tensors_and_numbers_of_numpy(tmp_path: Path) -> None:
    written(tmp_path / "a.wav", 100, RATE)
    inputs = AudioInputs(tmp_path, None, takes_absolute=False)
    samples = sine(100, RATE)
    tensor = torch.tensor(samples).bfloat16().requires_grad_()
    stereo = np.stack([samples, samples])  # [channels, N], as torchaudio has it
    content = (tmp_path / "a.wav").read_bytes()
    cases: list[tuple[object, int]] = [
        ((samples, RATE), 1),
        ([(samples, np.int64(RATE)), (samples, float(RATE))], 2),
        ([["a.wav"], ["a.wav", (samples, RATE)]], 3),
        (["a.wav", {"path": "a.wav"}, {"bytes": content}], 3),
        ({"array": samples, "sampling_rate": np.int32(RATE)}, 1),
        ({"array": tensor, "sampling_rate": torch.tensor(RATE)}, 1),
        ({"array": stereo, "sampling_rate": RATE}, 1),
        ({"array": torch.tensor(samples)[None], "sampling_rate": RATE}, 1),
    ]
    for value, num in cases:
        found = inputs.resolve(value, "row")
        assert [check_audio(one, audio_limits()) for one in found] == [100] * num
        np.testing.assert_allclose(heard(found[-1]), samples, atol=2e-3)


def test_samples_of_another_rate_and_of_whole_numbers_are_sounds(tmp_path: Path) -> None:
    array = {"array": sine(100, 8_000), "sampling_rate": 8_000}
    [found] = AudioInputs(tmp_path, None, takes_absolute=False).resolve(array, "row")
    assert check_audio(found, audio_limits()) == 200
    np.testing.assert_array_equal(heard(EncodedFile(encode_wav(sine(64, RATE), RATE), "x")), sine(64, RATE))
    whole = EncodedFile(encode_wav(np.array([16_384, -32_768], dtype=np.int16), RATE), "x")
    assert heard(whole).tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("../a.wav", "leads out of the data folder"),
        ("b.wav", "there is no file"),
        (np.zeros(4), "samples without a rate"),
        ({"array": np.zeros(4)}, "`sampling_rate` is None"),
        ({"array": np.zeros((2, 2, 2)), "sampling_rate": 8_000}, "is no sound"),
        ({"array": np.zeros((64, 64)), "sampling_rate": 8_000}, "is no sound"),
        ({"array": torch.zeros(4, device="meta"), "sampling_rate": 8_000}, "no values that can be read"),
        ((np.zeros(4), "fast"), "samples without a rate"),
        ({"array": np.zeros(4), "sampling_rate": float("nan")}, "`sampling_rate` is nan"),
    ],
)
def test_what_is_no_sound_is_named(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        AudioInputs(tmp_path, None, takes_absolute=False).resolve(value, "row")


def test_bad_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "noise.wav").write_bytes(bytes(range(256)) * 8)
    soundfile.write(tmp_path / "none.wav", np.zeros((0, 1)), RATE)
    written(tmp_path / "long.wav", 2 * RATE, RATE)
    for name, words, message in (
        ("empty.wav", (), "is empty"),
        ("noise.wav", (), "is corrupt or no sound"),
        ("none.wav", (), "has 0 samples"),
        ("long.wav", ("data.audio.max_seconds=1",), "lasts 2.0 s, data.audio.max_seconds is 1"),
        ("long.wav", ("data.audio.max_file_bytes=100",), "data.audio.max_file_bytes is 100"),
        ("missing.wav", (), "is missing"),
    ):
        for read in (check_audio, load_audio):
            with pytest.raises(MediaError, match=message):
                read(tmp_path / name, audio_limits(*words))
    with pytest.raises(MediaError, match="policy.model reads 1 s of one sound"):
        check_audio(tmp_path / "long.wav", replace(audio_limits(), max_samples=RATE))


def test_a_sound_that_is_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path / "a.flac", 20_000, RATE).read_bytes()
    cut = EncodedFile(content[: len(content) // 2], "cut.flac")
    with pytest.raises(MediaError, match=r"cut\.flac (has .* of the 20,000 samples|is corrupt)"):
        heard(cut)


def test_samples_that_are_no_numbers_are_refused() -> None:
    broken = EncodedFile(encode_wav(np.array([0.0, np.nan], dtype=np.float32), RATE), "nan.wav")
    with pytest.raises(MediaError, match="samples that are no numbers"):
        heard(broken)


def test_a_drawing_has_the_size_that_was_asked() -> None:
    assert draw_sound(sine(50, RATE), (128, 64)).size == (128, 64)
    assert draw_sound(sine(5_000, RATE), (128, 64)).size == (128, 64)
