"""Rows of data in the learner: offline jobs, and supervised rows beside an RL step. The losses are those of plain
transformers, exact under any split and after a resume."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import LocalHandle, by_value
from learner_data import add_dropout, edited, image, prompt, random_groups, tiny_config
from offline_rows import JOBS, config_of, rows
from one_learner import UNCLIPPED, connected_learner, copied, gradient_of, largest_difference, saved, scorer_of
from scored_rows import collated, plain_logprobs
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mobula.actors.datasets.conversations import CHOSEN
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.learner.examples import Example, all_whole, collate_examples, end_row
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

# AdamW's first step divides a gradient by its own size. With an epsilon of 1e-8, a gradient that is 0 but for float32
# rounding (1e-8, other digits on another CPU) moves its weight by a large part of the learning rate. With this one, a
# step is in proportion to small gradients, so that weights differ as gradients do.
LARGE_EPS = "learner.adam_eps=0.001"


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def logprobs_of(model: PreTrainedModel, scored: ScoredGroup) -> list[torch.Tensor]:
    """float64, of each answer's trained tokens, by the model's own forward, row by row."""
    found = []
    for t in scored.group.trajectories:
        row = TokenSequence.of_response(scored.group.prompt, t.actions.token_ids)
        found.append(plain_logprobs(model, row).double()[torch.from_numpy(t.action_mask)])
    return found


def cross_entropy(model: PreTrainedModel, groups: Sequence[ScoredGroup]) -> torch.Tensor:
    """The mean of -log p over the trained tokens of all answers."""
    return -torch.cat([logprobs for scored in groups for logprobs in logprobs_of(model, scored)]).mean()


def gradient_norm(model: PreTrainedModel, loss: torch.Tensor) -> float:
    loss.backward()
    return math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in model.parameters() if p.grad is not None))


def test_sft_is_the_mean_cross_entropy_of_masked_tokens_by_plain_transformers(folder, tokenizer, model) -> None:
    groups = rows(tokenizer, "sft")
    expected, learner = cross_entropy(model, groups), connected_learner(config_of(folder, "sft"))
    assert learner.assess(groups)["loss"] == pytest.approx(expected.item(), abs=1e-5)
    norm = learner.update(groups, 1).metrics["grad_norm"]
    assert norm == pytest.approx(gradient_norm(model, expected), rel=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_is_the_papers_loss_over_plain_transformers(folder: Path, tokenizer, model, loss: str) -> None:
    groups, beta, smoothing = rows(tokenizer, "dpo"), 0.2, 0.1
    losses, margins = [], []
    for scored in groups:
        masked = zip(scored.reference_logprobs, scored.group.trajectories, strict=True)
        references = [torch.from_numpy(ref[t.action_mask]).double() for ref, t in masked]
        chosen, rejected = ((a - b).sum() for a, b in zip(logprobs_of(model, scored), references, strict=True))
        h = chosen - rejected
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
    norm = learner.update(groups, 1).metrics["grad_norm"]
    assert norm == pytest.approx(gradient_norm(model, expected), rel=1e-3)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.5)])
def test_kto_is_the_papers_loss_over_plain_transformers(folder: Path, tokenizer, model, weights) -> None:
    """Each row has its own answer, of which two of three are desirable, and another row's for the divergence."""
    groups, beta = rows(tokenizer, "kto"), 0.2
    ratios: list[list[torch.Tensor]] = []
    for scored in groups:
        masked = zip(scored.reference_logprobs, scored.group.trajectories, strict=True)
        references = [torch.from_numpy(ref[t.action_mask]).double() for ref, t in masked]
        ratios.append([(a - b).sum() for a, b in zip(logprobs_of(model, scored), references, strict=True)])
    divergence = max(0.0, float(np.mean([mismatched.item() for _, mismatched in ratios])))
    losses, right = [], 0
    for (own, _), scored in zip(ratios, groups, strict=True):
        is_desirable = scored.rewards[0].value == CHOSEN
        value = 1 / (1 + torch.exp(-(1 if is_desirable else -1) * beta * (own - divergence)))
        losses.append((weights[0] if is_desirable else weights[1]) * (1 - value))
        right += bool(own > divergence) == is_desirable
    expected = torch.stack(losses).mean()
    words = [f"offline.kto.beta={beta}", f"offline.kto.desirable_weight={weights[0]}"]
    config = config_of(folder, "kto", *words, f"offline.kto.undesirable_weight={weights[1]}")
    learner = connected_learner(config)
    found = learner.assess(groups)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert (found["kl"], found["accuracy"]) == (pytest.approx(divergence, rel=1e-4), pytest.approx(right / len(groups)))
    norm = learner.update(groups, 1).metrics["grad_norm"]
    assert norm == pytest.approx(gradient_norm(model, expected), rel=1e-3)


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
    resumed = connected_learner(config_of(folder, job, LARGE_EPS))
    assert resumed.load(saved(whole, tmp_path)) == 2
    for learner in (whole, resumed):
        learner.update(groups[0], 3)
    assert largest_difference(copied(resumed), copied(whole)) == 0


def test_scores_of_rows_that_share_prefixes_are_those_of_single_rows(folder: Path, tokenizer) -> None:
    """Of a reward model with its new head, in one batch with every prefix once; gradients too."""
    asked = [prompt(tokenizer, "a", [image(1), image(2, 6, 4)]), prompt(tokenizer, "b", text="Which number? " * 9)]
    ends = [end_row(one, TokenActions(np.array(ids))) for one in asked for ids in ([1, 2, 3], [1, 2, 4], [5])]
    shared, padded = (
        connected_learner(config_of(folder, "reward_model", f"learner.packing={packing}")).policy
        for packing in (True, False)
    )
    batch = collated(ends)
    assert batch.shared_places.num_tokens < 0.5 * batch.places.num_tokens
    together, alone = shared(batch)[:, 0], torch.cat([padded(collated([end]))[:, 0] for end in ends])
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
        with learner.backend.inference():
            tokens = collate_examples(of, learner.reader, learner.device).tokens
            return learner.policy(tokens)[tokens.target_mask].numpy()

    single = [replace(example, candidates=(one,)) for example in examples for one in example.candidates]
    alone = np.concatenate([scores([one]) for one in single])
    assert len({one.sequence.num_tokens for one in single}) > 5 and len(set(alone.round(5).tolist())) > 5
    np.testing.assert_allclose(scores(examples), alone, atol=1e-6)


def test_labels_order_a_pair_and_not_places(folder: Path, tokenizer) -> None:
    groups, swapped = rows(tokenizer, "reward_model"), []
    for scored in groups:
        turned = replace(scored.group, trajectories=scored.group.trajectories[::-1])
        swapped.append(replace(scored, group=turned, rewards=(Reward(0.0), Reward(1.0))))
    learner = connected_learner(config_of(folder, "reward_model"))
    assert learner.assess(groups) == pytest.approx(learner.assess(swapped), abs=1e-6)


def test_a_step_without_a_trained_token_is_skipped_and_counted(folder: Path, tokenizer) -> None:
    learner = connected_learner(config_of(folder, "sft"))
    before, groups = copied(learner), rows(tokenizer, "sft", 2)
    masked = [edited(g, action_mask=[np.zeros(t.num_steps, bool) for t in g.group.trajectories]) for g in groups]
    metrics = learner.update(masked, 1).metrics
    assert (metrics["skipped"], metrics["optimizer_steps"], learner.version) == (1, 0, 1)
    assert largest_difference(copied(learner), before) == 0


def test_dpo_needs_the_log_probs_of_the_reference(folder: Path, tokenizer) -> None:
    groups = [replace(scored, reference_logprobs=None) for scored in rows(tokenizer, "dpo")]
    with pytest.raises(ValueError, match="set resources.reference.num_workers=1"):
        connected_learner(config_of(folder, "dpo")).update(groups, 1)


LORA = ("policy.lora.rank=4", "policy.lora.alpha=16.0", "algorithm.max_staleness=4", "warm_start=none")

OFF = "reference.place=learner_ranks"
PAIRED = ("policy.lora.rank=4", "policy.lora.alpha=16.0")

PLACES = {
    "loss": ("algorithm.kl.coef=0.5",),
    "reward": ("algorithm.kl.coef=0.5", "algorithm.kl.place=reward", "algorithm.kl.estimator=k1"),
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_updates_are_those_of_a_scorer_of_the_initial_policy(folder: Path, tokenizer, words: tuple[str, ...]) -> None:
    words = (*LORA, *words, "learner.share_prompts=false")  # micro-batches of another size share other prompts
    scorer = scorer_of(tiny_config(folder, *words), folder, (250,))
    asking = connected_learner(tiny_config(folder, *words, "resources.reference.num_workers=1"), (250,))
    alone = connected_learner(tiny_config(folder, *words, OFF, "learner.tokens_per_microbatch=100"), (250,))
    for version in (1, 2, 3):
        groups = random_groups(tokenizer, 4, 3, seed=version)
        expected = asking.update(with_scores_of(scorer, groups), version).metrics
        assert alone.update(groups, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert expected["kl"] > 1e-5, "the adapters have moved, and are back on when the step is trained"


def with_scores_of(scorer: ReferenceScorer, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    return [replace(g, reference_logprobs=rows) for g, rows in zip(groups, scorer.score(groups), strict=True)]


def test_no_scorer_is_started(folder: Path) -> None:
    words = (*LORA, *PLACES["loss"], "resources.reference.num_workers=1")
    assert "reference" in needed_roles(tiny_config(folder, *words))
    assert "reference" not in needed_roles(tiny_config(folder, *words, OFF))
    assert "reference" in needed_roles(config_of(folder, "dpo", *PAIRED))
    assert "reference" not in needed_roles(config_of(folder, "dpo", *PAIRED, OFF, "resources.reference.num_workers=0"))


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


def test_an_offline_job_without_adapters_or_a_reference_has_none_on_its_ranks(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reference.place=learner_ranks needs policy.lora.rank above 0"):
        config_of(folder, "dpo", OFF)
    with pytest.raises(ConfigError, match="offline.job=dpo or kto, since nothing reads a reference"):
        config_of(folder, "sft", *PAIRED, OFF)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_updates_of_pairs_are_those_of_a_scorer(folder: Path, tokenizer, packing: str) -> None:
    scorer = scorer_of(config_of(folder, "dpo", *PAIRED), folder)
    own = (OFF, "resources.reference.num_workers=0", "learner.tokens_per_microbatch=200", f"learner.packing={packing}")
    asking, alone = (connected_learner(config_of(folder, "dpo", *PAIRED, *words)) for words in ((), own))
    for version in (1, 2, 3):
        bare = [replace(row, reference_logprobs=None) for row in rows(tokenizer, "dpo", seed=version)]
        scored = with_scores_of(scorer, bare)
        expected = asking.update(scored, version).metrics
        assert alone.update(bare, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert dict(alone.assess(bare)) == pytest.approx(dict(asking.assess(scored)), rel=1e-3, abs=1e-5)
    assert abs(expected["margin"]) > 1e-4, "the adapters have moved, and are back on when the step is trained"


COEF = 0.5


def beside_rl(folder: Path, *words: str, batch_size: int = 6) -> RunConfig:
    """A run with supervised rows beside its steps."""
    mixed = ("path=rows", f"coef={COEF}", f"batch_size={batch_size}")
    return tiny_config(folder, *(f"algorithm.supervised.{word}" for word in mixed), "num_steps=5", *words)


@pytest.mark.parametrize("words", [(), ("learner.tokens_per_microbatch=60",), ("learner.packing=false",)])
def test_the_gradient_is_that_of_the_policy_loss_and_of_plain_cross_entropy(folder, tokenizer, model, words) -> None:
    groups, beside = random_groups(tokenizer, 4, 3), rows(tokenizer, "sft", seed=4)
    loss = cross_entropy(model, beside)
    (COEF * loss).backward()
    config = beside_rl(folder, UNCLIPPED, *words)
    alone, without = gradient_of(connected_learner(config, (250,)), groups)
    both, metrics = gradient_of(connected_learner(config, (250,)), groups, supervised=beside)
    for name, gradient in both.items():
        extra = model.get_parameter(name.removeprefix("model.")).grad
        wanted = alone[name] if extra is None else alone[name] + extra
        torch.testing.assert_close(gradient, wanted.to(gradient.dtype), atol=2e-6, rtol=2e-4)
    assert largest_difference(both, alone) > 1e-3
    assert metrics["supervised_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["loss"] == pytest.approx(without["loss"] + COEF * loss.item(), abs=1e-5)
    assert metrics["policy_loss"] == pytest.approx(without["policy_loss"], abs=1e-6)
    assert "supervised_loss" not in without and metrics["num_tokens"] == without["num_tokens"]


def test_each_optimizer_step_has_rows_of_its_own_in_their_order(folder, tokenizer, model) -> None:
    """Two minibatches in two epochs take four parts of the rows; at a rate near 0 one model scores them all."""
    groups, beside = random_groups(tokenizer, 4, 3), rows(tokenizer, "sft", num=8, seed=4)
    beside[2:4] = [beside[2]] * 2  # the second part is unlike the others
    expected = sum(cross_entropy(model, beside[n : n + 2]).item() for n in range(0, 8, 2)) / 4
    words = ("algorithm.num_minibatches=2", "algorithm.num_epochs=2", "learner.learning_rate=1.0e-12")
    config = beside_rl(folder, *words, batch_size=2)
    assert config.algorithm.supervised_rows_per_step == 8
    metrics = connected_learner(config, (250,)).update(groups, 1, supervised=beside).metrics
    assert metrics["supervised_loss"] == pytest.approx(expected, abs=1e-4)
    assert metrics["optimizer_steps"] == 4


class Source:
    """Rows in an endless order, by their place."""

    def __init__(self, tokenizer) -> None:
        self.cursor = 0
        self._rows = rows(tokenizer, "sft", num=11, seed=9)

    def next(self) -> ScoredGroup:
        self.cursor += 1
        return self._rows[(self.cursor - 1) % 11]

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        self.cursor = cursor


class Run:
    """One process's part of a run: a learner with its supervised rows."""

    def __init__(self, config: RunConfig, tokenizer) -> None:
        self.rows = SupervisedRows(Source(tokenizer), by_value, rows_per_step=3, total_steps=5)
        self.learner = Learner(config, 0, 1, (250,))
        self.group = LearnerGroup(lambda: [LocalHandle(self.learner)], config.timeouts, by_value, self.rows)

    async def losses(self, *steps: Sequence[ScoredGroup]) -> list[float]:
        """The supervised loss of each step."""
        return [(await self.group.update(groups)).metrics["supervised_loss"] for groups in steps]


async def test_a_run_goes_on_bit_for_bit_after_a_restart_and_after_a_repeated_step(folder, tokenizer, tmp_path) -> None:
    config = beside_rl(folder, batch_size=3)
    steps = [random_groups(tokenizer, 3, 2, seed=n) for n in range(5)]
    whole = Run(config, tokenizer)
    await whole.group.start()
    losses = await whole.losses(*steps[:2])
    state = whole.rows.state()
    await whole.group.save(tmp_path)
    await whole.group.finish_save()
    losses += await whole.losses(*steps[2:])
    expected = copied(whole.learner)
    assert state == {"cursor": 6} and len(set(losses)) == 5, "every step has other rows"

    resumed = Run(config, tokenizer)
    await resumed.group.start()
    resumed.rows.restore(2, state)
    for run in (resumed, whole):  # whole: as after the loss of a rank, steps are repeated
        assert await run.group.load(tmp_path) == 2
        assert await run.losses(*steps[2:]) == losses[2:]
        assert largest_difference(copied(run.learner), expected) == 0


async def test_rows_read_ahead_are_not_counted_as_taken(tokenizer) -> None:
    found = SupervisedRows(Source(tokenizer), by_value, rows_per_step=3, total_steps=5)
    await found.of(1)
    await asyncio.sleep(0.05)
    assert found.state() == {"cursor": 3}
