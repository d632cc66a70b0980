"""Parity of engine and learner, and the prompts that measure it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from mobula.actors.datasets.media import EncodedFile, FrameList, encode_wav
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import CanaryError
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.interfaces import Receiver, Sender
from mobula.cluster.weight_sync.tolerance import Gap, MeasuredRounding, Rounding, Tolerance
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import family_at, model_type_at

_logger = logging.getLogger(__name__)

IMAGES_FOLDER = "parity"  # in the run folder
MAX_IMAGES = 2  # of a prompt of the gate
SIZES = ((70, 50), (101, 133), (56, 56))  # (width, height); no two images expand alike

CASES: dict[str, tuple[str, tuple[int, ...]]] = {  # question, indices of its images
    "text": ("What is this?", ()),
    "one image": ("<image>Which digit is this?", (0,)),
    "two images": ("<image>Which digit is this? And this? <image>", (1, 0)),
    "several sizes": ("First <image>and <image> What is the sum? <image>!", (0, 1, 2)),
    "same image twice": ("First <image>and <image> What is the sum?", (0, 0)),
    "image at the end": ("Which digit is this?<image>", (1,)),
}

VIDEO, SEVERAL_VIDEOS = "video", "several videos"
NUM_FRAMES = (6, 3)  # of each video
FRAME_RATE = 2.0  # equals the sampling rate, so that every frame is used

# Of families with videos; those with images are for prompts that may have some: question, its images, its videos.
VIDEOS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    VIDEO: ("<video>Which digit is shown longest?", (), (0,)),
    "image and video": ("<image><video>Which of these?", (1,), (0,)),
    SEVERAL_VIDEOS: ("<video>And then:\n<video>And again:\n<video>", (), (1, 0, 1)),
}

MOST_VIDEOS = max(len(shown) for _, _, shown in VIDEOS.values())  # of a prompt
SOUND_RATE = 16_000  # samples a second
SOUND_LENGTHS = (13_000, 6_001)  # samples

# Of families with sounds; the last one is for those with images too: question, its images, its sounds.
SOUNDS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "sound": ("<audio>Which pattern is this?", (), (0,)),
    "two sounds": ("First <audio>and <audio> What is this?", (), (1, 0)),
    "image and sound": ("<image>and <audio>What is this?", (0,), (0,)),
}


@dataclass(frozen=True)
class Case:
    prompt: Prompt
    images: tuple[Image.Image, ...]
    videos: tuple[tuple[Image.Image, ...], ...] = ()
    sounds: tuple[np.ndarray, ...] = ()  # float32 [N] at SOUND_RATE


def cases(processor: ChatProcessor, folder: Path, most: int = len(SIZES)) -> dict[str, Case]:
    """Returns the cases that the processor's family supports, with at most `most` images each, written to `folder`."""
    paths = [_image(folder / f"image{n}.png", n, size) for n, size in enumerate(SIZES)]
    shots, waves = [], []
    if processor.videos.limit:
        seeds = iter(range(len(SIZES), len(SIZES) + sum(NUM_FRAMES)))
        for num in NUM_FRAMES:
            shots.append(tuple(_image(folder / f"frame{n}.png", n, SIZES[0]) for n in islice(seeds, num)))
    if processor.sounds.limit:
        waves = [_tones(length, seed) for seed, length in enumerate(SOUND_LENGTHS)]
    files = [EncodedFile(encode_wav(wave, SOUND_RATE), f"sound {n}") for n, wave in enumerate(waves)]
    most = most if processor.takes_images else 0

    def case(
        name: str, question: str, images: Sequence[int], videos: Sequence[int] = (), sounds: Sequence[int] = ()
    ) -> Case:
        row = Row(
            name,
            question,
            "7",
            "7",
            tuple(paths[i] for i in images),
            videos=tuple(FrameList(shots[i], FRAME_RATE, f"video {i}") for i in videos),
            audios=tuple(files[i] for i in sounds),
        )
        return Case(
            processor.prepare(row, f"0/{name}"),
            tuple(_opened(paths[i]) for i in images),
            tuple(tuple(map(_opened, shots[i])) for i in videos),
            tuple(waves[i] for i in sounds),
        )

    built = {
        name: case(f"case{number}", question, images)
        for number, (name, (question, images)) in enumerate(CASES.items())
        if len(images) <= most
    }
    for name, (question, images, played) in VIDEOS.items() if shots else ():
        if len(images) <= most and len(played) <= processor.videos.limit:
            built[name] = case(f"case-{name}", question, images, videos=played)
    for name, (question, images, played) in SOUNDS.items() if waves else ():
        if processor.takes_images or not images:
            built[name] = case(f"case-{name}", question, images, sounds=played)
    return built


def _tones(length: int, seed: int) -> np.ndarray:
    """Returns three tones with noise, float32 [length]."""
    random, times = np.random.default_rng(seed), np.arange(length) / SOUND_RATE
    pitches = random.uniform(200, 3000, 3)
    return (np.sin(2 * np.pi * pitches[:, None] * times).mean(0) + random.normal(0, 0.05, length)).astype(np.float32)


def _opened(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def _image(path: Path, seed: int, size: tuple[int, int]) -> Path:
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


@dataclass
class ParityGate:
    """Called with the version of every completed push; compares the log-probs of a few prompts after the first push,
    before its canary, which has one prompt and reports a difference as a failed transfer."""

    model_type: str
    learner: Sender
    receivers: Callable[[], Sequence[Receiver]]
    prompts: Mapping[str, Prompt]  # by the name of the case; empty disables the comparison
    tolerance: Tolerance
    is_passed: bool = field(default=False, init=False)

    async def __call__(self, version: int) -> None:
        if self.is_passed or not self.prompts:
            return
        gaps = {name: await self._gaps(prompt) for name, prompt in self.prompts.items()}
        measured = ", ".join(f"{name}: {Gap.of(differences)}" for name, differences in gaps.items())
        if not all(self.tolerance.accepts(differences) for differences in gaps.values()):
            raise CanaryError(
                f"policy.model is of the model type {self.model_type}, and engine and learner "
                f"compute other log-probs ({measured}; {self.tolerance}): it "
                "cannot be trained; choose a supported type, or add a family (docs/extending.md)"
            )
        _logger.info("%s trains because engine and learner agree (%s) with these weights", self.model_type, measured)
        self.is_passed = True

    async def _gaps(self, prompt: Prompt) -> np.ndarray:
        """Returns the absolute differences of the engine with the largest gap to the learner."""
        expected = await self.learner.sequence_logprobs(prompt)
        differences = [np.abs(await receiver.prompt_logprobs(prompt) - expected) for receiver in self.receivers()]
        return max(differences, key=np.max, default=np.array([np.nan]))


def tolerance_of(config: RunConfig) -> Tolerance:
    """Returns the allowed difference of engine and learner in the precision of a run."""
    sync, dtype = config.weight_sync, config.resources.dtype
    rounding = Rounding() if dtype == "float32" else MeasuredRounding()
    return Tolerance(sync.canary_tolerance.of(dtype), sync.canary_share.of(dtype), rounding)


def parity_gate(
    config: RunConfig,
    processor: object,
    learner: Sender,
    receivers: Callable[[], Sequence[Receiver]],
    tolerance: Tolerance,
) -> ParityGate:
    """Returns the gate of a run; it compares nothing for model types measured in docs/models.md."""
    if config.sampler.is_flow:  # the canary of the first push compares flow models
        return ParityGate("flow", learner, receivers, {}, tolerance)
    model_type = model_type_at(config.policy.model)
    prompts = {}
    if family_at(config.policy.model).needs_gate:
        _logger.warning(
            "log-probs of engine and learner of a %s are compared before the first step (docs/models.md)", model_type
        )
        folder = config.run_folder / IMAGES_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        assert isinstance(processor, ChatProcessor), "a family that draws has no gate"
        compared = cases(processor, folder, min(MAX_IMAGES, config.sampler.max_images_per_prompt))
        prompts = {name: case.prompt for name, case in compared.items()}
    return ParityGate(model_type, learner, receivers, prompts, tolerance)
