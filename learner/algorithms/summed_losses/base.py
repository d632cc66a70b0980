"""Interface of a summed loss: the inputs of a token, its formula and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SummedLoss:
    """A loss that is summed over the tokens of a call, not averaged.

    `formula` takes log-probs of the targets and the `inputs`, all of one shape, and keyword-only options. It returns
    the loss of each token.
    """

    inputs: tuple[str, ...]
    formula: Callable[..., Tensor]
    takes_several_targets: bool = False  # K targets at a position, with K values of every input

    @property
    def options(self) -> dict[str, bool]:
        """Option -> whether a call must set it."""
        parameters = inspect.signature(self.formula).parameters.values()
        return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __call__(self, logprobs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
        """Returns the loss of each token, in the shape of `logprobs`."""
        return self.formula(logprobs, *(inputs[name] for name in self.inputs), **options)
