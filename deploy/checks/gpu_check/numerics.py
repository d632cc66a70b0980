"""Stages of the GPU check without an engine: torch, chunked log-probs and the kernels of flow policies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.deploy.checks.gpu_check.roles import MIB, Context, Figures
from mobula.learner.policies.flow.families import StableDiffusion3
from mobula.learner.policies.flow.policy import (
    CONDITION,
    Denoising,
    FlowPolicy,
    LatentSequence,
    StepRescoring,
    canary_actions,
    collate_latents,
)
from mobula.learner.policies.head import Distribution, ScoringHead, token_logprobs
from mobula.learner.policies.sde import KERNELS, FlowStep

MATRIX_SIZE = 512
MATRIX_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a product's largest number


def check_torch_cuda(context: Context) -> Figures:
    assert not context.is_cuda or torch.cuda.is_available(), "torch sees no CUDA device: check driver and torch's build"
    device = torch.device(context.device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator) for _ in range(2))
    figures: dict[str, float | int | str] = {}
    for dtype, tolerance in MATRIX_TOLERANCE.items():
        x, y = (m.to(dtype) for m in (a, b))
        expected = x.double() @ y.double()
        product = (x.to(device) @ y.to(device)).cpu().double()
        off = float((product - expected).abs().max() / expected.abs().max())
        assert off <= tolerance, f"a product in {dtype} is off by {off:.3g} of its largest number"
        figures[f"{str(dtype).removeprefix('torch.')}_error"] = off
    x = a.to(device).requires_grad_()
    (x @ b.to(device)).square().sum().backward()
    expected = 2 * (a.double() @ b.double()) @ b.double().T
    assert x.grad is not None and torch.allclose(x.grad.cpu().double(), expected, rtol=1e-3, atol=1.0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(4, device=device)
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0] * 4
    finally:
        dist.destroy_process_group()
    if context.is_cuda:
        driver = torch.cuda.get_device_properties(0)
        figures |= {"compute_capability": f"{driver.major}.{driver.minor}", "memory_mib": driver.total_memory >> 20}
        figures |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return figures


# tokens, vocabulary, width, tokens in a chunk
LOGPROB_SIZES = {"cpu": (512, 4096, 64, 64), "cuda": (4096, 151_936, 1024, 512)}
HOT = Distribution(temperature=0.8, banned_ids=(3,))
LOGPROB_CLOSE = 1e-3


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def check_logprob_memory(context: Context) -> Figures:
    num_tokens, vocabulary, width, chunk = LOGPROB_SIZES[context.device]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    hidden = torch.randn(num_tokens, width, generator=generator)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator).to(context.device)
    runs = {}
    for name in ("all", "chunked"):
        output = nn.Linear(width, vocabulary, bias=False, device=context.device)
        with torch.no_grad():
            output.weight.copy_(weight)
        states = hidden.to(context.device).requires_grad_()
        context.restart_peak()
        with LargestTensor() as largest:
            if name == "chunked":
                logprobs = ScoringHead(output, chunk)(states, targets, HOT, False)[0]
            else:
                logprobs = token_logprobs(output(states), targets, HOT).logprobs
        logprobs.sum().backward()
        assert states.grad is not None
        peak = context.peak_figures().get("peak_mib", largest.num_elements * 4 // MIB)
        runs[name] = (logprobs.detach().cpu(), states.grad.cpu(), largest.num_elements, int(peak))
    for quantity, ours, expected in zip(("log-prob", "gradient"), runs["chunked"][:2], runs["all"][:2], strict=True):
        off = float((ours - expected).abs().max())
        assert off <= LOGPROB_CLOSE, f"a {quantity} of a chunk is off by {off:.3g}"
    num_elements = runs["chunked"][2]
    assert num_elements < num_tokens * vocabulary // 2, f"a tensor of {num_elements} elements exists"
    assert runs["chunked"][3] <= runs["all"][3], "chunks take more memory than all tokens at once"
    return {"chunked_mib": runs["chunked"][3], "at_once_mib": runs["all"][3]}


CHANNELS, FLOW_SIZE, NUM_STEPS, WIDTH = 16, 8, 6, 32
FLOW_CLOSE = 1e-4  # relative


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


def check_flow(context: Context) -> Figures:
    torch.backends.cudnn.allow_tf32 = False  # convolutions round their inputs to 10 bits otherwise
    worst = 0.0
    for kernel in KERNELS:
        if kernel == "ddim":  # no likelihood
            continue
        denoising = Denoising(64, 64, NUM_STEPS, 1.0, kernel, 0.7, 0, NUM_STEPS - 1, "float32")
        here, expected = _scored(denoising, context.device), _by_hand(denoising)
        for name, ours, exact in zip(("log-probs", "gradients"), here, expected, strict=True):
            off = float((ours.double() - exact).abs().max() / exact.abs().max())
            assert off <= FLOW_CLOSE, f"{name} of the kernel {kernel} are off by {off:.3g}"
            worst = max(worst, off)
    return {"relative_error": worst}


def _parts() -> tuple[Transformer, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    condition = {"encoder_hidden_states": torch.randn(1, 3, WIDTH), "pooled_projections": torch.randn(1, WIDTH)}
    return Transformer(), torch.tensor([1.0, 0.93, 0.84, 0.7, 0.5, 0.2, 0.0]), condition


def _actions(denoising: Denoising, sigmas: Tensor) -> LatentActions:
    return canary_actions(denoising, (CHANNELS, FLOW_SIZE, FLOW_SIZE), sigmas.numpy(), 1000 * sigmas.numpy()[:-1])


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
