"""Two FSDP2 ranks over gloo train exactly as one process does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_data import group, picture, prompt, random_groups, tiny_config
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cluster.trajectory import ScoredGroup
from configs.schema import RunConfig
from learner.backends import fsdp2
from learner.learner import Learner
from learner.policies.tiny import write_tiny_qwen2_5_vl
from learner.supervised import SupervisedExample


def steps(tokenizer) -> list[list[ScoredGroup]]:
    """Two updates. In the first one rank gets all the text and the other all the pictures; the second is uneven."""
    text = [group(prompt(tokenizer, f"t{n}"), [[1, 2], [3, 4]], [1.0, 0.0], n) for n in range(3)]
    pictures = [group(prompt(tokenizer, f"p{n}", [picture(n)]), [[5, 6], [7]], [0.0, 1.0], n) for n in range(3)]
    return [text + pictures, random_groups(tokenizer, 3, 3, seed=5)]


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Everything that `follow` does, on one rank; rank 0 writes what it saw."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    seen = follow(learner, steps(tokenizer), tokenizer, out)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    learner.close()


def met_at(learner: Learner, rank: int, path: Path) -> str:
    """The address of rank 0, passed on through a file."""
    if rank == 0:
        address = learner.rendezvous_address()
        path.with_suffix(".part").write_text(address)
        path.with_suffix(".part").rename(path)
        return address
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def follow(learner: Learner, updates: list[list[ScoredGroup]], tokenizer, out: Path) -> dict:
    """A supervised step, two updates, save, a third update; then load and the third update again."""
    answer = updates[0][0].group.trajectories[0].actions.token_ids
    asked = prompt(tokenizer, "canary", [picture(9)])
    rows = [SupervisedExample(asked, answer, answer > 0), SupervisedExample(prompt(tokenizer, "t"), answer, answer > 0)]
    seen = {"before": weights(learner)}
    seen |= {"supervised": learner.supervised_step(rows), "accuracy": learner.answer_accuracy(rows)}
    seen["metrics"] = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(updates)]
    seen |= {"weights": weights(learner), "canary": torch.from_numpy(learner.sequence_logprobs(asked))}
    learner.save(out / "state")
    learner.export(out / "export")
    learner.update(updates[0], 3)
    seen["third"] = weights(learner)
    seen["version"] = learner.load(out / "state")
    seen |= {"reloaded": weights(learner), "canary_reloaded": torch.from_numpy(learner.sequence_logprobs(asked))}
    learner.update(updates[0], 3)
    seen["third_again"] = weights(learner)
    return seen


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in learner._named_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> bool:
    assert a.keys() == b.keys()
    return all(torch.allclose(a[name], b[name], atol=atol, rtol=0) for name in a)


def config_of(model: Path, *overrides: str) -> RunConfig:
    """A large `adam_eps`: at 1e-8 Adam turns the rounding of a gradient near 0 into a step as large as the learning rate."""
    rates = ("learner.learning_rate=0.001", "warm_start.learning_rate=0.001", "learner.adam_eps=1.0e-4")
    return tiny_config(model, "learner.tokens_per_microbatch=120", *rates, *overrides)


LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0")
VARIANTS = {"untied": (), "tied": (), "adapters": LORA}
UNITS = {"untied": 0, "tied": 1 << 20, "adapters": 0}  # every block a unit, or the tiny model in one unit


def _rank(rank: int, models: dict[str, Path], out: Path) -> None:
    torch.set_num_threads(1)
    for name, model in models.items():
        fsdp2.MIN_UNIT_NUMEL = UNITS[name]
        config = config_of(model, "learner=fsdp2", "resources.learner.num_workers=2", *VARIANTS[name])
        train(config, rank, 2, out / f"two-{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one process and two ranks made of an untied model, a tied one and one with adapters."""
    out = tmp_path_factory.mktemp("fsdp2")
    models = {n: write_tiny_qwen2_5_vl(out / n, seed=0, tie_word_embeddings=n == "tied") for n in VARIANTS}
    for name in VARIANTS:
        (out / f"two-{name}").mkdir()
        (out / f"one-{name}").mkdir()
        train(config_of(models[name], *VARIANTS[name]), 0, 1, out / f"one-{name}")
    mp.spawn(_rank, args=(models, out), nprocs=2)
    return out


@pytest.fixture(params=VARIANTS)
def ran(request, folder: Path) -> tuple[dict, dict]:
    return tuple(torch.load(folder / f"{n}-{request.param}" / "seen.pt") for n in ("one", "two"))


def test_two_ranks_end_with_the_weights_of_one_process(ran) -> None:
    one, two = ran
    assert equal(one["weights"], two["weights"], atol=2e-6)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    torch.testing.assert_close(two["canary"], one["canary"], atol=1e-5, rtol=0)


def test_metrics_are_those_of_the_whole_batch_on_any_number_of_ranks(ran) -> None:
    one, two = ran
    for step in range(2):
        assert two["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-4, abs=1e-5)
    assert two["supervised"] == pytest.approx(one["supervised"], rel=1e-4)
    assert two["accuracy"] == one["accuracy"]


def test_a_resumed_group_goes_on_bit_for_bit(ran) -> None:
    for seen in ran:
        assert seen["version"] == 2
        assert equal(seen["reloaded"], seen["weights"], atol=0)
        assert torch.equal(seen["canary_reloaded"], seen["canary"])
        assert equal(seen["third_again"], seen["third"], atol=0)
        assert not equal(seen["third"], seen["weights"], atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_export_holds_the_weights_under_the_names_of_the_checkpoint(folder: Path, name: str) -> None:
    names = load_file(folder / name / "model.safetensors").keys()
    for number in ("one", "two"):
        exported = load_file(folder / f"{number}-{name}" / "export" / "model.safetensors")
        assert exported.keys() == names
        assert equal(exported, torch.load(folder / f"{number}-{name}" / "seen.pt")["weights"], atol=0)
