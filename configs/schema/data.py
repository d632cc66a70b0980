"""Keys of data and environments."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mobula.configs.schema.base import NOT_EMPTY, Section, UserCode


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
"""Kinds that do not read rows from `data.path` in a row format."""


AUTO_SUFFIX = "auto"
"""Value of `data.prompt_suffix` that derives the suffix from the reward."""


BOXED_SUFFIX = r" Answer in \boxed{}."


class HuggingFaceConfig(Section):
    """Rows that `datasets` reads."""

    subset: str = ""
    """The configuration of a dataset with several, e.g. `main` of `openai/gsm8k`; else empty."""
    streamed_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of each split that are streamed from the hub instead of downloading the dataset; 0 downloads."""


class SourceConfig(Section):
    """Location of rows, and the names of their columns."""

    kind: DataKind | UserCode
    """The reader: the format of the files. `chat` is for offline jobs only. `environment` reads no files; the first
    observations of `environment.name` are the prompts."""
    path: Annotated[Path, NOT_EMPTY]
    """The folder with the files of all splits; for `huggingface` also a name on the hub."""
    row_format: Literal["question", "messages", "verl", "lightrft", "alpaca", "sharegpt"] | UserCode = "question"
    """The schema of a record: its columns and their meaning."""
    columns: dict[str, str] = {}
    """Column of the row format -> name in the data if it differs, e.g. `{question: problem}`; a dot selects a nested
    column."""
    splits: dict[str, str] = {}
    """Split -> name in the data if it differs, e.g. `{validation: test}`, or a pattern of file names."""
    media_path: str = ""
    """The folder of media: paths are relative to it and may not leave it; empty for `data.path`."""
    label: str = ""
    """Label of all rows, for recipes; empty to keep the label of each row."""
    huggingface: HuggingFaceConfig = HuggingFaceConfig()
    """Read with `kind=huggingface`."""


class PlaceholdersConfig(Section):
    """Placeholders of media in the texts of rows; an empty text disables a placeholder. If parts of a message hold the
    media, placeholders are plain text."""

    image: str = "<image>"
    """Placeholder of an image."""
    video: str = "<video>"
    """Placeholder of a video."""
    audio: str = "<audio>"
    """Placeholder of a sound."""


class MixtureSource(SourceConfig):
    """One source of a mixture."""

    weight: PositiveFloat
    """The source's share of the prompts, relative to the other sources."""


class MixtureConfig(Section):
    """Several sources in given shares."""

    sources: dict[str, MixtureSource] = {}
    """The sources, by name; paths are relative to `data.path`."""
    temperature: PositiveFloat = 1.0
    """Shares of sources are weight^(1 / temperature): values above 1 make them more equal."""
    weight_by_rows: bool = False
    """Multiply the weight of a source by the number of its rows."""


class CurriculumConfig(Section):
    """The order of training rows by difficulty."""

    kind: Literal["none", "easy_first", "hard_first"] = "none"
    """The order of the stages; rows are shuffled within a stage."""
    key: Annotated[str, NOT_EMPTY] = "prompt_tokens"
    """The measure of difficulty: a number in the row's metadata, or `prompt_tokens`, the length of the prompt."""
    num_stages: PositiveInt = 10
    """Stages of equal size in an epoch."""
    num_epochs: PositiveInt = 1
    """Epochs with stages; later epochs are shuffled as a whole."""


class VideoConfig(Section):
    """Limits of videos, and sampling and scaling of frames."""

    fps: PositiveFloat = 2.0
    """Frames sampled for each second."""
    min_frames: PositiveInt = 4
    """Fewest frames sampled from a video; shorter videos give all frames."""
    max_frames: PositiveInt = 32
    """Most frames sampled from a video, at equal distances."""
    min_frame_pixels: PositiveInt = 784
    """Smaller frames are scaled up to this many pixels."""
    max_frame_pixels: PositiveInt = 200704
    """Larger frames are scaled down to this many pixels."""
    max_tokens: PositiveInt = 4096
    """Most vision tokens of a video: frames are scaled down further to stay within it."""
    frame_rate: PositiveFloat = 2.0
    """Frames per second of a video given as frames (a folder, a list, an array) without a rate."""
    max_file_bytes: PositiveInt = 512 * 2**20
    """A larger file is refused before it is read."""
    max_seconds: PositiveFloat = 3600.0
    """A longer video is refused before it is decoded."""
    max_file_frames: PositiveInt = 216000
    """A video of more frames is refused before it is decoded."""
    max_decoded_pixels: PositiveInt = 256 * 2**20
    """A video with more pixels in all sampled frames together is refused before it is decoded."""


class AudioConfig(Section):
    """Limits of audio clips."""

    max_file_bytes: PositiveInt = 64 * 2**20
    """A larger file is refused before it is read."""
    max_seconds: PositiveFloat = 300.0
    """A longer clip is refused before it is decoded; so is a clip longer than the model's input."""


class DataConfig(SourceConfig):
    """Sources and limits of prompts. docs/data.md has an example of each format."""

    writer: Literal["none"] | UserCode = "none"
    """User function that writes the data. Called with `data.path` before reading; must not write existing data again.
    """
    writer_options: dict[str, Any] = {}
    """Arguments of `writer`."""
    kind_options: dict[str, Any] = {}
    """Arguments of `kind`, if it is user code."""
    row_format_options: dict[str, Any] = {}
    """Arguments of `row_format`, if it is user code."""
    mixture: MixtureConfig = MixtureConfig()
    """Read with `kind=mixture`."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The order of training rows."""
    cache_path: Annotated[Path, NOT_EMPTY] = Path("data/cache")
    """Cache folder, shared by runs: downloaded media, and copies of files that cannot be read in parts."""
    shuffle_bytes: PositiveInt = 256 * 2**20
    """Size of the shuffle window in memory, for files that are read by blocks (Parquet)."""
    max_checked_rows: Annotated[int, Field(ge=0)] = 100000
    """Rows of each split that are checked before the start, 0 for all; the others are checked on use."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the training rows that is held out as validation and test rows of data that have neither; 0 refuses such
    data. Without one of the two, it has the rows of the other."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that media may be downloaded from; other hosts, also after a redirect, are refused."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """Redirects that a download follows."""
    download_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Timeout for the download of one file."""
    repeated_ids: Literal["skip", "number"] = "skip"
    """Rows with the id of an earlier row: `skip` leaves them out and reports them; `number` keeps all rows and appends
    the row's number in the split to every id."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of rows, turns and parts that are left out before a row is read, such as `[kto_tag]`. Without it, a field
    that changes what other trainers train and is not read here is refused."""
    placeholders: PlaceholdersConfig = PlaceholdersConfig()
    """Placeholders of media in the texts of rows."""
    prompt_suffix: str = ""
    """Text appended to every question. `auto` appends ` Answer in \\boxed{}.` if the reward reads the answer from a
    box, else nothing."""
    processor: Literal["chat"] | UserCode = "chat"
    """The processor of rows, for models that read and write text: renders prompts and prepares media."""
    processor_options: dict[str, Any] = {}
    """Arguments of `processor`, if it is user code."""
    system_prompt: str = ""
    """System turn of every prompt; empty for none."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, e.g. `{enable_thinking: false}`; the template must read each of them. Applied
    wherever a conversation is rendered: RL, supervised rows, offline jobs, evaluation and serving."""
    max_prompt_tokens: PositiveInt = 512
    """A longer prompt (vision tokens included) is skipped and counted, never cut."""
    min_pixels: PositiveInt = 784
    """The model's image processor scales smaller images up to this many pixels."""
    max_pixels: PositiveInt = 200704
    """The model's image processor scales larger images down to this many pixels. Families with tiles use as many tiles
    as fit into this many pixels, at least one, unless config.json lists the resolutions (`image_grid_pinpoints`)."""
    max_image_bytes: PositiveInt = 20 * 2**20
    """A larger image file is refused before it is read, and a larger download is stopped."""
    max_decoded_pixels: PositiveInt = 50000000
    """An image with more pixels is refused before it is decoded (decompression bombs)."""
    video: VideoConfig = VideoConfig()
    """Limits of videos, and sampling and scaling of frames."""
    audio: AudioConfig = AudioConfig()
    """Limits of audio clips."""
    media_cache_bytes: PositiveInt = 256 * 2**20
    """Size of the cache of processed images, videos and audio clips for later epochs."""
    max_skipped_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """If a larger share of a split is unusable, the run refuses to start."""


Seconds = Annotated[float, Field(gt=0, le=3600)]


class StagesConfig(Section):
    """A curriculum: training episodes start with the first stage; later stages open during the run."""

    kind: Literal["none", "episodes", "success"] = "none"
    """Condition that opens the next stage. `none`: there are no stages; `episodes`: a number of episodes of the newest
    stage; `success`: the share of them that reached `evaluation.correct_from` in `rewards.accuracy_component`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Options of the environment's reset for each stage, in order, e.g. a difficulty or a task. Open stages are sampled
    with equal probability; held-out episodes use the last stage."""
    episodes: PositiveInt = 512
    """Episodes of the newest stage before the next stage opens; with `success`, the window of the share."""
    success: Annotated[float, Field(ge=0, le=1)] = 0.8
    """The share of successes that opens the next stage."""

    @property
    def is_on(self) -> bool:
        return self.kind != "none"


class EnvironmentConfig(Section):
    """The environment of multi-turn episodes (docs/environments.md). `data.kind=environment` has its prompts; with
    other data it plays their rows."""

    name: Annotated[str, NOT_EMPTY]
    """`none`, a built-in environment or adapter (docs/tasks.md lists them), or user code: `module:Class` or
    `FILE.py:Class`."""
    options: dict[str, Any]
    """Arguments of the environment."""
    tools: tuple[str, ...] = ()
    """Tools of `environment=tools` and `image_tools`: functions `FILE.py:function`, and URLs of MCP servers."""
    host: Literal["inline", "process", "ray", "remote"] = "process"
    """`process` runs each environment in a subprocess, which is killed on a timeout; `inline` runs it on a thread of
    the rollout actor, which is cheaper and cannot be killed; `ray` runs it in a Ray actor on any node; `remote` calls
    the server of `environment.url` (`mobula serve-environment`)."""
    ray_num_cpus: NonNegativeFloat = 0.0
    """CPUs that Ray reserves for one environment with `host=ray`, in addition to the run's workers; 0 for none."""
    url: str = ""
    """The server of `host=remote`, e.g. `http://127.0.0.1:8600`."""
    token_env: str = ""
    """The environment variable with the server's bearer token; empty for none."""
    max_tokens: PositiveInt = 512
    """Longest episode after the prompt, including tokens of observations and images; `sampler.max_tokens` bounds one
    turn."""
    max_concurrent: PositiveInt = 64
    """Environments that one rollout actor runs concurrently; with `host=process` at most four a core."""
    start_timeout_s: Seconds = 60.0
    """Timeout for the start of an environment."""
    reset_timeout_s: Seconds = 30.0
    """Timeout for a reset."""
    step_timeout_s: Seconds = 30.0
    """Timeout for a step."""
    retries: NonNegativeInt = 1
    """Retries of a failed episode with the same seed; after that it has no reward."""
    max_failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed episodes among the last 100 of a rollout actor above which the run ends."""
    max_observation_bytes: PositiveInt = 4 * 2**20
    """Largest observation, text and image files together; a larger observation fails the episode."""
    num_train: PositiveInt = 1024
    """Training episodes of one epoch, with distinct seeds."""
    num_validation: PositiveInt = 64
    """Episodes of the validation split; the seeds are in no other split."""
    num_test: PositiveInt = 128
    """Episodes of the test split."""

    curriculum: StagesConfig = StagesConfig()
    """The order of training episodes by difficulty or task."""

    @property
    def is_on(self) -> bool:
        return self.name != "none"

    @property
    def arguments(self) -> dict[str, Any]:
        """`options`, and `tools` if there are any."""
        return {**self.options, **({"tools": self.tools} if self.tools else {})}
