"""Checks and writes model, data and processor before a role starts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from huggingface_hub import snapshot_download

from mobula.actors.datasets.conversations import Conversation, ImagePair, read_conversations, read_image_pairs
from mobula.actors.datasets.mixture import PROMPT_TOKENS
from mobula.actors.datasets.open_split import TRAIN, Splits, curriculum_of, open_split
from mobula.actors.datasets.prompts import (
    Difficulty,
    InDriver,
    P,
    PreflightReport,
    Preparation,
    Processor,
    PromptSet,
    PromptSource,
    RowChecker,
    fixed_prompts,
    preflight,
)
from mobula.actors.datasets.readers.arrow import fingerprint_of
from mobula.actors.datasets.readers.files import SUFFIXES, Opened, files_of
from mobula.actors.datasets.rows import R, Row, Skipped, Split
from mobula.actors.environments.rows import environment_split, row_player
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import DrawingProcessor
from mobula.actors.processors.teacher import TEACHER, check_teacher, named_teachers
from mobula.actors.processors.worker import make_processor
from mobula.cluster.errors import DatasetError, PreflightError
from mobula.cluster.files import file_sha256, install_folder
from mobula.cluster.metrics.report.run_folder import SKIPPED_FILE
from mobula.cluster.records.media import MediaKeeper, MediaStore
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.replay.run_identity import DATA_FILES, run_identity
from mobula.cluster.weight_sync.manifest import Manifest, checkpoint_files, checkpoint_manifest
from mobula.configs.near_paths import HUB_EXAMPLE, may_be_hub_name, near
from mobula.configs.schema import EvaluationConfig, PolicyConfig, RunConfig
from mobula.configs.schema.data import DataKind, SourceConfig
from mobula.configs.schema.rollout import SamplerKind
from mobula.deploy.planning.plan_command import EngineSizes
from mobula.deploy.preflight.checks import LoadedModel, find_mismatches, find_unusable, refuse
from mobula.deploy.preflight.decisions import with_decisions
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.preflight.rows import Seen, find_in_rows, row_notes
from mobula.deploy.preflight.user_code import check_user_code, data_writer
from mobula.learner.policies.adapters import adapted_modules
from mobula.learner.policies.checkpoint import stored_model
from mobula.learner.policies.families import (
    DRAWING_TYPES,
    family_at,
    frozen_prefixes,
    max_positions,
    model_type_at,
    unequal_window,
)
from mobula.learner.policies.flow.families import INDEX
from mobula.learner.policies.flow.policy import Denoising
from mobula.learner.policies.flow.tiny import TINY_FLOW, write_tiny_flow
from mobula.learner.policies.flow.tiny.patches import TINY_PATCHES, write_tiny_patches
from mobula.learner.policies.image_tokens import TINY_JANUS, write_tiny_janus
from mobula.learner.policies.loading import refuse_unknown_prefixes
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import score_class
from mobula.learner.policies.trained import flow_checkpoint, write_dequantised

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor

_logger = logging.getLogger(__name__)

OF_DATASETS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv")  # that the package datasets reads
USABLE_ROWS = "the usable rows of these files, which depend on lengths, columns and media"


def identity_with_data(config: RunConfig, usable_rows: str = "") -> dict[str, Any]:
    """Returns the run's identity, with fingerprints of training files on this machine and of the usable rows."""
    fingerprints = {DATA_FILES: _fingerprint(config), USABLE_ROWS: usable_rows}
    return run_identity(config) | {key: fingerprint for key, fingerprint in fingerprints.items() if fingerprint}


def _fingerprint(config: RunConfig) -> str:
    data = config.data
    sources: list[tuple[Path, SourceConfig]] = [(data.path / s.path, s) for s in data.mixture.sources.values()]
    sources = sources or [(data.path, data)]
    try:
        return fingerprint_of(
            file
            for path, source in sources
            for file in files_of(Opened(path, _split(source), data.cache_path, 0, "", 0), _suffixes(config, source))
        )
    except (DatasetError, OSError):  # rows of the hub or of an environment, or files that are written at the start
        return ""


def _split(source: SourceConfig) -> str:
    """Returns the name of the training split without a slice such as `train[:90%]`."""
    name = source.splits.get(TRAIN, TRAIN)
    return name.partition("[")[0] if source.kind is DataKind.HUGGINGFACE else name


def _suffixes(config: RunConfig, source: SourceConfig) -> Sequence[str]:
    kind = DataKind.JSONL if config.offline.is_on else source.kind
    return SUFFIXES.get(kind, OF_DATASETS)


VALIDATION = "validation"
BASES_FOLDER = ".bases"  # in the folder of the runs
SUPERVISED_PATH = "algorithm.supervised.path"


@dataclass(frozen=True)
class SupervisedSource:
    """Supervised rows that RL steps train in addition to their groups."""

    report: PreflightReport[Conversation]
    processor: ConversationProcessor  # with a separate tokenizer: it runs on another thread than other processors


@dataclass(frozen=True)
class PreparedJob(Generic[R, P]):
    """The checked parts of a run, with a processor that turns a row into a `P`."""

    config: RunConfig
    model_folder: Path  # files of the trained network
    checkpoint: Manifest  # contents of these files
    processor: Processor[R, P]
    media: MediaStore
    splits: dict[str, PreflightReport[R]]
    late_skips: dict[str, Skipped] = field(default_factory=dict)  # by sample, skipped while preparing the prompt
    teacher_folder: Path | None = None  # files of the teacher; None without a teacher
    workers: Preparation[R, P] | None = None  # each worker has a `processor`; None: the driver prepares prompts
    teachers: Mapping[str, Path] = field(default_factory=dict)  # label -> files of its teacher
    supervised: SupervisedSource | None = None
    engine: EngineSizes | None = None  # None: engines are not planned

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def preparation(self) -> Preparation[R, P]:
        return self.workers or InDriver(self.processor)

    @property
    def skipped(self) -> list[Skipped]:
        supervised = self.supervised.report.skipped if self.supervised else ()
        early = [*(skipped for report in self.splits.values() for skipped in report.skipped), *supervised]
        return [*early, *self.late_skips.values()]

    @property
    def identity(self) -> dict[str, Any]:
        supervised = [self.supervised.report.fingerprint] if self.supervised else []
        return identity_with_data(self.config, "; ".join([self.splits[TRAIN].fingerprint, *supervised]))

    def note_skipped(self, skipped: Skipped) -> None:
        """Records a sample skipped after the checks; several sources may report the same sample."""
        self.late_skips[skipped.sample] = skipped

    def usable(self, split: str) -> Split[R]:
        return Split(split, self.splits[split].rows, ())

    def source(self, is_open: Callable[[R], bool] | None = None) -> PromptSource[R, P]:
        """Returns an endless source of training rows; skips rows for which `is_open` returns False."""
        return PromptSource(
            self.splits[TRAIN].rows,
            self.preparation,
            seed=self.config.seed,
            split_name=TRAIN,
            on_skipped=self.note_skipped,
            is_open=is_open,
        )

    def fixed_prompts(self, split: str, num_prompts: int) -> PromptSet[P]:
        """Returns the first usable prompts of a split. Raises: DatasetError: no row is usable."""
        return fixed_prompts(self.usable(split), self.preparation, num_prompts)


@dataclass(frozen=True)
class Prepared(PreparedJob[Row, Prompt]):
    processor: ChatProcessor | FlowProcessor | DrawingProcessor


PreparedRows = PreparedJob[Conversation, ScoredGroup] | PreparedJob[ImagePair, ScoredGroup]
"""The parts of an offline job."""

AnyPrepared = Prepared | PreparedRows


def prepare(config: RunConfig, put: Callable[[Any], Any]) -> AnyPrepared:
    """Writes missing files, checks model and data, and loads the processor; `put` stores an image's tensors."""
    with refusing((ValueError, OSError)):  # errors of the user's configuration, model or data
        return _prepare(config, put)


def _prepare(config: RunConfig, put: Callable[[Any], Any]) -> AnyPrepared:
    served = config.sampler.adapters
    if served.are_on:
        raise PreflightError(
            f"sampler.adapters.max_served={served.max_served} freezes the weights of the engines for `mobula "
            "serve-training`, and a run pushes new ones: leave it out"
        )
    check_user_code(config)
    media = MediaStore(put, config.data.media_cache_bytes)
    loaded = load_checked(config, media)
    refuse(find_mismatches(config, loaded))
    folders = {key: checkpoint_folder(key, name) for key, name in named_teachers(config).items()}
    for key, folder in folders.items():
        check_teacher(config, folder, key)
    labels = config.algorithm.distillation.teachers if folders else ()
    teacher_folder, teachers = folders.get(TEACHER), {label: folders[f"{TEACHER}s.{label}"] for label in labels}
    ensure_data(config)
    config = with_decisions(config)
    processor, basis = loaded.processor, (config, engine_base(config, loaded.folder), loaded.checkpoint)
    splits = checked_splits(config, processor)
    refuse(find_in_rows(config, {name: report.notes for name, report in splits.items()}))
    if isinstance(processor, ConversationProcessor):
        return PreparedJob(*basis, processor, media, splits)
    if not isinstance(processor, ChatProcessor | DrawingProcessor):
        from mobula.actors.processors.flow import ImagePairProcessor  # which imports diffusers

        if isinstance(processor, ImagePairProcessor):
            return PreparedJob(*basis, processor, media, splits)
    return Prepared(
        *basis,
        processor,
        media,
        splits,
        teacher_folder=teacher_folder,
        teachers=teachers,
        supervised=_supervised(config, media) if config.algorithm.supervised.is_on else None,
    )


def checked_splits(config: RunConfig, processor: Any) -> dict[str, PreflightReport[Any]]:
    """Checks the rows of each split of the run with the processor of `load_checked`."""
    reader: Callable[[str], Split[Any]]
    names, difficulty = [TRAIN, config.evaluation.split], dict[str, Difficulty[Any]]()
    if config.offline.is_on and config.sampler.is_flow:
        reader = partial(read_image_pairs, config.data.path, ignored=config.data.ignored_fields)
    elif config.offline.is_on:
        reader = partial(read_conversations, config.data.path, form=config.offline.rows, **_texts_of_rows(config))
    else:
        names, late = _splits(config.evaluation), workers_download(config)
        change = row_player(config.environment, processor) if config.plays_rows else None
        reader = partial(open_split, config.data, label_key=config.rewards.label_key, fetches_late=late, change=change)
        if config.data.kind is DataKind.ENVIRONMENT:
            reader = partial(environment_split, config.environment, takes_images=processor.takes_images)
        curriculum = curriculum_of(config.data)
        difficulty = {TRAIN: curriculum.difficulty} if curriculum else {}
    is_made = config.data.kind is DataKind.ENVIRONMENT
    splits = Splits(reader, 0.0 if is_made else config.data.validation_fraction)
    seen = Seen()
    return {
        name: _checked(splits(name), processor, config, partial(seen.notes, config, name), difficulty.get(name))
        for name in names
    }


def load_checked(config: RunConfig, media: MediaKeeper) -> LoadedModel:
    """Loads the parts of `policy.model` that checks read, and checks its files against the configuration."""
    model_folder = ensure_model(config)
    stored, dtype = None, config.resources.dtype
    if config.sampler.is_flow:
        checkpoint = checkpoint_manifest(model_folder, dtype)
        flow_checkpoint(config).latent_shape(Denoising.of(config.sampler.flow))
        _check_trained(checkpoint, config.policy, {})
    else:
        family_at(config.policy.model)  # names an unsupported model type in its error
        stored = stored_model(model_folder, score_class(model_folder) if config.offline.job == "reward_model" else None)
        checkpoint = stored.in_dtype(dtype)
        dtypes = family_at(config.policy.model).engine_dtypes_on_cpu
        resources, is_vllm = config.resources, config.sampler.kind is SamplerKind.VLLM
        if resources.device == "cpu" and is_vllm and resources.dtype not in dtypes:
            raise PreflightError(
                f"policy.model={config.policy.model} is of the model type {model_type_at(config.policy.model)}, which "
                f"vLLM on CPU computes in {' and '.join(dtypes)} alone, and resources.dtype is {resources.dtype}: set "
                f"resources.dtype={dtypes[0]}, or sampler=huggingface"
            )
        _check_window(config)
        _check_answers(config)
        _check_trained(checkpoint, config.policy, family_at(config.policy.model).parts)
        _check_positions(config)
    return LoadedModel(model_folder, checkpoint, make_processor(config, media), stored)


def prepare_base(config: RunConfig, put: Callable[[Any], Any], *, keep_files: bool = False) -> Prepared:
    """Returns the checked language model with its processor, without data; `keep_files` as in `ChatProcessor.of`."""
    folder, media = ensure_model(config), MediaStore(put, config.data.media_cache_bytes)
    chat, stored = ChatProcessor.of(config, media, keep_files=keep_files), stored_model(folder)
    checkpoint = stored.in_dtype(config.resources.dtype)
    refuse(find_mismatches(config, LoadedModel(folder, checkpoint, chat, stored)))
    return Prepared(config, engine_base(config, folder), checkpoint, chat, media, {})


def engine_base(config: RunConfig, folder: Path) -> Path:
    """Returns the checkpoint that engines load: that of `policy.model`, or with `policy.quantisation` its dequantised
    weights, which are written once for all runs of `folder`."""
    policy = config.policy
    if policy.quantisation == "none":
        return folder
    depends_on = [weights_digest(folder), policy.quantisation, *policy.quantisation_modules, config.resources.dtype]
    digest = hashlib.sha256(" ".join(depends_on).encode()).hexdigest()
    base = config.folder / BASES_FOLDER / digest[:16]
    if not base.is_dir():
        _logger.info("policy.quantisation=%s: writing the weights of engines to %s", policy.quantisation, base)
    return install_folder(base, base.is_dir, lambda built: write_dequantised(config, built))


def weights_digest(folder: Path) -> str:
    """A digest of all bytes of a checkpoint's weights: a sample would miss the few layers that a partly frozen
    training has changed."""
    return hashlib.sha256("".join(map(file_sha256, checkpoint_files(folder))).encode()).hexdigest()


def workers_download(config: RunConfig) -> bool:
    """Whether processor workers download media. This process downloads them if a curriculum needs the lengths of all
    prompts before the start."""
    curriculum = curriculum_of(config.data)
    needs_lengths = curriculum is not None and curriculum.key == PROMPT_TOKENS
    return config.resources.processor.num_workers > 0 and not needs_lengths


def _supervised(config: RunConfig, media: MediaStore) -> SupervisedSource:
    """Returns the checked rows of `algorithm.supervised`; their media share the media store of the prompts."""
    supervised = config.algorithm.supervised
    device = config.resources.device
    chat = ChatProcessor(config.policy.model, config.data, config.sampler, media, keep_files=False, device=device)
    processor = ConversationProcessor(
        chat, system_prompt=config.data.system_prompt, max_tokens=supervised.max_tokens, has_tail=False
    )
    texts = _texts_of_rows(config)
    split = read_conversations(Path(supervised.path), TRAIN, "conversation", key=SUPERVISED_PATH, **texts)
    return SupervisedSource(_checked(split, processor, config, partial(row_notes, config)), processor)


def _texts_of_rows(config: RunConfig) -> dict[str, Any]:
    return {
        "placeholders": config.data.placeholders.model_dump(),
        "numbers_ids": config.data.repeated_ids == "number",
        "ignored": config.data.ignored_fields,
    }


def _splits(evaluation: EvaluationConfig) -> list[str]:
    used = (TRAIN, VALIDATION, evaluation.split, *(suite.split for suite in evaluation.suites.values()))
    return list(dict.fromkeys(used))


def _check_window(config: RunConfig) -> None:
    """Checks that vLLM and transformers use the same attention window, or that all sequences fit into it."""
    samples = config.sampler.kind is SamplerKind.VLLM and config.offline.job == "none"
    window = unequal_window(config.policy.model) if samples else None
    if window is not None and config.sampler.max_model_len > window:
        raise PreflightError(
            f"policy.model={config.policy.model} has sliding_window={window} in its config.json, which vLLM applies to "
            f"other layers than transformers does, and sampler.max_model_len={config.sampler.max_model_len} is longer: "
            f"set sampler.max_model_len={window} or less, or sampler=huggingface"
        )


def _check_answers(config: RunConfig) -> None:
    needed, kind = family_at(config.policy.model).image_sampler, config.sampler.kind
    if needed and kind != needed:
        raise PreflightError(
            f"policy.model={config.policy.model} answers with image tokens, which sampler.kind={kind} "
            f"cannot sample: set sampler={needed}"
        )
    if config.sampler.draws_tokens and not needed:
        raise PreflightError(
            f"policy.model={config.policy.model} draws no images, as sampler.kind={kind} asks: name a "
            f"checkpoint of type {', '.join(DRAWING_TYPES)}, or set sampler=vllm"
        )


def _check_trained(checkpoint: Manifest, policy: PolicyConfig, parts: Mapping[str, tuple[str, ...]]) -> None:
    names = [spec.name for spec in checkpoint.tensors]
    refuse_unknown_prefixes(policy.freeze, parts, names)
    if policy.lora.is_on:
        adapted_modules(checkpoint, policy)
    elif all(name.startswith(frozen_prefixes(policy)) for name in names):
        raise PreflightError(
            f"policy.freeze={list(policy.freeze)} freezes every parameter of policy.model={policy.model}, so nothing "
            "would be trained: take a prefix out of it"
        )


def _check_positions(config: RunConfig) -> None:
    most, supervised, offline = max_positions(config.policy.model), config.algorithm.supervised, config.offline
    lengths = {
        "algorithm.supervised.max_tokens": supervised.max_tokens if supervised.is_on else 0,
        "offline.max_tokens": offline.max_tokens if offline.is_on else 0,
        "sampler.max_model_len": 0 if offline.is_on else config.sampler.max_model_len,
    }
    for key, length in lengths.items():
        if most is not None and length > most:
            others = ", and data.max_prompt_tokens and sampler.max_tokens to fit" if key.startswith("sampler") else ""
            raise PreflightError(
                f"{key}={length} is more than the {most} positions of policy.model={config.policy.model}: set "
                f"{key}={most} or less{others}"
            )


def ensure_model(config: RunConfig) -> Path:
    """Returns the folder of `policy.model`, of a flow model that of its transformer. Writes a missing model
    `policy.tiny`; looks up a hub name."""
    policy, folder, is_flow = config.policy, Path(config.policy.model), config.sampler.is_flow
    if policy.tiny != "none" and not (folder / (INDEX if is_flow else "config.json")).is_file():
        writers = model_writers(is_tied=policy.tiny_tied_embeddings)
        write = writers.get(policy.tiny) if (policy.tiny in TINY_FLOW) == is_flow else None
        if write is None and is_flow:
            raise PreflightError(f"policy.tiny={policy.tiny} is no flow model: choose {', '.join(TINY_FLOW)} or none")
        if write is None:
            known = ", ".join((*TINY, *PRETRAINED))
            raise PreflightError(f"policy.tiny={policy.tiny} is unknown: choose {known} or none")
        kind = "the released weights of" if policy.tiny in PRETRAINED else "a random-weight"
        _logger.info("writing %s %s to %s", kind, policy.tiny, folder)
        with _writing("policy.model", folder):
            write(folder)
    if is_flow:
        return flow_checkpoint(config).weights_folder
    return checkpoint_folder("policy.model", policy.model)


TINY_DRAWN = {**dict.fromkeys(TINY_FLOW, "flow"), TINY_JANUS: "image_tokens", TINY_PATCHES: "image_patches"}
"""Tiny model that makes images -> its `sampler`."""


def model_writers(*, is_tied: bool) -> dict[str, Callable[..., Path]]:
    """Returns name -> function that writes a small model to a folder: with random weights, or released ones."""
    tiny = {name: partial(write_tiny, name, tie_word_embeddings=is_tied) for name in TINY}
    flow = {name: partial(write_tiny_flow, name) for name in TINY_FLOW}
    released = {name: model.write for name, model in PRETRAINED.items()}
    return {**flow, TINY_JANUS: write_tiny_janus, TINY_PATCHES: write_tiny_patches, **released, **tiny}


def checkpoint_folder(key: str, name: str) -> Path:
    """Returns the folder of the checkpoint `name`, the value of `key`: a local folder, or a hub name to download."""
    folder = Path(name)
    if (folder / "config.json").is_file():
        _refuse_broken_config(key, folder)
    if folder.exists():
        refuse(find_unusable(key, folder))
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise PreflightError(f"{key}={folder} is no checkpoint folder (it has no config.json): name one that is")
    if not may_be_hub_name(name):
        raise PreflightError(
            f"{key}={name}: no such folder{near(folder)}, and it is no hub name, which looks like {HUB_EXAMPLE}: "
            f"{_name_another(key)}"
        )
    try:
        folder = Path(snapshot_download(name))
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"{key}={name}: no such folder{near(folder)}, and no hub name that can be had, as {HUB_EXAMPLE} is one "
            f"({reason}): {_name_another(key)}"
        ) from error
    refuse(find_unusable(key, folder))
    return folder


def _name_another(key: str) -> str:
    return f"set {key} to a folder in the Hugging Face layout, or to a hub name that can be reached"


def _refuse_broken_config(key: str, folder: Path) -> None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        reason = "" if isinstance(settings, dict) and "model_type" in settings else "it names no model_type"
    except (ValueError, OSError) as error:
        reason = str(error)
    if reason:
        raise PreflightError(
            f"{key}={folder} has a config.json that cannot be used ({reason}): download it again, "
            f"or {_name_another(key)}"
        )


def require_model(config: RunConfig) -> None:
    """Refuses random weights, in commands that evaluate `policy.model`; missing released weights are written."""
    folder, file = Path(config.policy.model), INDEX if config.sampler.is_flow else "config.json"
    if config.policy.tiny not in ("none", *PRETRAINED) and not (folder / file).is_file():
        raise PreflightError(
            f"policy.model={folder} is no checkpoint folder (it has no {file}): name one that is, set policy=hf "
            "for a model of the hub, or make one with `mobula train` or `mobula init-model`"
        )


def ensure_data(config: RunConfig) -> None:
    with _writing("data.path", config.data.path):
        data_writer(config.data)(config.data.path)


@contextmanager
def _writing(key: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PreflightError(
            f"{key}={folder} is not there and cannot be written ({error}): name a folder that can, or free the disk"
        ) from error


def write_skipped(folder: Path, skipped: list[Skipped]) -> None:
    rows = [{"sample_id": s.sample, "reason": s.reason, "message": s.detail} for s in skipped]
    (folder / SKIPPED_FILE).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def _checked(
    split: Split[R],
    processor: RowChecker[R],
    config: RunConfig,
    note: Callable[[R], Iterable[str]],
    difficulty: Difficulty[R] | None = None,
) -> PreflightReport[R]:
    report = preflight(
        split,
        processor,
        max_skipped_fraction=config.data.max_skipped_fraction,
        max_checked_rows=config.data.max_checked_rows,
        difficulty=difficulty,
        note=note,
    )
    if report.skipped:
        _logger.warning("%s: %d samples are skipped: %s", split.name, len(report.skipped), report.num_skipped)
    return report
