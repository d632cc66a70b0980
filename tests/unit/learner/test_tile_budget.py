"""`data.max_pixels` bounds the tokens of images that are cut into tiles, in the prompt and in the tensors alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from mobula.configs.load import load_config
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import ImageFamily
from mobula.learner.policies.tiny import write_tiny

RELEASED = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}  # SmolVLM-256M
TOKENS_PER_TILE = 64


def released_sizes(name: str, folder: Path) -> Path:
    """The tiny model with the image sizes of SmolVLM-256M."""
    write_tiny(name, folder)
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"] |= RELEASED
    settings["image_seq_len"] = TOKENS_PER_TILE
    file.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
@pytest.mark.parametrize(
    ("max_pixels", "size", "num_tiles"),
    [
        (602112, (64, 64), 1),  # those of `experiment=own`: 775 x 775 pixels hold one tile of 512 x 512
        (200704, (3000, 2000), 1),  # less than a tile: one is the least
        (1048576, (64, 64), 2 * 2 + 1),  # small images are scaled up, and the image as a whole is a tile more
        (1048576, (1000, 300), 2 * 1 + 1),
        (9999999, (64, 64), 4 * 4 + 1),  # never more than the checkpoint's own 2,048
    ],
)
def test_an_image_takes_the_tokens_of_its_bounded_tiles(
    name: str, max_pixels: int, size: tuple[int, int], num_tiles: int, tmp_path: Path
) -> None:
    folder = released_sizes(name, tmp_path / "model")
    data = load_config(["experiment=digits", f"data.max_pixels={max_pixels}"]).data
    family = family_at(str(folder))
    assert isinstance(family, ImageFamily)
    processor = AutoProcessor.from_pretrained(folder, **family.processor_options(str(folder), data))
    placeholder = family.placeholder_id(AutoConfig.from_pretrained(folder))
    ids = family.expansion(processor, size)
    assert int((ids == placeholder).sum()) == num_tiles * TOKENS_PER_TILE
    pixels = family.process(processor, Image.new("RGB", size))["pixel_values"]
    assert pixels.shape == (num_tiles, 3, 512, 512) and pixels.dtype == np.float32


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(
    ("max_tiles", "size", "num_tiles"),
    [
        (1, (300, 300), 1),
        (2, (300, 150), 2 + 1),  # the image as a whole is a tile more
        (3, (300, 150), 2 + 1),
        (3, (56, 168), 3 + 1),
        (99, (300, 300), 4 + 1),  # never more than the checkpoint's own 4
        (0.5, (300, 300), 1),  # less than a tile: one is the least
    ],
)
def test_internvl_cuts_images_as_its_processor_does_within_the_budget(
    cuts: bool, max_tiles: float, size: tuple[int, int], num_tiles: int, tmp_path: Path
) -> None:
    folder = write_tiny("internvl3", tmp_path / "model")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["crop_to_patches"] = cuts  # false in released checkpoints, whose processor says true
    file.write_text(json.dumps(settings))
    data = load_config(["experiment=digits", f"data.max_pixels={int(max_tiles * 56 * 56)}", "data.min_pixels=1"]).data
    family = family_at(str(folder))
    assert isinstance(family, ImageFamily)
    processor = AutoProcessor.from_pretrained(folder, **family.processor_options(str(folder), data))
    image = Image.effect_noise(size, 64).convert("RGB")
    made = processor(text=["<IMG_CONTEXT>"], images=[image], return_tensors="np")
    assert made["input_ids"][0].tolist() == family.expansion(processor, size).tolist()
    pixels = family.process(processor, image)["pixel_values"]
    assert pixels.shape == (num_tiles, 3, 56, 56)
    np.testing.assert_array_equal(pixels, made["pixel_values"])
