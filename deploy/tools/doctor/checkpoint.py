"""The preflight of `policy.model` as findings of the doctor, where its files are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import RunConfig
from mobula.deploy.tools.doctor.this_machine import Finding, Verdict

NAME = "Checkpoint"


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


def _preflight(config: RunConfig) -> Iterator[Finding]:
    # Imported late: the doctor reports missing packages, which these modules need.
    from mobula.cluster.records.media import MediaStore
    from mobula.deploy.preflight.checks import find_mismatches
    from mobula.deploy.preflight.findings import Severity
    from mobula.deploy.wiring.preparation import load_checked

    loaded = load_checked(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
    findings = list(find_mismatches(config, loaded))
    if not findings:
        yield Finding(NAME, Verdict.OK, f"policy.model={config.policy.model}: tokenizer, chat template and weights fit")
    for finding in findings:
        verdict = Verdict.MISSING if finding.severity is Severity.REFUSE else Verdict.WARNING
        yield Finding(NAME, verdict, finding.problem, finding.action)


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
