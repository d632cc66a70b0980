"""Checks of a tokenizer against the embeddings of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding
from mobula.deploy.preflight.loaded import LoadedModel

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
