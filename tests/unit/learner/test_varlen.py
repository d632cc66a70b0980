"""Packed rows give what padded rows and single rows give, in values and gradients, images and windows included."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import varlen_reference
from family_prompts import family_prompts
from learner_data import image, prompt, random_groups, tiny_config, with_logprobs
from scored_rows import HOT, assert_equal, learner_config, scores_of
from tiny_text_models import write_text_policy
from transformers import AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import MediaSpan, ScoredGroup
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.learner.learner import Learner
from mobula.learner.policies.attention import packed as attention
from mobula.learner.policies.attention.packed import RowPacking
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy

CPU = torch.device("cpu")
PACKED, PADDED = "learner.packing=true", "learner.packing=false"
VISION = "qwen2.5-vl"
# Text alone, and families whose images or layers packing refuses.
UNPACKED = ("qwen3", "qwen2.5", "llama", "gemma3", "qwen3.5")
# gemma3_text has a layer with a window of 16 tokens, which is shorter than the rows.
FAMILIES = (VISION, "gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    return write_tiny_qwen2_5_vl(at) if request.param == VISION else write_text_policy(at, request.param)


def sequences(folder: Path) -> list[TokenSequence]:
    """Rows of very different lengths; of a vision model some have one image, two, or one that a sibling has too."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    shown = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)], [image(1)], []]
    if "vl" not in folder_type(folder):
        shown = [[]] * len(shown)
    prompts = [prompt(tokenizer, f"p{n}", some) for n, some in enumerate(shown)]
    sizes = (3, 1, 40, 12, 2)
    return [TokenSequence.of_response(p, rng.integers(0, 250, n)) for p, n in zip(prompts, sizes, strict=True)]


def test_packed_rows_are_padded_rows_are_single_rows(folder: Path) -> None:
    rows = sequences(folder)
    packed, padded = scores_of(folder, [rows], PACKED), scores_of(folder, [rows], PADDED)
    assert_equal(packed, padded)
    assert_equal(packed, scores_of(folder, [[row] for row in rows], PADDED))
    assert_equal(packed, scores_of(folder, [rows[:2], rows[2:]], PACKED))
    assert max(gradient.abs().max() for gradient in packed[1].values()) > 0.01


def test_the_kernel_for_rows_gives_what_padded_rows_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoder and vision tower; plain arithmetic stands in for the kernel, and float32 for the types that it takes."""
    rows = sequences(folder)
    padded = scores_of(folder, [rows], PADDED)
    monkeypatch.setattr(attention, "varlen_attn", varlen_reference.varlen_attn)
    monkeypatch.setattr(attention, "_has_kernel", lambda device: True)
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    varlen_reference.calls.clear()
    assert_equal(scores_of(folder, [rows], PACKED), padded, atol=1e-5)
    windows = {"qwen2_5_vl": {(-1, 0), (-1, -1)}, "gemma3_text": {(15, 0)}, "mistral": {(4095, 0)}}
    assert set(varlen_reference.calls) == windows.get(folder_type(folder), {(-1, 0)})


def folder_type(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


@pytest.mark.exhaustive
@pytest.mark.families
@pytest.mark.parametrize("name", [name for name in TINY if name not in UNPACKED])
def test_every_family_with_images_computes_packed_rows_as_padded_ones(tmp_path: Path, name: str) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    at = write_tiny(name, tmp_path / name, seed=1)
    asked = family_prompts(at, tmp_path).cases.values()
    rows = [TokenSequence.of_response(case.prompt, np.arange(20, 24 + n)) for n, case in enumerate(asked)]
    assert_equal(scores_of(at, [rows], PACKED), scores_of(at, [rows], PADDED))


def test_the_decoder_computes_tokens_and_no_padding(folder: Path) -> None:
    rows = sequences(folder)
    widths = {}
    for packs in (False, True):
        policy = TokenPolicy(
            load_model(str(folder), torch.float32, "sdpa"),
            learner_config(f"learner.packing={packs}".lower(), "learner.share_prompts=false"),
        )
        block = policy.model.get_decoder().layers[0]
        block.register_forward_pre_hook(lambda _, args, packs=packs: widths.update({packs: args[0].shape[:2].numel()}))
        with torch.no_grad():
            policy(collate(rows, MediaReader(timeout_s=1, max_items=8), CPU), HOT)
    num_tokens = [row.num_tokens for row in rows]
    assert widths == {False: len(rows) * max(num_tokens), True: sum(num_tokens)}


def test_blocks_that_are_computed_again_keep_the_rows_apart(folder: Path) -> None:
    rows = sequences(folder)
    model = load_model(str(folder), torch.float32, "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TokenPolicy(model, learner_config(PACKED))
    for sequence in (rows, rows[:2]):  # the bounds of the first batch are not those of the second
        policy.zero_grad()
        output = policy(collate(sequence, MediaReader(timeout_s=1, max_items=8), CPU), HOT)
        output.logprobs.sum().backward()
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    plain = TokenPolicy(load_model(str(folder), torch.float32, "sdpa").train(), learner_config(PADDED))
    plain(collate(rows[:2], MediaReader(timeout_s=1, max_items=8), CPU), HOT).logprobs.sum().backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, atol=1e-5, rtol=1e-5)


def test_a_decoder_that_leaves_the_bounds_out_is_refused(folder: Path) -> None:
    model = load_model(str(folder), torch.float32, "sdpa")
    policy = TokenPolicy(deepcopy(model), learner_config(PACKED))
    decoder = policy.model.get_decoder()
    for layer in decoder.layers:
        forward = layer.forward
        layer.forward = lambda *args, row_bounds=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="cannot be packed: set learner.packing=false"):
        policy(collate(sequences(folder), MediaReader(timeout_s=1, max_items=8), CPU), HOT)


def test_eager_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.attention=eager: set policy\.attention=sdpa"):
        load_config(["experiment=digits", "learner.packing=true", "policy.attention=eager"])
    model = load_model(str(write_text_policy(tmp_path, "qwen2")), torch.float32, "eager")
    with pytest.raises(ValueError, match="set policy.attention=sdpa or learner.packing=false"):
        RowPacking(model)


def gradients(folder: Path, *overrides: str, of: list[ScoredGroup] | None = None) -> dict[str, torch.Tensor]:
    """Of an update on the groups `of`, on random ones by default."""
    words = ("learner.max_grad_norm=1000000", *overrides)
    learner = Learner(tiny_config(folder, *words), 0, 1, (250,))
    learner.connect("")
    learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
    learner.update(of or random_groups(AutoTokenizer.from_pretrained(folder), 6, 4, longest=30), 1)
    learner.export(folder / "out")
    return {name: p.grad for name, p in learner._policy.named_parameters()}


def test_no_split_into_packed_microbatches_changes_the_gradient(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "tiny")
    padded = gradients(folder, PADDED, "learner.tokens_per_microbatch=100000")
    for tokens in (40, 150, 100_000):
        packed = gradients(folder, PACKED, f"learner.tokens_per_microbatch={tokens}")
        for name, gradient in padded.items():
            torch.testing.assert_close(packed[name], gradient, atol=1e-6, rtol=0)
    assert max(gradient.abs().max() for gradient in padded.values()) > 1e-3
    assert "varlen" not in (folder / "out" / "config.json").read_text()


def with_gaps(scored: ScoredGroup, logprobs: list[np.ndarray], rng: np.random.Generator) -> ScoredGroup:
    """As the untrained policy sampled them, with a reference that differs at every token."""
    references = [own - rng.normal(0, 0.5, len(own)).astype(np.float32) for own in logprobs]
    return replace(with_logprobs(scored, logprobs), reference_logprobs=references)


def gradient_by_hand(folder: Path, groups: list[ScoredGroup], kl_coef: float) -> dict[str, torch.Tensor]:
    """Of -sum A_t log p_t / number of tokens, row by row, with A_t = r - coef * sum over k >= t of KL_k."""
    policy = TokenPolicy(
        load_model(str(folder), torch.float32, "sdpa").train(), learner_config("learner.packing=false")
    )
    num_tokens = sum(t.num_steps for scored in groups for t in scored.group.trajectories)
    for scored in groups:
        for t, reward, reference in zip(
            scored.group.trajectories, scored.rewards, scored.reference_logprobs, strict=True
        ):
            kl_from_here = np.cumsum((t.behavior_logprobs - reference)[::-1])[::-1]
            advantages = torch.from_numpy(reward.value - kl_coef * kl_from_here)
            alone = TokenSequence.of_response(scored.group.prompt, t.actions.token_ids)
            output = policy(collate([alone], MediaReader(timeout_s=1, max_items=8), CPU), Distribution(0.8, (250,)))
            (-(advantages * output.logprobs[0]).sum() / num_tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def test_every_response_of_a_pack_is_trained_with_its_own_reward_and_kl(tmp_path: Path) -> None:
    """LightRFT defect B7: the KL was not unpacked, so that of a pack's responses only the first got its reward."""
    folder, rng = write_tiny_qwen2_5_vl(tmp_path / "tiny"), np.random.default_rng(2)
    words = ["algorithm.advantage=reinforce", "algorithm.loss_aggregation=token_mean", "algorithm.kl.coef=0.5",
             "algorithm.kl.estimator=k1", "algorithm.kl.place=reward", "resources.reference.num_workers=1",
             "learner.max_grad_norm=1000000"]  # fmt: skip
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 6, 4, longest=12)
    scorer = ReferenceScorer(tiny_config(folder), (250,))
    scorer.load(folder)
    groups = [with_gaps(g, own, rng) for g, own in zip(groups, scorer.score(groups), strict=True)]
    expected = gradient_by_hand(folder, groups, 0.5)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for packing in ("packing=true", "packing=false"):
        for tokens in (1, 200, 100_000):  # each row alone, several together, all of them
            found = gradients(
                folder, f"learner.{packing}", f"learner.tokens_per_microbatch={tokens}", *words, of=groups
            )
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def row(num_tokens: int, *images: int) -> TokenSequence:
    """Images of 16 tokens each, behind one another."""
    spans = tuple(MediaSpan(16 * n, 16 * n + 16) for n in range(len(images)))
    return TokenSequence(np.zeros(num_tokens, dtype=np.int32), 1, tuple(image(n, 8, 8) for n in images), spans)


def test_packed_microbatches_hold_tokens_up_to_the_budget() -> None:
    lengths = np.random.default_rng(1).integers(2, 60, size=37).tolist()
    rows = [TokenSequence(np.zeros(n, dtype=np.int32), 1, (), ()) for n in lengths]
    [plan] = split_microbatches(rows, learner_config("learner.packing=true", "learner.tokens_per_microbatch=100"), 1)
    sums = [sum(lengths[i] for i in batch) for batch in plan]
    assert sorted(i for batch in plan for i in batch) == list(range(37))
    assert max(sums) <= 100 and all(a + b > 100 for a, b in zip(sums, sums[1:], strict=False))


def test_ranks_share_images_and_tokens_evenly() -> None:
    """24 rows of 40 tokens: four have an image of 16 tokens each, which costs 20 tokens of the decoder a token."""
    rows = [row(40, n) if n < 4 else row(40) for n in range(24)]
    loads = {}
    for cost in (20, 0):
        plan = split_microbatches(rows, learner_config(f"learner.image_token_cost={cost}"), 2)
        loads[cost] = [sum(40 + 16 * 20 * (i < 4) for batch in share for i in batch) for share in plan]
    assert abs(loads[20][0] - loads[20][1]) <= 360, "they differ by one row at most"
    assert abs(loads[0][0] - loads[0][1]) > 360, "by tokens alone one rank has most of the images"


def test_siblings_share_what_their_image_costs() -> None:
    """Eight rows of 40 tokens and 320 / 8 for their image, and eight of 40: 960 in all, 480 are six of the first."""
    rows = [row(40, 1) for _ in range(8)] + [row(40) for _ in range(8)]
    plan = split_microbatches(rows, learner_config("learner.image_token_cost=20"), 2)
    assert [sum(i < 8 for batch in share for i in batch) for share in plan] == [6, 2]
