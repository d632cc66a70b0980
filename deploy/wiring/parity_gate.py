"""ParityGate: compares engines and learner before the first step of an unmeasured model type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import CanaryError
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.recovery.restartable_learner import RestartableLearner
from mobula.cluster.weight_sync.interfaces import Receiver
from mobula.cluster.weight_sync.tolerance import Gap, MeasuredRounding, Rounding, Tolerance
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.parity_prompts import cases
from mobula.deploy.wiring.preparation import Prepared
from mobula.learner.policies.families import family_at, model_type_at

_logger = logging.getLogger(__name__)


IMAGES_FOLDER = "parity"  # in the run folder
MAX_IMAGES = 2


class ParityGate:
    """Called with the version of every completed push; compares the log-probs of a few prompts after the first push.

    Runs before the canary of that push, which has one prompt and reports a difference as a failed transfer.

    Raises:
        CanaryError: the log-probs of a prompt differ by more than the tolerance.
    """

    def __init__(
        self,
        model_type: str,
        learner: RestartableLearner,
        receivers: Callable[[], Sequence[Receiver]],
        prompts: Mapping[str, Prompt],
        tolerance: Tolerance,
    ) -> None:
        """`prompts` maps a case name to its prompt; empty disables the comparison."""
        self._model_type = model_type
        self._learner = learner
        self._receivers = receivers
        self._prompts = prompts
        self._tolerance = tolerance
        self._is_passed = not prompts

    async def __call__(self, version: int) -> None:
        if self._is_passed:
            return
        gaps = {name: await self._gaps(prompt) for name, prompt in self._prompts.items()}
        measured = ", ".join(f"{name}: {Gap.of(differences)}" for name, differences in gaps.items())
        if not all(self._tolerance.accepts(differences) for differences in gaps.values()):
            raise CanaryError(
                f"policy.model is of the model type {self._model_type}, and engine and learner "
                f"compute other log-probs ({measured}; {self._tolerance}): it "
                "cannot be trained; choose a supported type, or add a family (docs/extending.md)"
            )
        _logger.info("%s trains because engine and learner agree (%s) with these weights", self._model_type, measured)
        self._is_passed = True

    async def _gaps(self, prompt: Prompt) -> np.ndarray:
        """Returns the absolute differences of the engine with the largest gap to the learner."""
        expected = await self._learner.sequence_logprobs(prompt)
        differences = [np.abs(await receiver.prompt_logprobs(prompt) - expected) for receiver in self._receivers()]
        return max(differences, key=np.max, default=np.array([np.nan]))


def tolerance_of(config: RunConfig) -> Tolerance:
    """Returns the allowed difference of engine and learner in the precision of a run."""
    sync, dtype = config.weight_sync, config.resources.dtype
    rounding = Rounding() if dtype == "float32" else MeasuredRounding()
    return Tolerance(sync.canary_tolerance.of(dtype), sync.canary_share.of(dtype), rounding)


def parity_gate(
    prepared: Prepared, learner: RestartableLearner, receivers: Callable[[], Sequence[Receiver]], tolerance: Tolerance
) -> ParityGate:
    """Returns the gate of a run; it compares nothing for model types measured in docs/models.md."""
    config = prepared.config
    if config.sampler.is_flow:  # the canary of the first push compares flow models
        return ParityGate("flow", learner, receivers, {}, tolerance)
    model_type = model_type_at(config.policy.model)
    prompts = {}
    if family_at(config.policy.model).needs_gate:
        _logger.warning(
            "log-probs of engine and learner of a %s are compared before the first step (docs/models.md)", model_type
        )
        folder = config.run_folder / IMAGES_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        assert isinstance(prepared.processor, ChatProcessor), "a family that draws has no gate"
        compared = cases(prepared.processor, folder, min(MAX_IMAGES, config.sampler.max_images_per_prompt))
        prompts = {name: case.prompt for name, case in compared.items()}
    return ParityGate(model_type, learner, receivers, prompts, tolerance)
