"""Readers by the name that `data.kind` chooses them with, one file each: how records lie in files."""

from collections.abc import Mapping
from typing import Any

from mobula.actors.datasets.readers.base import Reader
from mobula.actors.datasets.readers.huggingface import open_huggingface
from mobula.actors.datasets.readers.json_files import open_json, open_jsonl
from mobula.actors.datasets.readers.parquet import open_parquet
from mobula.actors.datasets.readers.prompt_lists import open_prompts
from mobula.actors.datasets.readers.webdataset import open_webdataset
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
    """The reader that `data.kind` names, with `data.kind_options`.

    Raises:
        ValueError: it is the user's own, and cannot be called with its options.
    """
    return chosen(READERS, source.kind, "data.kind", ("opened",), options)
