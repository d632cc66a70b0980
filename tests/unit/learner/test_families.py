"""Model families: support, prompts, recomputed blocks, experts, and images in tiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_data import tiny_config
from one_learner import Tensors, largest, largest_difference
from PIL import Image
from safetensors.torch import load_file
from scored_rows import (
    FamilyPrompts,
    chat_of,
    collated,
    family_prompts,
    kept_bytes,
    learner_of,
    plain_logprobs,
    policy_at,
)
from tiny_checkpoints import families, write_text_policy
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, ProcessorMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.errors import PreflightError, PromptError
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.backends.native import SingleBackend
from mobula.learner.policies.batch import TokenBatch, TokenSequence
from mobula.learner.policies.checkpoint import load_policy_model, save_policy
from mobula.learner.policies.families import TextFamily, family_at, max_positions, takes_images
from mobula.learner.policies.families.base import ImageFamily
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import disable_dropout, load_model, recompute_blocks
from mobula.learner.policies.tiny import QWEN3_VL_MOE, TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.tiny.writing import MAX_POSITIONS
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policy_weights import PolicyWeights


def config(model: Path, data: Path, *words: str) -> RunConfig:
    return load_config(["experiment=own", f"policy.model={model}", f"data.path={data}", *words])


def processor(run: RunConfig) -> ChatProcessor:
    return chat_of(run, suffix=run.question_suffix)


@pytest.mark.parametrize("family", TextFamily.model_types)
@torch.no_grad()
def test_the_policy_of_a_text_family_equals_its_plain_forward(tmp_path: Path, family: str) -> None:
    policy = policy_at(write_text_policy(tmp_path, family)).eval()
    plain = load_model(str(tmp_path), torch.float32, "sdpa").eval()
    ids = [np.random.default_rng(n).integers(0, 250, size).astype(np.int32) for n, size in enumerate((50, 33))]
    rows = [TokenSequence(own, 10, (), ()) for own in ids]
    for found, row in zip(policy(collated(rows), PLAIN).logprobs, rows, strict=True):
        expected = plain_logprobs(plain, row)
        assert expected.min() < -3
        torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=0)


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
    message = r"qwen3_5, which vLLM on CPU computes in bfloat16 alone.*dtype is float32"
    with pytest.raises(PreflightError, match=message):
        prepare(config(model, tmp_path), lambda media: media)
    for words in (["resources.dtype=bfloat16"], ["sampler=huggingface"]):
        with pytest.raises(PreflightError, match="train"):  # the data is what is missing next
            prepare(config(model, tmp_path, *words), lambda media: media)
    with pytest.raises(ValueError, match=r"qwen3_5, whose layers run through rows.*set learner\.packing=false"):
        policy_at(model, "learner.packing=true")


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


ANSWER = np.arange(20, 36, dtype=np.int32)


@pytest.mark.parametrize("name", families(TINY))
def test_recomputed_blocks_keep_less_and_give_the_same_gradients(name: str, tmp_path: Path) -> None:
    folder = write_tiny(name, tmp_path / name, seed=1)
    prompts = [case.prompt for case in family_prompts(folder, tmp_path).cases.values()]
    batch = collated([TokenSequence.of_response(prompt, ANSWER) for prompt in prompts])
    (kept, expected), (kept_less, found) = (backward(folder, batch, kind) for kind in ("none", "blocks"))
    assert kept_less < kept / 2
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=parameter: n + m)
    assert largest(expected) > 1e-3


def backward(folder: Path, batch: TokenBatch, kind: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that a forward pass in training mode keeps, and the gradient of each parameter that it reaches."""
    model = load_model(str(folder), torch.float32, "sdpa").train()
    disable_dropout(model)
    recompute_blocks(model, kind)
    policy = TokenPolicy(model, learner_of(folder))
    loss: list[torch.Tensor] = []
    kept = kept_bytes(lambda: loss.append(policy(batch, PLAIN).logprobs.mean()) or loss, policy.parameters())
    loss[0].backward()
    return kept, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


EXPERTS = ".mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3-vl-moe", tmp_path_factory.mktemp("tiny") / "moe", seed=1)


def test_what_is_pushed_is_what_the_checkpoint_holds(folder: Path) -> None:
    asked = run_of(folder)
    model = load_policy_model(asked.policy, torch.float32)
    weights = PolicyWeights(model, asked)
    weights.manifest.check_against(checkpoint_manifest(folder, "float32"))
    backend = SingleBackend(torch.device("cpu"), torch.float32, asked.learner)
    backend.wrap(TokenPolicy(model, asked.learner))
    stored, pushed = load_file(folder / "model.safetensors"), dict(weights.merged(backend))
    assert pushed.keys() == stored.keys()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in stored.items())
    experts = [name for name in stored if EXPERTS in name]
    assert experts and all(pushed[name].shape != model.state_dict()[name].shape for name in experts)


def test_an_export_is_the_checkpoint_again_for_us_and_for_plain_transformers(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "saved", model.state_dict(), model.state_dict().items())
    stored, saved = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "saved"))
    assert stored.keys() == saved.keys()
    assert all(torch.equal(stored[name], saved[name]) for name in stored)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_experts_whose_shape_does_not_say_how_they_lie_are_refused(tmp_path: Path) -> None:
    wide = {"moe_intermediate_size": 64}  # gate and up together are as wide as the states
    square = replace(QWEN3_VL_MOE, text=QWEN3_VL_MOE.text | wide)(tmp_path / "square")
    with pytest.raises(ValueError, match=r"gate_up_proj with the square shape \(4, 128, 128\).*other widths"):
        load_model(str(square), torch.float32, "sdpa")


def test_routers_can_be_frozen(folder: Path) -> None:
    frozen = load_policy_model(run_of(folder, "policy.freeze=[router]").policy, torch.float32)
    fixed = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert fixed == {f"model.language_model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


def trained(folder: Path, experts: str) -> tuple[Tensor, Tensors, Tensors]:
    """Log-probs [1, 24] of random tokens, gradients of their mean, and the weights after one step of AdamW."""
    policy = load_policy_model(tiny_config(folder).policy, torch.float32)
    assert policy.config.get_text_config()._experts_implementation == "grouped_mm"
    policy.set_experts_implementation(experts)
    assert policy.config.get_text_config()._experts_implementation == experts
    ids = torch.randint(0, 200, (1, 25), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3)
    logits = policy(input_ids=ids).logits[:, :-1]  # [1, 24, V]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logprobs.mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    optimizer.step()
    return logprobs.detach(), gradients, {name: p.detach() for name, p in policy.named_parameters()}


def test_grouped_products_equal_the_loop_over_experts(folder: Path) -> None:
    ours, expected = trained(folder, "grouped_mm"), trained(folder, "eager")
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-6)
    for found, wanted in zip(ours[1:], expected[1:], strict=True):
        assert any(".experts." in name for name in found)
        assert largest_difference(found, wanted) < 1e-6


def test_the_experts_of_a_layer_are_in_its_own_unit(folder: Path) -> None:
    policy = policy_at(folder)
    experts = [module for module in policy.modules() if hasattr(module, "gate_up_proj")]
    holding = [[block for block in policy.blocks() if module in set(block.modules())] for module in experts]
    assert len(experts) == policy.model.config.get_text_config().num_hidden_layers
    assert [len(found) for found in holding] == [1] * len(experts)
    assert len({id(found[0]) for found in holding}) == len(experts)
    assert all(isinstance(found[0], GradientCheckpointingLayer) for found in holding)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory) -> Path:
    return write_tiny("gemma3", tmp_path_factory.mktemp("tiny") / "gemma3", seed=1)


@pytest.fixture(scope="module")
def asked(gemma3: Path) -> FamilyPrompts:
    return family_prompts(gemma3, gemma3.parent)


@torch.no_grad()
def logprobs(folder: Path, asked: FamilyPrompts, case: str, *words: str) -> np.ndarray:
    """The learner's, of a case's prompt."""
    config = with_row_layout(run_of(folder, *words)).learner
    policy = TokenPolicy(load_model(str(folder), torch.float32, "sdpa"), config)
    return policy(collated([TokenSequence.of_prompt(asked.cases[case].prompt)]), PLAIN).logprobs[0].numpy()


def run_of(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none", *words])


def test_tokens_of_an_image_see_each_other(gemma3: Path, asked: FamilyPrompts, monkeypatch) -> None:
    both_ways = logprobs(gemma3, asked, "two images")
    monkeypatch.setattr("mobula.learner.policies.families.vision_models.Gemma3.decoder_inputs", lambda *_: {})
    assert np.abs(both_ways - logprobs(gemma3, asked, "two images")).max() > 1e-3


def test_a_blank_line_is_one_token_with_the_line_end_before_it(asked: FamilyPrompts) -> None:
    ids, [span] = (asked.cases["one image"].prompt.expanded_ids, asked.cases["one image"].prompt.media_spans)
    tokens = asked.processor.tokenizer.convert_ids_to_tokens(ids[span.start - 1 : span.end + 1].tolist())
    assert tokens == ["\n\n\n", "<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>", "\n\n"]


@pytest.mark.parametrize("words", [["learner.packing=true"], ["learner.packing=true", "policy.attention=sdpa"]])
def test_images_in_packed_rows_are_refused_and_text_is_not(
    gemma3: Path, asked: FamilyPrompts, words: list[str]
) -> None:
    expected = logprobs(gemma3, asked, "text")
    np.testing.assert_allclose(logprobs(gemma3, asked, "text", *words), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"Gemma 3, .* mask .*policy\.attention=sdpa, learner\.packing=false"):
        logprobs(gemma3, asked, "one image", *words)


def test_images_are_refused_with_vllm_on_cpu_alone(gemma3: Path, asked: FamilyPrompts, tmp_path: Path) -> None:
    asked.cases["one image"].images[0].save(tmp_path / "a.png")
    row = Row("r", "<image>?", "4", "4", (tmp_path / "a.png",))
    on_cpu = chat_of(run_of(gemma3))
    with pytest.raises(PromptError, match=r"resources\.device=cpu and sampler=vllm.*use a GPU, or sampler=huggingface"):
        on_cpu.check(row)
    assert on_cpu.check(Row("r", "What?", "4", "4")) > 0
    assert not on_cpu.takes_images
    for chat in (chat_of(run_of(gemma3), device="cuda"), chat_of(run_of(gemma3, "sampler=huggingface"))):
        assert chat.check(row) > 10
    assert family_at(str(gemma3)).needs_gate


async def test_the_transformers_sampler_sees_images_as_the_learner_does(gemma3: Path, asked: FamilyPrompts) -> None:
    run = run_of(gemma3, "sampler=huggingface")
    chat = chat_of(run)
    prepared = Prepared(run, gemma3, checkpoint_manifest(gemma3, "float32"), chat, None, {})
    sampler = HuggingFaceSampler(engine_settings(prepared, 0))
    await sampler.start()
    for case in ("text", "one image", "same image twice"):
        prompt = asked.cases[case].prompt
        found = await sampler.prompt_logprobs(prompt, [handle.reference for handle in prompt.media])
        np.testing.assert_allclose(found, logprobs(gemma3, asked, case), atol=1e-5)
    await sampler.close()


def edited_processor(folder: Path, **settings: Any) -> Path:
    """The checkpoint with other settings of its image processor."""
    file = folder / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= settings
    file.write_text(json.dumps(stored))
    return folder


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    folder = edited_processor(write_tiny("gemma3", tmp_path / "model"), do_pan_and_scan=True)
    with pytest.raises(ValueError, match="do_pan_and_scan=true"):
        chat_of(run_of(folder), device="cuda")


TOKENS_PER_TILE = 64
RELEASED = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}  # SmolVLM-256M


def bounded(folder: Path, **budget: int) -> tuple[ImageFamily, ProcessorMixin]:
    """The family of a checkpoint, and its processor with such a budget of pixels."""
    data = load_config(["experiment=digits", *(f"data.{key}={value}" for key, value in budget.items())]).data
    family = family_at(str(folder))
    assert isinstance(family, ImageFamily)
    return family, AutoProcessor.from_pretrained(folder, **family.processor_options(str(folder), data))


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
    folder = edited_processor(write_tiny(name, tmp_path), **RELEASED)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | {"image_seq_len": TOKENS_PER_TILE}))
    family, processor = bounded(folder, max_pixels=max_pixels)
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
    # False in released checkpoints, whose processor says true.
    folder = edited_processor(write_tiny("internvl3", tmp_path), crop_to_patches=cuts)
    family, processor = bounded(folder, max_pixels=int(max_tiles * 56 * 56), min_pixels=1)
    image = Image.effect_noise(size, 64).convert("RGB")
    made = processor(text=["<IMG_CONTEXT>"], images=[image], return_tensors="np")
    assert made["input_ids"][0].tolist() == family.expansion(processor, size).tolist()
    pixels = family.process(processor, image)["pixel_values"]
    assert pixels.shape == (num_tiles, 3, 56, 56)
    np.testing.assert_array_equal(pixels, made["pixel_values"])
