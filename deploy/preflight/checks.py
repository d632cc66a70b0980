"""The checks of a checkpoint against a configuration, before a role starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.deploy.preflight.templates import (
    check_answers,
    check_images,
    check_question,
    check_system_prompt,
    check_template_kwargs,
    check_turns,
)
from mobula.deploy.preflight.weights import check_weights
from mobula.learner.policies.attention.packed import missing_package
from mobula.learner.policies.families import family_at, model_type_at

KEY = "policy.model"
NUM_SHOWN = 4


def check_vocabulary(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that every token has an embedding. More embeddings than tokens are padding."""
    if loaded.chat is None:
        return
    size, beyond = loaded.chat.num_embeddings, loaded.chat.tokens_beyond_embeddings()
    if beyond:
        num_tokens = max(beyond.values()) + 1
        shown = ", ".join(list(beyond)[:NUM_SHOWN]) + (", ..." if len(beyond) > NUM_SHOWN else "")
        yield PreflightFinding(
            KEY,
            f"{KEY}={config.policy.model} has a tokenizer of {num_tokens} tokens and embeddings of {size}, none for "
            f"{shown}",
            f"resize the embeddings (model.resize_token_embeddings({num_tokens})) and save the checkpoint again, or "
            "save it with the tokenizer that it was trained with",
        )


def check_special_ids(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that stop, padding and media placeholder ids have embeddings."""
    if loaded.chat is None:
        return
    size = loaded.chat.num_embeddings
    for name, ids in loaded.chat.special_ids().items():
        beyond = [i for i in ids if not 0 <= i < size]
        if beyond:
            yield PreflightFinding(
                KEY,
                f"{KEY}={config.policy.model} names {beyond[0]} as {name} and has embeddings of {size}",
                f"correct {name} in its generation_config.json, config.json or tokenizer files",
            )


def check_attention(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the kernels of `policy.attention` are installed."""
    attention = config.policy.attention
    if package := missing_package(attention):
        yield PreflightFinding(
            "policy.attention",
            f"policy.attention={attention} needs the package {package}, which is not installed",
            "install it, or set policy.attention=sdpa, which computes packed rows with torch's own kernel",
        )


def check_packing(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the model separates packed rows, and that ranks can share the tokens of rows."""
    values = {
        "learner.packing": (config.learner.packing is True, False),  # `auto` computes padded rows
        "learner.sequence_parallel": (config.learner.sequence_parallel, 1),
    }
    if not loaded.chat or family_at(str(loaded.folder)).keeps_packed_rows_apart:
        return
    for key, (value, off) in values.items():
        if value != off:
            yield PreflightFinding(
                key,
                f"{key}={str(value).lower()}, and layers of a {model_type_at(str(loaded.folder))} (policy.model="
                f"{config.policy.model}) carry a state from token to token",
                f"set {key}={str(off).lower()}",
            )


Check = Callable[[RunConfig, LoadedModel], Iterable[PreflightFinding]]

CHECKS: tuple[Check, ...] = (
    check_attention,
    check_packing,
    check_weights,
    check_vocabulary,
    check_special_ids,
    check_template_kwargs,
    check_question,
    check_system_prompt,
    check_answers,
    check_turns,
    check_images,
)
"""In the order in which findings are shown. Each takes a second at most: it reads files and encodes short texts."""


def find_mismatches(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Runs every check."""
    for check in CHECKS:
        yield from check(config, loaded)
