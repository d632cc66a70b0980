"""The reward function `reward_model`: a sequence classifier of text, or of images and text, scores an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedConfig

from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.models.batching import score_in_batches
from mobula.rewards.models.conversation import ChatReader, ConversationReader, EncodedConversation, PairReader, pad
from mobula.rewards.models.loading import load_processor, load_strictly, one_of, positive_int
from mobula.rewards.models.question import QuestionFinder
from mobula.rewards.models.score_head import classifier_class, read_config, takes_images
from mobula.rewards.tools import Tools

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
