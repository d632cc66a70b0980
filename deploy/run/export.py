"""`mobula export`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.cluster.recovery.checkpoints import learner_state_of, newest_learner_state
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER, file_access
from mobula.deploy.host.terminal import terminal
from mobula.deploy.run.run_client import named_folder
from mobula.learner.policy_weights import Merge, export_state

EXPORT_FOLDER, POLICY_FOLDER = "export", "policy"  # of the run folder


@dataclass(frozen=True)
class ExportedPolicy:
    path: Path
    run_folder: Path
    step: int
    layout: str
    merge_error: tuple[float, float] | None = None  # `Merge.error`


def export(
    run: str | Path | None, step: int | None, *, merge: bool, ema: bool, dtype: str | None, output: Path | None
) -> int:
    """`mobula export`: prints what `export_policy` wrote; returns the exit code."""
    written = export_policy(run, step, merge=merge, ema=ema, dtype=dtype, output=output)
    text = f"step {written.step} of {written.run_folder}: {written.path}, {written.layout}"
    if written.merge_error is not None:
        error, change = written.merge_error
        text += (
            f"\nthe adapters are merged into the original base and were trained on the quantised one: relative to "
            f"the trained weights, quantisation changed {error:.1%} and the adapters {change:.2%}; evaluate the export"
        )
    terminal(soft_wrap=True).print(text)
    return 0


def export_policy(
    run: str | Path | None,
    step: int | None,
    *,
    merge: bool,
    ema: bool,
    dtype: str | None,
    output: Path | None,
    as_trained: bool = False,
) -> ExportedPolicy:
    """Writes the policy of a checkpoint, the newest one if `step` is None. The run may go on.

    With `ema` its weights are their average (`learner.ema_decay`). They have the dtypes of `policy.model`, or `dtype`.
    `merge` is into the original weights of `policy.model`, with `as_trained` into those of a quantised base.
    """
    folder = named_folder(run)
    config = load_resolved(folder / CONFIG_FILE)
    _check(config, folder, merge=merge, ema=ema, dtype=dtype)
    version, state = _state(folder / CHECKPOINTS_FOLDER, step)
    is_adapter = config.policy.lora.is_on and not merge
    target = (
        output
        or folder / EXPORT_FOLDER / f"step-{version:06d}{'-ema' if ema else ''}{'-adapter' if is_adapter else ''}"
    )
    if target.exists():
        raise PreflightError(f"{target} exists: give another folder with --output, or remove it first")
    with file_access(config):
        merged = _write(config, state, target, merge=merge, ema=ema, dtype=dtype or "", as_trained=as_trained)
    layout = "a checkpoint in the Hugging Face layout"
    if is_adapter:
        kind = "LoRA for diffusers" if config.sampler.is_flow else "PEFT adapter"
        layout = f"a {kind} of {config.policy.model}"
    return ExportedPolicy(target, folder, version, layout, None if as_trained else merged.error)


def trained_config(run: str | Path | None, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of a run with the policy that it trained, and `overrides` of single keys.

    The policy is `policy/` of the run folder; of a run that has not ended that of its newest checkpoint, which is
    exported.
    """
    folder = named_folder(run)
    policy = folder / POLICY_FOLDER
    if not policy.is_dir():
        version, _ = _state(folder / CHECKPOINTS_FOLDER, None)
        policy = folder / EXPORT_FOLDER / f"step-{version:06d}"
        if not policy.is_dir():
            is_merged = load_resolved(folder / CONFIG_FILE).policy.lora.is_on
            export_policy(folder, version, merge=is_merged, ema=False, dtype=None, output=policy, as_trained=True)
    named = {text.partition("=")[0] for text in overrides}
    own = [] if "policy.model" in named else [f"policy.model={policy.resolve()}"]
    return load_resolved(folder / CONFIG_FILE, [*own, *overrides])


def _check(config: RunConfig, folder: Path, *, merge: bool, ema: bool, dtype: str | None) -> None:
    if dtype and config.policy.lora.is_on and not merge:
        raise PreflightError(
            f"{folder} has adapters, which are written in float32: leave out --dtype={dtype}, or add --merge to write "
            "the whole policy"
        )
    if config.offline.job == "reward_model" and config.policy.lora.is_on and not merge:
        raise PreflightError(
            f"{folder} is a reward model, whose score head is in no adapter: add --merge to write the whole model"
        )
    if merge and not config.policy.lora.is_on:
        raise PreflightError(f"{folder} has no adapters to merge (policy.lora.rank=0): leave out --merge")
    if ema and config.learner.ema_decay == 0:
        raise PreflightError(
            f"{folder} kept no average of its weights (learner.ema_decay=0): leave out --ema, or train with "
            "learner.ema_decay=0.999"
        )


def _state(checkpoints: Path, step: int | None) -> tuple[int, Path]:
    if step is not None:
        return step, learner_state_of(checkpoints, step)
    newest = newest_learner_state(checkpoints)
    if newest is None:
        raise PreflightError(
            f"{checkpoints} holds no complete checkpoint: wait for the first one, after the warm start"
        )
    return newest


def _write(
    config: RunConfig, state: Path, target: Path, *, merge: bool, ema: bool, dtype: str, as_trained: bool
) -> Merge:
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        merged = export_state(config, state, draft, merge=merge, average=ema, dtype=dtype, as_trained=as_trained)
        os.rename(draft, target)
        return merged
    except OSError as error:
        raise PreflightError(
            f"{target} could not be written from {state} and policy.model={config.policy.model} ({error}): see that "
            "both can be read from here (a run that goes on removes old checkpoints) and that the disk has room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
