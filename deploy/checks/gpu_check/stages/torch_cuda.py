"""torch computes on the device: matrix products, bfloat16, gradients and a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mobula.deploy.checks.gpu_check.context import Context, Figures

SIZE = 512
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a product's largest number


def run(context: Context) -> Figures:
    assert not context.is_cuda or torch.cuda.is_available(), "torch sees no CUDA device: check driver and torch's build"
    device = torch.device(context.device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    figures: dict[str, float | int | str] = {}
    for dtype, tolerance in TOLERANCE.items():
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
    _collective(device)
    if context.is_cuda:
        driver = torch.cuda.get_device_properties(0)
        figures |= {"compute_capability": f"{driver.major}.{driver.minor}", "memory_mib": driver.total_memory >> 20}
        figures |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return figures


def _collective(device: torch.device) -> None:
    """A group of one rank over the backend of the device."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(4, device=device)
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0] * 4
    finally:
        dist.destroy_process_group()
