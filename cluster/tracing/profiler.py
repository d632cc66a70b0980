"""UpdateProfiler: runs torch's profiler for single updates of a learner rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

_logger = logging.getLogger(__name__)

FOLDER = "traces"  # of the run folder
ACTIVITIES = {"cpu": [ProfilerActivity.CPU], "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}


class UpdateProfiler:
    """Profiles the updates that make the versions `steps`, and writes one Chrome trace per rank below `folder`. A
    profiled update takes several times as long; other updates are not affected."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int, device: str) -> None:
        self._steps = frozenset(steps)
        self._folder = folder / FOLDER
        self._rank = rank
        self._activities = ACTIVITIES[device]

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        if version not in self._steps:
            yield
            return
        with profile(activities=self._activities, record_shapes=True) as profiler:
            yield
        path = self._folder / f"update-{version:06d}-rank-{self._rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            _logger.warning("the profile of update %d could not be written to %s: %s", version, path, error)
