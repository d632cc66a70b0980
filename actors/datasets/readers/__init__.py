"""Readers of file formats, by the name in `data.kind`."""

from collections.abc import Mapping
from typing import Any

from mobula.actors.datasets.readers.arrow import open_huggingface, open_parquet
from mobula.actors.datasets.readers.files import Reader, open_json, open_jsonl, open_prompts, open_webdataset
from mobula.cluster.user_code import chosen
from mobula.configs.schema.data import SourceConfig

READERS: dict[str, Reader] = {
    "jsonl": open_jsonl,
    "prompts": open_prompts,
    "json": open_json,
    "parquet": open_parquet,
    "huggingface": open_huggingface,
    "webdataset": open_webdataset,
}


def reader_of(source: SourceConfig, options: Mapping[str, Any]) -> Reader:
    """Returns the reader of `data.kind` with `data.kind_options`."""
    return chosen(READERS, source.kind, "data.kind", ("opened",), options)
