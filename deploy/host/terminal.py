"""The terminal that commands print to: what a user, a model or a machine wrote comes out as it was written."""

from __future__ import annotations

from rich.console import Console


def terminal(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console on which `:b:` stays `:b:`; with `soft_wrap` lines are as long as they are, to be read again."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, emoji=False)
