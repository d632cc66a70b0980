"""The conversation that a reward model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest
from mobula.rewards.images import decode_image, without_markers

IMAGES_FROM = ("prompt", "response")


class QuestionFinder:
    r"""Reads the question out of `RewardRequest.prompt_text`.

    `pattern` is a regular expression with a group `question`, searched in the rendered prompt, e.g.
    `user\n(?P<question>.*?)<\|im_end\|>`; a dot matches newlines. None takes the whole prompt. Special tokens are
    removed in both cases.
    """

    def __init__(self, pattern: str | None) -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"options.question_pattern={pattern!r} is no regular expression ({error})") from error
        if self._pattern is not None and "question" not in self._pattern.groupindex:
            raise ValueError(f"options.question_pattern={pattern!r} has no group (?P<question>...): add it")

    def find(self, request: RewardRequest) -> str:
        """Returns the question."""
        if self._pattern is None:
            return without_markers(request.prompt_text).strip()
        match = self._pattern.search(request.prompt_text)
        if match is None:
            raise RewardError(f"the prompt does not match question_pattern={self._pattern.pattern!r}")
        return without_markers(match["question"] or "").strip()


def decoded_images(request: RewardRequest, source: str, frame_stride: int) -> tuple[Image.Image, ...]:
    """Returns every `frame_stride`-th image of the prompt or of the response, starting with the first, as RGB."""
    files = request.prompt_images if source == "prompt" else request.response.images
    if not files:
        hint = "set needs_images for the component" if source == "prompt" else "only generated images can be scored"
        raise RewardError(f"the {source} has no images: {hint}")
    chosen = list(enumerate(files, start=1))[::frame_stride]
    return tuple(decode_image(file, f"image {n} of the {source}") for n, file in chosen)


PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # [1, T]; others vary in shape


CUT_ROUNDS = 8  # decoding and encoding again may change the number of tokens; each round cuts the remaining excess


@dataclass(frozen=True)
class EncodedConversation:
    """One encoded conversation: `inputs` are forward() arguments of a batch of one; `note` tells of cut tokens."""

    inputs: Mapping[str, torch.Tensor]
    note: str = ""

    @property
    def num_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[-1])


class ConversationReader(Protocol):
    """Encodes requests: `PairReader` or `ChatReader`."""

    def read(self, request: RewardRequest) -> EncodedConversation:
        """Encodes one request.

        Raises:
            RewardError: the request is too long, or its images cannot be read.
        """
        ...


class PairReader:
    """Encodes (question, answer) as the two segments of an encoder model. Only the end of the answer is cut."""

    def __init__(self, tokenizer: Any, questions: QuestionFinder, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._questions = questions
        self._max_tokens = max_tokens

    def read(self, request: RewardRequest) -> EncodedConversation:
        question, answer = self._questions.find(request), request.response.text
        whole = self._tokenizer(question, answer, return_tensors="pt")
        excess = whole["input_ids"].shape[-1] - self._max_tokens
        if excess <= 0:
            return EncodedConversation(dict(whole))
        num_answer = len(self._tokenizer(answer, add_special_tokens=False)["input_ids"])
        _refuse_long_question(excess, num_answer, self._max_tokens)
        limits = {"truncation": "only_second", "max_length": self._max_tokens}
        return EncodedConversation(
            dict(self._tokenizer(question, answer, **limits, return_tensors="pt")), _note(excess)
        )


class ChatReader:
    """Encodes a user turn with the question (and the prompt's images) and an assistant turn with the answer.

    `processor` is a tokenizer, or a processor with a tokenizer if the model takes images. Only the end of the answer is
    cut, so that the conversation with the closing tokens of the template has at most `max_tokens`.
    """

    def __init__(self, processor: Any, questions: QuestionFinder, max_tokens: int, *, takes_images: bool) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer if takes_images else processor
        self._questions = questions
        self._max_tokens = max_tokens
        self._takes_images = takes_images
        self._content = content_form(processor)
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def read(self, request: RewardRequest) -> EncodedConversation:
        question = self._plain(self._questions.find(request))
        encoded = request.prompt_images if self._takes_images else ()
        images = [decode_image(image, f"image {n} of the prompt") for n, image in enumerate(encoded, start=1)]
        answer = self._plain(request.response.text)
        inputs = self._encode(question, answer, images)
        num_cut = 0
        for _ in range(CUT_ROUNDS):
            excess = inputs["input_ids"].shape[-1] - self._max_tokens
            if excess <= 0:
                return EncodedConversation(inputs, _note(num_cut) if num_cut else "")
            ids = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
            _refuse_long_question(excess, len(ids), self._max_tokens)
            num_cut += excess
            answer = self._tokenizer.decode(ids[: len(ids) - excess], clean_up_tokenization_spaces=False)
            inputs = self._encode(question, answer, images)
        raise RewardError(f"the response cannot be cut to max_tokens={self._max_tokens}: raise it")

    def _plain(self, text: str) -> str:
        """Removes special tokens, which would imitate the end of a turn or an image."""
        return self._special.sub("", text)

    def _encode(self, question: str, answer: str, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        content = self._content(question)
        if images:
            content = [*({"type": "image"} for _ in images), *_parts(question)]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": self._content(answer)}]
        text = self._processor.apply_chat_template(turns, tokenize=False)
        if self._takes_images:
            bos = self._tokenizer.bos_token  # which the template may write, and the tokenizer adds
            adds = not (bos and text.startswith(bos))
            given = {"images": list(images) or None, "add_special_tokens": adds}
            return dict(self._processor(text=[text], **given, return_tensors="pt"))
        return dict(self._tokenizer(text, add_special_tokens=False, return_tensors="pt"))


def content_form(processor: Any) -> Callable[[str], Any]:
    """Returns a function from the text of a turn to the content that the chat template takes: text or a list of
    parts."""
    problem = ""
    for form in (str, _parts):
        turns = [{"role": role, "content": form(f"probe of {role}")} for role in ("user", "assistant")]
        try:
            rendered = processor.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # templates raise errors of many types
            problem = f" ({type(error).__name__}: {error})"
            continue
        if "probe of user" in rendered and "probe of assistant" in rendered and "'type'" not in rendered:
            return form
    raise ValueError(f"its chat template cannot write a question and an answer{problem}: use another one")


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def pad(conversations: Sequence[EncodedConversation], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Builds one batch: tokens are padded on the right, tensors of images are concatenated."""
    longest = max(conversation.num_tokens for conversation in conversations)
    batch = {}
    for name in {name for conversation in conversations for name in conversation.inputs}:
        if name in PER_TOKEN:
            filler = pad_token_id if name == "input_ids" else 0
            rows = (c.inputs.get(name, torch.zeros_like(c.inputs["input_ids"])) for c in conversations)
            parts = [torch.nn.functional.pad(row, (0, longest - row.shape[-1]), value=filler) for row in rows]
        else:
            parts = [c.inputs[name] for c in conversations if name in c.inputs]
        batch[name] = torch.cat(parts)
    return batch


def _refuse_long_question(excess: int, num_answer: int, max_tokens: int) -> None:
    if excess >= num_answer:
        raise RewardError(f"the question alone leaves no room for an answer in max_tokens={max_tokens}: raise it")


def _note(num_cut: int) -> str:
    return f"the last {num_cut} tokens of the response were cut off"
