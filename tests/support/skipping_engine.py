"""A rollout actor whose vLLM engine can be made to leave out a tensor of every push."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mobula.actors.rollout.actor import RolloutActor


class SkippingActor(RolloutActor):
    """Loads everything until it is asked to skip a tensor."""

    async def head_dtype(self) -> str:
        """The type of the engine's logits."""
        return str(self._sampler._engine.model_config.head_dtype)

    async def checksums(self) -> list[dict[str, str]]:
        """vLLM's own of the parameters of each rank, by their names."""
        return await self._sampler._engine.compute_weight_checksums()

    async def skip(self, name: str) -> None:
        """From now on leave the tensor of this checkpoint name out; none with an empty name."""
        model = self._sampler._engine.engine_core.transfer_engine.model
        model.__dict__.pop("load_weights", None)
        load = model.load_weights

        def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return load((found, tensor) for found, tensor in tensors if found != name)

        model.load_weights = load_weights
