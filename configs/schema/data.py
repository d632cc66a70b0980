"""Schema of data: where rows are read from, limits of a prompt, mixtures and curricula."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from mobula.configs.schema.base import NOT_EMPTY, Field, PositiveFloat, PositiveInt, Section, UserCode


class DataKind(StrEnum):
    JSONL = "jsonl"
    PROMPTS = "prompts"
    CHAT = "chat"
    JSON = "json"
    PARQUET = "parquet"
    HUGGINGFACE = "huggingface"
    WEBDATASET = "webdataset"
    MIXTURE = "mixture"
    ENVIRONMENT = "environment"


WITHOUT_FILES_OF_ROWS = (DataKind.MIXTURE, DataKind.ENVIRONMENT, DataKind.CHAT)
"""Data whose rows are not read from `data.path` in a row format."""


AUTO_SUFFIX = "auto"
"""The value of `data.prompt_suffix` with which the reward decides."""

BOXED_SUFFIX = r" Answer in \boxed{}."


class SourceConfig(Section):
    """Location of rows, and the names of their columns."""

    kind: DataKind | UserCode
    """The reader, which is the format of the files. `chat` is for offline jobs alone. `environment` takes the first
    observations of `environment.name` as prompts and reads no files."""
    path: Annotated[Path, NOT_EMPTY]
    """The folder with the files of all splits; for `huggingface` also a name on the hub."""
    subset: str = ""
    """For `huggingface`: the configuration of a dataset that has several, e.g. `main` of `openai/gsm8k`; else empty."""
    row_format: Literal["question", "messages", "verl", "lightrft", "alpaca", "sharegpt"] | UserCode = "question"
    """The schema of a record: its columns and their meaning."""
    columns: dict[str, str] = {}
    """Column of the row format -> its name in the data where that is another, e.g. `{question: problem}`; a dot leads
    into a nested column."""
    splits: dict[str, str] = {}
    """Split -> its name in the data where that is another, e.g. `{validation: test}`, or a pattern of file names."""
    media_path: str = ""
    """The folder that paths of media are relative to and may not leave; empty for `data.path`."""
    label: str = ""
    """Label of all rows, for recipes; empty to leave each row its own."""


class PlaceholdersConfig(Section):
    """The text that stands for a medium in the texts of rows; empty for none, so that what looks like one is text.

    Where a part of a message names a medium, parts alone do, and all text is text.
    """

    image: str = "<image>"
    """The text that stands for an image."""
    video: str = "<video>"
    """The text that stands for a video."""
    audio: str = "<audio>"
    """The text that stands for a sound."""


class MixtureSource(SourceConfig):
    """One source of a mixture."""

    weight: PositiveFloat
    """Its share of the prompts, relative to the other sources."""


class CurriculumConfig(Section):
    """The order of training rows by difficulty."""

    kind: Literal["none", "easy_first", "hard_first"] = "none"
    """The order of the stages; rows of one stage are shuffled."""
    key: Annotated[str, NOT_EMPTY] = "prompt_tokens"
    """The measure of difficulty: a number of the row's metadata, or `prompt_tokens`, the length of its prompt."""
    num_stages: PositiveInt = 10
    """Stages of equal size that an epoch is cut into."""
    num_epochs: PositiveInt = 1
    """Epochs with stages; later ones are shuffled as a whole."""


class VideoConfig(Section):
    """Limits of videos, and how their frames are sampled and scaled."""

    fps: PositiveFloat = 2.0
    """Frames sampled for each second."""
    min_frames: PositiveInt = 4
    """Least number of frames sampled from a video that has as many."""
    max_frames: PositiveInt = 32
    """Most frames sampled from a video, at equal distances."""
    min_frame_pixels: PositiveInt = 784
    """Smaller frames are scaled up to this many pixels."""
    max_frame_pixels: PositiveInt = 200704
    """Larger frames are scaled down to this many pixels."""
    max_tokens: PositiveInt = 4096
    """Vision tokens of one video: frames are scaled down further where they would take more."""
    frame_rate: PositiveFloat = 2.0
    """Frames per second of a video that comes as frames (a folder, a list, an array) without a rate."""
    max_file_bytes: PositiveInt = 512 * 2**20
    """A larger file is refused before it is read."""
    max_seconds: PositiveFloat = 3600.0
    """A longer video is refused before it is decoded."""
    max_file_frames: PositiveInt = 216000
    """A video of more frames is refused before it is decoded."""
    max_decoded_pixels: PositiveInt = 256 * 2**20
    """A video whose sampled frames have more pixels in all is refused before it is decoded."""


class AudioConfig(Section):
    """Limits of audio clips."""

    max_file_bytes: PositiveInt = 64 * 2**20
    """A larger file is refused before it is read."""
    max_seconds: PositiveFloat = 300.0
    """A longer clip is refused before it is decoded; so is a clip that the model would cut."""


class DataConfig(SourceConfig):
    """The prompts: where they are read from, and what a prompt may be. docs/data.md has an example of each format."""

    writer: Literal["none"] | UserCode = "none"
    """Your own function that writes the data: it is called with `data.path` before they are read, and leaves data alone
    that it wrote before."""
    writer_options: dict[str, Any] = {}
    """Arguments of `writer`."""
    kind_options: dict[str, Any] = {}
    """Arguments of the reader `kind`, where it is your own code."""
    row_format_options: dict[str, Any] = {}
    """Arguments of `row_format`, where it is your own code."""
    sources: dict[str, MixtureSource] = {}
    """The sources of `data.kind=mixture`, by name; their paths begin in `data.path`."""
    temperature: PositiveFloat = 1.0
    """Shares of sources are weight^(1 / temperature): above 1 they are more alike."""
    weight_by_rows: bool = False
    """Multiply the weight of a source by the number of its rows."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The order of training rows."""
    streamed_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of each split that `huggingface` streams from the hub in place of a download of everything; 0 downloads."""
    cache_path: Annotated[Path, NOT_EMPTY] = Path("data/cache")
    """Folder for what later runs use again: downloaded media, and copies of files that cannot be read in parts."""
    shuffle_bytes: PositiveInt = 256 * 2**20
    """Bytes of rows that are in memory at a time to be shuffled, where files are read by blocks (Parquet)."""
    max_checked_rows: Annotated[int, Field(ge=0)] = 100000
    """Rows of each split that are checked before the start, 0 for all; the others are checked when they are used."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that media may be downloaded from; URLs of others, and redirects to others, are refused."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """Redirects that a download follows."""
    download_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """The longest download of one file."""
    repeated_ids: Literal["skip", "number"] = "skip"
    """Rows whose id another row before them has: `skip` leaves them out by name, `number` appends to every id of the
    data its place in the split, so that all rows stay."""
    placeholders: PlaceholdersConfig = PlaceholdersConfig()
    """The text that stands for a medium in the texts of rows."""
    prompt_suffix: str = ""
    """Text appended to every question. `auto` appends ` Answer in \\boxed{}.` where the reward reads the answer from a
    box, and nothing elsewhere."""
    processor: Literal["chat"] | UserCode = "chat"
    """The processor of rows for models that read and write text: it renders the prompt and prepares its media."""
    processor_options: dict[str, Any] = {}
    """Arguments of `processor`, where it is your own code."""
    system_prompt: str = ""
    """System turn of every prompt; empty for none."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, e.g. `{enable_thinking: false}`; the template has to read each of them. They hold
    wherever a conversation is rendered: RL, supervised rows, offline jobs, evaluation and serving."""
    max_prompt_tokens: PositiveInt = 512
    """A longer prompt (vision tokens included) is skipped and counted, never cut."""
    min_pixels: PositiveInt = 784
    """Smaller images are scaled up to this many pixels by the model's image processor."""
    max_pixels: PositiveInt = 200704
    """Larger images are scaled down to this many pixels by the model's image processor. Families that
    scale every image to whole tiles take as many tiles as have at most this many pixels together, or one;
    where config.json names the resolutions (`image_grid_pinpoints`), these alone decide."""
    max_image_bytes: PositiveInt = 20 * 2**20
    """A larger image file is refused before it is read, and a larger download of one is stopped."""
    max_decoded_pixels: PositiveInt = 50000000
    """An image that would decode to more pixels is refused before it is decoded (decompression bombs)."""
    video: VideoConfig = VideoConfig()
    """Videos: how frames are taken and scaled, and what is refused."""
    audio: AudioConfig = AudioConfig()
    """Audio: what is refused."""
    media_cache_bytes: PositiveInt = 256 * 2**20
    """Byte budget of processed images, videos and audio clips that are kept for later epochs."""
    max_skipped_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """If a larger share of a split is unusable the run refuses to start."""
