"""Notes on families for docs/models.md: the types that are refused, and the chat templates that are tested."""

from __future__ import annotations

REFUSED = {
    "qwen3_5_moe": "its experts lie transposed and choose for themselves as those of qwen3_vl_moe do, vLLM on CPU "
    "computes its other layers in bfloat16 alone, and engine and learner were never compared",
    "kimi_vl": "transformers does not load it without remote code",
    "gemma3n": "its decoder takes embeddings of every layer, which a learner does not compute here",
    "gemma2": "its logits are capped behind the output embeddings, which is not computed here",
}
"""`model_type` -> why."""

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
