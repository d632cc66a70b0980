"""Muon for hidden matrices, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

NOT_HIDDEN = ("embed", "lm_head")  # parts of a name: their rows are tokens or positions, not a linear map of features


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's own Muon and AdamW over one set of parameter groups and one state, so that it is saved as one optimizer.

    Muon's step is scaled to the root mean square of AdamW's, so that both take one learning rate.

    Source: Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.2.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1  # one row is a scalar head, so a vector
            is_hidden = is_matrix and not any(part in name for part in NOT_HIDDEN)
            (matrices if is_hidden else others).append(parameter)
        self._inner: list[torch.optim.Optimizer] = []
        if matrices:
            self._inner.append(
                torch.optim.Muon(
                    matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            self._inner.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=betas, eps=eps))
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        """One step of each part, on the groups and the state of the whole: loading a state replaces both."""
        assert closure is None, "the gradients are computed before the step"
        for inner, group in zip(self._inner, self.param_groups, strict=True):
            inner.param_groups = [group]
            inner.state = self.state
            inner.step()
