"""The checks of a checkpoint against a configuration, before a role starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.weight_sync.manifest import Manifest
from configs.schema import RunConfig
from deploy.preflight.findings import PreflightFinding

if TYPE_CHECKING:
    from actors.processors.chat import ChatProcessor
    from actors.processors.conversation import ConversationProcessor
    from actors.processors.flow import FlowProcessor
    from actors.processors.image_tokens import ImageTokenProcessor
    from actors.processors.picture_pairs import PicturePairProcessor


@dataclass(frozen=True)
class LoadedModel:
    """The parts of `policy.model` that are loaded before a run; checks read these and load nothing twice."""

    folder: Path  # with the files of the trained network
    checkpoint: Manifest
    processor: (
        ChatProcessor | ConversationProcessor | FlowProcessor | PicturePairProcessor | ImageTokenProcessor
    )  # by the job and the kind of model


Check = Callable[[RunConfig, LoadedModel], Iterable[PreflightFinding]]

CHECKS: tuple[Check, ...] = ()
"""In the order in which findings are shown. Each takes a second at most: it reads files and encodes short texts."""


def find_mismatches(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Runs every check."""
    for check in CHECKS:
        yield from check(config, loaded)
