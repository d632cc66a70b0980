"""What docs/extending.md adds, used. `test_extending.py` runs this in a copy to which the page was applied.

Its name hides it from the repository's own test run, where the additions do not exist.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, equal, met_at, steps, weights
from engines import engine_settings, open_model
from learner_data import group, prompt, tiny_config, with_logprobs
from metrics_data import make_group
from rich.console import Console
from tiny_text_models import write_text_policy
from transformers import AutoTokenizer

from mobula.actors.rollout.demonstrations import Demonstrations
from mobula.actors.samplers import build_sampler
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Response
from mobula.cluster.roles import ReplayStats, SamplingSettings, UpdateReport
from mobula.cluster.runtime.placement import NodeResources, plan_placement
from mobula.configs.load import load_config
from mobula.deploy.wiring.observers import build_metrics
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.algorithms.advantages import ADVANTAGES, AdvantageOptions, EarlierRewards, StepRewards
from mobula.learner.algorithms.corrections import CORRECTIONS
from mobula.learner.algorithms.kl import KL_ESTIMATORS
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES
from mobula.learner.learner import Learner
from mobula.learner.policies.families import family_at, takes_pictures
from mobula.learner.policies.loading import checkpoint_names, load_model
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


def updated(model: Path, *words: str) -> dict[str, float]:
    """The metrics of one update of a learner with these words."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scored = group(prompt(tokenizer, "p"), [[1, 2], [3], [4, 5, 6]], [1.0, 0.0, 0.0])
    found = with_logprobs(scored, [t.behavior_logprobs for t in scored.group.trajectories])
    learner = Learner(tiny_config(model, *words), 0, 1, ())
    learner.connect("")
    metrics = dict(learner.update([found], 1).metrics)
    assert metrics["skipped"] == 0 and math.isfinite(metrics["loss"])
    return metrics


def test_advantage(model: Path) -> None:
    values = torch.tensor([1.0, 0.0, 9.0, 5.0, 7.0])
    included = torch.tensor([True, True, True, True, False])
    groups, nothing = torch.tensor([0, 0, 0, 1, 1]), torch.empty(0)
    earlier = EarlierRewards(nothing, nothing.long())
    rewards = StepRewards(values, included, groups, *[torch.ones(5)] * 3, groups, earlier)
    found = ADVANTAGES["median"](rewards, AdvantageOptions("population", 1, 1.0))
    assert found.tolist() == [0.0, -1.0, 8.0, 0.0, 0.0]
    updated(model, "algorithm.advantage=median")


def test_policy_loss(model: Path) -> None:
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old, advantages = torch.tensor([[-2.0, -2.0]]), torch.tensor([[1.0, -1.0]])
    found = POLICY_LOSSES["topr"](logprobs, old, advantages, torch.ones(1, 2, dtype=torch.bool), cap=1.0)
    assert found.is_clipped.tolist() == [[False, True]]
    assert torch.autograd.grad(found.loss.sum(), logprobs)[0].tolist() == [[-1.0, 1.0]]
    assert load_config(["experiment=digits", "algorithm.loss=topr"]).algorithm.loss_parameters == {"cap": 1.0}
    updated(model, "algorithm.loss=topr", "algorithm.losses.topr.cap=0.5")


def test_kl_estimator() -> None:
    p, q = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert KL_ESTIMATORS["absolute"](p, q, p).tolist() == [[0.5, 1.0]]
    assert load_config(["experiment=digits", "algorithm.kl.estimator=absolute"]).algorithm.kl.estimator == "absolute"


def test_correction(model: Path) -> None:
    behavior, mask = torch.zeros(2, 2), torch.tensor([[True, True], [True, False]])
    proximal = torch.tensor([[0.1, 0.1], [1.0, 5.0]])
    found = CORRECTIONS["mis_geometric"](proximal, behavior, mask, cap=1.2)
    assert found.tolist() == [pytest.approx([math.exp(0.1)] * 2), [0.0, 0.0]]
    updated(model, "algorithm.correction=mis_geometric", "algorithm.old_logprobs=recomputed")


@pytest.fixture
def tools() -> Iterator[Tools]:
    process = IsolatedProcess(timeout_s=30, start_timeout_s=120)
    yield Tools(process, "cpu", "float32")
    process.close()


def test_reward(tools: Tools) -> None:
    request = RewardRequest(Response("7", 64, False), ("7",), {}, "Which digit?")
    config = load_config(["experiment=digits", "rewards=brief_math"]).rewards
    own = next(c for c in config.components if c.name == "brief")
    assert build_function(own.function, own.options, tools)(request) == 0.75
    assert build_function("brevity", {"num_tokens": 128}, tools)(request) == 0.5
    with pytest.raises(ValueError, match="num_tokens=0 is unfit"):
        build_function("brevity", {"num_tokens": 0}, tools)


async def test_environment(model: Path) -> None:
    """Prompts and whole demonstrated episodes: a halving search finds one of 100 numbers within 7 guesses."""
    words = ["data=environment", "environment=higher_lower", "rewards=environment", f"policy.model={model}"]
    config = load_config([*words, "environment.num_train=20", "environment.num_validation=2", "environment.num_test=2"])
    prepared = prepare(config, lambda value: value)
    shown = Demonstrations(config.environment, config.sampler, prepared.processor, model=str(model))
    rows = prepared.splits["train"].rows
    episodes = [await shown.of(prepared.processor.prepare(row, f"0/{n}/x")) for n, row in enumerate(rows)]
    texts = [prepared.processor.decode(found.actions.token_ids[found.mask]) for found in episodes]
    assert all(text.endswith(row.answer) for text, row in zip(texts, rows, strict=True))
    shown.close()


def test_model_family(tmp_path: Path) -> None:
    """The parity of its log-probs is checked by the test that the page names."""
    assert takes_pictures(str(write_text_policy(tmp_path, "olmo2"))) is False


def test_vision_family(tmp_path: Path) -> None:
    """Its log-probs and gradients are compared by the tests that the page names."""
    folder = write_tiny("llava", tmp_path / "model", seed=0)
    family = family_at(str(folder))
    assert (family.model_types, family.takes_pictures, family.needs_gate) == (("llava",), True, False)
    names = checkpoint_names(load_model(str(folder), torch.float32, "sdpa")).values()
    parts = [start for starts in family.parts.values() for start in starts]
    assert [name for name in names if not name.startswith(tuple(parts))] == []
    assert [start for start in parts if not any(name.startswith(start) for name in names)] == []


def test_dataset_reader(model: Path, tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = "question,answer,image\nWhat is 3 + 4?,7,\n<image>?,7,\nWhat is 1 + 1?,2,\n"
        (tmp_path / f"{split}.csv").write_text(rows)
    words = [f"policy.model={model}", f"data.path={tmp_path}", "data=csv", "data.max_skipped_fraction=0.5"]
    prepared = prepare(load_config(words), lambda value: value)
    assert [row.answer for row in prepared.splits["train"].rows] == ["7", "2"]
    first = str(prepared.skipped[0])
    assert "train.csv:2: the text has 1 <image> and the row 0 pictures: write one <image> a picture" in first


async def test_sampler(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_model(model, "sampler=timed")
    sampler = build_sampler(opened.config.sampler.kind.value, engine_settings(opened))
    await sampler.start()
    with caplog.at_level(logging.INFO):
        settings = SamplingSettings(2, 1.0, 4, 0)
        sampled = await sampler.sample(opened.prompts[0], (), settings, Attempt("r"), lambda *_: None)
    assert len(sampled) == 2 and f"{opened.prompts[0].prompt_id} took " in caplog.text
    await sampler.close()


def _rank(rank: int, num_ranks: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    words = ("learner=replicated", f"resources.learner.num_workers={num_ranks}")
    learner = Learner(config_of(model, *words if num_ranks > 1 else ()), rank, num_ranks, (250,))
    learner.connect(met_at(learner, rank, out / "address") if num_ranks > 1 else "")
    groups, _ = steps(AutoTokenizer.from_pretrained(model))
    learner.update(groups, 1)
    learner.save(out / "state")
    trained = weights(learner)
    learner.update(groups, 2)
    learner.load(out / "state")
    if rank == 0:
        torch.save((trained, weights(learner)), out / f"{num_ranks}.pt")
    learner.close()


def test_learner_backend(model: Path, tmp_path: Path) -> None:
    """Two ranks take the step of one process, and go back to their checkpoint."""
    for num_ranks in (1, 2):
        (tmp_path / str(num_ranks)).mkdir()
    _rank(0, 1, model, tmp_path / "1")
    multiprocessing.set_forkserver_preload(["backend_run"])
    mp.start_processes(_rank, args=(2, model, tmp_path / "2"), nprocs=2, start_method="forkserver")
    one, _ = torch.load(tmp_path / "1" / "1.pt")
    two, resumed = torch.load(tmp_path / "2" / "2.pt")
    untrained = Learner(config_of(model), 0, 1, ())
    untrained.connect("")
    assert equal(one, two, atol=2e-6) and not equal(two, weights(untrained), atol=1e-5)
    assert equal(two, resumed, atol=0)


def test_metrics_sink(tmp_path: Path) -> None:
    words = ["experiment=digits", f"folder={tmp_path}", "name=r", "metrics.csv=true", "metrics.ray=false"]
    config = load_config([*words, "metrics.progress=false", "metrics.tensorboard=false"])
    config.run_folder.mkdir()
    metrics = build_metrics(config, Console(), 0)
    with metrics.step(3) as step:
        step.record([make_group("a", [1.0, 0.0, 0.0, 0.0])], UpdateReport(3, {}), ReplayStats(0, 1, 1, 0.0, {}))
    metrics.close()
    number, reward, seconds = (config.run_folder / "steps.csv").read_text().strip().split(",")
    assert (number, reward) == ("3", "0.25") and float(seconds) > 0


def test_resource_preset() -> None:
    resources = load_config(["resources=gpu_4"], is_complete=False).resources
    roles = ("learner", "rollout", "reference")
    assert (resources.rollout.num_workers, resources.device, resources.transport) == (2, "cuda", "nccl")
    placed = plan_placement(resources, [NodeResources("node", 16.0, 4.0)], roles)
    assert sum(worker.num_gpus for worker in placed.workers) == 4
