"""`mobula audit`: the verdict and its view."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mobula.cluster.audit.chain import AUDIT_FILE, AuditFinding, read_chain, signing_key
from mobula.cluster.audit.history import (
    Comparison,
    Descent,
    History,
    Part,
    SavedCheckpoint,
    account_of,
    compare,
    named,
    replayed,
    staleness_of,
)
from mobula.cluster.audit.verification import Audit, verify
from mobula.cluster.errors import CheckpointError, PreflightError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.cluster.recovery.checkpoints import learner_state_of
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.run.run_client import named_folder

MAX_FINDINGS = 50  # that are shown; --json has all
SHORT = 12  # characters of a digest


def audit(
    name: str | None,
    folder: Path | None,
    console: Console,
    *,
    head: str = "",
    key_env: str = "",
    has_weights: bool = False,
    is_json: bool = False,
) -> int:
    """Audits the run in `folder`, or `name` below `runs`, or the latest one; returns the exit code.

    `head` is a digest that must be in the chain, `key_env` the environment variable with the key; with `has_weights`
    checkpoints are compared with pushes.
    """
    run_folder = named_folder(folder or name, AUDIT_FILE, CONFIG_FILE)
    with signing_key(key_env, "--key-env") as key:
        result = verify(run_folder, head, key)
    weights = compared_weights(result.history, run_folder) if has_weights else {}
    wrong = [
        AuditFinding(f"{CHECKPOINTS_FOLDER}, version {version}", text) for version, text in weights.items() if text
    ]
    result = replace(result, findings=[*result.findings, *wrong])
    if is_json:
        found = {**as_json(result), "weights_compared": sorted(weights)}
        console.print(json.dumps(found, indent=1))
    else:
        for label, text in (*_lines(result), *_comparison_lines(result.history)):
            console.print(Text.assemble((f"{label:<12}", "bold"), text))
        _show_findings(result, console)
        for line in _limits(result, weights):
            console.print(line)
    return 1 if result.findings else 0


def compared_weights(history: History, folder: Path) -> dict[int, str]:
    """Compares each checkpoint with the checksum of the push of its version: version -> difference, or empty text."""
    from mobula.learner.policy_weights import saved_checksum

    config = load_resolved(folder / CONFIG_FILE)
    refuse_other_weights(config, folder)
    pushed = {record.body["version"]: record for record in history.pushes if record.body.get("weights")}
    compared = {}
    for version in sorted(history.checkpoints.keys() & pushed.keys() - history.rollbacks.keys()):
        record = pushed[version]
        try:
            checksum = saved_checksum(config, learner_state_of(folder / CHECKPOINTS_FOLDER, version))
        except (PreflightError, CheckpointError):
            continue  # not there any more, or named by another finding
        is_equal = checksum == record.body["weights"]
        compared[version] = "" if is_equal else f"it has other weights than {record.name} had pushed"
    return compared


def refuse_other_weights(config: RunConfig, folder: Path) -> None:
    """Raises: PreflightError: pushes have other tensors than checkpoints."""
    is_merged_elsewhere = config.policy.lora.is_on and config.weight_sync.payload != "adapters"
    for is_so, reason in (
        (config.learner.backend == "deepspeed", "DeepSpeed checkpoints are read by DeepSpeed, which can run code"),
        (config.algorithm.slow_copy is not None, "engines sample with a slow copy of the weights"),
        (
            is_merged_elsewhere and config.resources.device != "cpu",
            "adapters were merged on a GPU, which rounds otherwise",
        ),
    ):
        if is_so:
            raise PreflightError(f"{folder}: --weights cannot compare its checkpoints, because {reason}: leave it out")


def as_json(result: Audit) -> dict[str, Any]:
    history, staleness, found = result.history, staleness_of(result.history), reproduced(result.history)
    return {
        "is_closed": result.is_closed,
        "is_signed": result.is_signed,
        "uncovered": list(result.uncovered),
        "findings": [{"file": finding.file, "message": finding.message} for finding in result.findings],
        "num_records": result.num_records,
        "head": result.newest.sha256,
        "has_torn_end": result.has_torn_end,
        "version": history.version,
        "tokens_by_lag": {str(lag): num for lag, num in staleness.tokens_by_lag.items()},
        "mean_lag": staleness.mean,
        "max_staleness": staleness.max_allowed,
        "num_groups": sum(len(step.groups) for step in history.steps.values()),
        "num_steps_repeated": sum(step.num_repeats for step in history.steps.values()),
        "num_steps_void": history.num_void,
        "num_steps_remade": history.num_remade,
        "groups_regenerated": dict(history.regenerated),
        "groups_rejected": dict(history.rejected),
        "prompts": asdict(account_of(history)),
        "num_pushes": len(history.pushes),
        "receipts": {engine: dict(counts) for engine, counts in sorted(history.receipts.items())},
        "num_admitted": dict(history.num_admitted),
        "parts": [_part_json(part) for part in history.parts],
        "reproduces": None if found is None else {"run": str(found[0]), **(asdict(found[1]) if found[1] else {})},
        "guard": [dict(record.body) for record in (*history.guarded.values(), *history.rollbacks.values())],
        "checkpoints": {
            str(version): {
                **asdict(history.descent(version)),
                "part": saved.part + 1,
                "manifest": saved.record.body["manifest"],
            }
            for version, saved in sorted(history.checkpoints.items())
        },
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "resumed_from": part.resumed_from,
        "recovered_to": part.recovered_to,
        "status": part.status,
        "losses": [dict(loss) for loss in part.losses],
        "num_learner_restarts": part.num_restored,
        "provenance": None if part.started is None else dict(part.started.body),
    }


def _lines(result: Audit) -> Iterator[tuple[str, str]]:
    history = result.history
    torn = "; a record was half written when a process was killed" if result.has_torn_end else ""
    yield "chain", f"{result.num_records} records in {AUDIT_FILE}, newest {result.newest.sha256}{torn}"
    for number, part in enumerate(history.parts, start=1):
        yield f"part {number}", _part_text(part)
    yield from _trained_lines(history)
    weights = {record.body["weights"] for record in history.pushes if record.body.get("weights")}
    yield "pushes", f"{len(history.pushes)}, of {len(weights) or 'unknown'} different weights"
    for engine, counts in sorted(history.receipts.items()):
        joined = f", joined {history.num_admitted[engine]} times by checksum" if history.num_admitted[engine] else ""
        yield f"  {engine}", ", ".join(f"{how} {num}" for how, num in sorted(counts.items())) + joined
    for version, saved in sorted(history.checkpoints.items()):
        yield "checkpoint", _checkpoint_text(version, saved, history.descent(version))
    for version, record in sorted(history.rollbacks.items()):
        yield (
            "rollback",
            f"version {version} got the weights of version {record.body['restored']}: {record.body['text']}",
        )
    for version, record in sorted(history.guarded.items()):
        yield "guard", f"version {version}, {record.body['action']}: {record.body['text']}"


def _part_text(part: Part) -> str:
    if part.started is None:
        return "its first record cannot be read"
    start = "a new run" if part.resumed_from is None else f"resumed from the checkpoint of version {part.resumed_from}"
    if part.recovered_to is not None and part.recovered_to != part.resumed_from:
        start += f", by the journal to {part.recovered_to}"
    lost = f"; lost workers: {named([str(loss['worker']) for loss in part.losses])}" if part.losses else ""
    restored = f"; learner ranks restored {part.num_restored} times" if part.num_restored else ""
    num_torn = part.started.body["found"]["torn_bytes"]
    torn = f"; {num_torn} bytes of an unfinished record removed" if num_torn else ""
    end = part.status or "killed, or still running"
    return f"{start}; {end}; {part.label}{lost}{restored}{torn}"


def _trained_lines(history: History) -> Iterator[tuple[str, str]]:
    staleness = staleness_of(history)
    num_groups = sum(len(step.groups) for step in history.steps.values())
    rejected = ", ".join(f"{reason} {num}" for reason, num in sorted(history.rejected.items()))
    yield "trained", f"{history.version} steps of {num_groups} groups" + (f"; rejected: {rejected}" if rejected else "")
    repeated = sum(step.num_repeats for step in history.steps.values())
    if repeated or history.num_void:
        yield (
            "repeated",
            (
                f"{repeated} steps by restarted ranks, {history.num_remade} from the journal, from equal groups; "
                f"{history.num_void - history.num_remade} steps after a checkpoint were lost with their process"
            ),
        )
    if history.regenerated:
        yield "regenerated", named([f"{group} ({source})" for group, source in history.regenerated.items()])
    account = account_of(history)
    if account.num:
        lost = f"; lost: {named(list(account.lost))}" if account.lost else ""
        yield (
            "prompts",
            (
                f"{account.num} handed out: {len(account.trained)} trained, {len(account.rejected)} rejected, "
                f"{len(account.open)} open at the newest record, {len(account.lost)} lost with a part{lost}"
            ),
        )
    lags = ", ".join(
        f"{lag}: {num} tokens ({num / staleness.num_tokens:.1%})" for lag, num in staleness.tokens_by_lag.items()
    )
    allowed = "unknown" if staleness.max_allowed is None else staleness.max_allowed
    yield "staleness", f"{lags or 'no token'}; mean {staleness.mean:.3f}, max {staleness.max} of {allowed} allowed"


def _checkpoint_text(version: int, saved: SavedCheckpoint, descent: Descent) -> str:
    named = f"version {version}, {saved.record.body['manifest'][:SHORT]}, of part {saved.part + 1}"
    if version == 0:
        return f"{named}: the policy before RL"
    steps = descent.steps
    if not steps:
        return f"{named}: the weights of version {descent.base}"
    trained = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"{named}: {trained} after version {descent.base}"


def _comparison_lines(history: History) -> Iterator[tuple[str, str]]:
    found = reproduced(history)
    if found is None:
        return
    folder, compared = found
    if compared is None:
        yield "reproduces", f"{folder}, whose {AUDIT_FILE} cannot be read"
        return
    policy = {None: "no policies to compare", True: "the policies are equal bit for bit", False: "the policies differ"}
    where = f"step {compared.equal_to + 1} differs first: {compared.first_difference}"
    steps = where if compared.first_difference else f"all {compared.num_shared} steps trained equal groups"
    yield "reproduces", f"{folder}: {steps}; {policy[compared.has_equal_policy]}"


def reproduced(history: History) -> tuple[Path, Comparison | None] | None:
    """Returns the run that this one reproduces, and the comparison with it; None if it reproduces none."""
    started = history.parts[0].started
    source = started and started.body.get("reproduces")
    if not isinstance(source, dict) or "run" not in source:
        return None
    folder = Path(str(source["run"]))
    try:
        return folder, compare(history, replayed(read_chain(folder)))
    except PreflightError:
        return folder, None


def _show_findings(result: Audit, console: Console) -> None:
    for finding in result.findings[:MAX_FINDINGS]:
        console.print(Text(f"{finding}", style="red"))
    if len(result.findings) > MAX_FINDINGS:
        console.print(f"and {len(result.findings) - MAX_FINDINGS} more: --json has all", style="red")
    verdict = f"{len(result.findings)} findings" if result.findings else "nothing is missing, altered or out of order"
    console.print(verdict, style="red" if result.findings else "green")


def _limits(result: Audit, weights: Mapping[int, str]) -> Iterator[str]:
    """Yields what the audit does not prove."""
    if not result.is_closed:
        yield (
            "not closed: the run goes on, was killed, or its last records were removed; what was written after "
            f"{result.newest.name} is unproven"
        )
    if result.uncovered:
        yield f"not proven, because no record has them: {named(list(result.uncovered))} (--json has all)"
    if weights:
        yield f"weights: {len(weights)} checkpoints were compared with the checksums of their pushes"
    else:
        yield "weights: --weights compares checkpoints with the checksums of their pushes"
    if result.is_signed:
        yield (
            "author: every record was signed with this key; --head compares the chain with a digest that was noted "
            "elsewhere, for the case that an earlier state of the whole folder was put back"
        )
    else:
        yield (
            "author: not proven, because no signature was checked (audit.key_env, --key-env): who can write the folder "
            "can write a whole chain and its files; --head compares it with a digest that was noted elsewhere"
        )
