"""SlowWeights: a slow-moving copy of the trained parameters, the sampling policy of DiffusionNFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from mobula.learner.optim.average import Copy, NullAverage, WeightAverage, local

FOLDER = "slow"  # of a learner's state


class SlowWeights(WeightAverage):
    """slow = d * slow + (1 - d) * weights after each step v, with d = min(max_decay, decay_rate * v).

    Source: DiffusionNFT, arXiv:2509.16117, section 3.3: the old policy is moved softly.
    """

    folder = FOLDER

    def __init__(
        self, trained: Callable[[], dict[str, Tensor]], decay_rate: float, max_decay: float, copy: Copy
    ) -> None:
        """`trained` and `copy` as in `WeightAverage`."""
        super().__init__(trained, max_decay, copy)
        self._decay_rate, self._max_decay = decay_rate, max_decay

    def follow(self, version: int) -> None:
        """Moves the copy towards the weights after step `version`."""
        self._decay = min(self._max_decay, self._decay_rate * version)
        self.update()

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Swaps the slow weights into the policy while the body runs. No gradient may be accumulated."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        slow, weights = local(self.tensors.values()), self._weights()
        trained = [w.detach().clone() for w in weights]
        torch._foreach_copy_(weights, slow)
        torch._foreach_copy_(slow, trained)


class NullSlow(NullAverage):
    """Null object of SlowWeights, for runs that sample with the trained policy."""

    def follow(self, version: int) -> None: ...

    def in_place(self) -> AbstractContextManager[None]:
        return nullcontext()
