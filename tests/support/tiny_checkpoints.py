"""Checkpoints of random weights, written as released ones are laid out, and checkpoints of a config.json alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from data_rows import encoded
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from mobula.learner.policies.shapes import ModelShape, shape_of_config
from mobula.learner.policies.tiny import TINY
from mobula.learner.policies.tiny.writing import MAX_POSITIONS, VISION_TEMPLATE, build_tokenizer
from mobula.rewards.models.reward_model import classifier_class

USUAL_FAMILIES = ("qwen2.5-vl", "qwen3.5", "gemma3", "internvl3")
"""Windows; linear attention; masks of images; tiles."""


def families(names: Iterable[str], usual: Collection[str] = USUAL_FAMILIES) -> list[ParameterSet]:
    """Parameters of a test of model families: `make test` takes the usual ones, the exhaustive lane the others."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.exhaustive) for name in names]


def qwen_config(*, hidden: int, layers: int, intermediate: int | None = None) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL with the vision tower of the released ones."""
    found = Qwen2_5_VLConfig()
    text, vision = found.text_config, found.vision_config
    heads = hidden // 128
    text.hidden_size, text.num_hidden_layers, text.intermediate_size = hidden, layers, intermediate or 4 * hidden
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 7)
    text.layer_types, text.max_window_layers = text.layer_types[:layers], layers
    vision.hidden_size, vision.out_hidden_size = 1280, hidden
    return found


@cache
def qwen(*, hidden: int, layers: int) -> ModelShape:
    return shape_of_config(qwen_config(hidden=hidden, layers=layers))


@cache
def shape_7b() -> ModelShape:
    return shape_of_config(qwen_config(hidden=3584, layers=28, intermediate=18944))


def checkpoint(folder: Path, *, hidden: int = 3584, layers: int = 28, intermediate: int = 18944) -> Path:
    """A folder with config.json alone."""
    qwen_config(hidden=hidden, layers=layers, intermediate=intermediate).save_pretrained(folder)
    return folder


OWN = {"qwen3": {"head_dim": 32}, "gemma": {"head_dim": 32}, "gemma3_text": {"head_dim": 32, "sliding_window": 16}}


def write_text_policy(folder: Path, family: str, *, with_template: bool = True) -> Path:
    """A model of two layers, of the `model_type` that is named."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE if with_template else None
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS, initializer_range=0.08,
        dtype="float32", **ends, **(OWN[family] if family in OWN else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # so that norms and biases matter
        if parameter.dim() == 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(**{key: value for key, value in ends.items() if value is not None})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


LETTERS = "abcdefghijklmnopqrstuvwxyz "


def encoded_image(seed: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """Noise as a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels))


def write_text_model(folder: Path, *, num_labels: int = 1, pad: bool = True) -> Path:
    """A Qwen2 with a score head."""
    torch.manual_seed(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, num_labels=num_labels, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id if pad else None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_pair_model(folder: Path) -> Path:
    """A BERT that classifies into three labels."""
    torch.manual_seed(2)
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LETTERS.strip(), *(f"##{c}" for c in LETTERS.strip())]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2, id2label={0: "bad", 1: "fair", 2: "good"},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_vision_model(folder: Path) -> Any:
    """A Qwen2.5-VL with a score head; returns the model that was written."""
    torch.manual_seed(3)
    tiny = TINY["qwen2.5-vl"]
    tokenizer = tiny.new_tokenizer()
    config = tiny.new_config(tokenizer)
    config.num_labels = 1
    model = classifier_class(config)(config).float().eval()
    model.save_pretrained(folder)
    tiny.new_processor(tokenizer).save_pretrained(folder)
    return model


def write_clip(folder: Path, *, projection_dim: int = 24) -> Path:
    """A CLIP whose text is read letter by letter."""
    torch.manual_seed(9)
    vocab = {token: i for i, token in enumerate(["<pad>", *LETTERS, "<start>", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = [("<start>", vocab["<start>"]), ("<end>", vocab["<end>"])]
    tokenizer.post_processor = processors.TemplateProcessing("<start> $A <end>", special_tokens=ends)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<start>", eos_token="<end>", model_max_length=16
    )
    text = {
        "vocab_size": len(vocab), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16, "bos_token_id": vocab["<start>"],
        "eos_token_id": vocab["<end>"], "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection_dim))
    with torch.no_grad():  # random towers embed everything nearly alike; their differences are what tests look at
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    CLIPProcessor(images, fast).save_pretrained(folder)
    return folder
