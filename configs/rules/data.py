"""Rules of the data."""

from __future__ import annotations

from mobula.configs.schema.data import WITHOUT_FILES_OF_ROWS, DataConfig, DataKind, SourceConfig
from mobula.configs.schema.run import RunConfig


def _pixel_range_is_open(config: RunConfig) -> str | None:
    if config.data.min_pixels <= config.data.max_pixels:
        return None
    return (
        f"data.min_pixels={config.data.min_pixels} is more than data.max_pixels={config.data.max_pixels}: "
        "lower data.min_pixels or raise data.max_pixels"
    )


def _mixture_has_sources(config: RunConfig) -> str | None:
    data = config.data
    if data.kind is DataKind.MIXTURE and not data.sources:
        return "data.kind=mixture has no data.sources: name at least one, e.g. as docs/data.md does"
    if data.kind is not DataKind.MIXTURE and data.sources:
        return (
            f"data.sources has {', '.join(data.sources)} but data.kind={data.kind} reads data.path alone: set "
            "data.kind=mixture, or data.sources={}"
        )
    unfit = [name for name, source in data.sources.items() if source.kind in (DataKind.MIXTURE, DataKind.ENVIRONMENT)]
    if unfit:
        return (
            f"data.sources.{unfit[0]}.kind={data.sources[unfit[0]].kind} is no reader: use jsonl, json, parquet, "
            "huggingface or webdataset"
        )
    return None


def _shares_are_of_a_mixture(config: RunConfig) -> str | None:
    data = config.data
    if data.kind is DataKind.MIXTURE or (data.temperature == 1 and not data.weight_by_rows):
        return None
    return (
        f"data.temperature={data.temperature:g} and data.weight_by_rows={str(data.weight_by_rows).lower()} are for "
        f"data.kind=mixture, and this is {data.kind}: set data.temperature=1 and data.weight_by_rows=false"
    )


def _a_subset_is_of_huggingface(config: RunConfig) -> str | None:
    data = config.data
    for key, source in _sources(data).items():
        if source.subset and source.kind is not DataKind.HUGGINGFACE:
            return (
                f"{key}.subset={source.subset} is for {key}.kind=huggingface, and this is {source.kind}: "
                f"{_instead(source, 'subset')}"
            )
    return None


def _streamed_rows_are_of_huggingface(config: RunConfig) -> str | None:
    data = config.data
    kinds = [source.kind for source in _sources(data).values()]
    if data.streamed_rows == 0 or DataKind.HUGGINGFACE in kinds:
        return None
    return f"data.streamed_rows={data.streamed_rows} is for data.kind=huggingface, and this is {data.kind}: set it to 0"


def _options_of_rows_have_a_reader(config: RunConfig) -> str | None:
    """`data.columns` is exempt, because experiments set it for their datasets."""
    data = config.data
    if data.kind not in WITHOUT_FILES_OF_ROWS:
        return None
    for name, value in (("label", data.label), ("media_path", data.media_path), ("splits", data.splits)):
        if value:
            return f"data.{name}={value} is not read with data.kind={data.kind}: {_instead(data, name)}"
    return None


def _sources(data: DataConfig) -> dict[str, SourceConfig]:
    """Key -> section; a mixture has the keys of its sources as well."""
    return {"data": data, **{f"data.sources.{name}": source for name, source in data.sources.items()}}


def _instead(source: SourceConfig, name: str) -> str:
    return f"set data.sources.NAME.{name}" if source.kind is DataKind.MIXTURE else "leave it empty"


RULES = (
    _pixel_range_is_open,
    _mixture_has_sources,
    _shares_are_of_a_mixture,
    _a_subset_is_of_huggingface,
    _streamed_rows_are_of_huggingface,
    _options_of_rows_have_a_reader,
)
