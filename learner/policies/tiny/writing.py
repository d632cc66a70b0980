"""Tokenizer, templates and the writer of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2Tokenizer,
)

MAX_POSITIONS = 4096

# About 1/sqrt(width). The usual 0.02 suits widths of thousands; at this width it leaves every block next to silent, and
# learning starts several times slower.
INITIALIZER_RANGE = 0.08
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# The pre-tokenizer would part "\boxed" from "{", so the opening of an answer is an added token; it is not special, and
# decoding therefore keeps it.
ANSWER_OPENING = r"\boxed{"

# One token each, which keeps prompts short; all other text falls back to single bytes.
WORDS = (
    "user", "assistant", "system",
    "Which", "What", " digit", " digits", " is", " this", " the", " sum", " of", " in", " are", " these",
    " Answer", " answer",
)  # fmt: skip


def template_of(name: str) -> str:
    """The chat template in the file `NAME.jinja` of this folder."""
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")


VISION_TEMPLATE = template_of("vision")


def chat_template(*, image: str, video: str = "", end: str = "<|im_end|>") -> str:
    """`VISION_TEMPLATE` with the placeholders of another family, and the token that ends a turn."""
    text = VISION_TEMPLATE.replace("<|im_end|>", end)
    for name, placeholder in (("image", image), ("video", video)):
        text = text.replace(f"<|vision_start|><|{name}_pad|><|vision_end|>", placeholder)
    return text


def audio_template(*, audio: str, image: str = "", video: str = "") -> str:
    """`chat_template` with the placeholder of sounds beside the others."""
    part = "{%- elif part['type'] == 'audio' -%}\n{{- '" + audio + "' -}}\n"
    text = "{%- elif part['type'] == 'text' -%}\n"
    return chat_template(image=image, video=video).replace(text, part + text)


def build_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS,
    named: Mapping[str, str] | None = None,
    *,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
    added: Sequence[str] = (),
) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer: any text round-trips, once brought to Unicode's NFC.

    Ids: the 256 bytes, the merges of `WORDS`, `special` and then `named` (attribute of the tokenizer -> token) in
    order, `ANSWER_OPENING`, `added`. Each digit is one.
    """
    named = dict(named or {})
    options: dict[str, Any] = {"bos_token": bos} if bos else {}
    if named:
        options["model_specific_special_tokens"] = named
    vocab, merges = _byte_level_bpe(WORDS)
    tokens = list(dict.fromkeys([*special, *named.values()]))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + i for i, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # declared as strings, read as pairs
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=tokens,
        model_max_length=MAX_POSITIONS,
        **options,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (ANSWER_OPENING, *added)])
    return tokenizer


def _byte_level_bpe(words: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges under which each of `words` is one token.

    A word is first split by the merges of the words before it and its pieces are then joined from the left, so that a
    later word never breaks an earlier one: its merges rank lower.
    """
    vocab = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        symbols = word.replace(" ", "Ġ")  # byte-level BPE writes a space as Ġ
        left, *rest = (piece.value for piece in BPE(vocab=vocab, merges=merges).tokenize(symbols))
        for right in rest:
            merges.append((left, right))
            left += right
            vocab.setdefault(left, len(vocab))
    return vocab, merges


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    made = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(made, int), "one token has one id"
    return made


HIDDEN_SIZE = 128


def decoder_config(tokenizer: PreTrainedTokenizerBase, **own: Any) -> dict[str, Any]:
    """Two layers of 128; head_dim is 32, which engines on CPU take."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | own


def vision_config(**own: Any) -> dict[str, Any]:
    """Two layers of 64 and two heads."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": INITIALIZER_RANGE,
    } | own


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The architecture of a released model in a tiny size. Called with a folder, it writes a checkpoint there.

    A checkpoint has the layout of a released one and below 3 M float32 parameters. The same seed gives the same bytes;
    the caller's random state does not change. Files of the same names are overwritten.

    Example:
        >>> folder = TINY["qwen2.5-vl"](Path("tiny"), seed=0)
        >>> model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
        >>> engine = vllm.LLM(model=str(folder), dtype="float32", enforce_eager=True)
    """

    model: type[PreTrainedModel]  # its `config_class` is the class of the configuration
    processor: Callable[[Qwen2Tokenizer], ProcessorMixin] | None = None
    """None: text alone, the tokenizer is the processor."""
    template: str = VISION_TEMPLATE  # the chat template
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # arguments of `build_tokenizer`
    text: Mapping[str, Any] = field(default_factory=dict)  # settings of the decoder that differ from `decoder_config`
    text_names_tie: bool = True  # whether these hold `tie_word_embeddings`, as the settings of the whole model do
    config: Mapping[str, Any] | None = None
    """Settings of the whole model without those of the decoder. None: the model is the decoder."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Setting of the whole model -> the token of which it holds the id."""
    drawn: str = ""
    """End of the name of a parameter that a new model has as zeros, which would hide all inputs from the decoder."""
    finish: Callable[[Path, PretrainedConfig], None] | None = None
    """Changes the written files to those of a released checkpoint."""

    def __call__(self, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
        tokenizer = self.new_tokenizer()
        model = self.new_model(tokenizer, seed=seed, tie_word_embeddings=tie_word_embeddings)
        model.save_pretrained(folder)
        if self.finish:
            self.finish(folder, model.config)
        self.new_processor(tokenizer).save_pretrained(folder)
        return folder

    def new_tokenizer(self) -> Qwen2Tokenizer:
        tokenizer = build_tokenizer(**self.tokenizer)
        tokenizer.chat_template = self.template
        return tokenizer

    def new_processor(self, tokenizer: Qwen2Tokenizer) -> ProcessorMixin | Qwen2Tokenizer:
        """Returns the processor, or the tokenizer of a text model, with the chat template."""
        processor = self.processor(tokenizer) if self.processor else tokenizer
        processor.chat_template = self.template
        return processor

    def new_config(self, tokenizer: Qwen2Tokenizer, *, tie_word_embeddings: bool = False) -> Any:
        assert self.model.config_class, "every released architecture has a configuration"
        shared = {"tie_word_embeddings": tie_word_embeddings}
        own = deepcopy({**self.text})  # configurations keep and change the dictionaries that they are given
        text = decoder_config(tokenizer, **((shared if self.text_names_tie else {}) | own))
        if self.config is None:
            return self.model.config_class(dtype="float32", **text)
        ids = {name: token_id(tokenizer, token) for name, token in self.ids.items()}
        whole = shared | deepcopy({**self.config}) | ids
        config_class: Any = self.model.config_class  # of a model with a decoder
        return config_class(text_config=text, dtype="float32", **whole)

    def new_model(self, tokenizer: Qwen2Tokenizer, *, seed: int, tie_word_embeddings: bool = False) -> PreTrainedModel:
        """Returns the model in float32 on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model(self.new_config(tokenizer, tie_word_embeddings=tie_word_embeddings))
            model.to(device="cpu", dtype=torch.float32)  # type: ignore[call-arg]  # its decorator hides self
            if self.drawn:
                [zeros] = [weight for name, weight in model.named_parameters() if name.endswith(self.drawn)]
                zeros.data.normal_(std=INITIALIZER_RANGE)
        # Only stop and pad ids: an engine that reads its sampling defaults here samples from the plain policy.
        stops = list(dict.fromkeys([tokenizer.eos_token_id, tokenizer.pad_token_id]))
        model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
        return model


def rename(starts: Mapping[str, str]) -> Callable[[Path, PretrainedConfig], None]:
    """Returns a `finish` that renames parameters: start of a name as a new model saves it -> start as released."""

    def finish(folder: Path, config: PretrainedConfig) -> None:
        file, state = folder / "model.safetensors", {}
        for name, tensor in load_file(file).items():
            start = next((start for start in starts if name.startswith(start)), "")
            state[starts.get(start, "") + name.removeprefix(start)] = tensor.clone()
        save_file(state, file, metadata={"format": "pt"})

    return finish
