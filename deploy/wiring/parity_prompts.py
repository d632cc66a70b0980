"""The prompts on which engine and learner are compared: text, pictures, a video, sounds, and several of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from actors.datasets.audios import encode_wav
from actors.datasets.pictures import EncodedFile
from actors.datasets.rows import Row
from actors.datasets.videos import FrameList
from actors.processors.chat import ChatProcessor
from cluster.records.trajectory import Prompt

SIZES = ((70, 50), (101, 133), (56, 56))  # (width, height), so that no two pictures expand alike
CASES: dict[str, tuple[str, tuple[int, ...]]] = {  # question, and which of the pictures it shows
    "text": ("What is this?", ()),
    "one picture": ("<image>Which digit is this?", (0,)),
    "two pictures": ("<image>Which digit is this? And this? <image>", (1, 0)),
    "several sizes": ("First <image>and <image> What is the sum? <image>!", (0, 1, 2)),
    "same picture twice": ("First <image>and <image> What is the sum?", (0, 0)),
    "picture at the end": ("Which digit is this?<image>", (1,)),
}


VIDEO = "video"  # the case that families with videos have beside those
NUM_FRAMES = 6
FRAME_RATE = 2.0  # as many as are taken: all of them are
SOUND_RATE = 16_000  # samples a second
SOUND_LENGTHS = (13_000, 6_001)  # samples
SOUNDS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {  # question, its pictures, its sounds
    "sound": ("<audio>Which pattern is this?", (), (0,)),
    "two sounds": ("First <audio>and <audio> What is this?", (), (1, 0)),
    "picture and sound": ("<image>and <audio>What is this?", (0,), (0,)),
}
"""The cases of families with sounds; the last one is for those with pictures too."""


@dataclass(frozen=True)
class Case:
    """A prompt, and the pictures, the frames of the video and the sounds in it."""

    prompt: Prompt
    pictures: tuple[Image.Image, ...]
    frames: tuple[Image.Image, ...] = ()
    sounds: tuple[np.ndarray, ...] = ()  # float32 [N] at SOUND_RATE


def cases(processor: ChatProcessor, folder: Path, most: int = len(SIZES)) -> dict[str, Case]:
    """Those that the processor's family takes, with `most` pictures at most; pictures are written to `folder`."""
    paths = [_picture(folder / f"picture{n}.png", n, size) for n, size in enumerate(SIZES)]
    found = {}
    for number, (name, (question, shown)) in enumerate(CASES.items()):
        if len(shown) > (most if processor.takes_pictures else 0):
            continue
        row = Row(f"case{number}", question, "7", "7", tuple(paths[i] for i in shown))
        pictures = tuple(Image.open(paths[i]).convert("RGB") for i in shown)
        found[name] = Case(processor.prepare(row, f"0/{row.sample_id}"), pictures)
    if processor.takes_videos:
        found[VIDEO] = _video_case(processor, folder)
    if processor.takes_audios:
        found |= _sound_cases(processor, paths)
    return found


def _sound_cases(processor: ChatProcessor, paths: Sequence[Path]) -> dict[str, Case]:
    samples = [_tones(length, seed) for seed, length in enumerate(SOUND_LENGTHS)]
    files = [EncodedFile(encode_wav(one, SOUND_RATE), f"sound {n}") for n, one in enumerate(samples)]
    found = {}
    for name, (question, shown, played) in SOUNDS.items():
        if shown and not processor.takes_pictures:
            continue
        audios = tuple(files[i] for i in played)
        row = Row(f"case-{name}", question, "7", "7", tuple(paths[i] for i in shown), audios=audios)
        pictures = tuple(Image.open(paths[i]).convert("RGB") for i in shown)
        sounds = tuple(samples[i] for i in played)
        found[name] = Case(processor.prepare(row, f"0/{row.sample_id}"), pictures, sounds=sounds)
    return found


def _tones(length: int, seed: int) -> np.ndarray:
    """float32 [length]: three tones and noise."""
    random, times = np.random.default_rng(seed), np.arange(length) / SOUND_RATE
    pitches = random.uniform(200, 3000, 3)
    return (np.sin(2 * np.pi * pitches[:, None] * times).mean(0) + random.normal(0, 0.05, length)).astype(np.float32)


def _video_case(processor: ChatProcessor, folder: Path) -> Case:
    frames = tuple(_picture(folder / f"frame{n}.png", len(SIZES) + n, SIZES[0]) for n in range(NUM_FRAMES))
    video = FrameList(frames, FRAME_RATE, "frames")
    row = Row("case-video", "<video>Which digit is shown longest?", "7", "7", videos=(video,))
    shown = tuple(Image.open(frame).convert("RGB") for frame in frames)
    return Case(processor.prepare(row, f"0/{row.sample_id}"), (), shown)


def _picture(path: Path, seed: int, size: tuple[int, int]) -> Path:
    """Smooth noise as a file."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    return path
