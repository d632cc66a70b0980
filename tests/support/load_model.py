"""Checkpoints and prompts of the load matrix: as small as the tiny model, with room for long prompts and responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

MAX_POSITIONS = 8192
NUM_ROWS = 96  # prompts of one epoch
IMAGE_SIDE = 448  # pixels: 256 tokens
LONG = 3000
CONSTANT = 0.3  # in the first channel of every token


def write_load_model(folder: Path, mean_length: int) -> Path:
    """A random-weight Qwen2.5-VL for up to MAX_POSITIONS tokens, whose responses end after about `mean_length` tokens,
    with a long tail."""
    write_tiny_qwen2_5_vl(folder, seed=0)
    for name, keys in (("config.json", ("max_position_embeddings",)), ("tokenizer_config.json", ("model_max_length",))):
        _set(folder / name, keys, MAX_POSITIONS)
    _end_after(folder, mean_length)
    return folder


def write_load_data(folder: Path, prompt_tokens: int) -> Path:
    """Train, validation and test splits whose prompts have about 20, 600 (of which 128 are of two images) or 3,000
    (of which 2,816 are of eleven images) tokens."""
    folder.mkdir(parents=True)
    num_images, num_letters = {20: (0, 4), 600: (2, 420), LONG: (11, 100)}[prompt_tokens]
    side = IMAGE_SIDE if prompt_tokens == LONG else IMAGE_SIDE // 2
    generator = np.random.default_rng(0)
    paths = [_write_image(folder / f"{n}.png", side, generator) for n in range(24 if num_images else 0)]
    rows = []
    for n in range(NUM_ROWS):
        images = [paths[(n * 5 + k) % len(paths)] for k in range(num_images)]
        letters = "".join(generator.choice(list("abcdefghijklmnop "), num_letters))
        rows.append({"id": f"{n:03}", "question": "<image>" * num_images + letters, "answer": "7", "image": images})
    for split, part in (("train", rows), ("validation", rows[:8]), ("test", rows[:8])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def _write_image(path: Path, side: int, generator: np.random.Generator) -> str:
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
    """Make EOS about equally likely after whatever the logits of the model: 1 / `mean_length` on average.

    One channel of the residual stream is the same at every token; the output row of EOS reads that channel alone.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    head, text, stops = model.get_output_embeddings(), model.model.language_model, model.generation_config.eos_token_id
    with torch.no_grad():
        text.embed_tokens.weight[:, 0] = CONSTANT
        merger = model.model.visual.merger.mlp[-1]
        merger.weight[0], merger.bias[0] = 0, CONSTANT
        for layer in text.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        head.weight[:, 0] = 0
        head.weight[stops] = 0
    states, others = _spoken(model, tokenizer, stops)
    low, high = -200.0, 200.0  # of the weight; the share of EOS grows with it
    for _ in range(60):
        middle = (low + high) / 2
        share = torch.sigmoid(middle * states[..., 0] - others).mean()
        low, high = (middle, high) if share < 1 / mean_length else (low, middle)
    with torch.no_grad():
        head.weight[stops[0], 0] = low
        head.weight[stops[1], 0] = low - 40.0
    model.save_pretrained(folder)


def _spoken(model: Any, tokenizer: Any, stops: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What precedes the output layer at each token that the model samples, [B, T, H], and the log-sum-exp of the logits
    of all tokens but the stops, [B, T]."""
    letters = torch.randint(65, 91, (64, 24), generator=torch.Generator().manual_seed(0))
    texts = [f"<|im_start|>user\n{bytes(row.tolist()).decode()}<|im_end|>\n<|im_start|>assistant\n" for row in letters]
    prompts = tokenizer(texts, return_tensors="pt")
    states: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        spoken = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=160, suppress_tokens=stops)
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        logits = model(input_ids=spoken).logits
        hook.remove()
    logits[..., stops] = -torch.inf
    start = prompts["input_ids"].shape[1] - 1
    return states[0][:, start:].double(), logits[:, start:].double().logsumexp(-1)
