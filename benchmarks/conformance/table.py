"""docs/models.md from the reports of families that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.conformance.measure import ALL, Report
from mobula.cluster.weight_sync.tolerance import Gap
from mobula.deploy.checks.parity import CASES, SOUNDS, VIDEOS
from mobula.learner.policies.families import AUDIO_TYPES, REFUSED, TEXT_FAMILIES, VIDEO_TYPES, VISION_FAMILIES

COLUMNS = (*CASES, *VIDEOS, *SOUNDS)
FILES = (
    "A run, and `mobula doctor WORDS`, compares the files of `policy.model` with the model of its config.json before a "
    "role starts. Learner and engines load the same tensors: those of `model.safetensors`, else of the shards that "
    "`model.safetensors.index.json` names, as transformers reads them.",
    "",
    "- Passed over: other files of the folder (`consolidated*.safetensors`, shards of an earlier save, `*.bin`, "
    "`adapter_model.safetensors`, folders), the copy of a tied tensor, buffers that are computed (`inv_freq`, "
    "`position_ids`), and what transformers leaves out by its own lists (`mtp.*`).",
    "- Named in a warning, and neither trained nor written again: other tensors that the model does not have.",
    "- Read under the names of transformers: a base model saved without its prefix, names of other versions of "
    "transformers, and the one side of a tie that a file holds.",
    "- Refused by name: tensors that are missing or have another shape than config.json gives them, a tie "
    "(`tie_word_embeddings`) whose two sides differ, an adapter (`adapter_config.json`) beside the weights or without "
    "its model, pickled weights (`*.bin`, `*.pth`) alone, and quantised checkpoints (`quantization_config` of any "
    "method, ModelOpt, MLX, integer or 8-bit matrices, GGUF). Teachers are checked for the last three as well, reward "
    "models for `quantization_config`.",
    "",
    "`policy/` and `mobula export` write each tensor in the dtype that it has in `policy.model`, with the other files "
    "of that folder; config.json names the dtype of most values. `mobula export --dtype bfloat16` (or `float32`, "
    "`float16`) writes all tensors in one. Optimizer, checkpoints and exported adapters stay float32.",
)
NOTES = {
    "qwen3_vl_moe": (
        "engine and learner choose experts each for themselves, and where rounding makes them choose others their "
        "log-probs differ; choices are not replayed. The preset freezes the routers (`policy.freeze=[router]`), and a "
        "run compares engine and learner before its first step, in its own precision and with its own weights"
    ),
    "qwen3_5": (
        "measured in bfloat16, in which alone vLLM computes it on CPU; the learner's float32 equals transformers' to "
        "1e-5, and its own bfloat16 is 0.019 nat away from that in the mean. Tolerance: 0.05 nat in the mean, and "
        "those of `weight_sync.canary_tolerance` in a run. Engine and learner are compared before the first step. "
        "Rows are padded: `learner.packing=true` is refused. Never run on a GPU"
    ),
    "glm4v": (
        "vLLM's own processing takes one video a prompt (`get_supported_mm_limits`), so the ids that it makes of "
        "several are not compared; engines here get processed videos, and several in a prompt are measured"
    ),
    "llava_onevision": (
        "`data.max_pixels` has no effect: the model finds tiles by `image_grid_pinpoints` of its config.json, so a "
        "smaller budget needs images that are smaller files"
    ),
    "gemma3": (
        "on CPU vLLM ignores the bidirectional mask of images (0.007 to 0.01 nat in the mean, 0.04 at most), so "
        "`resources.device=cpu` with `sampler=vllm` takes text alone; `sampler=huggingface` takes images on any "
        "device. Engine and learner are compared before the first step. Images were never run on a GPU, where the "
        "presets' tolerance for bfloat16 (0.3 nat) is wider than the effect of the mask on this model: compare with "
        "`resources.dtype=float32` first. Images need `policy.attention=sdpa` and padded rows"
    ),
}
"""`model_type` -> what its measurements do not say."""

# Family -> the structure of its released chat template that tests render, and how answers are trained.
TEMPLATE_STRUCTURES = {
    "Qwen2-VL, Qwen2.5, Qwen2.5-VL, Qwen2.5-Omni, Qwen2-Audio, Qwen3-VL-Instruct, InternVL 3, LLaVA-OneVision": (
        "the text of turns; with or without a default system prompt",
        "the answer and its end are trained",
    ),
    "Qwen3": (
        "an empty thought before a last answer without one, earlier thoughts dropped, `enable_thinking`",
        "the empty thought is not trained; a thought in an answer is",
    ),
    "Qwen3.5, Qwen3-VL-Thinking": (
        "the generation prompt opens `<think>`",
        "what closes an empty thought is not trained; rewards count the prompt's `<think>`",
    ),
    "SmolVLM, Idefics 3": (
        "parts alone, capitalised roles, a space before an answer",
        "the space is trained with the answer, of whose first token it is part",
    ),
    "Llama 3.1, Llama 3.2": (
        "a system turn with a date, trimmed texts, `<|eot_id|>`",
        "fixed dates: `data.template_kwargs`",
    ),
    "Gemma, Gemma 3": (
        "the system prompt in the first turn of the user, role `model`, alternating roles, trimmed texts",
        "rows whose roles do not alternate are skipped by name",
    ),
    "DeepSeek-R1 distilled": (
        "thoughts dropped from every answer, the generation prompt opens `<think>`",
        "thoughts are trained as the policy writes them, plain answers as the template does",
    ),
    "LLaVA 1.5": (
        "no token that ends an answer; BOS by the processor alone",
        "the tokenizer's EOS is trained behind an answer",
    ),
    "Mistral 7B": (
        "BOS, the system prompt in the last turn of the user, alternating roles, no text before an answer but a space",
        "the space is trained; rows with a system prompt are skipped by name in offline jobs",
    ),
    "GLM-4, GLM-4.1V": (
        "the token that ends an answer is the head of the next turn, an empty thought before a plain answer",
        "that token is trained once; the tokenizer's EOS behind the last answer",
    ),
    "templates with `{% generation %}`, of text alone, of parts alone": ("as named", "content is given in that form"),
}
LIMITS = {"float32": 1e-5, "bfloat16": 0.05}  # nat, the mean of a case


def page(reports: Sequence[Report]) -> str:
    """The whole page."""
    ordered = sorted(reports, key=lambda report: (report.model_type, report.name, report.is_tied))
    return "\n".join([*_lines(ordered), *_templates()]) + "\n"


def _templates() -> Iterator[str]:
    yield "## Chat templates"
    yield ""
    yield (
        "Structures of released chat templates that the tests render, in short templates of our own: prompts of RL, "
        "answers of SFT, pairs of DPO, two turns, answers with a thought. No released template file was rendered. What "
        "a template writes around an answer is not trained, unless `offline.train_template_text` is set."
    )
    yield ""
    yield "| family | structure | answers |"
    yield "|---|---|---|"
    for family, (structure, answers) in TEMPLATE_STRUCTURES.items():
        yield f"| {family} | {structure} | {answers} |"
    yield ""


def failures(report: Report) -> list[str]:
    """Returns the conditions that a family fails; empty if it conforms."""
    limit = LIMITS[report.dtype]
    reasons = [f"the engine expands {case!r} otherwise" for case, is_same in report.same_ids.items() if not is_same]
    for name, gap in (report.gaps | {f"a push of {part}": gap for part, gap in report.pushes.items()}).items():
        if not gap.mean <= limit:
            reasons.append(f"{name}: the mean gap is {gap.mean:.1e}, more than {limit:.0e}")
    if report.adapters is not None and not report.adapters.mean <= limit:
        reasons.append(f"a push of adapters: the mean gap is {report.adapters.mean:.1e}, more than {limit:.0e}")
    if report.adapters is not None and not report.adapters_load:
        reasons.append("PEFT does not make of the exported adapters what a push carries")
    reasons += [f"a push of {part} does not move the engine" for part, moved in report.moved.items() if moved < 1e-3]
    return reasons if report.export_loads else [*reasons, "the exported checkpoint does not load as it was exported"]


def _lines(reports: Sequence[Report]) -> Iterator[str]:
    yield "# Models"
    yield ""
    yield "Generated by `python -m benchmarks.conformance`, do not edit."
    yield ""
    yield (
        "Each row is a checkpoint of random weights and the real architecture (`mobula init-model tiny-NAME`), in one "
        "vLLM engine and one learner on CPU, in float32, or in bfloat16 where a note says so: there a mean gap of "
        f"{LIMITS['bfloat16']:g} nat is accepted, else of {LIMITS['float32']:.0e}. A cell has the mean and the largest "
        "absolute difference of their log-probs in nat, over the tokens of prompts and of sampled responses. `push` is "
        "after a weight sync in which every weight changed; the same holds after pushes of each tower, connector and "
        "decoder alone. `LoRA` is after a push of a learner with adapters, merged; PEFT loads the exported adapters to "
        "the same weights (`-`: not measured). For all rows the engine expands prompts to the same ids, and the "
        "exported checkpoint loads in transformers with the names that it had, unless a note says otherwise."
    )
    yield ""
    yield "| `model_type` | tiny model | embeddings | parameters | " + " | ".join((*COLUMNS, "push", "LoRA")) + " |"
    yield "|---" * (6 + len(COLUMNS)) + "|"
    for report in reports:
        cells = [_cell(report.gaps.get(case)) for case in COLUMNS]
        cells += [_cell(report.pushes[ALL]), _cell(report.adapters)]
        tied = "tied" if report.is_tied else "untied"
        size = f"{report.num_parameters / 1e6:.2f} M"
        yield f"| `{report.model_type}` | `{report.name}` | {tied} | {size} | " + " | ".join(cells) + " |"
    notes = [f"- `{report.name}`: {'; '.join(reasons)}." for report in reports if (reasons := failures(report))]
    notes += [f"- `{kind}`: {note}." for kind, note in NOTES.items()]
    if notes:
        yield from ("", "Notes:", "", *notes)
    yield from _ties(reports)
    measured = {report.model_type for report in reports}
    others = [kind for kind in (*VISION_FAMILIES, *AUDIO_TYPES, *TEXT_FAMILIES) if kind not in measured]
    yield ""
    yield (
        "Accepted, compared with the forward pass of transformers in the tests, and never measured with an engine: "
        f"{_names(others)}. Every other model that transformers loads as image-text-to-text passes a parity gate: a "
        "run compares engine and learner on text, one image and two before its first step, and is refused if they "
        "differ."
    )
    yield ""
    yield (
        f"Videos are taken by {_names(VIDEO_TYPES)} alone, sounds by {_names(AUDIO_TYPES)}; a run that asks for "
        "them of another model is refused."
    )
    yield from ("", "## Files of a checkpoint", "", *FILES)
    yield from ("", "## Refused at start", "", "By `model_type`:", "")
    yield from (f"- `{kind}`: {reason}" for kind, reason in REFUSED.items())
    yield ""


def _ties(reports: Sequence[Report]) -> Iterator[str]:
    """Names the architectures that ignore `tie_word_embeddings`."""
    for adjective, is_tied in (("tied", True), ("untied", False)):
        others = {report.model_type for report in reports if report.is_tied is not is_tied}
        alone = [kind for kind in sorted({report.model_type for report in reports}) if kind not in others]
        if alone:
            yield ""
            yield f"Embeddings are always {adjective}, whatever `tie_word_embeddings` says: {_names(alone)}."


def _names(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _cell(gap: Gap | None) -> str:
    return "-" if gap is None else f"{gap.mean:.0e} / {gap.max:.0e}"
