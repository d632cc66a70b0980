"""The checks of a checkpoint against a configuration, before a role starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.attention import check_attention, check_packing
from mobula.deploy.preflight.findings import PreflightFinding
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.deploy.preflight.templates import (
    check_answers,
    check_images,
    check_question,
    check_system_prompt,
    check_template_kwargs,
    check_turns,
)
from mobula.deploy.preflight.tokens import check_special_ids, check_vocabulary
from mobula.deploy.preflight.weights import check_weights

Check = Callable[[RunConfig, LoadedModel], Iterable[PreflightFinding]]

CHECKS: tuple[Check, ...] = (
    check_attention,
    check_packing,
    check_weights,
    check_vocabulary,
    check_special_ids,
    check_template_kwargs,
    check_question,
    check_system_prompt,
    check_answers,
    check_turns,
    check_images,
)
"""In the order in which findings are shown. Each takes a second at most: it reads files and encodes short texts."""


def find_mismatches(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Runs every check."""
    for check in CHECKS:
        yield from check(config, loaded)
