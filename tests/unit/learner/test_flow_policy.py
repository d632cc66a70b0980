"""A flow model as a policy: its log-probs, its divergence from itself without adapters, and a step of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import CPU, DENOISING, encoded_prompts, write_loud_sd3
from torch.distributions import Normal, kl_divergence

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import LoRAConfig
from mobula.learner.backends.native import SingleBackend
from mobula.learner.policies.adapters import adapted_modules, add_adapters, as_merged
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import flow_family_at
from mobula.learner.policies.flow.policy import FlowPolicy, LatentBatch, StepRescoring, canary_actions
from mobula.learner.policies.loading import checkpoint_names
from mobula.learner.policies.trained import collate_rows, row_of

SIGMAS = np.array([1.0, 0.95, 0.86, 0.7, 0.5, 0.2, 0.0], dtype=np.float32)
REPLAY = StepRescoring(DENOISING, "none")
SHAPE = (16, 16, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud_sd3(tmp_path_factory.mktemp("flow") / "sd3")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return encoded_prompts(folder, ["71", "8"])


def policy(folder: Path, *, rank: int = 0) -> FlowPolicy:
    """In training mode; with adapters of this rank at `to_q` and `to_out.0`, whose B is not 0."""
    model = FlowCheckpoint(str(folder)).transformer(torch.float32).train()
    if rank:
        names = [name for name, _ in model.named_modules() if name.endswith((".attn.to_q", ".attn.to_out.0"))]
        add_adapters(model, names, LoRAConfig(rank=rank, alpha=8.0, target_modules=("to_q", "to_out.0")), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return FlowPolicy(model, flow_family_at(folder))


def batch_of(prompts: list[Prompt], *windows: tuple[int, int]) -> LatentBatch:
    """Random steps of each prompt."""
    rows = []
    for prompt, (start, end) in zip(prompts, windows, strict=True):
        denoising = replace(DENOISING, window_start=start, window_end=end)
        rows.append(row_of(prompt, canary_actions(denoising, SHAPE, SIGMAS, 1000 * SIGMAS[:-1])))
    return collate_rows(rows, MediaReader(timeout_s=1, max_items=8), CPU)


def by_hand(own: FlowPolicy, prompt: Prompt, actions: LatentActions) -> tuple[np.ndarray, np.ndarray]:
    """(means, deviations) of each step, in double precision from the velocity of two plain forwards of all steps."""
    means, stds = [], []
    encoded = [m.reference.inputs for m in prompt.media]
    num = actions.num_steps
    with torch.no_grad():
        velocities = [
            own.model(
                hidden_states=torch.from_numpy(actions.latents[:-1]),
                timestep=torch.from_numpy(actions.timesteps),
                encoder_hidden_states=torch.from_numpy(c["encoder_hidden_states"]).expand(num, -1, -1),
                pooled_projections=torch.from_numpy(c["pooled_projections"]).expand(num, -1),
                return_dict=False,
            )[0].double()
            for c in encoded
        ]
    guided = velocities[1] + DENOISING.guidance * (velocities[0] - velocities[1])
    for step, v in zip(range(num), guided.numpy(), strict=True):
        x, sigma, following = actions.latents[step].astype(float), *map(float, actions.sigmas[step : step + 2])
        rate = 0.7 * np.sqrt(sigma / (1 - (float(actions.sigmas[1]) if sigma == 1 else sigma)))
        drift = v + rate**2 / (2 * sigma) * (x + (1 - sigma) * v)
        means.append(x + drift * (following - sigma))
        stds.append(rate * np.sqrt(sigma - following))
    return np.array(means), np.array(stds)


def test_log_probs_and_entropy_are_those_of_the_gaussians(folder: Path, prompts: list[Prompt]) -> None:
    own, batch = policy(folder), batch_of(prompts[:1], (0, 5))
    actions = canary_actions(DENOISING, SHAPE, SIGMAS, 1000 * SIGMAS[:-1])
    output = own(batch, REPLAY)
    means, stds = by_hand(own, prompts[0], actions)
    for t, (mean, std) in enumerate(zip(means, stds, strict=True)):
        normal = Normal(torch.tensor(mean), torch.tensor(std))
        expected = normal.log_prob(torch.tensor(actions.latents[t + 1], dtype=torch.float64)).mean().item()
        assert output.logprobs[0, t].item() == pytest.approx(expected, rel=1e-4)
        assert output.entropy[0, t].item() == pytest.approx(Normal(0.0, std).entropy().item(), abs=1e-5)
    assert output.divergence is None


def test_rows_of_different_lengths_are_filled_up_with_nothing(folder: Path, prompts: list[Prompt]) -> None:
    own = policy(folder)
    together = own(batch_of(prompts, (0, 3), (2, 4)), REPLAY).logprobs
    alone = [
        own(batch_of([prompt], window), REPLAY).logprobs
        for prompt, window in zip(prompts, ((0, 3), (2, 4)), strict=True)
    ]
    assert together.shape == (2, 3) and together[1, 2] == 0
    assert together[0].tolist() == alone[0][0].tolist()
    assert together[1, :2].tolist() == alone[1][0].tolist()


@pytest.mark.parametrize("kind", ["exact", "per_time"])
def test_the_divergence_is_that_from_the_model_without_adapters(folder: Path, prompts: list[Prompt], kind: str) -> None:
    own, batch = policy(folder, rank=2), batch_of(prompts[:1], (0, 5))
    output = own(batch, StepRescoring(DENOISING, kind))
    actions = canary_actions(DENOISING, SHAPE, SIGMAS, 1000 * SIGMAS[:-1])
    (means, stds), (base, _) = by_hand(own, prompts[0], actions), by_hand(policy(folder), prompts[0], actions)
    for t in range(5):
        step = 1.0 if kind == "exact" else float(actions.sigmas[t] - actions.sigmas[t + 1])
        std = torch.tensor(stds[t])
        expected = kl_divergence(Normal(torch.tensor(means[t]), std), Normal(torch.tensor(base[t]), std)).mean() * step
        assert output.divergence[0, t].item() == pytest.approx(expected.item(), rel=1e-3)
    output.divergence.sum().backward()
    gradients = {name: p.grad for name, p in own.model.named_parameters() if p.requires_grad}
    assert gradients and all(".lora_" in name and grad.abs().sum() > 0 for name, grad in gradients.items())
    assert own(batch, REPLAY).logprobs.tolist() == output.logprobs.tolist()  # its adapters are on again


def test_without_adapters_there_is_nothing_to_diverge_from(folder: Path, prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match=r"compared with itself without adapters: set policy\.lora\.rank above 0"):
        policy(folder)(batch_of(prompts[:1], (0, 5)), StepRescoring(DENOISING, "exact"))


def test_a_gradient_step_makes_what_was_done_likelier(folder: Path, prompts: list[Prompt]) -> None:
    config = load_config(["experiment=digits", "learner=single", "resources.learner.num_workers=1"]).learner
    backend = SingleBackend(CPU, torch.float32, config)
    own = backend.wrap(policy(folder, rank=2))
    optimizer, batch = backend.optimizer(), batch_of(prompts, (0, 5), (0, 5))
    optimizer.param_groups[0]["lr"] = 1e-3
    before = own(batch, REPLAY).logprobs
    backend.backward(-before.sum(), is_last=True)
    assert backend.step(optimizer, max_grad_norm=1.0) > 0
    assert (own(batch, REPLAY).logprobs.sum() > before.sum()).item()


def test_names_are_the_checkpoints_and_merged_adapters_change_the_adapted_weights_alone(folder: Path) -> None:
    plain, adapted = FlowCheckpoint(str(folder)).transformer(torch.float32), policy(folder, rank=2).model
    assert checkpoint_names(plain) == {name: name for name in plain.state_dict()}
    merged = dict(as_merged(adapted.state_dict().items(), 4.0))
    assert merged.keys() == plain.state_dict().keys()
    changed = [name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, merged[name])]
    assert changed and all(name.endswith((".attn.to_q.weight", ".attn.to_out.0.weight")) for name in changed)


def test_adapters_go_to_layers_of_numbered_lists_by_name(folder: Path) -> None:
    manifest = checkpoint_manifest(folder / "transformer", "float32")
    config = load_config(["experiment=digits", "policy.lora.rank=2", "policy.lora.target_modules=[to_q,to_out.0]"])
    found = adapted_modules(manifest, config.policy)
    assert {name.split(".attn", 1)[1].lstrip("2") for name in found} == {".to_q", ".to_out.0"}
    unknown = load_config(["experiment=digits", "policy.lora.rank=2", "policy.lora.target_modules=[to_nothing]"])
    with pytest.raises(ValueError, match="no matrix of the model is called to_nothing; there are .*to_out.0"):
        adapted_modules(manifest, unknown.policy)


def test_blocks_are_what_may_be_sharded_by_itself(folder: Path) -> None:
    own = policy(folder)
    assert list(own.blocks()) == list(own.model.transformer_blocks)
