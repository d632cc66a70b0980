"""Which checkpoints can be trained: vision-language and text-only families, each other one refused by its name."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_text_models import write_text_policy

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import PreflightError, PromptError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.families import max_positions, takes_images
from mobula.learner.policies.families.registry import TextFamily
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import MAX_POSITIONS, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy


def config(model: Path, data: Path, *words: str) -> RunConfig:
    return load_config(["experiment=own", f"policy.model={model}", f"data.path={data}", *words])


def processor(run: RunConfig) -> ChatProcessor:
    store = MediaStore(lambda media: media, run.data.media_cache_bytes)
    suffix = run.question_suffix
    return ChatProcessor(run.policy.model, run.data, run.sampler, store, keep_files=False, suffix=suffix)


@pytest.mark.parametrize("family", TextFamily.model_types)
def test_the_policy_of_a_text_family_equals_its_plain_forward(tmp_path: Path, family: str) -> None:
    model = load_model(str(write_text_policy(tmp_path, family)), torch.float32, "sdpa").eval()
    rows = [np.random.default_rng(n).integers(0, 250, size).astype(np.int32) for n, size in enumerate((50, 33))]
    reader = MediaReader(timeout_s=1, max_items=1)
    batch = collate([TokenSequence(row, 10, (), ()) for row in rows], reader, torch.device("cpu"))
    with torch.no_grad():
        found = TokenPolicy(deepcopy(model), load_config(["experiment=digits"]).learner)(batch, PLAIN).logprobs
        for row, ids in zip(found, map(torch.from_numpy, rows), strict=True):
            logits = model(ids.long()[None]).logits[0, 9:-1]
            expected = logits.log_softmax(-1).gather(-1, ids.long()[10:, None])[:, 0]
            assert expected.min() < -3
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)


def test_a_text_model_takes_prompts_without_images(tmp_path: Path) -> None:
    run = config(write_text_policy(tmp_path / "model", "qwen3"), tmp_path, "data.system_prompt=Be brief.")
    chat = processor(run)
    prompt = chat.prepare(Row("r", "What is 2 + 2?", "4", "4"), "p")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2? Answer in \\boxed{}.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (prompt.media, prompt.compact_ids.tolist()) == ((), prompt.expanded_ids.tolist())
    assert chat.check(Row("r", "What is 2 + 2?", "4", "4")) == prompt.num_tokens
    assert chat.eos_token_ids[0] == chat.encode_answer("4")[-1]
    Image.new("L", (56, 56)).save(tmp_path / "a.png")
    with pytest.raises(PromptError, match="r has 1 images, and policy.model is a text-only model"):
        chat.check(Row("r", "<image>?", "4", "4", (tmp_path / "a.png",)))


def test_a_text_model_without_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template: choose an instruction-tuned checkpoint"):
        processor(config(write_text_policy(tmp_path, "llama", with_template=False), tmp_path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen3_5_moe", "is of the model type qwen3_5_moe, which is not supported .its experts lie transposed"),
        ("gemma2", "is of the model type gemma2, which is not supported .its logits are capped"),
        ("bert", "is of the model type bert, which is not supported"),
        ("no_such_family", "config.json that transformers .* cannot use"),
    ],
)
def test_another_family_is_refused_by_its_name_with_those_that_there_are(
    tmp_path: Path, kind: str, message: str
) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model")
    settings = json.loads((model / "config.json").read_text()) if kind == "no_such_family" else {}
    (model / "config.json").write_text(json.dumps(settings | {"model_type": kind}))
    with pytest.raises(PreflightError, match=rf"policy\.model=.*{message}.*: choose .*qwen2_5_vl.* or .*qwen3"):
        prepare(config(model, tmp_path), lambda media: media)


def test_precision_and_packing_that_do_not_fit_a_family_are_refused(tmp_path: Path) -> None:
    model = write_tiny("qwen3.5", tmp_path / "model")
    run = config(model, tmp_path)
    with pytest.raises(
        PreflightError, match=r"qwen3_5, which vLLM on CPU computes in bfloat16 alone.*dtype is float32"
    ):
        prepare(run, lambda media: media)
    for words in (["resources.dtype=bfloat16"], ["sampler=huggingface"]):
        with pytest.raises(PreflightError, match="train"):  # the data is what is missing next
            prepare(config(model, tmp_path, *words), lambda media: media)
    with pytest.raises(ValueError, match=r"qwen3_5, whose layers run through rows.*set learner\.packing=false"):
        words = ["experiment=digits", "learner.packing=true"]
        TokenPolicy(load_model(str(model), torch.float32, "sdpa"), load_config(words).learner)


def test_a_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    model = write_text_policy(tmp_path, "qwen2")
    assert not takes_images(str(model))
    assert max_positions(str(model)) == max_positions(str(write_tiny_qwen2_5_vl(tmp_path / "vl"))) == MAX_POSITIONS
    words = [f"sampler.max_model_len={MAX_POSITIONS + 1}"]
    with pytest.raises(PreflightError, match=f"max_model_len={MAX_POSITIONS + 1} is more than the {MAX_POSITIONS}"):
        prepare(config(model, tmp_path, *words), lambda media: media)
    settings = json.loads((model / "config.json").read_text())
    settings["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    (model / "config.json").write_text(json.dumps(settings))
    assert max_positions(str(model)) is None, "the engine works it out"
