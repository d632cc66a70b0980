"""Qwen3-VL with a mixture of experts in its decoder."""

from __future__ import annotations

from learner.policies.families.qwen3_vl import Qwen3VL

MAX_LAYERS = 256


class Qwen3VLMoe(Qwen3VL):
    """Source: arXiv:2511.21631.

    Engine and learner choose experts each for themselves: where two experts are nearly equal, rounding may choose
    another one. `policy.freeze=[router]` keeps the weights that choose as they are; a run compares engine and learner
    before its first step.
    """

    model_types = ("qwen3_vl_moe",)
    parts = {
        **Qwen3VL.parts,
        "router": tuple(f"model.language_model.layers.{layer}.mlp.gate." for layer in range(MAX_LAYERS)),
    }
    transposed = r"\.mlp\.experts\.(gate_up_proj|down_proj)$"
    needs_gate = True
    note = (
        "engine and learner choose experts each for themselves, and where rounding makes them choose others their "
        "log-probs differ; choices are not replayed. The preset freezes the routers (`policy.freeze=[router]`), and a "
        "run compares engine and learner before its first step, in its own precision and with its own weights"
    )
