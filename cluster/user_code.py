"""Loads user code that a configuration names in place of a built-in part: `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mobula.configs.near_paths import near

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]  # the directory of `mobula`, which contains `examples/`
# Environment variable of workers: the working directory of the command. Paths are relative to it.
FOLDER_VARIABLE = "MOBULA_COMMAND_FOLDER"
REFERENCE = re.compile(r"[^:\s]+:[A-Za-z_][\w.]*")
NO_OPTIONS: Mapping[str, Any] = {}
_IMPORTING = threading.RLock()  # reentrant: an imported file may load another file


def is_user_code(name: str) -> bool:
    """Whether a name refers to user code, not to a built-in part."""
    return ":" in name


def names_user_code(values: Any) -> bool:
    """Whether nested configuration values name user code or its options. `examples/` does not count."""
    if isinstance(values, Mapping):
        return any(names_user_code(v) or (k.endswith("_options") and bool(v)) for k, v in values.items())
    if isinstance(values, list):
        return any(map(names_user_code, values))
    return isinstance(values, str) and REFERENCE.fullmatch(values) is not None and not _is_ours(values)


def user_files(values: Any) -> list[str]:
    """Returns the files of user code that nested configuration values name, without files of `examples/`."""
    if isinstance(values, Mapping | list):
        below = values.values() if isinstance(values, Mapping) else values
        return [file for value in below for file in user_files(value)]
    is_file = isinstance(values, str) and REFERENCE.fullmatch(values) is not None and not _is_ours(values)
    return [file] if is_file and (file := values.rpartition(":")[0]).endswith(".py") else []


def _is_ours(name: str) -> bool:
    return name.startswith("examples/") and (PACKAGE / name.rpartition(":")[0]).is_file()


def chosen(
    registry: Mapping[str, Callable[..., T]],
    name: str,
    key: str,
    given: Sequence[str],
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Callable[..., T]:
    """Returns the entry of `registry`, or the user's function or class `name` with `options` as keyword arguments.

    Args:
        key: Configuration key with the value `name`; `KEY_options` has the options.
        given: Names of the positional arguments of its calls, for messages.

    Raises:
        ValueError: the name is unknown, its parameters do not fit, or an option is unknown, missing, or given for a
            built-in part.
    """
    if not is_user_code(name):
        if options:
            raise ValueError(
                f"{key}_options has {', '.join(options)}, and {key}={name} is not your own code: remove it"
            )
        return registry[name]
    try:
        function = load(name)
        check_call(function, given, options, f"{key}_options.")
    except ValueError as error:
        raise ValueError(f"{key}={name}: {error}") from error
    return partial(function, **options)


def load(target: str) -> Any:
    """Returns the object at `module:name` or `path/to/file.py:name`. The module is imported once per process.

    Raises:
        ValueError: the object does not exist, or its module raised; the message has the line of the user's code.
    """
    source, _, name = target.rpartition(":")
    module = _module_in(source) if source.endswith(".py") else _module(source)
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise ValueError(f"{source} has no {name}{did_you_mean(name, vars(module))}") from None


def check_call(function: Any, given: Sequence[str], options: Mapping[str, Any], options_key: str = "options.") -> None:
    """Compares the parameters of a user's function or class with the arguments of its calls.

    Raises:
        ValueError: it cannot be called with these arguments.
    """
    if not callable(function):
        raise ValueError(f"it is a {type(function).__name__}: name what is called as ({', '.join(given)})")
    signature = inspect.signature(function)
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if len(positional) < len(given) and not takes_any:
        raise ValueError(f"it takes {signature}, and is called with ({', '.join(given)}) and options by keyword")
    check_options("it", signature, options, len(given), options_key)


def check_options(
    target: str,
    signature: inspect.Signature,
    options: Mapping[str, Any],
    num_given: int = 1,
    options_key: str = "options.",
) -> None:
    """Compares options with the parameters after the first `num_given`.

    Raises:
        ValueError: an option is unknown or missing.
    """
    parameters = dict(list(signature.parameters.items())[num_given:])
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    for option in options:
        if option not in named and not takes_any:
            known = ", ".join(named) or "none"
            raise ValueError(f"{target} has no option {option!r}{did_you_mean(option, named)}: it has {known}")
    missing = [n for n, p in named.items() if p.default is p.empty and n not in options]
    if missing:
        raise ValueError(f"{target} needs {options_key}{missing[0]}, which is not set")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is closest to an unknown name, in brackets; empty if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def file_at(path: str) -> Path:
    """Finds a file relative to the working directory of the command, to that of this process, or to `mobula`.

    A job submitted with a working directory runs in a copy of it on each node. `mobula` contains `examples/`.

    Raises:
        ValueError: there is no file.
    """
    folders = [Path(os.environ.get(FOLDER_VARIABLE, "")), Path(), PACKAGE]
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if file is None:
        raise ValueError(f"no file {Path(path).absolute()} here{near(Path(path))}")
    return file.resolve()


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {error.name!r}: put it on the PYTHONPATH, or write path/to/file.py:name"
            ) from error
        raise _raised(error) from error
    except (Exception, SystemExit) as error:
        raise _raised(error) from error


def _module_in(path: str) -> ModuleType:
    """Imports a file as a module, once, under a unique name that cannot shadow an installed module."""
    file = file_at(path)
    name = f"user_file_{file.as_posix().encode().hex()}"
    with _IMPORTING:  # environments are loaded in threads: no thread may see a half-imported module
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, f"{path} ends in .py, so it has a loader"
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # for imports of files in its folder; last, so that it shadows no module
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # as the import system does: before it runs
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]  # the import failed half-way: a later import must run it again
            if isinstance(error, Exception | SystemExit):
                raise _raised(error) from error
            raise
        return module


def _raised(error: BaseException) -> ValueError:
    """Returns the error of an import, with the line of the user's module that raised it."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # the text of the error has file and line
        return ValueError(f"its import raised {reason}")
    tools = (__file__, importlib.__file__, "<frozen importlib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(tools)]
    if not frames:
        return ValueError(f"its import raised {reason}")
    line = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return ValueError(f"its import raised {reason}, in {line.filename}:{line.lineno}: `{line.line}`")
