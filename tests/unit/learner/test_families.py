"""Model families: support, prompts, recomputed blocks and experts."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import tiny_config
from PIL import Image
from safetensors.torch import load_file
from scored_rows import FamilyPrompts, family_prompts, kept_bytes, learner_of
from tiny_checkpoints import families, write_text_policy
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.errors import PreflightError, PromptError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.backends.native import SingleBackend
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate
from mobula.learner.policies.checkpoint import load_policy_model, save_policy
from mobula.learner.policies.families import TextFamily, family_at, max_positions, takes_images
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import disable_dropout, load_model, recompute_blocks
from mobula.learner.policies.tiny import QWEN3_VL_MOE, TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.tiny.writing import MAX_POSITIONS
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policy_weights import PolicyWeights


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


ANSWER = range(20, 36)


@pytest.mark.parametrize("name", families(TINY))
def test_recomputed_blocks_keep_less_and_give_the_same_gradients(name: str, tmp_path: Path) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    folder = write_tiny(name, tmp_path / name, seed=1)
    prompts = [case.prompt for case in family_prompts(folder, tmp_path).cases.values()]
    rows = [TokenSequence.of_response(prompt, torch.tensor(ANSWER, dtype=torch.int32).numpy()) for prompt in prompts]
    batch = collate(rows, MediaReader(timeout_s=1, max_items=12), torch.device("cpu"))
    (kept, expected), (kept_less, found) = (backward(folder, batch, kind) for kind in ("none", "blocks"))
    assert kept_less < kept / 2
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=parameter: n + m)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3


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


def config_of_experts(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none", *words])


def test_what_is_pushed_is_what_the_checkpoint_holds(folder: Path) -> None:
    asked = config_of_experts(folder)
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
    frozen = load_policy_model(config_of_experts(folder, "policy.freeze=[router]").policy, torch.float32)
    fixed = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert fixed == {f"model.language_model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


EAGER = "eager"


def model(folder: Path) -> PreTrainedModel:
    return load_policy_model(tiny_config(folder).policy, torch.float32)


def trained(policy: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Log-probs [1, 24] of random tokens, gradients of their sum, and the weights after one step of AdamW."""
    ids = torch.randint(0, 200, (1, 25), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3)
    logits = policy(input_ids=ids).logits[:, :-1]  # [1, 24, V]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logprobs.mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    optimizer.step()
    return logprobs.detach(), gradients, {name: p.detach() for name, p in policy.named_parameters()}


def test_grouped_products_equal_the_loop_over_experts(tmp_path: Path) -> None:
    folder = write_tiny("qwen3-vl-moe", tmp_path / "moe", seed=1)
    grouped, loop = model(folder), model(folder)
    assert grouped.config.get_text_config()._experts_implementation == "grouped_mm"
    loop.set_experts_implementation(EAGER)
    assert loop.config.get_text_config()._experts_implementation == EAGER
    ours, expected = trained(grouped), trained(loop)
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-6)
    for found, wanted in zip(ours[1:], expected[1:], strict=True):
        assert found.keys() == wanted.keys()
        assert any(".experts." in name for name in found)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_the_experts_of_a_layer_are_in_its_own_unit(tmp_path: Path) -> None:
    config = tiny_config(write_tiny("qwen3-vl-moe", tmp_path / "moe", seed=1))
    policy = TokenPolicy(load_policy_model(config.policy, torch.float32), config.learner)
    blocks = list(policy.blocks())
    experts = [module for module in policy.modules() if hasattr(module, "gate_up_proj")]
    holding = [[block for block in blocks if any(one is module for one in block.modules())] for module in experts]
    assert len(experts) == policy.model.config.get_text_config().num_hidden_layers
    assert [len(found) for found in holding] == [1] * len(experts)
    assert len({id(found[0]) for found in holding}) == len(experts)
    assert all(isinstance(found[0], GradientCheckpointingLayer) for found in holding)


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gemma3_folder(tmp_path_factory) -> Path:
    return write_tiny("gemma3", tmp_path_factory.mktemp("tiny") / "gemma3", seed=1)


@pytest.fixture(scope="module")
def asked(gemma3_folder: Path) -> FamilyPrompts:
    return family_prompts(gemma3_folder, gemma3_folder.parent)


def logprobs(gemma3_folder: Path, asked: FamilyPrompts, case: str, *words: str) -> np.ndarray:
    """The learner's, of a case's prompt."""
    policy = TokenPolicy(
        load_model(str(gemma3_folder), torch.float32, "sdpa"),
        with_row_layout(run_of(gemma3_folder, *words)).learner,
    )
    batch = collate([TokenSequence.of_prompt(asked.cases[case].prompt)], MediaReader(timeout_s=1, max_items=8), CPU)
    with torch.no_grad():
        return policy(batch, PLAIN).logprobs[0].numpy()


def chat_of(run: RunConfig, device: str = "cpu") -> ChatProcessor:
    store = MediaStore(lambda media: media, run.data.media_cache_bytes)
    return ChatProcessor(run.policy.model, run.data, run.sampler, store, keep_files=False, device=device)


def run_of(gemma3_folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"policy.model={gemma3_folder}", "policy.tiny=none", *words])


def test_tokens_of_an_image_see_each_other(gemma3_folder: Path, asked: FamilyPrompts, monkeypatch) -> None:
    both_ways = logprobs(gemma3_folder, asked, "two images")
    monkeypatch.setattr("mobula.learner.policies.families.vision_models.Gemma3.decoder_inputs", lambda *_: {})
    assert np.abs(both_ways - logprobs(gemma3_folder, asked, "two images")).max() > 1e-3


def test_a_blank_line_is_one_token_with_the_line_end_before_it(asked: FamilyPrompts) -> None:
    ids, [span] = (asked.cases["one image"].prompt.expanded_ids, asked.cases["one image"].prompt.media_spans)
    tokens = asked.processor._tokenizer.convert_ids_to_tokens(ids[span.start - 1 : span.end + 1].tolist())
    assert tokens == ["\n\n\n", "<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>", "\n\n"]


@pytest.mark.parametrize("words", [["learner.packing=true"], ["learner.packing=true", "policy.attention=sdpa"]])
def test_images_in_packed_rows_are_refused_and_text_is_not(
    gemma3_folder: Path, asked: FamilyPrompts, words: list[str]
) -> None:
    np.testing.assert_allclose(
        logprobs(gemma3_folder, asked, "text", *words),
        logprobs(gemma3_folder, asked, "text"),
        atol=1e-5,
    )
    with pytest.raises(ValueError, match=r"Gemma 3, .* mask .*policy\.attention=sdpa, learner\.packing=false"):
        logprobs(gemma3_folder, asked, "one image", *words)


def test_images_are_refused_with_vllm_on_cpu_alone(gemma3_folder: Path, asked: FamilyPrompts, tmp_path: Path) -> None:
    asked.cases["one image"].images[0].save(tmp_path / "a.png")
    row = Row("r", "<image>?", "4", "4", (tmp_path / "a.png",))
    on_cpu = chat_of(run_of(gemma3_folder))
    with pytest.raises(PromptError, match=r"resources\.device=cpu and sampler=vllm.*use a GPU, or sampler=huggingface"):
        on_cpu.check(row)
    assert on_cpu.check(Row("r", "What?", "4", "4")) > 0
    assert not on_cpu.takes_images
    for chat in (
        chat_of(run_of(gemma3_folder), "cuda"),
        chat_of(run_of(gemma3_folder, "sampler=huggingface")),
    ):
        assert chat.check(row) > 10
    assert family_at(str(gemma3_folder)).needs_gate


async def test_the_transformers_sampler_sees_images_as_the_learner_does(
    gemma3_folder: Path, asked: FamilyPrompts
) -> None:
    run = run_of(gemma3_folder, "sampler=huggingface")
    chat = chat_of(run)
    prepared = Prepared(run, gemma3_folder, checkpoint_manifest(gemma3_folder, "float32"), chat, None, {})
    sampler = HuggingFaceSampler(engine_settings(prepared, 0))
    await sampler.start()
    for case in ("text", "one image", "same image twice"):
        prompt = asked.cases[case].prompt
        found = await sampler.prompt_logprobs(prompt, [handle.reference for handle in prompt.media])
        np.testing.assert_allclose(found, logprobs(gemma3_folder, asked, case), atol=1e-5)
    await sampler.close()


def test_pan_and_scan_is_refused(gemma3_folder: Path, tmp_path: Path) -> None:
    at = write_tiny("gemma3", tmp_path / "model")
    file = at / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["do_pan_and_scan"] = True
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="do_pan_and_scan=true"):
        chat_of(run_of(at), "cuda")
