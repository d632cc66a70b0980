"""Checks that a teacher fits the policy: vocabulary, images, length."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import family_at, max_positions, model_type_at, takes_images

TEACHER = "algorithm.distillation.teacher"
# Settings that change pixel values. Size limits may differ: the policy's limits apply.
IMAGE_SETTINGS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)


def named_teachers(config: RunConfig) -> dict[str, str]:
    """Returns the configuration key of each teacher -> its checkpoint; empty without distillation."""
    distillation = config.algorithm.distillation
    if not distillation.is_on:
        return {}
    return {TEACHER: distillation.teacher, **{f"{TEACHER}s.{n}": t for n, t in distillation.teachers.items()}}


def check_teacher(config: RunConfig, teacher: Path, key: str) -> None:
    """Checks that the teacher in a folder reads the token ids and images of `policy.model`; `key` names the teacher."""
    policy = config.policy.model
    _check_vocabulary(policy, teacher, key)
    sees = takes_images(str(teacher), key)
    if takes_images(policy):
        if not sees:
            raise PreflightError(f"{key}={teacher} takes no images and policy.model={policy} does: {_another(key)}")
        _check_images(policy, teacher, key)
    most, wanted = max_positions(str(teacher)), config.sampler.max_model_len
    if most is not None and wanted > most:
        raise PreflightError(
            f"sampler.max_model_len={wanted} is more than the {most} positions of {key}={teacher}: set "
            f"sampler.max_model_len={most} or less, or name a teacher for longer sequences"
        )


def _check_vocabulary(policy: str, teacher: Path, key: str) -> None:
    """Compares token ids. Merges may differ: a teacher reads ids, not text."""
    ours, theirs = (
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab() for source in (policy, teacher)
    )
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise PreflightError(
            f"{key}={teacher} has another vocabulary than policy.model={policy}: {len(differing)} tokens differ, "
            f"e.g. {token!r} is {_shown(ours.get(token))} in the policy and {_shown(theirs.get(token))} in the "
            f"teacher; {_another(key)}"
        )
    widths = [
        AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config().vocab_size
        for source in (policy, teacher)
    ]
    if widths[1] < widths[0]:
        raise PreflightError(
            f"{key}={teacher} computes {widths[1]} logits and policy.model={policy} {widths[0]}, so the policy "
            f"could sample ids that the teacher does not have: {_another(key)} with at least as many"
        )


def _check_images(policy: str, teacher: Path, key: str) -> None:
    if family_at(policy) is not family_at(str(teacher), key):
        kinds = [model_type_at(str(source)) for source in (teacher, policy)]
        raise PreflightError(f"{key}={teacher} is a {kinds[0]} and policy.model={policy} a {kinds[1]}: {_another(key)}")
    both = [
        AutoImageProcessor.from_pretrained(source, trust_remote_code=False).to_dict() for source in (policy, teacher)
    ]
    # As JSON: some image processors keep a list where others keep a tuple.
    ours, theirs = ({name: json.dumps(settings.get(name)) for name in IMAGE_SETTINGS} for settings in both)
    differing = [name for name in IMAGE_SETTINGS if ours[name] != theirs[name]]
    if differing:
        name = differing[0]
        raise PreflightError(
            f"{key}={teacher} takes images with {name}={theirs[name]} and policy.model={policy} with "
            f"{ours[name]}: {_another(key)}"
        )


def _shown(token_id: int | None) -> str:
    return "absent" if token_id is None else f"id {token_id}"


def _another(key: str) -> str:
    return f"set {key} to a checkpoint of the family of policy.model"
