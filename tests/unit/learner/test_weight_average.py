"""The average of the weights is a true copy, moves once a step, is resumed exactly and exported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from learner_data import group, prompt, random_groups, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.offload import Offloader
from mobula.learner.optim.average import NullAverage, WeightAverage, read_average
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

DECAY = 0.75
AVERAGE = f"learner.ema_decay={DECAY}"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


def connected(config: RunConfig) -> Learner:
    learner = Learner(config, 0, 1, ())
    learner.connect("")
    return learner


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return tiny_config(folder, "algorithm.max_staleness=4", AVERAGE, *overrides)


def update(learner: Learner, version: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(learner._config.policy.model)
    learner.update(random_groups(tokenizer, 4, 4, seed=version), version)


def trained(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner._policy.named_parameters() if p.requires_grad}


def averaged(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner._average.tensors.items()}


def test_it_is_the_weighted_sum_of_the_weights_after_each_optimizer_step(folder: Path) -> None:
    """In float64 from the definition: a_k = d^k w_0 + (1 - d) sum_i d^(k - i) w_i, over the k steps of RL."""
    learner = connected(config_of(folder, "algorithm.num_minibatches=2", "policy.freeze=[visual.]"))
    seen = [trained(learner)]
    step = learner._backend.step
    learner._backend.step = lambda *args, **words: (step(*args, **words), seen.append(trained(learner)))[0]
    update(learner, 1)
    update(learner, 2)
    assert len(seen) == 5, "two minibatches a step"
    found, k = averaged(learner), len(seen) - 1
    assert found.keys() == seen[0].keys() and not any("visual" in name for name in found)
    for name, tensor in found.items():
        expected = DECAY**k * seen[0][name].double()
        for i in range(1, k + 1):
            expected = expected + (1 - DECAY) * DECAY ** (k - i) * seen[i][name].double()
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    assert max((found[name] - seen[-1][name]).abs().max() for name in found) > 1e-4


def test_it_sleeps_with_the_optimizer_and_a_slow_copy_with_the_policy(folder: Path) -> None:
    """Of a colocated learner: between two steps nothing of it is on the device. `meta` takes the device's place."""
    learner, device = connected(config_of(folder)), torch.device("meta")
    slow = WeightAverage(learner._backend.trained, DECAY, lambda *_: lambda: None)
    parts = (learner._policy, learner._optimizer, device)
    offloader = Offloader(*parts, with_policy=(slow,), with_optimizer=(learner._average,))

    def places() -> list[set[str]]:
        weights = [p.device.type for p in learner._policy.parameters()]
        return [set(weights), *({t.device.type for t in c.tensors.values()} for c in (slow, learner._average))]

    offloader.offload("optimizer")
    assert places() == [{"cpu"}] * 3
    before = averaged(learner)
    learner._average.to(torch.device("cpu"))
    update(learner, 1)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in averaged(learner).items())
    offloader.onload()
    assert places() == [{"meta"}] * 3 and offloader.is_policy_on_device


def test_one_gpu_in_turns_keeps_an_average() -> None:
    config = load_config(["experiment=sd3_5_ocr_grpo", "data.path=some/folder", "resources=one_gpu_colocated"])
    assert config.learner.ema_decay == 0.9 and config.resources.colocated and config.resources.device == "cuda"


def test_it_shares_no_memory_with_the_weights(folder: Path) -> None:
    learner = connected(config_of(folder))
    before = averaged(learner)
    with torch.no_grad():
        for p in learner._policy.parameters():
            p.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaged(learner).items())
    learner.begin_rl()
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in averaged(learner).items())


def test_a_step_that_is_not_finite_leaves_it_alone(folder: Path) -> None:
    learner = connected(config_of(folder))
    update(learner, 1)
    before = averaged(learner)
    asked = prompt(AutoTokenizer.from_pretrained(folder), "a")
    assert learner.update([group(asked, [[1], [2]], [math.inf, 0.0])], 2).metrics["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaged(learner).items())


def test_a_resumed_run_goes_on_with_it_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    first = connected(config_of(folder))
    update(first, 1)
    first.save(tmp_path / "state")
    first.finish_save()
    update(first, 2)
    second = connected(config_of(folder))
    assert second.load(tmp_path / "state") == 1
    update(second, 2)
    found = averaged(second)
    assert all(torch.equal(tensor, found[name]) for name, tensor in averaged(first).items())


@pytest.mark.parametrize("lora", [(), ("policy.lora.rank=4",)], ids=["full", "adapters"])
def test_it_is_exported_in_the_place_of_the_weights(folder: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    learner = connected(config_of(folder, *lora))
    update(learner, 1)
    learner.save(tmp_path / "state")
    learner.finish_save()
    export_state(learner._config, tmp_path / "state", tmp_path / "average", merge=True, average=True)
    learner.export(tmp_path / "weights")
    with torch.no_grad():
        for name, p in learner._policy.named_parameters():
            if p.requires_grad:
                p.copy_(learner._average.tensors[name])
    learner.export(tmp_path / "expected")
    found, expected, weights = (
        load_file(tmp_path / name / "model.safetensors") for name in ("average", "expected", "weights")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert any(not torch.equal(found[name], weights[name]) for name in found)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "average")


def test_a_state_without_it_is_refused(folder: Path, tmp_path: Path) -> None:
    without = connected(tiny_config(folder))
    assert isinstance(without._average, NullAverage)
    without.save(tmp_path / "state")
    without.finish_save()
    with pytest.raises(CheckpointError, match=r"holds no average of the weights: .*learner\.ema_decay=0"):
        connected(config_of(folder)).load(tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no average"):
        export_state(tiny_config(folder), tmp_path / "state", tmp_path / "out", merge=False, average=True)


def test_shards_that_were_saved_flat_and_padded_are_read_whole(tmp_path: Path) -> None:
    """As two ranks of DeepSpeed save three values."""
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "average", no_dist=True)
    found = {"w": torch.empty(3, 1)}
    read_average(tmp_path, found, no_dist=True)
    assert torch.equal(found["w"], torch.arange(3.0)[:, None])
