"""How every command of `mobula` ends when it fails: one message on stderr, and an exit code that says whose turn it is.

Exit codes: 0 done, 1 the run failed, 2 the user has something to mend (one message on stderr, no traceback), 130 it
was told to stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from cluster.errors import MobulaError, PreflightError
from configs.errors import ConfigError
from deploy.terminal import terminal

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
GO_ON = "the same command with resume=auto goes on from the last checkpoint"


@contextmanager
def explained(when_interrupted: str = GO_ON) -> Iterator[None]:
    """What was raised on purpose becomes one message on stderr and an exit code; anything else is a bug and travels."""
    try:
        yield
    except (ConfigError, PreflightError) as error:
        _complain(error)
        raise typer.Exit(USER_ERROR) from error
    except MobulaError as error:
        _complain(error)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        _complain(f"interrupted: {when_interrupted}")
        raise typer.Exit(INTERRUPTED) from error


def _complain(message: object) -> None:
    console = terminal(stderr=True, soft_wrap=True)
    console.print("mobula:", style="bold red", end=" ")
    console.print(str(message), markup=False, highlight=False)
