"""The preflight of `policy.model` and of the rows as findings of the doctor, where they are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mobula.cluster.errors import DatasetError, PreflightError
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import CurriculumConfig
from mobula.deploy.preflight.findings import PreflightFinding
from mobula.deploy.tools.doctor.this_machine import Finding, Verdict

NAME = "Checkpoint"
NUM_CHECKED_ROWS = 1000


def check_checkpoint(config: RunConfig) -> Iterator[Finding]:
    """Runs the preflight, if the checkpoint is here; nothing is downloaded or written."""
    model = config.policy.model
    try:
        if is_here(config):
            yield from _preflight(config)
        else:
            yield Finding(NAME, Verdict.OK, f"policy.model={model} is not here yet, a run checks it at its start")
    except ImportError as error:
        yield Finding(NAME, Verdict.WARNING, f"not checked: {error}", "see the packages above")
    except (PreflightError, ValueError, OSError) as error:  # the user's mistakes, by whichever part finds them
        yield Finding(NAME, Verdict.MISSING, f"policy.model={model} cannot be used", str(error))


def check_rows(config: RunConfig) -> Iterator[Finding]:
    """Checks the first rows of each split as a run does, if they and the checkpoint are here; writes nothing."""
    from mobula.actors.processors.make import make_processor
    from mobula.cluster.records.media import MediaStore
    from mobula.deploy.preflight.rows import ROWS, find_in_rows
    from mobula.deploy.wiring.preparation import checked_splits

    if not (config.data.path.is_dir() and is_here(config)):
        yield Finding("Rows", Verdict.OK, f"data.path={config.data.path} or the model is not here yet: not checked")
        return
    limits = {"max_checked_rows": NUM_CHECKED_ROWS, "curriculum": CurriculumConfig()}
    config = config.model_copy(update={"data": config.data.model_copy(update=limits)})
    try:
        processor = make_processor(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
        notes = {name: report.notes for name, report in checked_splits(config, processor).items()}
    except (DatasetError, ValueError, OSError) as error:
        yield Finding("Rows", Verdict.MISSING, f"data.path={config.data.path} cannot be used", str(error))
        return
    yield Finding("Rows", Verdict.OK, ", ".join(f"{name}: {counts[ROWS]:,} usable" for name, counts in notes.items()))
    yield from (_found("Rows", finding) for finding in find_in_rows(config, notes))


def _preflight(config: RunConfig) -> Iterator[Finding]:
    # Imported late: the doctor reports missing packages, which these modules need.
    from mobula.cluster.records.media import MediaStore
    from mobula.deploy.preflight.checks import find_mismatches
    from mobula.deploy.wiring.preparation import load_checked

    loaded = load_checked(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
    findings = list(find_mismatches(config, loaded))
    if not findings:
        yield Finding(NAME, Verdict.OK, f"policy.model={config.policy.model}: tokenizer, chat template and weights fit")
    yield from (_found(NAME, finding) for finding in findings)


def _found(name: str, finding: PreflightFinding) -> Finding:
    verdicts = {"refuse": Verdict.MISSING, "warn": Verdict.WARNING, "note": Verdict.OK}
    return Finding(name, verdicts[finding.severity], finding.problem, finding.action)


def is_here(config: RunConfig) -> bool:
    """Whether the files are in a local folder or in the cache of the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(config.policy.model)
    if any((folder / index).is_file() for index in ("config.json", "model_index.json")):
        return True
    if not config.policy.model or config.policy.tiny != "none" or folder.exists():
        return False
    try:
        snapshot_download(config.policy.model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    return True
