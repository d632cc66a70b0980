"""AdamW of weights in bfloat16: results in float32 are rounded up or down at random, so that their mean is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mobula.learner.optim.average import local

CHUNK = 1 << 24  # values that are computed in float32 at one time
LOW_BITS = 16  # those of a float32 that bfloat16 lacks


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments have the type of the parameters and are rounded stochastically.

    Rounded to the nearest, an update below 1/512 of its weight is lost, and so is a decay of the second moment below
    1/512 of it. The random numbers follow from the step, the parameter and the shard: a resumed run draws them again,
    and ranks that hold the same shard of several replicas draw the same.

    Sources: arXiv:1711.05101 (AdamW); arXiv:2010.06192 (stochastic rounding of weights in bfloat16).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        assert closure is None, "the gradients are computed before the step"
        numbered = enumerate((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in numbered:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                tensors = local((parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))
                generator = _generator(parameter, int(state["step"]), number)
                for parts in zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True):
                    _update(*parts, step=float(state["step"]), group=group, generator=generator)


def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: float,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    beta1, beta2 = group["betas"]
    gradient = gradient.float()
    new_mean = mean.float().lerp(gradient, 1 - beta1)
    new_square = square.float().mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (new_square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decayed = weight.float().mul(1 - group["lr"] * group["weight_decay"])
    new_weight = decayed.addcdiv_(new_mean, scale, value=-group["lr"] / (1 - beta1**step))
    for old, new in ((weight, new_weight), (mean, new_mean), (square, new_square)):
        old.copy_(new if old.dtype is torch.float32 else rounded(new, generator))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds float32 values stochastically to bfloat16: up with probability (value - lower) / (upper - lower), where
    lower and upper are the neighbours in bfloat16. The mean of the result is the value.
    """
    noise = torch.randint(1 << LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def _generator(parameter: Tensor, step: int, number: int) -> torch.Generator:
    shard = 0
    if isinstance(parameter, DTensor):
        shard = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
    return torch.Generator(parameter.device).manual_seed(hash((step, number, shard)) & (1 << 63) - 1)
