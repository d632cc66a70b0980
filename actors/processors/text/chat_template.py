"""ChatTemplate: renders turns with a checkpoint's chat template; special tokens of its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import GENERATION_CONFIG_NAME

from mobula.actors.datasets.formats.records import SHOWN_FIELDS
from mobula.actors.datasets.rows import Turn
from mobula.cluster.errors import PromptError
from mobula.cluster.records.markup import literal

_TAG = re.compile(r"</?([A-Za-z][\w-]*)>")
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def end_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a response: of the tokenizer, then of generation_config.json, else of config.json."""
    ids = [tokenizer.eos_token_id, *_listed(_generation_eos(model))]
    if not any(i is not None for i in ids):
        ids = _listed(
            getattr(AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config(), "eos_token_id", None)
        )
    ends = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not ends:
        raise ValueError(
            f"policy.model={model} names no token that ends a response: set eos_token_id in its generation_config.json"
        )
    return ends


def pad_token_id(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> int:
    """The padding id; an end id if the tokenizer has none or pads with a token that is no marker."""
    is_marker = tokenizer.pad_token is not None and _MARKER.fullmatch(tokenizer.pad_token)
    return tokenizer.pad_token_id if is_marker else ends[0]


def decode_response(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | np.ndarray, hidden: Collection[int]
) -> str:
    """The text of a response without `hidden` ids (ends, padding, media). Tags that are special tokens stay."""
    ids = [i for i in np.asarray(token_ids).tolist() if i not in hidden]
    return tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[return-value]  # of one sequence: a str


def reserved_tokens(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], written: Iterable[str]) -> re.Pattern[str]:
    """Builds a pattern of the tokens that a row may not contain: `ids`, markers in the tokenizer's special_tokens_map,
    and special tokens and markers in `written`, texts of the chat template. Pairs of tags such as `<answer>` and
    `</answer>` are text."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    markers = [name for name, token in added.items() if token.special or _MARKER.fullmatch(name)]
    names = {name for text in written for name in markers if name in text}
    named = (value for value in tokenizer.special_tokens_map.values() if isinstance(value, str))
    names.update(name for name in tokenizer.convert_ids_to_tokens(list(ids)) if name)
    names.update(name for name in named if _MARKER.fullmatch(name))
    names = {name for name in names if not _is_tag(name, added)}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _is_tag(name: str, added: Collection[str]) -> bool:
    match = _TAG.fullmatch(name)
    return match is not None and {f"<{match[1]}>", f"</{match[1]}>"} <= set(added)


def _generation_eos(model: str) -> int | list[int] | None:
    try:
        return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError as error:
        if not (Path(model) / GENERATION_CONFIG_NAME).is_file():  # the file is optional
            return None
        raise ValueError(
            f"policy.model={model} has a {GENERATION_CONFIG_NAME} that cannot be read: download it again, or remove it"
        ) from error


def _listed(ids: int | list[int] | None) -> list[int | None]:
    return list(ids) if isinstance(ids, list) else [ids]


Message = tuple[str, Sequence[Mapping[str, str]]]
"""(role, parts of the content)"""

PROBE = "probe7c1f"
Fields = Mapping[str, Any]
NOTHING: Fields = MappingProxyType({})
_PART_MARKUP = re.compile(r"""['"]type['"]\s*:""")  # a list of parts printed as text
_EARLIER = (("user", PROBE[:5]), ("assistant", PROBE[:5]))


class ContentForm(StrEnum):
    """The form of a message's content."""

    PARTS = "parts"  # a list of mappings with a type
    TEXT = "text"


class ChatTemplate:
    """The template of a processor or tokenizer. The constructor tries short messages of each role. Vision-language
    models get parts and text-only models get text, unless the template then drops the text or prints the list."""

    def __init__(
        self,
        renderer: ProcessorMixin | PreTrainedTokenizerBase,
        *,
        takes_parts: bool,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """`template_kwargs` is `data.template_kwargs`."""
        self._renderer: Any = renderer
        self._bos = _added_bos(renderer.tokenizer) if isinstance(renderer, ProcessorMixin) else ""
        self._kwargs = dict(template_kwargs)
        order = tuple(ContentForm)
        self._order = order if takes_parts else order[::-1]
        self._forms: dict[str, ContentForm] = {}
        for role in ("user", "assistant", "system", "tool"):
            self._forms[role] = next((form for form in self._order if self._is_taken(role, form)), self._order[0])

    @property
    def source(self) -> str:
        return str(self._renderer.chat_template)

    def form(self, role: str) -> ContentForm:
        return self._forms.get(role, self._forms["user"])

    def render(
        self, messages: Sequence[Message], *, is_open: bool, variables: Fields = NOTHING, fields: Sequence[Fields] = ()
    ) -> str:
        """Renders the messages, with further `fields` of each such as `tool_calls`, and with `variables` such as
        `tools` in addition to `data.template_kwargs`; `is_open` adds the generation prompt."""
        given = [{"role": role, "content": self._content(role, parts)} for role, parts in messages]
        given = [{**message, **more} for message, more in zip_longest(given, fields, fillvalue=NOTHING)]
        try:
            return self._rendered(given, is_open, variables)
        except Exception as error:  # templates raise errors of any type
            roles = ", ".join(role for role, _ in messages)
            raise PromptError(
                f"the chat template of policy.model refuses turns of {roles} ({type(error).__name__}: {error}): change "
                "the row, or use another template"
            ) from error

    def written(self, media: Sequence[str]) -> list[str]:
        """The template's text around turns of each role, and around parts of the types in `media`."""
        text = {"type": "text", "text": PROBE}
        turns: list[list[Message]] = [
            [("user", [text]), ("assistant", [text]), ("user", [text])],
            [("system", [text]), ("user", [text])],
            [("user", [text]), ("assistant", [text]), ("tool", [text])],
        ]
        turns += [[("user", [{"type": kind}, text])] for kind in media]
        texts = []
        for messages in turns:
            with suppress(PromptError):  # the template refuses the role or medium
                texts.append(self.render(messages, is_open=True).replace(PROBE, ""))
        return texts

    def around_answer(self) -> tuple[str, str, str]:
        """A generation prompt, the white space that the template adds before an answer, and its text behind an answer.
        Each is empty if the template refuses or drops answers."""
        question: Message = ("user", [{"type": "text", "text": PROBE[:5]}])
        opened = head = tail = ""
        with suppress(PromptError):
            opened = self.render([question], is_open=True)
            answered = self.render([question, ("assistant", [{"type": "text", "text": PROBE}])], is_open=False)
            head, _, tail = answered.rpartition(PROBE)
        space = head.removeprefix(opened)
        return opened, space if space.isspace() else "", tail

    def _content(self, role: str, parts: Sequence[Mapping[str, str]]) -> Any:
        if self.form(role) is ContentForm.PARTS:
            return [dict(part) for part in parts]
        media = [part["type"] for part in parts if part["type"] != "text"]
        if media:
            raise PromptError(
                f"the chat template of policy.model takes the content of a {role} turn as text alone, so it has no "
                f"place for the {media[0]} in it: remove the row, or use a template that takes parts"
            )
        return "".join(part["text"] for part in parts)

    def _is_taken(self, role: str, form: ContentForm) -> bool:
        turns = {
            "user": [("user", PROBE)],
            "assistant": [_EARLIER[0], ("assistant", PROBE), _EARLIER[0]],
            "system": [("system", PROBE), _EARLIER[0]],
            "tool": [*_EARLIER, ("tool", PROBE)],
        }[role]
        given = []
        for other, text in turns:
            is_text = (form if text == PROBE else self.form(other)) is ContentForm.TEXT
            given.append({"role": other, "content": text if is_text else [{"type": "text", "text": text}]})
        try:
            rendered = self._rendered(given, True)
        except Exception:  # the template refuses the form or the role
            return False
        return PROBE in rendered and not _PART_MARKUP.search(rendered)

    def _rendered(self, messages: list[dict[str, Any]], is_open: bool, variables: Fields = NOTHING) -> str:
        text = self._renderer.apply_chat_template(
            messages, add_generation_prompt=is_open, tokenize=False, **{**self._kwargs, **variables}
        )
        return text if text.startswith(self._bos) else self._bos + text


def template_variables(template: str) -> dict[str, Any]:
    """The variables in `Row.template`."""
    given = json.loads(template or "{}")
    return {**given.pop("chat_template_kwargs", {}), **given}


def inlined(turns: Sequence[Turn], render: Callable[[Sequence[Turn], bool], str], num_context: int) -> list[Turn]:
    """Returns the turns with their fields (tool calls, thoughts) in their texts, as a policy writes them. The first
    `num_context` turns must be rendered with all of their fields. A template may leave out the thoughts of other
    answers when later turns follow; they are trained as the policy has written them."""
    found, problem = list(turns), "the chat template of policy.model"
    for n, turn in enumerate(turns):
        before, after = found[:n], list(turns[n + 1 : num_context])
        for name in ("content", *SHOWN_FIELDS) if turn.fields else ():
            others = {key: value for key, value in turn.fields.items() if key != name}
            other = replace(turn, text="" if name == "content" else turn.text, fields=others)
            if other != turn and render([*before, other, *after], False) == render([*before, turn, *after], False):
                action = f"leave it out with data.ignored_fields=[{name}]" if name in turn.fields else "remove the row"
                place = f"of a turn of the {turn.role} with {', '.join(turn.fields)}"
                raise PromptError(
                    f"{problem} does not show `{name}` {place}: write it as the template does, or {action}"
                )
        if turn.fields:
            found[n] = _as_text(turn, before, render, is_context=n < num_context) or turn
    context = slice(num_context)
    is_alike = found == list(turns) or render(found[context], False) == render(turns[context], False)
    if not is_alike or any(turn.fields for turn in found):
        names = ", ".join(dict.fromkeys(name for turn in turns for name in turn.fields))
        raise PromptError(f"{problem} writes {names} as no text can: remove the row, or use another template")
    return found


def _as_text(
    turn: Turn, before: Sequence[Turn], render: Callable[[Sequence[Turn], bool], str], *, is_context: bool
) -> Turn | None:
    """Returns `turn` without fields, with a text that is rendered alike, or outside the context with the text behind
    the generation prompt; None if there is none."""
    written, texts = render([*before, turn], False), [turn.text]
    with suppress(PromptError):  # the template asks for a field
        head, _, tail = render([*before, Turn(turn.role, PROBE)], False).rpartition(PROBE)
        for start in (head, render(before, True)):
            if written.startswith(start) and written.endswith(tail):
                text = literal(written[len(start) : len(written) - len(tail)])
                texts.append(f"<think>\n{text}" if "</think>" in text and "<think>" not in text else text)
        for text in texts:
            if render([*before, Turn(turn.role, text)], False) == written:
                return replace(turn, text=text, fields={})
    return None if is_context or len(texts) == 1 else replace(turn, text=texts[-1], fields={})


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that a tokenizer adds at the start of a text, or "". Processors add it to rendered text that does not
    begin with it. For text-only models the template writes it."""
    added = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if added and tokenizer.bos_token else ""


def give_template(processor: ProcessorMixin | PreTrainedTokenizerBase, model: str) -> None:
    """Sets `processor.chat_template` to the checkpoint's template, or the default one of several."""
    template: Any = processor.chat_template
    if not template and isinstance(processor, ProcessorMixin):
        template = processor.tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            raise ValueError(
                f"policy.model={model} has the chat templates {', '.join(template)} and no default one: put the one to "
                "use into the folder as chat_template.jinja"
            )
        template = template["default"]
    if not template:
        raise ValueError(
            f"policy.model={model} has no chat template: choose an instruction-tuned checkpoint, or put a "
            "chat_template.jinja into the folder"
        )
    processor.chat_template = template
