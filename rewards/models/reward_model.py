"""The reward function `reward_model`: a sequence classifier of text, or of images and text, scores an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.images import decode_image
from mobula.rewards.models.loading import (
    QuestionFinder,
    load_processor,
    load_strictly,
    one_of,
    positive_int,
    score_in_batches,
)
from mobula.rewards.tools import Tools


def read_config(name: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"options.model={name!r} is no checkpoint ({reason}): name a folder with its files") from error


def takes_images(config: PreTrainedConfig) -> bool:
    return getattr(config, "vision_config", None) is not None


def classifier_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' sequence classifier of this architecture, or the base model with a `score` head.

    Like the heads of transformers, it is one bias-free linear layer, `score.weight` [labels, hidden], on the last
    hidden state of the last token that is not padding; the other weights, `model.*`, are the base model's.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]  # type: ignore[return-value]  # it is a class
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"options.model is of type {config.model_type!r}, which is unknown here: use another")
    return _with_score_head(MODEL_MAPPING[type(config)])


@cache
def _with_score_head(base: Any) -> type[PreTrainedModel]:
    """Builds a classifier over `base` with the same configuration, initialisation and key conversions."""
    family = next(c for c in base.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, family), {"__doc__": _with_score_head.__doc__})


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


FORMS = ("chat", "pair")
OUTPUTS = ("logit", "probability")


class RewardModel:
    """The logit of one label, or its probability (sigmoid of a single logit, softmax over several).

    `model` is a complete Hugging Face checkpoint of a sequence classifier, or of a vision-language model with a
    `score.weight`. `form` is chat (question and answer through the model's chat template) or pair (two segments, for
    encoders). `label` is the name or index of a label; null takes the only label. `question_pattern`: see
    `QuestionFinder`. A conversation above `max_tokens` loses the end of the answer, never of the question, which the
    reason of the score states. `batch_size` conversations are scored at a time.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        form: str,
        label: str | int | None,
        output: str,
        question_pattern: str | None,
        max_tokens: int,
        batch_size: int,
    ) -> None:
        self._in_time = tools.in_time
        self._batch_size = positive_int("batch_size", batch_size)
        self._output = one_of("output", output, OUTPUTS)
        config = read_config(model)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        if positive_int("max_tokens", max_tokens) > longest:
            raise ValueError(f"options.max_tokens={max_tokens} is more than the model's {longest} positions: lower it")
        self._reader = _reader(model, config, form, QuestionFinder(question_pattern), max_tokens)
        self._model = load_strictly(classifier_class(config), model, tools)
        self._label = _label_index(self._model.config, label)
        self._pad_token_id = config.get_text_config().pad_token_id
        self._device = torch.device(tools.device)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        return score_in_batches(
            requests,
            encode=self._reader.read,
            size=lambda conversation: conversation.num_tokens,
            score=self._score,
            # Without a padding token the model reads the last position of a row, so rows must not be padded.
            batch_size=1 if self._pad_token_id is None else self._batch_size,
            in_time=self._in_time,
        )

    def _score(self, conversations: Sequence[EncodedConversation]) -> list[Outcome]:
        batch = pad(conversations, self._pad_token_id or 0)
        inputs = {
            name: part.to(self._device, self._model.dtype if part.is_floating_point() else part.dtype)
            for name, part in batch.items()
        }
        logits = self._model(**inputs).logits.float().cpu()  # [B, labels]
        values = logits
        if self._output == "probability":
            values = torch.sigmoid(logits) if logits.shape[-1] == 1 else torch.softmax(logits, dim=-1)
        pairs = zip(values[:, self._label].tolist(), conversations, strict=True)
        return [_outcome(value, conversation.note) for value, conversation in pairs]


def _outcome(value: float, note: str) -> Outcome:
    if not math.isfinite(value):
        return ScoringFailure(FailureKind.NOT_FINITE, f"the reward model returned {value}")
    return Score(value, note)


def _reader(
    model: str, config: PreTrainedConfig, form: str, questions: QuestionFinder, max_tokens: int
) -> PairReader | ChatReader:
    with_images = takes_images(config)
    if one_of("form", form, FORMS) == "pair":
        if with_images:
            raise ValueError(f"options.form='pair' has no place for images, which {model!r} takes: use chat")
        return PairReader(load_processor(AutoTokenizer, model), questions, max_tokens)
    processor = load_processor(AutoProcessor if with_images else AutoTokenizer, model)
    if not processor.chat_template and with_images:
        # Some checkpoints have a template in the tokenizer only.
        processor.chat_template = processor.tokenizer.chat_template
    if not processor.chat_template:
        raise ValueError(f"options.model={model!r} has no chat template: add it to its tokenizer, or use form pair")
    return ChatReader(processor, questions, max_tokens, takes_images=with_images)


def _label_index(config: PreTrainedConfig, label: str | int | None) -> int:
    names = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    if label is None and len(names) == 1:
        return 0
    for index, name in names.items():
        if label == name or (isinstance(label, int) and not isinstance(label, bool) and label == index):
            return index
    raise ValueError(f"options.label={label!r} is not one of the model's: use {', '.join(map(str, names.values()))}")
