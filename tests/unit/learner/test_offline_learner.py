"""The offline learner on one process: the losses of plain transformers, exact under any split and after a resume."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import add_dropout, image, prompt, random_groups, tiny_config
from offline_rows import JOBS, config_of, rows
from one_learner import connected_learner, copied, largest_difference
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.overrides import overridden
from mobula.learner.examples import Example, all_whole, collate_examples, end_row
from mobula.learner.learner import Learner
from mobula.learner.policies.batch import collate
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

# AdamW's first step divides a gradient by its own size. With an epsilon of 1e-8, a gradient that is 0 but for float32
# rounding (1e-8, other digits on another CPU) moves its weight by a large part of the learning rate. With this one, a
# step is in proportion to small gradients, so that weights differ as gradients do.
LARGE_EPS = "learner.adam_eps=0.001"


def plain_logprobs(model, scored: ScoredGroup) -> list[torch.Tensor]:
    """Of each answer's tokens, by the model's own forward, row by row."""
    found = []
    for t in scored.group.trajectories:
        asked = scored.group.prompt
        ids = torch.from_numpy(np.concatenate([asked.expanded_ids, t.actions.token_ids])).long()[None]
        media = [handle.reference.inputs for handle in asked.media]
        inputs = {n: torch.from_numpy(np.concatenate([m[n] for m in media])) for n in (media[0] if media else ())}
        types = (ids == model.config.image_token_id).long()
        logits = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, asked.num_tokens - 1 : -1]
        found.append(logits.double().log_softmax(-1).gather(-1, ids[0, asked.num_tokens :, None])[:, 0])
    return found


def test_sft_is_the_mean_cross_entropy_of_masked_tokens_by_plain_transformers(folder: Path, tokenizer) -> None:
    groups = rows(tokenizer, "sft")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logprobs = [plain_logprobs(model, scored)[0] for scored in groups]
    masks = [torch.from_numpy(scored.group.trajectories[0].action_mask) for scored in groups]
    expected = -sum(lp[mask].sum() for lp, mask in zip(logprobs, masks, strict=True)) / sum(m.sum() for m in masks)
    learner = connected_learner(config_of(folder, "sft"))
    assert learner.assess(groups)["loss"] == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    assert learner.update(groups, 1).metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_is_the_papers_loss_over_plain_transformers(folder: Path, tokenizer, loss: str) -> None:
    groups, beta, smoothing = rows(tokenizer, "dpo"), 0.2, 0.1
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    losses, margins = [], []
    for scored in groups:
        sums = [
            (lp - torch.from_numpy(ref).double())[torch.from_numpy(t.action_mask)].sum()
            for lp, ref, t in zip(
                plain_logprobs(model, scored), scored.reference_logprobs, scored.group.trajectories, strict=True
            )
        ]
        h = sums[0] - sums[1]
        p = 1 / (1 + torch.exp(-beta * h))
        margins.append(beta * h)
        both = -(1 - smoothing) * torch.log(p) - smoothing * torch.log(1 - p)
        losses.append(both if loss == "sigmoid" else (h - 1 / (2 * beta)) ** 2)
    expected = torch.stack(losses).mean()
    words = (f"offline.dpo.loss={loss}", f"offline.dpo.beta={beta}")
    words += (f"offline.dpo.label_smoothing={smoothing}",) if loss == "sigmoid" else ()
    learner = connected_learner(config_of(folder, "dpo", *words))
    found = learner.assess(groups)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["margin"] == pytest.approx(torch.stack(margins).mean().item(), abs=1e-4)
    assert found["chosen_reward"] - found["rejected_reward"] == pytest.approx(found["margin"], abs=1e-4)
    assert found["accuracy"] == pytest.approx(sum(m > 0 for m in margins).item() / len(margins))
    expected.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    assert learner.update(groups, 1).metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("job", JOBS)
def test_the_gradient_does_not_depend_on_the_split_and_a_resume_is_exact(folder, tokenizer, job: str, tmp_path) -> None:
    groups = [rows(tokenizer, job, seed=seed) for seed in range(3)]
    budgets = (f"learner.tokens_per_microbatch={n}" for n in (100_000, 60))
    whole, split = (connected_learner(config_of(folder, job, LARGE_EPS, budget)) for budget in budgets)
    start = copied(whole)
    for version in (1, 2):
        metrics = [learner.update(groups[version], version).metrics for learner in (whole, split)]
        assert metrics[0] == pytest.approx(metrics[1], rel=2e-4, abs=1e-5)
        assert metrics[0]["optimizer_steps"] == 1
    assert largest_difference(copied(whole), copied(split)) < 1e-6
    assert largest_difference(copied(whole), start) > 1e-4
    whole.save(tmp_path)
    whole.finish_save()
    whole.update(groups[0], 3)
    resumed = connected_learner(config_of(folder, job, LARGE_EPS))
    assert resumed.load(tmp_path) == 2
    resumed.update(groups[0], 3)
    assert largest_difference(copied(resumed), copied(whole)) == 0


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_packed_rows_have_the_loss_and_the_gradient_of_padded_ones(folder: Path, tokenizer, job: str) -> None:
    sides = (("learner.packing=false",), ("learner.packing=true", "learner.tokens_per_microbatch=90"))
    padded, packed = (connected_learner(config_of(folder, job, *own)).update(rows(tokenizer, job), 1) for own in sides)
    assert packed.metrics == pytest.approx(padded.metrics, rel=1e-3, abs=1e-4)


def test_scores_of_rows_that_share_prefixes_are_those_of_single_rows(folder: Path, tokenizer) -> None:
    """Of a reward model with its new head, in one batch with every prefix once; gradients too."""
    asked = [prompt(tokenizer, "a", [image(1), image(2, 6, 4)]), prompt(tokenizer, "b", text="Which number? " * 9)]
    ends = [end_row(one, TokenActions(np.array(ids))) for one in asked for ids in ([1, 2, 3], [1, 2, 4], [5])]
    shared, padded = (
        connected_learner(config_of(folder, "reward_model", f"learner.packing={packing}"))._policy
        for packing in (True, False)
    )
    reader = MediaReader(timeout_s=1, max_items=4)
    batch, *single = (collate(some, reader, torch.device("cpu")) for some in (ends, *([end] for end in ends)))
    assert batch.shared_places.num_tokens < 0.5 * batch.places.num_tokens
    together, alone = shared(batch)[:, 0], torch.cat([padded(one)[:, 0] for one in single])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)
    for scores in (together, alone):
        (scores * torch.linspace(-1, 1, len(ends))).mean().backward()
    expected = dict(padded.named_parameters())
    for name, parameter in shared.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-5)
    assert max(p.grad.abs().max() for p in expected.values() if p.grad is not None) > 0.01


def test_scores_of_a_padded_batch_are_those_of_single_rows_and_have_no_dropout(tmp_path: Path, tokenizer) -> None:
    """LightRFT defect B21: its reward model pooled the padding, and scored in training mode."""
    folder = add_dropout(write_tiny_qwen2_5_vl(tmp_path / "dropout", seed=0))
    padded = ("policy.attention=eager", "learner.packing=false")
    learner = connected_learner(config_of(folder, "reward_model", *padded, "policy.dropout=true"))
    groups = rows(tokenizer, "reward_model")
    assert learner.assess(groups) == learner.assess(groups)
    examples = all_whole(learner.steps.examples(groups), Example)

    def scores(of: list[Example]) -> np.ndarray:
        with learner._backend.inference():
            tokens = collate_examples(of, learner._reader, learner._device).tokens
            return learner._policy(tokens)[tokens.target_mask].numpy()

    single = [replace(example, candidates=(one,)) for example in examples for one in example.candidates]
    alone = np.concatenate([scores([one]) for one in single])
    assert len({one.sequence.num_tokens for one in single}) > 5 and len(set(alone.round(5).tolist())) > 5
    np.testing.assert_allclose(scores(examples), alone, atol=1e-6)


def test_labels_order_a_pair_and_not_places(folder: Path, tokenizer) -> None:
    groups = rows(tokenizer, "reward_model")
    swapped = []
    for scored in groups:
        turned = replace(scored.group, trajectories=scored.group.trajectories[::-1])
        swapped.append(replace(scored, group=turned, rewards=(Reward(0.0), Reward(1.0))))
    learner = connected_learner(config_of(folder, "reward_model"))
    assert learner.assess(groups) == pytest.approx(learner.assess(swapped), abs=1e-6)


def test_a_step_without_a_trained_token_is_skipped_and_counted(folder: Path, tokenizer) -> None:
    learner = connected_learner(config_of(folder, "sft"))
    before = copied(learner)
    groups = []
    for scored in rows(tokenizer, "sft", 2):
        [t] = scored.group.trajectories
        masked = replace(scored.group, trajectories=(replace(t, action_mask=np.zeros(t.num_steps, dtype=bool)),))
        groups.append(replace(scored, group=masked))
    metrics = learner.update(groups, 1).metrics
    assert (metrics["skipped"], metrics["optimizer_steps"], learner.version) == (1, 0, 1)
    assert largest_difference(copied(learner), before) == 0


def test_dpo_needs_the_log_probs_of_the_reference(folder: Path, tokenizer) -> None:
    groups = [replace(scored, reference_logprobs=None) for scored in rows(tokenizer, "dpo")]
    with pytest.raises(ValueError, match="set resources.reference.num_workers=1"):
        connected_learner(config_of(folder, "dpo")).update(groups, 1)


LORA = ("policy.lora.rank=4", "policy.lora.alpha=16.0", "algorithm.max_staleness=4", "warm_start=none")

OFF = "reference.place=learner_ranks"

PLACES = {
    "loss": ("algorithm.kl.coef=0.5",),
    "reward": ("algorithm.kl.coef=0.5", "algorithm.kl.place=reward", "algorithm.kl.estimator=k1"),
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_updates_are_those_of_a_scorer_of_the_initial_policy(folder: Path, words: tuple[str, ...]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(tiny_config(folder, *LORA, *words), (250,))
    scorer.load(folder)
    apart = "learner.share_prompts=false"  # micro-batches of another size share another part of the prompts
    asking = connected_learner(tiny_config(folder, *LORA, *words, apart, "resources.reference.num_workers=1"), (250,))
    alone = connected_learner(
        tiny_config(folder, *LORA, *words, apart, OFF, "learner.tokens_per_microbatch=100"), (250,)
    )
    for version in (1, 2, 3):
        groups = random_groups(tokenizer, 4, 3, seed=version)
        scored = [
            dataclasses.replace(g, reference_logprobs=s) for g, s in zip(groups, scorer.score(groups), strict=True)
        ]
        expected = asking.update(scored, version).metrics
        assert alone.update(groups, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert expected["kl"] > 1e-5, "the adapters have moved, and are back on when the step is trained"


def test_no_scorer_is_started(folder: Path) -> None:
    words = (*LORA, *PLACES["loss"], "resources.reference.num_workers=1")
    assert "reference" in needed_roles(tiny_config(folder, *words))
    assert "reference" not in needed_roles(tiny_config(folder, *words, OFF))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("policy.lora.rank=0",), "policy.lora.rank above 0"),
        (("warm_start=supervised",), "warm_start=none"),
        (("algorithm.kl.coef=0",), "algorithm.kl.coef above 0"),
    ],
)
def test_a_learner_that_is_no_reference_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"reference.place=learner_ranks needs {message}.*reference.place=scorers"):
        tiny_config(folder, *overridden((*LORA, *PLACES["loss"], OFF), words))


PAIRED = ("policy.lora.rank=4", "policy.lora.alpha=16.0")


def dpo_learner(folder: Path, *words: str) -> Learner:
    return connected_learner(config_of(folder, "dpo", *PAIRED, *words))


@pytest.mark.parametrize("packing", [False, True])
def test_updates_of_pairs_are_those_of_a_scorer(folder: Path, packing: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(config_of(folder, "dpo", *PAIRED), ())
    scorer.load(folder)
    asking = dpo_learner(folder)
    alone = dpo_learner(folder, OFF, "resources.reference.num_workers=0", "learner.tokens_per_microbatch=200",
                      f"learner.packing={packing}".lower())  # fmt: skip
    for version in (1, 2, 3):
        bare = [dataclasses.replace(row, reference_logprobs=None) for row in rows(tokenizer, "dpo", seed=version)]
        scored = [dataclasses.replace(g, reference_logprobs=s) for g, s in zip(bare, scorer.score(bare), strict=True)]
        expected = asking.update(scored, version).metrics
        assert alone.update(bare, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert dict(alone.assess(bare)) == pytest.approx(dict(asking.assess(scored)), rel=1e-3, abs=1e-5)
    assert abs(expected["margin"]) > 1e-4, "the adapters have moved, and are back on when the step is trained"


def test_no_scorer_of_pairs_is_started(folder: Path) -> None:
    assert "reference" in needed_roles(config_of(folder, "dpo", *PAIRED))
    assert "reference" not in needed_roles(config_of(folder, "dpo", *PAIRED, OFF, "resources.reference.num_workers=0"))


def test_full_training_has_no_reference_of_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reference.place=learner_ranks needs policy.lora.rank above 0"):
        config_of(folder, "dpo", OFF)


def test_a_job_that_compares_with_nothing_needs_no_reference(folder: Path) -> None:
    with pytest.raises(ConfigError, match="offline.job=dpo, since nothing reads a reference"):
        config_of(folder, "sft", *PAIRED, OFF)
