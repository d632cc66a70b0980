"""Checkpoints and prompts of the load matrix: as small as the tiny model, with room for long prompts and responses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from learner.policies.tiny import write_tiny_qwen2_5_vl

MAX_POSITIONS = 8192
NUM_ROWS = 96  # prompts of one epoch
PICTURE_SIDE = 448  # pixels: 256 tokens
LONG = 3000


def write_load_model(folder: Path, mean_length: int) -> Path:
    """A random-weight Qwen2.5-VL for up to MAX_POSITIONS tokens, whose responses end after about `mean_length` tokens,
    with a long tail."""
    write_tiny_qwen2_5_vl(folder, seed=0)
    for name, keys in (("config.json", ("max_position_embeddings",)), ("tokenizer_config.json", ("model_max_length",))):
        _set(folder / name, keys, MAX_POSITIONS)
    _end_after(folder, mean_length)
    return folder


def write_load_data(folder: Path, prompt_tokens: int) -> Path:
    """Train, validation and test splits whose prompts have about 20, 600 (of which 128 are of two pictures) or 3,000
    (of which 2,816 are of eleven pictures) tokens."""
    folder.mkdir(parents=True)
    num_pictures, num_letters = {20: (0, 4), 600: (2, 420), LONG: (11, 100)}[prompt_tokens]
    side = PICTURE_SIDE if prompt_tokens == LONG else PICTURE_SIDE // 2
    generator = np.random.default_rng(0)
    pictures = [_write_picture(folder / f"{n}.png", side, generator) for n in range(24 if num_pictures else 0)]
    rows = []
    for n in range(NUM_ROWS):
        images = [pictures[(n * 5 + k) % len(pictures)] for k in range(num_pictures)]
        letters = "".join(generator.choice(list("abcdefghijklmnop "), num_letters))
        rows.append({"id": f"{n:03}", "question": "<image>" * num_pictures + letters, "answer": "7", "image": images})
    for split, part in (("train", rows), ("validation", rows[:8]), ("test", rows[:8])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def _write_picture(path: Path, side: int, generator: np.random.Generator) -> str:
    coarse = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((side, side)).save(path)
    return path.name


def _set(path: Path, keys: tuple[str, ...], value: int) -> None:
    """Set these keys wherever they stand in a JSON file, at any depth."""

    def changed(found: object) -> object:
        if isinstance(found, dict):
            return {key: value if key in keys else changed(below) for key, below in found.items()}
        return found

    path.write_text(json.dumps(changed(json.loads(path.read_text())), indent=2))


def _end_after(folder: Path, mean_length: int) -> None:
    """Solve the output row of EOS for a probability of 1 / `mean_length` after random tokens."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    head, eos = model.get_output_embeddings(), model.generation_config.eos_token_id[0]
    ids = torch.randint(0, 256, (32, 256), generator=torch.Generator().manual_seed(0))
    states: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach().double()))
    with torch.no_grad():
        logits = model(input_ids=ids).logits.double()
    hook.remove()
    logits[..., eos] = -torch.inf
    wanted = logits.logsumexp(-1) - np.log(mean_length - 1)  # [32, 256]
    found = torch.linalg.lstsq(states[0].flatten(0, 1), wanted.flatten()[:, None]).solution[:, 0]
    with torch.no_grad():
        head.weight[eos] = found.float()
    model.save_pretrained(folder)
