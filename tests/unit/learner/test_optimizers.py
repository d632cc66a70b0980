"""Optimizers and averages of the weights."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, image, prompt, random_groups, tiny_config
from one_learner import Tensors, connected_learner, copied, largest_difference, saved
from peft import PeftModel
from safetensors.torch import load_file
from scored_rows import plain_logprobs
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, PreTrainedModel

from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.backends.base import trained_parameters
from mobula.learner.learner import Learner
from mobula.learner.optim import NOT_HIDDEN, OPTIMIZERS, MuonWithAdamW, WeightAverage, read_average
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policy_weights import export_state
from mobula.learner.rank import Offloader
from mobula.learner.state_files import write_state


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, "algorithm.max_staleness=9", *overrides))


@pytest.fixture
def groups(folder: Path) -> list[ScoredGroup]:
    return random_groups(AutoTokenizer.from_pretrained(folder), 3, 4)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_trains_and_a_resumed_run_goes_on_bit_for_bit(folder, groups, tmp_path, name: str) -> None:
    first, second = (connected(folder, f"learner.optimizer={name}") for _ in range(2))
    first.update(groups, 1)
    assert largest_difference(copied(first), copied(second)) > 1e-5
    second.load(saved(first, tmp_path))
    for learner in (first, second):
        learner.update(groups, 2)
    assert largest_difference(copied(first), copied(second)) == 0


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_settings_that_a_resumed_run_changes_are_those_of_its_steps(folder, groups, tmp_path, name: str) -> None:
    first = connected(folder, f"learner.optimizer={name}")
    first.update(groups, 1)
    saved(first, tmp_path)
    before = copied(first)
    same, decayed = (connected(folder, f"learner.optimizer={name}", *own) for own in ((), ("learner.weight_decay=50",)))
    for learner in (same, decayed):
        learner.load(tmp_path)
        rate = learner.update(groups, 2).metrics["learning_rate"]
    assert rate > 0
    without, found = copied(same), copied(decayed)
    for key, old in before.items():
        is_decayed = old.ndim >= 2 and (name != "muon" or not any(part in key for part in NOT_HIDDEN))
        expected = 50 * rate * old if is_decayed else torch.zeros_like(old)
        torch.testing.assert_close(without[key] - found[key], expected, atol=1e-7, rtol=1e-3)


def named() -> dict[str, nn.Parameter]:
    """Parameters with random gradients."""
    torch.manual_seed(0)
    shapes = {"layer.weight": (6, 4), "embed_tokens.weight": (6, 4), "lm_head.weight": (6, 4), "norm.weight": (4,)}
    made = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    for parameter in made.values():
        parameter.grad = torch.randn_like(parameter)
    return made


def step(parameters: dict[str, nn.Parameter], **settings: float) -> dict[str, torch.Tensor]:
    """How far one step of Muon with these settings moves each parameter."""
    config = LearnerConfig(backend="single", learning_rate=0.1, muon_momentum=0.0, beta2=0.99)
    optimizer = MuonWithAdamW(parameters.items(), config)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for own in optimizer.param_groups:
        own.update(settings)
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in parameters.items()}


def test_moments_in_8_bits_take_a_quarter_of_the_memory_and_follow_adamw_over_20_steps() -> None:
    """Both minimise |w - t|^2 with the noise of a minibatch."""
    pytest.importorskip("torchao")
    config = load_config(["experiment=digits", "learner.learning_rate=0.01"]).learner
    torch.manual_seed(0)
    target = torch.randn(64, 128)
    ways = {}
    for name in ("adamw", "adamw_8bit"):
        weight = nn.Parameter(torch.zeros(64, 128))
        optimizer = OPTIMIZERS[name]([("layer.weight", weight)], config)
        noise = torch.Generator().manual_seed(1)
        for step in range(20):
            optimizer.param_groups[0]["lr"] = 0.01 if step < 10 else 0.005  # set as a number, as the learner does
            weight.grad = weight.detach() - target + 0.1 * torch.randn(target.shape, generator=noise)
            optimizer.step()
        ways[name] = weight.detach(), optimizer.state[weight]
    exact, close = ways["adamw"][0], ways["adamw_8bit"][0]
    assert exact.abs().mean() > 0.1
    assert (close - exact).norm() < 0.05 * exact.norm()
    moments = ways["adamw_8bit"][1]
    num_bytes = sum(moments[m].codes.nbytes + moments[m].scale.nbytes for m in ("exp_avg", "exp_avg_sq"))
    assert num_bytes < 0.27 * sum(ways["adamw"][1][m].nbytes for m in ("exp_avg", "exp_avg_sq"))


def test_muon_steps_hidden_matrices_along_a_nearly_orthogonal_direction() -> None:
    """Its singular values are close to one number, whatever those of the gradient are; other parameters take AdamW's
    first step, whose size is the learning rate."""
    parameters = named()
    parameters["layer.weight"].grad *= torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    moved = step(parameters)
    values = torch.linalg.svdvals(moved.pop("layer.weight"))
    assert values.max() / values.min() < 2.0
    for steps in moved.values():
        torch.testing.assert_close(steps.abs(), torch.full_like(steps, 0.1))


def test_the_learning_rate_of_both_parts_is_set_at_once() -> None:
    assert not any(steps.any() for steps in step(named(), lr=0.0).values())


DECAY = 0.75

AVERAGE = f"learner.ema_decay={DECAY}"


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="untied", marks=pytest.mark.exhaustive), pytest.param(True, id="tied")],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return tiny_config(folder, "algorithm.max_staleness=4", AVERAGE, *overrides)


def update(learner: Learner, folder: Path, version: int) -> None:
    learner.update(random_groups(AutoTokenizer.from_pretrained(folder), 4, 4, seed=version), version)


def weights_of(learner: Learner) -> Tensors:
    return {name: tensor.clone() for name, tensor in learner.backend.trained().items()}


def averaged(learner: Learner) -> Tensors:
    return {name: tensor.clone() for name, tensor in learner._average.tensors.items()}


def test_it_is_the_weighted_sum_of_the_weights_after_each_optimizer_step(folder: Path, monkeypatch) -> None:
    """In float64 from the definition: a_k = d^k w_0 + (1 - d) sum_i d^(k - i) w_i, over the k steps of RL."""
    learner = connected_learner(config_of(folder, "algorithm.num_minibatches=2", "policy.freeze=[visual.]"))
    seen, follow = [weights_of(learner)], WeightAverage.update
    monkeypatch.setattr(WeightAverage, "update", lambda self: (follow(self), seen.append(weights_of(learner))))
    update(learner, folder, 1)
    update(learner, folder, 2)
    assert len(seen) == 5, "two minibatches a step"
    found, k = averaged(learner), len(seen) - 1
    assert found.keys() == seen[0].keys() and not any("visual" in name for name in found)
    for name, tensor in found.items():
        expected = DECAY**k * seen[0][name].double()
        for i in range(1, k + 1):
            expected = expected + (1 - DECAY) * DECAY ** (k - i) * seen[i][name].double()
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    assert largest_difference(found, seen[-1]) > 1e-4


def test_it_sleeps_with_the_optimizer_and_a_slow_copy_with_the_policy(folder: Path) -> None:
    """Of a colocated learner: between two steps nothing of it is on the device. `meta` takes the device's place."""
    policy = TokenPolicy(load_policy_model(tiny_config(folder).policy, torch.float32), tiny_config(folder).learner)
    weights, copy = partial(trained_parameters, policy), lambda *_: lambda: None
    slow, average = (WeightAverage(weights, DECAY, copy) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters())
    offloader = Offloader(policy, optimizer, torch.device("meta"), with_policy=(slow,), with_optimizer=(average,))

    def places() -> list[set[str]]:
        kept = (policy.state_dict(), slow.tensors, average.tensors)
        return [{tensor.device.type for tensor in tensors.values()} for tensors in kept]

    offloader.offload("optimizer")
    assert places() == [{"cpu"}] * 3
    before = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1)
    average.update()
    torch.testing.assert_close(average.tensors, {name: tensor + 1 - DECAY for name, tensor in before.items()})
    offloader.onload()
    assert places() == [{"meta"}] * 3 and offloader.is_policy_on_device


def test_one_gpu_in_turns_keeps_an_average() -> None:
    config = load_config(["experiment=sd3_5_ocr_grpo", "data.path=some/folder", "resources=one_gpu_colocated"])
    assert config.learner.ema_decay == 0.9 and config.resources.colocated and config.resources.device == "cuda"


def test_it_shares_no_memory_with_the_weights(folder: Path) -> None:
    learner = connected_learner(config_of(folder))
    before = averaged(learner)
    with torch.no_grad():
        for tensor in learner.backend.trained().values():
            tensor.add_(1.0)
    assert largest_difference(averaged(learner), before) == 0
    learner.begin_rl()
    assert largest_difference(averaged(learner), {name: tensor + 1 for name, tensor in before.items()}) == 0


def test_a_step_that_is_not_finite_leaves_weights_and_average_alone(folder: Path) -> None:
    learner = connected_learner(config_of(folder))
    update(learner, folder, 1)
    weights, before = copied(learner), averaged(learner)
    asked = prompt(AutoTokenizer.from_pretrained(folder), "a")
    assert learner.update([group(asked, [[1], [2]], [math.inf, 0.0])], 2).metrics["skipped"] == 1
    assert largest_difference(averaged(learner), before) == 0 == largest_difference(copied(learner), weights)


def test_a_resumed_run_goes_on_with_it_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    first, second = (connected_learner(config_of(folder)) for _ in range(2))
    update(first, folder, 1)
    assert second.load(saved(first, tmp_path)) == 1
    for learner in (first, second):
        update(learner, folder, 2)
    assert largest_difference(averaged(first), averaged(second)) == 0


@pytest.mark.parametrize("lora", [(), ("policy.lora.rank=4",)], ids=["full", "adapters"])
def test_it_is_exported_in_the_place_of_the_weights(folder: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    config = config_of(folder, *lora)
    learner = connected_learner(config)
    update(learner, folder, 1)
    state, average = saved(learner, tmp_path / "state"), averaged(learner)
    export_state(config, state, tmp_path / "average", merge=True, average=True)
    learner.export(tmp_path / "weights")
    with torch.no_grad():
        for name, tensor in learner.backend.trained().items():
            tensor.copy_(average[name])
    learner.export(tmp_path / "expected")
    found, expected, weights = (
        load_file(tmp_path / name / "model.safetensors") for name in ("average", "expected", "weights")
    )
    assert largest_difference(found, expected) == 0 < largest_difference(found, weights)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "average")


def test_a_state_without_it_is_refused(folder: Path, tmp_path: Path) -> None:
    state = saved(connected_learner(tiny_config(folder)), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"holds no average of the weights: .*learner\.ema_decay=0"):
        connected_learner(config_of(folder)).load(state)
    with pytest.raises(CheckpointError, match="holds no average"):
        export_state(tiny_config(folder), state, tmp_path / "out", merge=False, average=True)


def test_shards_that_were_saved_flat_and_padded_are_read_whole(tmp_path: Path) -> None:
    """As two ranks of DeepSpeed save three values."""
    write_state({"w": torch.arange(4.0)}, tmp_path / "average", None)
    found = {"w": torch.empty(3, 1)}
    read_average(tmp_path, found, no_dist=True)
    assert torch.equal(found["w"], torch.arange(3.0)[:, None])


LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0")


def after_updates(config: RunConfig, folder: Path) -> tuple[Path, np.ndarray]:
    """The state in `folder` of a learner after two updates, and its log-probs of a prompt with an image."""
    learner, tokenizer = connected_learner(config), AutoTokenizer.from_pretrained(config.policy.model)
    for version in (1, 2):
        learner.update(random_groups(tokenizer, 6, 4, seed=version), version)
    return saved(learner, folder), learner.sequence_logprobs(canary(Path(config.policy.model)))


def canary(folder: Path) -> Prompt:
    return prompt(AutoTokenizer.from_pretrained(folder), "canary", [image(9)])


@torch.no_grad()
def logprobs(model: PreTrainedModel, folder: Path) -> np.ndarray:
    """float32 [P - 1]: of the same prompt, by the model's own forward."""
    return plain_logprobs(model, TokenSequence.of_prompt(canary(folder))).numpy()


def open_model(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def test_plain_transformers_computes_what_the_learner_computes(folder: Path, tmp_path: Path) -> None:
    config, export = tiny_config(folder, "algorithm.max_staleness=4", "policy.freeze=[visual.]"), tmp_path / "export"
    state, expected = after_updates(config, tmp_path / "state")
    export_state(config, state, export, merge=False, average=False)
    np.testing.assert_allclose(logprobs(open_model(export), folder), expected, atol=1e-5)
    assert np.abs(logprobs(open_model(folder), folder) - expected).max() > 1e-3, "training moved the policy"
    assert AutoProcessor.from_pretrained(export).tokenizer.get_vocab()


def test_peft_computes_what_the_learner_computes_and_so_do_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    config, base = tiny_config(folder, "algorithm.max_staleness=4", *LORA), open_model(folder)
    state, expected = after_updates(config, tmp_path / "state")
    for name, merge in (("adapter", False), ("merged", True)):
        export_state(config, state, tmp_path / name, merge=merge, average=False)
    assert np.abs(logprobs(base, folder) - expected).max() > 1e-3, "training moved the policy"
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder)
    for model in (adapted, open_model(tmp_path / "merged")):
        np.testing.assert_allclose(logprobs(model, folder), expected, atol=1e-5)
    files = {file.name for file in (tmp_path / "adapter").iterdir() if file.suffix in (".json", ".safetensors")}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_folder_without_a_state_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete learner state"):
        export_state(tiny_config(folder), tmp_path, tmp_path / "export", merge=False, average=False)
