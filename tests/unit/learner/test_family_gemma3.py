"""Gemma 3 with images: their mask, the blank lines around them, the sampler that has both, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scored_rows import FamilyPrompts, family_prompts

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.errors import PromptError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.deploy.wiring.preparation import Prepared
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.families import family_at
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny("gemma3", tmp_path_factory.mktemp("tiny") / "gemma3", seed=1)


@pytest.fixture(scope="module")
def asked(folder: Path) -> FamilyPrompts:
    return family_prompts(folder, folder.parent)


def logprobs(folder: Path, asked: FamilyPrompts, case: str, *words: str) -> np.ndarray:
    """The learner's, of a case's prompt."""
    policy = TokenPolicy(
        load_model(str(folder), torch.float32, "sdpa"), with_row_layout(run_of(folder, *words)).learner
    )
    batch = collate([TokenSequence.of_prompt(asked.cases[case].prompt)], MediaReader(timeout_s=1, max_items=8), CPU)
    with torch.no_grad():
        return policy(batch, PLAIN).logprobs[0].numpy()


def chat_of(run: RunConfig, device: str = "cpu") -> ChatProcessor:
    store = MediaStore(lambda media: media, run.data.media_cache_bytes)
    return ChatProcessor(run.policy.model, run.data, run.sampler, store, keep_files=False, device=device)


def run_of(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none", *words])


def test_tokens_of_an_image_see_each_other(folder: Path, asked: FamilyPrompts, monkeypatch) -> None:
    both_ways = logprobs(folder, asked, "two images")
    monkeypatch.setattr("mobula.learner.policies.families.vision_models.Gemma3.decoder_inputs", lambda *_: {})
    assert np.abs(both_ways - logprobs(folder, asked, "two images")).max() > 1e-3


def test_a_blank_line_is_one_token_with_the_line_end_before_it(asked: FamilyPrompts) -> None:
    ids, [span] = (asked.cases["one image"].prompt.expanded_ids, asked.cases["one image"].prompt.media_spans)
    tokens = asked.processor._tokenizer.convert_ids_to_tokens(ids[span.start - 1 : span.end + 1].tolist())
    assert tokens == ["\n\n\n", "<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>", "\n\n"]


@pytest.mark.parametrize("words", [["learner.packing=true"], ["learner.packing=true", "policy.attention=sdpa"]])
def test_images_in_packed_rows_are_refused_and_text_is_not(
    folder: Path, asked: FamilyPrompts, words: list[str]
) -> None:
    np.testing.assert_allclose(logprobs(folder, asked, "text", *words), logprobs(folder, asked, "text"), atol=1e-5)
    with pytest.raises(ValueError, match=r"Gemma 3, .* mask .*policy\.attention=sdpa, learner\.packing=false"):
        logprobs(folder, asked, "one image", *words)


def test_images_are_refused_with_vllm_on_cpu_alone(folder: Path, asked: FamilyPrompts, tmp_path: Path) -> None:
    asked.cases["one image"].images[0].save(tmp_path / "a.png")
    row = Row("r", "<image>?", "4", "4", (tmp_path / "a.png",))
    on_cpu = chat_of(run_of(folder))
    with pytest.raises(PromptError, match=r"resources\.device=cpu and sampler=vllm.*use a GPU, or sampler=huggingface"):
        on_cpu.check(row)
    assert on_cpu.check(Row("r", "What?", "4", "4")) > 0
    assert not on_cpu.takes_images
    for chat in (chat_of(run_of(folder), "cuda"), chat_of(run_of(folder, "sampler=huggingface"))):
        assert chat.check(row) > 10
    assert family_at(str(folder)).needs_gate


async def test_the_transformers_sampler_sees_images_as_the_learner_does(folder: Path, asked: FamilyPrompts) -> None:
    run = run_of(folder, "sampler=huggingface")
    chat = chat_of(run)
    prepared = Prepared(run, folder, checkpoint_manifest(folder, "float32"), chat, None, {})
    sampler = HuggingFaceSampler(engine_settings(prepared, 0))
    await sampler.start()
    for case in ("text", "one image", "same image twice"):
        prompt = asked.cases[case].prompt
        found = await sampler.prompt_logprobs(prompt, [handle.reference for handle in prompt.media])
        np.testing.assert_allclose(found, logprobs(folder, asked, case), atol=1e-5)
    await sampler.close()


def test_pan_and_scan_is_refused(folder: Path, tmp_path: Path) -> None:
    at = write_tiny("gemma3", tmp_path / "model")
    file = at / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["do_pan_and_scan"] = True
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="do_pan_and_scan=true"):
        chat_of(run_of(at), "cuda")
