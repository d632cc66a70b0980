"""Writers by the name of the reader that reads their files again, one file each."""

from actors.datasets.writers.base import OpenWriter
from actors.datasets.writers.json_files import JsonArrayWriter, JsonLinesWriter
from actors.datasets.writers.parquet import ParquetWriter
from actors.datasets.writers.webdataset import ShardWriter

WRITERS: dict[str, OpenWriter] = {
    "jsonl": JsonLinesWriter,
    "prompts": JsonLinesWriter,
    "json": JsonArrayWriter,
    "parquet": ParquetWriter,
    "huggingface": ParquetWriter,  # `load_dataset` of the folder reads them
    "webdataset": ShardWriter,
}
