"""Options that several commands share, and commands whose options are the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from mobula.deploy.host.authentication import AuthMode

if TYPE_CHECKING:
    from mobula.cluster.serving import Address

T = TypeVar("T")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A run's config.yaml in place of groups; single keys may be set."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Groups and keys in any order, e.g. experiment=sums resources=laptop algorithm.kl.coef=0.01",
    ),
]

RUN = "The run: its folder, its name below runs/, or latest."
RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help=f"{RUN} The latest one if it is left out.")]
RunFolder = Annotated[Path | None, typer.Option("--run", metavar="RUN", help="The same by an option.")]
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] [KEY=VALUE]...", help=f"{RUN} Without one, groups and keys as for train; with one, single keys."
    ),
]
RunCluster = Annotated[
    str | None, typer.Option("--address", help="Ask on this Ray cluster (HOST:PORT); NAME is needed then.")
]
Deadline = Annotated[float, typer.Option("--timeout", min=10, help="Seconds to wait for the run's answer.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and says which.")]
TokenEnv = Annotated[str | None, typer.Option(help="Environment variable with the bearer token.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the bearer token, instead.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A further name of this server in requests (Host, Origin); again for more."),
]


def run_and_words(words: list[str] | None, run: Path | None) -> tuple[str | None, list[str]]:
    """Splits the words of a command into the run that the first one, or `--run`, names, and the overrides."""
    first, *others = words or [""]
    if run is None and first and ("=" not in first or Path(first).is_dir()):
        return first, others
    return None if run is None else str(run), list(words or [])


def address_of(
    host: str, port: int, token_env: str | None, token_file: Path | None, allow_host: list[str] | None
) -> Address:
    """Returns the address of a server from its options. Reads the token."""
    from mobula.cluster.serving import Address, read_token

    return Address(host, port, read_token(token_env, token_file), tuple(allow_host or ()))


AuthOption = Annotated[
    AuthMode,
    typer.Option(
        "--auth", envvar="RAY_AUTH_MODE", case_sensitive=False, help="As the cluster was started: disabled, token."
    ),
]


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a command of a function of one dataclass; its fields, annotated for typer, are the options.

    An option that is left out has the default of its field.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=_default(field.default, field.default_factory),
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def bound(run: Callable[[T], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            run(options(**{name: value for name, value in values.items() if value is not None}))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return bound


def _default(value: Any, factory: Any) -> Any:
    if factory is not MISSING:
        return None
    return inspect.Parameter.empty if value is MISSING else value
