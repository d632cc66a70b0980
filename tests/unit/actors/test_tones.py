"""The tones dataset: ten patterns, equally often, reproducible, distinguished by their spectrum alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mobula.actors.datasets.open_split import open_split
from mobula.actors.processors.audio import AudioLimits, check_audio
from mobula.configs.load import load_config
from mobula.examples.tones.tones import PATTERNS, RATE, tone, write_tones


def write(folder: Path, seed: int = 0) -> Path:
    return write_tones(folder, seed=seed, num_train=20, num_validation=10, num_test=10)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", seed=1)
    files = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
    assert len(files) == 40 + 4
    assert all((a / file).read_bytes() == (b / file).read_bytes() for file in files)
    assert (a / files[-1]).read_bytes() != (c / files[-1]).read_bytes()
    assert write(a) == a
    with pytest.raises(ValueError, match="choose another folder or delete this one"):
        write(a, seed=1)


def test_rows_are_read_with_their_sounds(tmp_path: Path) -> None:
    config = load_config(["experiment=tones", f"data.path={write(tmp_path / 'tones')}"])
    split = open_split(config.data, "train", config.rewards.label_key)
    rows = [split.rows[place] for place in range(len(split.rows))]
    assert Counter(row.answer for row in rows) == {str(n): 2 for n in range(len(PATTERNS))}
    limits = AudioLimits(config.data.audio, 2 * RATE, 60 * RATE)
    assert all(0.59 < check_audio(row.audios[0], limits) / (2 * RATE) < 0.91 for row in rows)
    assert json.loads((tmp_path / "tones" / "dataset.json").read_text())["task"] == "tones"


def test_patterns_differ_in_pitch_and_silence() -> None:
    for pattern, pitches in enumerate(PATTERNS):
        samples = tone(pattern, np.random.default_rng(pattern)).astype(float)
        quarters = np.array_split(samples, len(pitches))
        crossings = [np.abs(np.diff(np.sign(q[40:-40]))).sum() / 2 / len(q) * RATE / 2 for q in quarters]
        loud = [np.abs(q[40:-40]).mean() > 2_000 for q in quarters]
        assert loud == [pitch > 0 for pitch in pitches]
        heard = [(c, pitch) for c, pitch in zip(crossings, pitches, strict=True) if pitch > 0]
        assert all((c > d * 1.4) == (p > q) for c, p in heard for d, q in heard)
