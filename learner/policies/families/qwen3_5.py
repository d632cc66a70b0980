"""Qwen3.5: Qwen3-VL's images and videos without DeepStack, and gated delta rules in three of four decoder layers."""

from __future__ import annotations

from mobula.learner.policies.families.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    """A delta rule runs through a whole row of the batch, so rows behind one another would see each other."""

    model_types = ("qwen3_5",)
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.",),
        "language": ("model.language_model.", "lm_head."),
    }
    engine_dtypes_on_cpu = ("bfloat16",)
    keeps_packed_rows_apart = shares_prefixes = False
    padded_because = "its layers carry a state from token to token"
    needs_gate = True
    on_cpu = "`resources.dtype=bfloat16` alone with vLLM, whose kernels take no float32; wider tolerance"
    note = (
        "measured in bfloat16, in which alone vLLM computes it on CPU; the learner's float32 equals transformers' to "
        "1e-5, and its own bfloat16 is 0.019 nat away from that in the mean. Tolerance: 0.05 nat in the mean, and "
        "those of `weight_sync.canary_tolerance` in a run. Engine and learner are compared before the first step. "
        "Rows are padded: `learner.packing=true` is refused. Never run on a GPU"
    )
