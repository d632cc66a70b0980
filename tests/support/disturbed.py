"""A learner whose vision tower computes something else than the engine's."""

from __future__ import annotations

from mobula.learner.learner import Learner

FACTOR = 1.5  # on the features of every image


class DisturbedLearner(Learner):
    def connect(self, init_method: str) -> None:
        super().connect(init_method)
        for name, module in self.policy.named_modules():
            if name.endswith("vision_tower"):
                module.register_forward_hook(_scale)


def _scale(module: object, args: object, output: object) -> None:
    output.last_hidden_state = output.last_hidden_state * FACTOR
    output.hidden_states = output.hidden_states and tuple(state * FACTOR for state in output.hidden_states)
