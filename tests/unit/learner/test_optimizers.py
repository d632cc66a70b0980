"""Optimizers and averages of the weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from learner_data import group, image, prompt, random_groups, tiny_config
from one_learner import connected_learner
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.backends.native import SingleBackend
from mobula.learner.backends.sharded import ShardedWriter, load_sharded
from mobula.learner.learner import Learner
from mobula.learner.optim import NOT_HIDDEN, OPTIMIZERS, MuonWithAdamW, NullAverage, WeightAverage, read_average
from mobula.learner.policies.base import Policy
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state
from mobula.learner.rank import Offloader
from mobula.learner.state_files import write_state


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, "algorithm.max_staleness=9", *overrides))


def largest_difference(a: Learner, b: Learner) -> float:
    pairs = zip(a._policy.parameters(), b._policy.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_trains_and_a_resumed_run_goes_on_bit_for_bit(folder, tmp_path, name: str) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 4)
    first, untrained = (connected(folder, f"learner.optimizer={name}") for _ in range(2))
    first.update(groups, 1)
    assert largest_difference(first, untrained) > 1e-5
    first.save(tmp_path / "state")
    first.finish_save()
    first.update(groups, 2)
    second = connected(folder, f"learner.optimizer={name}")
    second.load(tmp_path / "state")
    second.update(groups, 2)
    assert largest_difference(first, second) == 0


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_settings_that_a_resumed_run_changes_are_those_of_its_steps(folder, tmp_path, name: str) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 4)
    first = connected(folder, f"learner.optimizer={name}")
    first.update(groups, 1)
    first.save(tmp_path / "state")
    first.finish_save()
    before = {key: value.detach().clone() for key, value in first._policy.named_parameters()}
    same, decayed = (
        connected(folder, f"learner.optimizer={name}"),
        connected(folder, f"learner.optimizer={name}", "learner.weight_decay=50"),
    )
    for learner in (same, decayed):
        learner.load(tmp_path / "state")
    same.update(groups, 2)
    rate = decayed.update(groups, 2).metrics["learning_rate"]
    assert rate > 0
    for (key, p), (_, q) in zip(same._policy.named_parameters(), decayed._policy.named_parameters(), strict=True):
        is_decayed = p.ndim >= 2 and (name != "muon" or not any(part in key for part in NOT_HIDDEN))
        torch.testing.assert_close(
            p - q, 50 * rate * before[key] if is_decayed else torch.zeros_like(p), atol=1e-7, rtol=1e-3
        )


def named() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    shapes = {"layer.weight": (6, 4), "embed_tokens.weight": (6, 4), "lm_head.weight": (6, 4), "norm.weight": (4,)}
    return [(name, nn.Parameter(torch.randn(shape, dtype=torch.float64))) for name, shape in shapes.items()]


def build(parameters: list[tuple[str, nn.Parameter]]) -> MuonWithAdamW:
    return MuonWithAdamW(parameters, LearnerConfig(backend="single", learning_rate=0.1, muon_momentum=0.0, beta2=0.99))


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
    before = {name: p.detach().clone() for name, p in parameters}
    for _, p in parameters:
        p.grad = torch.randn_like(p)
    parameters[0][1].grad *= torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    build(parameters).step()
    moved = {name: p.detach() - before[name] for name, p in parameters}
    values = torch.linalg.svdvals(moved["layer.weight"])
    assert values.max() / values.min() < 2.0
    for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight"):
        torch.testing.assert_close(moved[name].abs(), torch.full_like(moved[name], 0.1))


def test_the_learning_rate_of_both_parts_is_set_at_once() -> None:
    parameters = named()
    optimizer = build(parameters)
    for settings in optimizer.param_groups:
        settings["lr"] = 0.0
    before = [p.detach().clone() for _, p in parameters]
    for _, p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(torch.equal(p, old) for (_, p), old in zip(parameters, before, strict=True))


class Half(Policy):
    """Of two layers one is read."""

    def __init__(self, names: tuple[str, ...] = ("used", "idle")) -> None:
        super().__init__()
        self.model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


def trained(policy: Half) -> tuple[Policy, torch.optim.Optimizer]:
    config = load_config(["experiment=digits", "learner=single", "resources.learner.num_workers=1"]).learner
    backend = SingleBackend(torch.device("cpu"), torch.float32, config)
    own = backend.wrap(policy)
    optimizer = backend.optimizer()
    backend.backward(own.model["used"](torch.ones(1, 2)).sum(), is_last=True)
    backend.step(optimizer, max_grad_norm=1.0)
    return own, optimizer


def test_it_resumes_with_the_state_of_the_others(tmp_path: Path) -> None:
    own, optimizer = trained(Half())
    assert len(optimizer.state) == 2, "weight and bias of the layer that is read"
    ShardedWriter().save(tmp_path, own, optimizer, 3)()
    other, fresh = trained(Half())
    fresh.state.clear()
    assert load_sharded(tmp_path, other, fresh) == 3
    for name, tensor in own.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    weight, expected = other.model["used"].weight, own.model["used"].weight
    assert torch.equal(fresh.state[weight]["exp_avg"], optimizer.state[expected]["exp_avg"])
    assert fresh.state[weight]["step"] == 1 and fresh.state[other.model["idle"].weight]["step"] == 0


def test_a_weight_that_is_missing_is_still_an_error(tmp_path: Path) -> None:
    ShardedWriter().save(tmp_path, *trained(Half(("used",))), 3)()
    other, fresh = trained(Half())
    with pytest.raises(CheckpointError, match=r"Missing key in checkpoint state_dict: model\.model\.idle"):
        load_sharded(tmp_path, other, fresh)


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


def update(learner: Learner, version: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(learner._config.policy.model)
    learner.update(random_groups(tokenizer, 4, 4, seed=version), version)


def trained_of_weight_average(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner._policy.named_parameters() if p.requires_grad}


def averaged(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner._average.tensors.items()}


def test_it_is_the_weighted_sum_of_the_weights_after_each_optimizer_step(folder: Path) -> None:
    """In float64 from the definition: a_k = d^k w_0 + (1 - d) sum_i d^(k - i) w_i, over the k steps of RL."""
    learner = connected_learner(config_of(folder, "algorithm.num_minibatches=2", "policy.freeze=[visual.]"))
    seen = [trained_of_weight_average(learner)]
    step = learner._backend.step
    learner._backend.step = lambda *args, **words: (
        step(*args, **words),
        seen.append(trained_of_weight_average(learner)),
    )[0]
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
    learner, device = connected_learner(config_of(folder)), torch.device("meta")
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
    learner = connected_learner(config_of(folder))
    before = averaged(learner)
    with torch.no_grad():
        for p in learner._policy.parameters():
            p.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaged(learner).items())
    learner.begin_rl()
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in averaged(learner).items())


def test_a_step_that_is_not_finite_leaves_it_alone(folder: Path) -> None:
    learner = connected_learner(config_of(folder))
    update(learner, 1)
    before = averaged(learner)
    asked = prompt(AutoTokenizer.from_pretrained(folder), "a")
    assert learner.update([group(asked, [[1], [2]], [math.inf, 0.0])], 2).metrics["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaged(learner).items())


def test_a_resumed_run_goes_on_with_it_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    first = connected_learner(config_of(folder))
    update(first, 1)
    first.save(tmp_path / "state")
    first.finish_save()
    update(first, 2)
    second = connected_learner(config_of(folder))
    assert second.load(tmp_path / "state") == 1
    update(second, 2)
    found = averaged(second)
    assert all(torch.equal(tensor, found[name]) for name, tensor in averaged(first).items())


@pytest.mark.parametrize("lora", [(), ("policy.lora.rank=4",)], ids=["full", "adapters"])
def test_it_is_exported_in_the_place_of_the_weights(folder: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    learner = connected_learner(config_of(folder, *lora))
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
    without = connected_learner(tiny_config(folder))
    assert isinstance(without._average, NullAverage)
    without.save(tmp_path / "state")
    without.finish_save()
    with pytest.raises(CheckpointError, match=r"holds no average of the weights: .*learner\.ema_decay=0"):
        connected_learner(config_of(folder)).load(tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no average"):
        export_state(tiny_config(folder), tmp_path / "state", tmp_path / "out", merge=False, average=True)


def test_shards_that_were_saved_flat_and_padded_are_read_whole(tmp_path: Path) -> None:
    """As two ranks of DeepSpeed save three values."""
    write_state({"w": torch.arange(4.0)}, tmp_path / "average", None)
    found = {"w": torch.empty(3, 1)}
    read_average(tmp_path, found, no_dist=True)
    assert torch.equal(found["w"], torch.arange(3.0)[:, None])


LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0")


def after_updates(config: RunConfig) -> Learner:
    learner = connected_learner(config)
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    for version in (1, 2):
        learner.update(random_groups(tokenizer, 6, 4, seed=version), version)
    return learner


def saved(learner: Learner, folder: Path) -> Path:
    learner.save(folder)
    learner.finish_save()
    return folder


def logprobs(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """float32 [P - 1]: of the tokens of a prompt with an image after the first, by the model's own forward."""
    asked, handle = canary(folder)
    ids = torch.from_numpy(asked.expanded_ids).long()[None]
    inputs = {name: torch.from_numpy(array) for name, array in handle.reference.inputs.items()}
    types = torch.zeros_like(ids)
    for span in asked.media_spans:
        types[0, span.start : span.end] = 1
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def canary(folder: Path):
    handle = image(9)
    return prompt(AutoTokenizer.from_pretrained(folder), "canary", [handle]), handle


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def test_plain_transformers_computes_what_the_learner_computes(folder: Path, tmp_path: Path) -> None:
    learner = after_updates(tiny_config(folder, "algorithm.max_staleness=4", "policy.freeze=[visual.]"))
    config = learner._config
    state = saved(learner, tmp_path / "state")
    export_state(config, state, tmp_path / "export", merge=False, average=False)
    expected = torch.from_numpy(learner.sequence_logprobs(canary(folder)[0]))
    torch.testing.assert_close(logprobs(load(tmp_path / "export"), folder), expected, atol=1e-5, rtol=0)
    assert (logprobs(load(folder), folder) - expected).abs().max() > 1e-3, "training moved the policy"
    assert AutoProcessor.from_pretrained(tmp_path / "export").tokenizer.get_vocab()


def test_peft_computes_what_the_learner_computes_and_so_do_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    learner = after_updates(tiny_config(folder, "algorithm.max_staleness=4", *LORA))
    state = saved(learner, tmp_path / "state")
    export_state(learner._config, state, tmp_path / "adapter", merge=False, average=False)
    export_state(learner._config, state, tmp_path / "merged", merge=True, average=False)
    expected = torch.from_numpy(learner.sequence_logprobs(canary(folder)[0]))
    base = load(folder)
    assert (logprobs(base, folder) - expected).abs().max() > 1e-3, "training moved the policy"
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder)
    torch.testing.assert_close(logprobs(adapted, folder), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(load(tmp_path / "merged"), folder), expected, atol=1e-5, rtol=0)
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir() if f.suffix in (".json", ".safetensors")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_folder_without_a_state_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete learner state"):
        export_state(tiny_config(folder), tmp_path, tmp_path / "export", merge=False, average=False)
