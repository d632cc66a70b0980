"""ChatTemplate: renders turns with a checkpoint's chat template, as parts or as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mobula.cluster.errors import PromptError

Message = tuple[str, Sequence[Mapping[str, str]]]
"""(role, parts of the content)"""

PROBE = "probe7c1f"
_PART_MARKUP = re.compile(r"""['"]type['"]\s*:""")  # a list of parts printed as text
_EARLIER = (("user", PROBE[:5]), ("assistant", PROBE[:5]))


class ContentForm(StrEnum):
    """The form of a message's content."""

    PARTS = "parts"  # a list of mappings with a type
    TEXT = "text"


class ChatTemplate:
    """The template of a processor or tokenizer. The constructor tries short messages of each role.

    Vision-language models get parts and text-only models get text, unless the template then drops the text or prints
    the list.
    """

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
        """The form of this role's content."""
        return self._forms.get(role, self._forms["user"])

    def render(self, messages: Sequence[Message], *, is_open: bool) -> str:
        """Renders the messages; `is_open` adds the generation prompt.

        Raises:
            PromptError: the template refuses the messages, or takes text alone and there are media.
        """
        given = [{"role": role, "content": self._content(role, parts)} for role, parts in messages]
        try:
            return self._rendered(given, is_open)
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

        Each is empty if the template refuses or drops answers.
        """
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
        """Whether the template renders the text of a turn of `role` in this form."""
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

    def _rendered(self, messages: list[dict[str, Any]], is_open: bool) -> str:
        text = self._renderer.apply_chat_template(
            messages, add_generation_prompt=is_open, tokenize=False, **self._kwargs
        )
        return text if text.startswith(self._bos) else self._bos + text


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that a tokenizer adds at the start of a text, or "".

    Processors add it to rendered text that does not begin with it. For text-only models the template writes it.
    """
    added = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if added and tokenizer.bos_token else ""


def give_template(processor: ProcessorMixin | PreTrainedTokenizerBase, model: str) -> None:
    """Sets `processor.chat_template` to the checkpoint's template, or the default one of several.

    Raises:
        ValueError: there is none, or several without a default one.
    """
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
