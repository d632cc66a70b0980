"""Synthetic tone patterns as an audio question answering dataset: WAV files and JSONL rows, made from a seed.

Each of ten patterns is a sequence of pitches. A sound is one of them with a base pitch, tempo, loudness and noise of
its own, in 16 bits at 8 kHz, so that every use resamples it. The folder that `write_tones` makes:

    sounds/train_0000.wav ...
    train.jsonl validation.jsonl test.jsonl
    dataset.json                what the folder holds; its presence says that the folder is whole
"""

from __future__ import annotations

import wave
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mobula.actors.datasets.written import Rows, install_dataset

FORMAT_VERSION = 1
RATE = 8000
LOW, HIGH, SILENT = 1.0, 2.0, 0.0
PATTERNS: tuple[tuple[float, ...], ...] = (  # pitches as multiples of the base pitch, at equal lengths
    (LOW, LOW, LOW, LOW),
    (HIGH, HIGH, HIGH, HIGH),
    (LOW, LOW, HIGH, HIGH),
    (HIGH, HIGH, LOW, LOW),
    (LOW, HIGH, LOW, HIGH),
    (HIGH, LOW, HIGH, LOW),
    (LOW, SILENT, LOW, SILENT),
    (HIGH, SILENT, HIGH, SILENT),
    (LOW, SILENT, HIGH, SILENT),
    (HIGH, SILENT, LOW, SILENT),
)
QUESTION = r"<audio>Which pattern is this? Answer in \boxed{}."


def write_tones(
    folder: Path, *, seed: int = 0, num_train: int = 1000, num_validation: int = 200, num_test: int = 300
) -> Path:
    """Write the dataset into `folder` and return it; see `install_dataset`. The same arguments give the same bytes.

    Raises:
        ValueError: the folder holds something else.
    """
    sizes = {"train": num_train, "validation": num_validation, "test": num_test}
    marker = {"format_version": FORMAT_VERSION, "task": "tones", "seed": seed, **sizes}
    return install_dataset(folder, marker, lambda to: _build(to, seed, sizes))


def tone(pattern: int, random: np.random.Generator) -> np.ndarray:
    """int16 [N]: a sound of the pattern, 0.6 to 0.9 s long."""
    pitches = PATTERNS[pattern]
    length = int(random.uniform(0.15, 0.225) * RATE)  # of one pitch
    base = random.uniform(250, 450)
    # Phases go on from one pitch to the next; a jump would be a click that tells patterns apart by itself.
    speeds = np.repeat([base * pitch for pitch in pitches], length)
    loudness = np.repeat([float(pitch != SILENT) for pitch in pitches], length)
    ramp = np.ones(32) / 32
    wave_form = np.sin(2 * np.pi * np.cumsum(speeds) / RATE) * np.convolve(loudness, ramp, mode="same")
    noisy = random.uniform(0.3, 0.8) * wave_form + random.normal(0, 0.02, len(wave_form))
    return (noisy.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)


def _build(folder: Path, seed: int, sizes: Mapping[str, int]) -> Rows:
    """Writes sounds into a new folder; returns the rows of each split."""
    (folder / "sounds").mkdir()
    rows = {}
    for number, (split, size) in enumerate(sizes.items()):
        random = np.random.default_rng([seed, number])
        patterns = random.permutation(np.arange(size) % len(PATTERNS)).tolist()  # every pattern equally often
        rows[split] = [_row(folder, split, place, pattern, random) for place, pattern in enumerate(patterns)]
    return rows


def _row(folder: Path, split: str, place: int, pattern: int, random: np.random.Generator) -> dict[str, str]:
    path = f"sounds/{split}_{place:04d}.wav"
    with wave.open(str(folder / path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(tone(pattern, random).astype("<i2").tobytes())
    return {
        "id": f"tone-{split}-{place:04d}",
        "question": QUESTION,
        "answer": str(pattern),
        "solution": rf"\boxed{{{pattern}}}",
        "audio": path,
    }
