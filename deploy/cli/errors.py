"""How a failed `mobula` command ends: one message on stderr, and an exit code for the kind of the error.

Exit codes: 0 done, 1 the run failed, 2 the user has something to change (one message on stderr, no traceback), 3 the
guard against reward hacking stopped the run, 130 it was interrupted. The message of a run that failed ends with the log
file, which holds the traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mobula.cluster.errors import (
    FAILED,
    GUARDED,
    INTERRUPTED,
    USER_ERROR,
    MobulaError,
    PreflightError,
    RewardHackingError,
)
from mobula.configs.errors import ConfigError
from mobula.deploy.host.terminal import terminal
from mobula.deploy.run.logs import log_failure

GO_ON = "the same command with resume=auto goes on from the last checkpoint"


@contextmanager
def explained(when_interrupted: str = GO_ON) -> Iterator[None]:
    """Turns an error of this project into one message on stderr and an exit code. Other errors are bugs and propagate.
    The run's log file has the traceback of both."""
    try:
        yield
    except (ConfigError, PreflightError) as error:
        _complain(error)
        raise typer.Exit(USER_ERROR) from error
    except MobulaError as error:
        log = log_failure(error)
        _complain(f"{error}" if log is None else f"{error}; traceback and earlier faults: {log}")
        raise typer.Exit(GUARDED if isinstance(error, RewardHackingError) else FAILED) from error
    except KeyboardInterrupt as error:
        _complain(f"interrupted: {when_interrupted}")
        raise typer.Exit(INTERRUPTED) from error
    except typer.Exit:
        raise
    except Exception as error:
        log_failure(error)
        raise


def _complain(message: object) -> None:
    console = terminal(stderr=True, soft_wrap=True)
    console.print("mobula:", style="bold red", end=" ")
    console.print(str(message))
