"""Writers by the name of the reader that reads their files again, one file each."""

from mobula.actors.datasets.writers.base import OpenWriter
from mobula.actors.datasets.writers.json_files import JsonArrayWriter, JsonLinesWriter
from mobula.actors.datasets.writers.parquet import ParquetWriter
from mobula.actors.datasets.writers.webdataset import ShardWriter

WRITERS: dict[str, OpenWriter] = {
    "jsonl": JsonLinesWriter,
    "prompts": JsonLinesWriter,
    "json": JsonArrayWriter,
    "parquet": ParquetWriter,
    "huggingface": ParquetWriter,  # `load_dataset` of the folder reads them
    "webdataset": ShardWriter,
}
