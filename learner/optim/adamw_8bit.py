"""AdamW whose moments take a byte each, from torchao."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from mobula.learner.optim import local

TINY = 1e-12  # what torchao makes of the scale of a block of zeros
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it has a sign


class AdamWOfBytes(AdamW8bit):  # type: ignore[misc]  # torchao has no types
    """torchao's AdamW8bit as a learner uses it: the learning rate is set as a number, nothing is compiled on CPUs, and
    states are saved in float32.

    Moments are quantised in blocks of 256 values, each with a scale of its own; tensors below 4,096 values, of this
    rank's shard, keep float32.

    Source: 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "the gradients are computed before the step"
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        is_on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if is_on_cpu else nullcontext():
            super().step()

    def state_dict(self) -> dict[str, Any]:
        """The state with plain moments and learning rates as numbers: torch's distributed checkpoints can copy it and
        share it out again."""
        state = super().state_dict()
        states = {key: {name: _plain(value) for name, value in own.items()} for key, own in state["state"].items()}
        groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
        return {**state, "state": states, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, own in self.state.items():
            for name, has_sign in MOMENTS.items():
                if name in own:
                    buffer = self._new_buffer(parameter, has_sign)
                    _fill(*local((buffer, own[name])))
                    own[name] = buffer


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy `values`; a quantised `buffer` has exactly these afterwards, if blocks of its size were dequantised.

    torchao scales a block by its largest magnitude, which the map has for positive values alone: where that was a
    negative one, it is to be found from the smallest value. Rounding leaves a few numbers; one gives the block back.
    """
    if not isinstance(buffer, OptimState8bit):
        buffer.copy_(values)
        return
    blocks, qmap = values.reshape(-1, buffer.block_size), buffer.qmap
    best = torch.full_like(buffer.scale, torch.inf)  # [n]
    for end in (blocks.amax(dim=1) / qmap[-1], blocks.amin(dim=1) / qmap[0]):  # [n] each
        for step in range(-4, 5):
            scale = (end.view(torch.int32) + step).view(torch.float32).clamp(min=TINY)  # so many floats further
            codes = quantize_8bit_with_qmap(blocks / scale[:, None], qmap)
            error = (qmap[codes.int()] * scale[:, None] - blocks).abs().amax(dim=1)
            is_better = error < best
            best = torch.where(is_better, error, best)
            buffer.scale.copy_(torch.where(is_better, scale, buffer.scale))
            kept = buffer.codes.view(codes.shape)
            kept.copy_(torch.where(is_better[:, None], codes, kept))


def _plain(value: Any) -> Any:
    """Returns a quantised tensor in float32; other values unchanged."""
    if isinstance(value, OptimState8bit):
        return value.dequantize(torch.float32)
    if isinstance(value, DTensor) and isinstance(shard := value.to_local(), OptimState8bit):
        return DTensor.from_local(
            shard.dequantize(torch.float32),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value
