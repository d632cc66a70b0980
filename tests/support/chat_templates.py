"""Chat templates with the structures of released ones, in few lines; `<|im_end|>` ends a turn in all of them."""

from __future__ import annotations

TEXT = (
    "{%- macro text(m) -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
LAST_QUERY = (
    "{%- set found = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set found.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
)
PARTED = (
    "{%- set content = text(m) -%}{%- set thought = '' -%}{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
)
OTHER_TURNS = "{{- '<|im_start|>' + m.role + '\n' + text(m) + '<|im_end|>\n' -}}"

QWEN3 = (
    TEXT + LAST_QUERY + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + PARTED
    + "{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > found.last and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}{{- content + '<|im_end|>\n' -}}"
    "{%- else -%}" + OTHER_TURNS + "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{%- endif -%}"
)  # fmt: skip
THINKING = (
    TEXT + LAST_QUERY + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + PARTED
    + "{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > found.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- content + '<|im_end|>\n' -}}"
    "{%- else -%}" + OTHER_TURNS + "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
)  # fmt: skip
QWEN2_5 = (
    TEXT + "{%- for m in messages -%}{%- if loop.first and m.role != 'system' -%}"
    "{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' -}}{%- endif -%}" + OTHER_TURNS + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)  # fmt: skip
SMOLVLM = (
    TEXT + "<|im_start|>{%- for m in messages -%}{{- m.role | capitalize + ':' -}}"
    "{%- if m.content is string or m.content[0].type == 'text' -%}{{- ' ' -}}{%- endif -%}"
    "{{- text(m) + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
LLAMA_3_1 = (
    TEXT + "{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}"
    "{%- set system = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set system = text(messages[0]).strip() -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "<|im_start|>system\n\nToday is {{ date_string }}\n\n{{ system }}<|im_end|>"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n\n' + text(m) | trim + '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n\n' -}}{%- endif -%}"
)
GEMMA_3 = (
    TEXT + "{%- set first = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set first = text(messages[0]) + '\n\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Roles must alternate') -}}{%- endif -%}"
    "{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}"
    "{{- (first if loop.first else '') + text(m) | trim + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}"
)
DEEPSEEK_R1 = (
    TEXT + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{- '<|im_start|>Assistant|' + text(m).split('</think>')[-1] + '<|im_end|>' -}}"
    "{%- else -%}{{- ('' if m.role == 'system' else '<|im_start|>User|') + text(m) -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>Assistant|<think>\n' -}}{%- endif -%}"
)
GENERATION = (
    TEXT + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}"
    "{% generation %}{{- text(m) + '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}"
    "{%- else -%}" + OTHER_TURNS + "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WITHOUT_AN_END = (
    TEXT + "{%- for m in messages -%}{{- m.role.upper() + ': ' + text(m) + ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)
MISTRAL = (  # its system prompt is dropped once an answer follows
    TEXT + "{%- set system = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set system = text(messages[0]) + '\n\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{{- '<|endoftext|>' -}}{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Roles must alternate') -}}{%- endif -%}"
    "{%- if m.role == 'user' -%}{{- '[INST] ' + (system if loop.last else '') + text(m) + '[/INST]' -}}"
    "{%- else -%}{{- ' ' + text(m) | trim + '<|im_end|>' -}}{%- endif -%}{%- endfor -%}"
)
GLM_4 = (  # the token that ends an answer is the head of the next turn
    TEXT + "{{- '<|endoftext|>' -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- set content = text(m) -%}{%- set thought = '' -%}{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() -%}"
    "{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
    "{{- '<|im_start|>assistant\n<think>' + thought + '</think>\n' + content.strip() -}}"
    "{%- else -%}{{- '<|im_end|>' + m.role + '\n' + text(m) -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TEXT_ALONE = (
    "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
PARTS_ALONE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- for part in m.content -%}{{- part.text if part.type == 'text' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

CHAT_TEMPLATES = {
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "qwen3.5": THINKING,
    "smolvlm": SMOLVLM,
    "llama3.1": LLAMA_3_1,
    "gemma3": GEMMA_3,
    "deepseek-r1": DEEPSEEK_R1,
    "generation": GENERATION,
    "without an end": WITHOUT_AN_END,
    "mistral": MISTRAL,
    "glm4": GLM_4,
    "text alone": TEXT_ALONE,
    "parts alone": PARTS_ALONE,
}
TOOLS = (
    TEXT + LAST_QUERY + "{%- if tools -%}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + PARTED
    + "{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}{%- endif -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > found.last and thought -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- content -}}{%- for call in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- else -%}" + OTHER_TURNS + "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)  # fmt: skip
