"""The reward function `reward_model`: a sequence classifier of text, or of images and text, scores an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.models.conversation import (
    ChatReader,
    ConversationReader,
    EncodedConversation,
    PairReader,
    QuestionFinder,
    pad,
)
from mobula.rewards.models.loading import load_processor, load_strictly, one_of, positive_int, score_in_batches
from mobula.rewards.tools import Tools


def read_config(name: str) -> PreTrainedConfig:
    """Reads the configuration of a checkpoint."""
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
        """Returns one outcome per request."""
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
) -> ConversationReader:
    with_images = takes_images(config)
    if one_of("form", form, FORMS) == "pair":
        if with_images:
            raise ValueError(f"options.form='pair' has no place for images, which {model!r} takes: use chat")
        return PairReader(load_processor(AutoTokenizer, model), questions, max_tokens)
    processor = load_processor(AutoProcessor if with_images else AutoTokenizer, model)
    if not processor.chat_template and with_images:
        processor.chat_template = (
            processor.tokenizer.chat_template
        )  # some checkpoints have a template in the tokenizer only
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
