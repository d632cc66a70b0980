"""Converts Arrow records to Python values: maps to mappings, float32 to the shortest decimal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError

NARROW = {pa.float16(): np.float16, pa.float32(): np.float32}


def records_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Raises: RowError: a map has a key twice."""
    try:
        records = table.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise RowError("repeated_key", f"a map of the record has a key twice ({error}): write it once") from error
    return [_spelled(record, pa.struct(table.schema)) for record in records]


def refuse_repeated(schema: pa.Schema, name: str) -> None:
    """Raises: DatasetError: two columns have one name."""
    repeated = [column for column in schema.names if schema.names.count(column) > 1]
    if repeated:
        raise DatasetError(f"{name} has two columns {repeated[0]}: rename one of them")


def _spelled(value: Any, kind: pa.DataType) -> Any:
    """Converts float32 0.1 to 0.1 in columns and struct fields, but not in arrays (such as samples of a sound)."""
    if value is None:
        return None
    if kind in NARROW:
        return float(str(NARROW[kind](value)))
    if pa.types.is_struct(kind):
        return {field.name: _spelled(value[field.name], field.type) for field in kind}
    return value
