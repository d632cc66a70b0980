"""Rules of the data."""

from __future__ import annotations

from mobula.configs.schema.data import WITHOUT_FILES_OF_ROWS, DataKind
from mobula.configs.schema.run import RunConfig


def _pixel_range_is_open(config: RunConfig) -> str | None:
    if config.data.min_pixels <= config.data.max_pixels:
        return None
    return (
        f"data.min_pixels={config.data.min_pixels} is more than data.max_pixels={config.data.max_pixels}: "
        "lower data.min_pixels or raise data.max_pixels"
    )


def _mixture_has_sources(config: RunConfig) -> str | None:
    data, sources = config.data, config.data.mixture.sources
    if data.kind is DataKind.MIXTURE and not sources:
        return "data.kind=mixture has no data.mixture.sources: name at least one, e.g. as docs/data.md does"
    unfit = [name for name, source in sources.items() if source.kind in (DataKind.MIXTURE, DataKind.ENVIRONMENT)]
    if unfit:
        return (
            f"data.mixture.sources.{unfit[0]}.kind={sources[unfit[0]].kind} is no reader: use jsonl, json, parquet, "
            "huggingface or webdataset"
        )
    return None


def _options_of_rows_have_a_reader(config: RunConfig) -> str | None:
    """`data.columns` is exempt, because experiments set it for their datasets."""
    data = config.data
    if data.kind not in WITHOUT_FILES_OF_ROWS:
        return None
    for name, value in (("label", data.label), ("media_path", data.media_path), ("splits", data.splits)):
        if value:
            is_mixture = data.kind is DataKind.MIXTURE
            instead = f"set data.mixture.sources.NAME.{name}" if is_mixture else "leave it empty"
            return f"data.{name}={value} is not read with data.kind={data.kind}: {instead}"
    return None


RULES = (
    _pixel_range_is_open,
    _mixture_has_sources,
    _options_of_rows_have_a_reader,
)
