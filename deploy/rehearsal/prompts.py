"""Prompts of a rehearsal: the run's own data through a shrunk model's processor, or prompts of a stated length."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.datasets.prompts import PreflightReport
from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaHandle, MediaSpan, MediaStore
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import TRAIN, VALIDATION, Prepared, prepare
from mobula.learner.policies.shapes import ModelShape
from mobula.learner.policies.tiny import TINY, write_tiny

NUM_STATED_ROWS = 4096


@dataclass(frozen=True)
class StatedPrompts:
    """Prompts that have a length and one image of so many tokens and bytes."""

    num_tokens: int
    media_tokens: int = 0
    media_bytes: int = 0


class StatedProcessor:
    """Implements `Processor`: every prompt has the stated length."""

    media_token_ids: tuple[int, ...] = ()
    template_token_ids: tuple[int, ...] = ()
    takes_images = True
    num_ahead = 1

    def __init__(self, stated: StatedPrompts) -> None:
        self._stated = stated

    def begin(self, row: Row, prompt_id: str) -> Future[Prompt]:
        begun: Future[Prompt] = Future()
        begun.set_result(self.prepare(row, prompt_id))
        return begun

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        stated = self._stated
        ids = np.zeros(stated.num_tokens, dtype=np.int32)
        media = (MediaHandle(row.sample_id, "image", stated.media_bytes, None),) if stated.media_tokens else ()
        spans = (MediaSpan(0, stated.media_tokens),) if stated.media_tokens else ()
        return Prompt(prompt_id, row.sample_id, "", ids, ids, media, spans, row.references, row.metadata)

    def check(self, row: Row) -> int:
        return self._stated.num_tokens

    def num_media(self, row: Row) -> int:
        return int(self._stated.media_tokens > 0)


def stated_run(config: RunConfig, shape: ModelShape, stated: StatedPrompts) -> Prepared:
    """The checked parts of a run whose data are not there."""
    rows = tuple(Row(str(index), "", "", "") for index in range(NUM_STATED_ROWS))
    report = PreflightReport(rows, (), stated.num_tokens)
    names = {TRAIN, VALIDATION, config.evaluation.split, *(s.split for s in config.evaluation.suites.values())}
    processor: Any = StatedProcessor(stated)
    store = MediaStore(lambda media: None, config.data.media_cache_bytes)
    return Prepared(config, Path(config.policy.model), shape.manifest, processor, store, dict.fromkeys(names, report))


def prepared_run(config: RunConfig, shape: ModelShape) -> Prepared:
    """The checked parts of a run with its own data, which are read, checked and processed as a run does.

    `config.policy.model` is a folder of a shrunk model; the manifest is that of the real one.
    """
    prepared = prepare(config, lambda media: None)
    if not isinstance(prepared, Prepared):
        raise PreflightError("a rehearsal needs a run that samples responses: offline jobs have no rollouts")
    return replace(prepared, checkpoint=shape.manifest)


def shrunk(config: RunConfig, model_type: str, folder: Path) -> RunConfig:
    """The configuration with a tiny model of the family of `model_type`, which is written to `folder`."""
    if config.policy.tiny in TINY and not (Path(config.policy.model) / "config.json").is_file():
        name = config.policy.tiny
    elif (name := next((tiny for tiny in TINY if _as_type(tiny) == model_type), "")) == "":
        raise PreflightError(
            f"no shrunk model stands for the model type {model_type}: set policy.tiny to one of {', '.join(TINY)}"
        )
    write_tiny(name, folder, tie_word_embeddings=config.policy.tiny_tied_embeddings)
    policy = config.policy.model_copy(update={"model": str(folder), "tiny": "none"})
    return config.model_copy(update={"policy": policy})


def _as_type(tiny: str) -> str:
    return tiny.replace("-", "_").replace(".", "_")
