"""The shape of a run's policy, before its weights are there."""

from __future__ import annotations

from mobula.cluster.errors import PreflightError
from mobula.configs.groups import MISSING
from mobula.configs.schema import RunConfig
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.shapes import ModelShape, has_config, shape_of, tiny_shape
from mobula.learner.policies.tiny import TINY


def policy_shape(config: RunConfig) -> ModelShape | None:
    """The shape of `policy.model`, of which config.json alone is read; None while no model is named, and of
    models that make images, whose memory is not planned.

    Raises:
        PreflightError: it has no config.json that can be used.
    """
    source = config.policy.model
    if source == MISSING or config.sampler.is_flow or config.sampler.draws_tokens:
        return None
    if config.policy.tiny != "none" and not has_config(source):
        if config.policy.tiny not in (known := (*TINY, *PRETRAINED)):
            raise PreflightError(f"policy.tiny={config.policy.tiny} is unknown: choose {', '.join(known)} or none")
        return tiny_shape(config.policy.tiny, tie_word_embeddings=config.policy.tiny_tied_embeddings)
    try:
        return shape_of(source)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"policy.model={source} has no config.json that memory can be planned from ({reason}): name a checkpoint "
            "folder, or a hub name that can be reached"
        ) from error
