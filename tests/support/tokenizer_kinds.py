"""Tokenizers with the structures of released ones, built from a few sentences, and chat templates that go with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tiny_checkpoints import write_text_policy
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.media import MediaStore
from mobula.configs.load import load_config

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
    "qwen2.5": QWEN2_5, "qwen3": QWEN3, "qwen3.5": THINKING, "smolvlm": SMOLVLM, "llama3.1": LLAMA_3_1,
    "gemma3": GEMMA_3, "deepseek-r1": DEEPSEEK_R1, "generation": GENERATION, "without an end": WITHOUT_AN_END,
    "mistral": MISTRAL, "glm4": GLM_4, "text alone": TEXT_ALONE, "parts alone": PARTS_ALONE,
}  # fmt: skip

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

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]",
)  # fmt: skip

STRIPPING = "<|end|>"  # as Phi 3: it swallows the white space behind it

TEXTS = [
    "USER: Hello there, how are you? ASSISTANT: I am fine. The answer is 7. \n\n- one\n- two",
    "user system assistant model What is 2 + 2? The answer is 4. Be helpful. Say more. <think>\nhm\n</think>",
    "a b c < / | > _ [ ] </ im_end|> s",
] * 20


def _sentencepiece(
    *, normalizer: bool = False, scheme: str = "always", crosses_words: bool = False, texts: Sequence[str] = ()
) -> Tokenizer:
    """BPE with byte fallback: Llama 2 by a normalizer, later ones by Metaspace."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    metaspace = partial(pre_tokenizers.Metaspace, prepend_scheme=scheme)
    made.pre_tokenizer = metaspace(split=not crosses_words)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", *BYTES], show_progress=False)
    made.train_from_iterator(texts or TEXTS, trainer)
    fields = json.loads(made.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] not in BYTES]
    fields["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(fields))
    if normalizer:
        both = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(both)  # type: ignore[assignment]
    else:
        made.pre_tokenizer = metaspace(split=False)  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    return made


def _byte_level(*, prefix: bool = False, trim: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.post_processor = processors.ByteLevel(trim_offsets=trim)  # type: ignore[assignment]
    return made


def _word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    made.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    made.decoder = decoders.WordPiece()  # type: ignore[assignment]
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "prepend": lambda: _sentencepiece(normalizer=True),
    "metaspace_first": lambda: _sentencepiece(scheme="first"),
    "metaspace_always": lambda: _sentencepiece(scheme="always"),
    "metaspace_never": lambda: _sentencepiece(scheme="never"),
    "byte_level": _byte_level,
    "byte_level_untrimmed": lambda: _byte_level(trim=False),
    "byte_level_prefixed": lambda: _byte_level(prefix=True),
    "word_piece": _word_piece,
    "unigram": _unigram,
}

UNKNOWN = {"word_piece": "[UNK]", "unigram": "<unk>"}

CROSSING: dict[str, Callable[[], Tokenizer]] = {  # tokens with characters of two words
    "crosses_words": lambda: _sentencepiece(scheme="first", crosses_words=True, texts=["ASSISTANT: I am fine."] * 20),
    "crosses_spaces": lambda: _sentencepiece(scheme="first", crosses_words=True, texts=["ASSISTANT: "] * 20),
}

LOSSY = ("word_piece", "unigram")  # case, white space or characters are not in the tokens

TURNS = (
    "{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- ANSWER -}}{%- else -%}{{- TURN -}}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- OPEN -}}{%- endif -%}"
)


def _template(turn: str, opened: str, end: str, answer: str = "") -> tuple[str, str]:
    """A template of Jinja expressions, and the end of an answer; without `answer` it is written as any turn."""
    return TURNS.replace("TURN", turn).replace("OPEN", opened).replace("ANSWER", answer or turn), end


TEMPLATES = {  # name -> template, end of an answer
    "chatml": _template(
        "'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'", "'<|im_start|>assistant\n'", "<|im_end|>"
    ),
    "llama3": _template(
        "'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'",
        "'<|start_header_id|>assistant<|end_header_id|>\n\n'",
        "<|eot_id|>",
    ),
    "gemma": _template(
        "'<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n'",
        "'<start_of_turn>model\n'",
        "<end_of_turn>",
        "'<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n'",
    ),
    "vicuna": _template("'USER: ' + m.content + ' '", "'ASSISTANT:'", "</s>", "'ASSISTANT: ' + m.content + '</s>'"),
    # a token may hold the space at the end of the generation prompt and the first word of an answer
    "trailing_space": _template(
        "'USER: ' + m.content + ' '", "'ASSISTANT: '", "</s>", "'ASSISTANT: ' + m.content + '</s>'"
    ),
    # the generation prompt ends before the line end
    "tinyllama": _template("'<|' + m.role + '|>\n' + m.content + '</s>\n'", "'<|assistant|>'", "</s>"),
    "llama2": _template(
        "'<s>' * (not loop.first) + '[INST] ' + m.content + ' [/INST]'", "''", "</s>", "' ' + m.content + ' </s>'"
    ),
    "mistral": _template("'[INST] ' + m.content + '[/INST]'", "''", "</s>", "' ' + m.content + '</s>'"),
    "phi3": _template("'<|' + m.role + '|>\n' + m.content + '<|end|>\n'", "'<|assistant|>\n'", "<|end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "generation": (GENERATION, "<|im_end|>"),
}


def write_tokenizer(folder: Path, kind: str, template: str, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Replaces the tokenizer of a text model in `folder`; with `adds_bos` texts begin with BOS by the tokenizer."""
    source, end = TEMPLATES[template]
    built = (TOKENIZERS | CROSSING)[kind]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token=end, pad_token="</s>")
    tokenizer.unk_token = UNKNOWN.get(kind)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(STRIPPING, special=True, normalized=False, rstrip=True)])
    if adds_bos:
        bos = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=bos)
    tokenizer.chat_template = source
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if not (folder / "config.json").exists():
        write_text_policy(folder, "llama")
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | ends | {"pad_token_id": tokenizer.pad_token_id}))
    tokenizer.save_pretrained(folder)
    return tokenizer


def chat_of_model(model: Path | str, *words: str, device: str = "cpu", **changes: object) -> ChatProcessor:
    """The processor of a run with this model and no text behind questions; `changes` are of its `data` section."""
    config = load_config(["experiment=own", f"policy.model={model}", "data.path=x", "data.prompt_suffix=''", *words])
    data = config.data.model_copy(update=changes)
    store = MediaStore(lambda value: value, 1 << 28)
    return ChatProcessor(str(model), data, config.sampler, store, keep_files=False, device=device)
