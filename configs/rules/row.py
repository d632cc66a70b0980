"""A rule that is a condition and a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mobula.configs.schema.run import RunConfig

Rule = Callable[[RunConfig], str | None]


@dataclass(frozen=True)
class RuleRow:
    """Implements `Rule`: a configuration that `is_wrong` gets `message`, with values for `{KEY}`."""

    is_wrong: Callable[[RunConfig], bool]
    message: str

    def __call__(self, config: RunConfig) -> str | None:
        return self.message.format_map(dict(config)) if self.is_wrong(config) else None
