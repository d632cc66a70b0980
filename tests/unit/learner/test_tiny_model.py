"""The tiny Qwen2.5-VL loads as a released checkpoint does, and its parts agree with one another."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Tokenizer,
)

from mobula.learner.policies.tiny import SPECIAL_TOKENS, WORDS, write_tiny_qwen2_5_vl


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tied"), seed=0, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def processor(folder: Path) -> ProcessorMixin:
    return AutoProcessor.from_pretrained(folder)


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()


def encode(processor: ProcessorMixin, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": "Which digit is this?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=[prompt], images=images or None, return_tensors="pt")


def checkpoint_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as checkpoint:
        return set(checkpoint.keys())


def image(width: int, height: int) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height))


def test_model_has_about_six_hundred_thousand_float32_parameters(folder: Path) -> None:
    model = load_model(folder)
    assert 500_000 < model.num_parameters() < 1_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_vocabulary_of_model_and_tokenizer_agree(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    model = load_model(folder)
    assert len(tokenizer) == model.config.text_config.vocab_size == model.lm_head.out_features
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_mrope_sections_share_out_half_a_head(folder: Path) -> None:
    text = load_model(folder).config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == head_dim // 2


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{7}",
        "Which digit is this? Answer in \\boxed{}.",
        "tabs\tand\r\n\n  spaces  ",
        "naïve 漢字 🙂👩‍👩‍👧 \u0000 عربي",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>",
        "",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Qwen2Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_holds_every_byte(tokenizer: Qwen2Tokenizer) -> None:
    assert set(ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()


def test_answer_takes_four_tokens(tokenizer: Qwen2Tokenizer) -> None:
    assert tokenizer.tokenize(r"\boxed{7}<|im_end|>") == [r"\boxed{", "7", "}", "<|im_end|>"]
    assert tokenizer.tokenize("18") == ["1", "8"]


@pytest.mark.parametrize("word", WORDS)
def test_known_words_take_one_token(tokenizer: Qwen2Tokenizer, word: str) -> None:
    assert len(tokenizer.encode(word)) == 1


def test_special_tokens_are_skipped_and_the_answer_is_not(tokenizer: Qwen2Tokenizer) -> None:
    ids = tokenizer.encode("".join(SPECIAL_TOKENS) + r"\boxed{7}")
    assert tokenizer.decode(ids, skip_special_tokens=True) == r"\boxed{7}"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_is_qwens_without_a_system_prompt(processor: ProcessorMixin) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": r"\boxed{7}"},
        {"role": "user", "content": "Sure?"},
    ]
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{7}<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("width", "height", "num_tokens"), [(56, 56, 4), (28, 28, 1), (84, 112, 12), (900, 900, 64)])
def test_an_image_takes_one_token_for_28x28_pixels(
    processor: ProcessorMixin, width: int, height: int, num_tokens: int
) -> None:
    ids = encode(processor, [image(width, height)])["input_ids"]
    assert (ids == processor.image_token_id).sum() == num_tokens


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_forward_takes_text_and_images(
    request: pytest.FixtureRequest, processor: ProcessorMixin, tied: bool, num_images: int
) -> None:
    model = load_model(request.getfixturevalue("tied_folder" if tied else "folder"))
    inputs = encode(processor, [image(56, 56), image(84, 112)][:num_images])
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (*inputs["input_ids"].shape, model.config.text_config.vocab_size)
    assert logits.isfinite().all()


def test_model_sees_the_image(folder: Path, processor: ProcessorMixin) -> None:
    model = load_model(folder)
    upright = encode(processor, [image(56, 56)])
    rotated = encode(processor, [image(56, 56).rotate(90)])
    with torch.no_grad():
        assert not torch.equal(model(**upright).logits[:, -1], model(**rotated).logits[:, -1])


def test_tied_checkpoint_has_no_head_of_its_own(folder: Path, tied_folder: Path) -> None:
    assert checkpoint_names(folder) - checkpoint_names(tied_folder) == {"lm_head.weight"}
    model = load_model(tied_folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_checkpoint_has_the_names_of_released_checkpoints(folder: Path) -> None:
    assert {name.split(".")[0] for name in checkpoint_names(folder)} == {"lm_head", "model", "visual"}


def test_same_seed_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_tiny_qwen2_5_vl(tmp_path / "again", seed=0)
    other = write_tiny_qwen2_5_vl(tmp_path / "other", seed=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert (folder / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_writing_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny_qwen2_5_vl(tmp_path, seed=3)
    assert torch.equal(before, torch.get_rng_state())
