"""KLScale: the factor of algorithm.kl.coef in effect at each version, state of a run."""

from __future__ import annotations

from collections.abc import Sequence


class KLScale:
    """Steps of a factor that is 1 at the start. Which factor makes a version does not depend on when it is asked, so
    repeated steps train as before.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []  # (first version, factor), ascending

    @property
    def newest(self) -> float:
        return self._steps[-1][1] if self._steps else 1.0

    def at(self, version: int) -> float:
        """The factor for the step that makes `version`."""
        return next((factor for first, factor in reversed(self._steps) if first <= version), 1.0)

    def set_from(self, version: int, factor: float) -> None:
        """Sets the factor of the steps that make `version` and later ones."""
        self._steps = [*(step for step in self._steps if step[0] < version), (version, factor)]

    def state(self) -> list[list[float]]:
        """Returns the state for a checkpoint, as JSON."""
        return [[first, factor] for first, factor in self._steps]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        self._steps = [(int(first), float(factor)) for first, factor in state]
