"""Log-probs of chunks of tokens equal those of all tokens at once, and no [tokens, vocabulary] matrix is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mobula.deploy.checks.gpu_check.context import MIB, Context, Figures
from mobula.learner.policies.head import Distribution, ScoringHead, token_logprobs

# tokens, vocabulary, width, tokens in a chunk
SIZES = {"cpu": (512, 4096, 64, 64), "cuda": (4096, 151_936, 1024, 512)}
HOT = Distribution(temperature=0.8, banned_ids=(3,))
CLOSE = 1e-3


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def run(context: Context) -> Figures:
    num_tokens, vocabulary, width, chunk = SIZES[context.device]
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
        assert off <= CLOSE, f"a {quantity} of a chunk is off by {off:.3g}"
    num_elements = runs["chunked"][2]
    assert num_elements < num_tokens * vocabulary // 2, f"a tensor of {num_elements} elements exists"
    assert runs["chunked"][3] <= runs["all"][3], "chunks take more memory than all tokens at once"
    return {"chunked_mib": runs["chunked"][3], "at_once_mib": runs["all"][3]}
