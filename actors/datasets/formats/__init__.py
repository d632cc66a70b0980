"""Row formats by name; user code is one more."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mobula.actors.datasets.formats.base import Draft, Record, RowFormat
from mobula.actors.datasets.formats.records import FORMATS
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import SkippedSample
from mobula.cluster.user_code import chosen, is_user_code
from mobula.configs.schema.data import SourceConfig


def format_of(source: SourceConfig, options: Mapping[str, Any]) -> RowFormat:
    """Returns the row format of `data.row_format`; user code is a function from a record to a `Draft`."""
    name = source.row_format
    readers = {known: row_format.read for known, row_format in FORMATS.items()}
    read = chosen(readers, name, "data.row_format", ("record",), options)
    if not is_user_code(name):
        return FORMATS[name]
    return RowFormat(tuple(source.columns), partial(_read_by_user, name, read), is_own=True)


def _read_by_user(name: str, read: Callable[[Record], Draft], record: Record) -> Draft:
    try:
        draft = read(record)
    except SkippedSample:
        raise
    except Exception as error:  # user code may raise errors of any type
        raise RowError("row_format_raised", f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(draft, Draft):
        raise RowError("row_format_raised", f"{name} returned a {type(draft).__name__}: return a Draft")
    return draft
