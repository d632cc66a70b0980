"""Families with sounds: places, positions, sounds that siblings share, and rows that are skipped by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from learner_data import group
from scored_rows import family_prompts

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import preflight
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.records.trajectory import MediaSpan
from mobula.configs.load import load_config
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny

CPU = torch.device("cpu")
RATE = 16_000
QUESTION = "<audio>Which pattern is this?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny(name, out / name, seed=1) for name in ("qwen2-audio", "qwen2.5-omni")}


def config(folder: Path, *words: str):
    return load_config([
        "experiment=tones", f"policy.model={folder}", "policy.tiny=none", "data.max_prompt_tokens=256",
        "data.max_skipped_fraction=1.0", *words,
    ])  # fmt: skip


@pytest.fixture(params=["qwen2-audio", "qwen2.5-omni"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def processor(folder: Path, *words: str) -> ChatProcessor:
    found = config(folder, *words)
    store = MediaStore(lambda media: media, found.data.media_cache_bytes)
    return ChatProcessor(str(folder), found.data, found.sampler, store, keep_files=False)


@cache
def noise(length: int) -> np.ndarray:
    return np.random.default_rng(length).normal(0, 0.1, length).astype(np.float32)


@pytest.mark.parametrize(("samples", "tokens"), [(321, 1), (1_281, 2), (16_000, 25), (16_001, 25), (40_000, 62)])
def test_a_sound_takes_as_many_tokens_as_the_tower_makes_embeddings(
    folder: Path, tmp_path: Path, samples: int, tokens: int
) -> None:
    soundfile.write(tmp_path / "a.wav", noise(samples), RATE, subtype="FLOAT")
    row = Row("a", QUESTION, "7", "7", audios=(tmp_path / "a.wav",))
    chat = processor(folder)
    prompt = chat.prepare(row, "p")
    [span] = prompt.media_spans
    assert span.end - span.start == tokens
    assert chat.check(row) == prompt.num_tokens == len(prompt.compact_ids) - 1 + tokens
    policy = load_model(str(folder), torch.float32, "sdpa").eval()
    from mobula.learner.policies.families import family_of

    shown = collate([TokenSequence.of_prompt(prompt)], MediaReader(timeout_s=1, max_items=2), CPU)
    with torch.no_grad():  # raises if the tower makes more or fewer
        assert family_of(policy.config).hidden_states(policy, shown).shape[1] == prompt.num_tokens


def test_a_sound_of_two_prompts_is_stored_once_and_travels_in_records(folder: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.flac", noise(8_000), RATE)
    chat = processor(folder)
    one, two = (chat.prepare(Row(n, QUESTION, "7", "7", audios=(tmp_path / "a.flac",)), n) for n in "ab")
    [handle] = one.media
    assert handle == two.media[0] and handle.modality == "audio"
    assert handle.reference is two.media[0].reference
    assert handle.reference.thumbnail.startswith(b"\x89PNG")
    scored = group(one, [[1, 2]], [1.0])
    back = from_batch(to_batch(scored.group, scored.rewards)).group.prompt
    assert (back.media, back.media_spans) == (one.media, one.media_spans)
    assert back.expanded_ids.tolist() == one.expanded_ids.tolist()


def test_rows_with_bad_sounds_are_skipped_and_named(folder: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "good.wav", noise(8_000), RATE)
    soundfile.write(tmp_path / "none.wav", np.zeros((0, 1)), RATE)
    soundfile.write(tmp_path / "short.wav", noise(100), RATE)
    soundfile.write(tmp_path / "long.wav", np.zeros(31 * RATE, dtype=np.float32), RATE)
    (tmp_path / "corrupt.wav").write_bytes(b"RIFF0000WAVEnoise" * 10)
    (tmp_path / "empty.wav").write_bytes(b"")
    names = ("good", "none", "short", "long", "corrupt", "empty", "missing", "../outside")
    rows = [f'{{"id": "{n}", "question": "<audio>Which?", "answer": "7", "audio": "{n}.wav"}}' for n in names]
    rows.append('{"id": "two", "question": "<audio><audio>Which?", "answer": "7", "audio": "good.wav"}')
    rows.append('{"id": "many", "question": "<audio><audio>Which?", "answer": "7", "audio": ["good.wav", "good.wav"]}')
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    found = config(folder, "data=jsonl", f"data.path={tmp_path}")
    split = open_split(found.data, "train", found.rewards.label_key)
    report = preflight(split, processor(folder), max_skipped_fraction=1.0, max_checked_rows=0)
    assert [report.rows[place].sample_id for place in range(len(report.rows))] == ["good"]
    details = {skipped.sample.rpartition("(")[2].rstrip(")"): skipped.detail for skipped in report.skipped}
    for name, message in {
        "none": "has 0 samples",
        "short": "too short to be heard, 321 samples are the fewest",
        "long": "reads 30 s of one sound",
        "corrupt": "corrupt or no sound",
        "empty": "is empty",
        "missing": "there is no file",
        "../outside": "leads out of the data folder",
        "two": "the text has 2 <audio> and the row 1 sounds",
        "many": "has 2 sounds, sampler.max_audios_per_prompt is 1",
    }.items():
        assert message in details[name], (name, details)


def test_a_model_that_does_not_hear_is_refused_by_name(tmp_path: Path) -> None:
    silent = write_tiny("qwen2.5-vl", tmp_path / "model")
    with pytest.raises(ValueError, match=r"max_audios_per_prompt=1 asks for sounds.*qwen2_5_vl: set it to 0"):
        processor(silent)


def test_positions_of_images_beside_sounds_are_those_of_the_paper(folders: dict[str, Path], tmp_path: Path) -> None:
    """A sound counts on like text; an image has rows and columns from where it begins."""
    folder = folders["qwen2.5-omni"]
    from mobula.learner.policies.families.vision import released_positions

    prompt = family_prompts(folder, tmp_path).cases["image and sound"].prompt
    image, sound = prompt.media_spans
    shown = collate([TokenSequence.of_prompt(prompt)], MediaReader(timeout_s=1, max_items=2), CPU)
    types = torch.zeros_like(shown.input_ids)
    types[:, image.start : image.end] = 1
    found = released_positions(shown, types, 2, 25)[:, 0]
    _, height, width = (shown.media.inputs["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    assert image.end - image.start == height * width
    rows = np.indices((1, height, width)).reshape(3, -1) + image.start
    assert found[:, : image.start].tolist() == [list(range(image.start))] * 3
    assert found[:, image.start : image.end].tolist() == rows.tolist()
    behind = image.start + max(height, width)
    expected = list(range(behind, behind + prompt.num_tokens - image.end))
    assert found[:, image.end :].tolist() == [expected] * 3
    assert isinstance(sound, MediaSpan) and sound.start > image.end
