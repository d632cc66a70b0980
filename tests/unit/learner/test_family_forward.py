"""Every family: ids and tensors equal its own processor's, log-probs its own forward's, padded and mixed in a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scored_rows import FamilyPrompts, collated, family_prompts, learner_of
from tiny_checkpoints import USUAL_FAMILIES, families

from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import MediaSpan
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.families import family_at
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import checkpoint_names, load_model
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import TokenPolicy

ANSWER = np.array([20, 30, 40, 50], dtype=np.int32)
SHOWN = [name for name in TINY if name not in ("qwen3", "qwen2.5", "llama")]
FORWARD = (*USUAL_FAMILIES, "qwen2.5-omni", "qwen3")
TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {}


@pytest.fixture
def folder(request, folders, tmp_path_factory) -> Path:
    name = request.param
    if name not in folders:
        folders[name] = write_tiny(name, tmp_path_factory.mktemp("tiny") / name, seed=1)
    return folders[name]


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> FamilyPrompts:
    return family_prompts(folder, tmp_path)


@pytest.fixture
def rows(asked: FamilyPrompts) -> dict[str, TokenSequence]:
    """A response of one more token to each case's prompt."""
    cases = enumerate(asked.cases.items())
    return {name: TokenSequence.of_response(case.prompt, ANSWER[: 1 + n]) for n, (name, case) in cases}


@pytest.fixture
def policy(folder: Path) -> TokenPolicy:
    model = load_model(str(folder), torch.float32, "sdpa").eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():  # so that norms and biases matter
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return TokenPolicy(model, learner_of(folder))


@pytest.mark.parametrize("folder", families(TINY, FORWARD), indirect=True)
@torch.no_grad()
def test_ids_and_log_probs_equal_the_familys_own(folder, asked: FamilyPrompts, policy: TokenPolicy, rows) -> None:
    """Where a processor takes videos within a budget, or of one length alone, test_family_media.py compares them."""
    assert sum(p.numel() for p in policy.parameters()) < 3_000_000
    found = policy(collated(list(rows.values())), PLAIN).logprobs
    plain = load_model(str(folder), torch.float32, "sdpa").eval()  # the policy's output layer gives log-probs
    plain.load_state_dict(policy.model.state_dict())
    for (name, row), logprobs in zip(rows.items(), found, strict=True):
        num_videos = len(asked.cases[name].videos)
        if num_videos > 1 or (num_videos and policy.family.has_pixel_budget):
            continue
        inputs, answer = asked.own_inputs(name), torch.from_numpy(row.token_ids[row.num_context :]).long()
        assert inputs["input_ids"][0].tolist() == row.token_ids[: row.num_context].tolist(), name
        for key, value in inputs.items():
            if key in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
                tail = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}.get(key, answer * 0)
                inputs[key] = torch.cat([value, tail[None]], dim=1)
        logits = plain(**inputs).logits[0, -len(answer) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        assert expected.min() < -3
        message = f"{name}: {{}}".format
        torch.testing.assert_close(logprobs[: len(answer)], expected, atol=1e-5, rtol=0, msg=message)


def gradients(policy: TokenPolicy, *batches: list[TokenSequence]) -> dict[str, torch.Tensor]:
    """Of the sum of log-probs, by name of the parameters that have one."""
    policy.zero_grad()
    for batch in batches:
        policy(collated(batch), PLAIN).logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("folder", families(SHOWN, FORWARD), indirect=True)
def test_the_tower_runs_once_a_batch_and_every_parameter_gets_a_gradient(policy: TokenPolicy, rows) -> None:
    batch, calls = list(rows.values()), []
    core = policy.family.core(policy.model)
    towers = [module for name, module in core.named_children() if name in TOWERS]
    for tower in towers:
        tower.register_forward_pre_hook(lambda *_: calls.append(1))
    reached = gradients(policy, batch[:1]).keys()
    assert all(p.grad.abs().max() == 0 for t in towers for p in t.parameters() if p.grad is not None)
    together = gradients(policy, batch)
    assert together.keys() == reached and len(calls) == 2 * len(towers)
    for tower in towers:
        assert max(p.grad.abs().max() for p in tower.parameters() if p.grad is not None) > 0
    for name, alone in gradients(policy, *([row] for row in batch)).items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(together[name], alone, atol=2e-4, rtol=2e-3, msg=message)


@pytest.mark.parametrize("folder", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"], indirect=True)
def test_positions_of_images_are_those_of_the_papers(policy: TokenPolicy) -> None:
    """M-RoPE (arXiv:2409.12191, section 2.1): text counts on in all three; an image of t x h x w embeddings has the
    time, row and column of each, from where the text stopped; what follows begins behind the largest of them."""
    placeholder = policy.family.placeholder_id(policy.model.config)
    grid = np.array([[1, 4, 6]])  # patches; 2 x 3 embeddings
    pixels = np.zeros(
        (24, policy.family.blank_image(policy.model.config, torch.device("cpu"))["pixel_values"].shape[1])
    )
    medium = ProcessedMedia("image", {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grid})
    handle = MediaHandle("k", "image", 0, medium)
    ids = np.array([5, 6, 7, *[placeholder] * 6, 8, 9], dtype=np.int32)
    rows = [
        TokenSequence(ids, 10, (handle,), (MediaSpan(3, 9),)),
        TokenSequence(np.arange(10, 21, dtype=np.int32), 2, (), ()),
    ]
    shown = collated(rows)
    types = torch.from_numpy((shown.host_ids == placeholder) & shown.in_media).long()
    found = policy.family.decoder_inputs(policy.family.core(policy.model), shown, types)["position_ids"]
    expected = [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    assert found[:, 0].tolist() == expected
    assert found[:, 1].tolist() == [list(range(11))] * 3


@pytest.mark.parametrize("folder", families([name for name in SHOWN if name != "llava"]), indirect=True)
def test_parts_and_media_tokens_are_there(folder: Path, asked: FamilyPrompts, policy: TokenPolicy) -> None:
    family = family_at(str(folder))
    names = list(checkpoint_names(policy.model).values())
    for part, starts in family.parts.items():
        assert any(name.startswith(starts) for name in names), (part, names[:3])
    assert all(name.startswith(tuple(s for starts in family.parts.values() for s in starts)) for name in names)
    sees = family.takes_images
    placeholder = (family.placeholder_id if sees else family.audio_placeholder_id)(policy.model.config)
    assert placeholder in asked.processor.media_token_ids
    prompt = asked.cases["several sizes" if sees else "two sounds"].prompt
    assert len(prompt.media_spans) == (3 if sees else 2)
    inside = np.zeros(prompt.num_tokens, dtype=bool)
    for span in prompt.media_spans:
        inside[span.start : span.end] = True
    assert not (prompt.expanded_ids[~inside] == placeholder).any()


@pytest.mark.parametrize("folder", ["llava-onevision"], indirect=True)
def test_a_partitioned_newline_is_refused(policy: TokenPolicy, rows) -> None:
    policy.model.model.image_newline.data = torch.empty(0)  # as ZeRO-3 leaves it between forward passes
    message = r"learner\.zero_stage=3 partitions image_newline .*zero_stage=2, or learner=fsdp2"
    with pytest.raises(ValueError, match=message):
        policy(collated(list(rows.values())), PLAIN)
