"""A flow policy on the device: every kernel equals a network in double precision on the CPU, gradients included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.learner.policies.flow.denoising import Denoising, canary_actions
from mobula.learner.policies.flow.families.pipelines import StableDiffusion3
from mobula.learner.policies.flow.policy import FlowPolicy, StepRescoring
from mobula.learner.policies.flow.rows import CONDITION, LatentSequence, collate_latents
from mobula.learner.policies.sde import KERNELS, FlowStep

CHANNELS, SIZE, NUM_STEPS, WIDTH = 16, 8, 6, 32
CLOSE = 1e-4  # relative


class Transformer(nn.Module):
    """Convolutions with the arguments of diffusers' SD3Transformer2DModel, which need no diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Conv2d(WIDTH, CHANNELS, 3, padding=1)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        return_dict: bool,
    ) -> tuple[Tensor]:
        shown = self.condition(encoder_hidden_states.mean(1) + pooled_projections) + timestep[:, None] / 1000
        return (self.last(torch.nn.functional.silu(self.first(hidden_states) + shown[..., None, None])),)


def run(context: Context) -> Figures:
    torch.backends.cudnn.allow_tf32 = False  # convolutions round their inputs to 10 bits otherwise
    worst = 0.0
    for kernel in KERNELS:
        if kernel == "ddim":  # no likelihood
            continue
        denoising = Denoising(64, 64, NUM_STEPS, 1.0, kernel, 0.7, 0, NUM_STEPS - 1, "float32")
        here, expected = _scored(denoising, context.device), _by_hand(denoising)
        for name, ours, exact in zip(("log-probs", "gradients"), here, expected, strict=True):
            off = float((ours.double() - exact).abs().max() / exact.abs().max())
            assert off <= CLOSE, f"{name} of the kernel {kernel} are off by {off:.3g}"
            worst = max(worst, off)
    return {"relative_error": worst}


def _parts() -> tuple[Transformer, Tensor, dict[str, Tensor]]:
    """Network, noise levels and condition, the same on every call."""
    torch.manual_seed(0)
    condition = {"encoder_hidden_states": torch.randn(1, 3, WIDTH), "pooled_projections": torch.randn(1, WIDTH)}
    return Transformer(), torch.tensor([1.0, 0.93, 0.84, 0.7, 0.5, 0.2, 0.0]), condition


def _actions(denoising: Denoising, sigmas: Tensor) -> LatentActions:
    return canary_actions(denoising, (CHANNELS, SIZE, SIZE), sigmas.numpy(), 1000 * sigmas.numpy()[:-1])


def _scored(denoising: Denoising, device: str) -> tuple[Tensor, Tensor]:
    """Log-probs [T] of the policy, and the gradient of their sum in the first layer."""
    model, sigmas, condition = _parts()
    medium = ProcessedMedia(CONDITION, {name: tensor.numpy() for name, tensor in condition.items()})
    handle = MediaHandle("text", CONDITION, medium.num_bytes, medium, "text")
    row = LatentSequence(_actions(denoising, sigmas), (handle,))
    batch = collate_latents([row], MediaReader(timeout_s=1, max_items=1), torch.device(device))
    policy = FlowPolicy(model.to(device), StableDiffusion3())
    logprobs = policy(batch, StepRescoring(denoising, "none")).logprobs[0]
    logprobs.sum().backward()
    assert model.first.weight.grad is not None
    return logprobs.detach().cpu(), model.first.weight.grad.cpu()


def _by_hand(denoising: Denoising) -> tuple[Tensor, Tensor]:
    """The same in double precision on the CPU, one step after the other."""
    model, sigmas, condition = _parts()
    model.double()
    actions, logprobs = _actions(denoising, sigmas), []
    for n in range(actions.num_steps):
        latents, following = (torch.from_numpy(actions.latents[k : k + 1]).double() for k in (n, n + 1))
        inputs = {name: tensor.double() for name, tensor in condition.items()}
        [velocity] = model(latents, 1000 * sigmas[n : n + 1].double(), **inputs, return_dict=False)
        levels = (sigmas[k : k + 1].double() for k in (n, n + 1, 1))
        logprobs.append(denoising.transition(FlowStep(latents, velocity, *levels)).logprobs(following)[0])
    stacked = torch.stack(logprobs)
    stacked.sum().backward()
    assert model.first.weight.grad is not None
    return stacked.detach(), model.first.weight.grad
