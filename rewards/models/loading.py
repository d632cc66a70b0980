"""What reward models share: loading, batches, options, and the question and images of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import (
    FailureKind,
    Outcome,
    RewardRequest,
    ScoringFailure,
    TimedOutError,
    failure,
    score_prepared,
)
from mobula.rewards.images import decode_image, without_markers
from mobula.rewards.isolation.process import InTime
from mobula.rewards.tools import Tools

T = TypeVar("T")


def score_in_batches(
    requests: Sequence[RewardRequest],
    *,
    encode: Callable[[RewardRequest], T],
    size: Callable[[T], int],
    score: Callable[[Sequence[T]], Sequence[Outcome | float]],
    batch_size: int,
    in_time: InTime,
) -> list[Outcome | float]:
    """Returns one outcome per request, in order. A request that `encode` refuses does not affect the others. A batch
    that raises, for example out of memory, or times out, fails alone. Batches have requests of similar `size` to
    minimise padding, the largest first, so that a lack of memory shows at once."""

    def scored(encoded: Sequence[T]) -> list[Outcome | float]:
        order = sorted(range(len(encoded)), key=lambda index: size(encoded[index]), reverse=True)
        outcomes: dict[int, Outcome | float] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            outcomes.update(zip(batch, _scored(score, [encoded[index] for index in batch], in_time), strict=True))
        return [outcomes[index] for index in range(len(encoded))]

    return score_prepared(requests, encode, scored)


def _scored(
    score: Callable[[Sequence[T]], Sequence[Outcome | float]], batch: Sequence[T], in_time: InTime
) -> Sequence[Outcome | float]:
    def compute() -> Sequence[Outcome | float]:
        with torch.inference_mode():
            return score(batch)

    try:
        return in_time.call(compute, f"a batch of {len(batch)}", len(batch))
    except TimedOutError as error:
        return (failure(error),) * len(batch)
    except Exception as error:  # any error of a model fails its batch only
        reason = f"a batch of {len(batch)} raised {type(error).__name__}: {error}"
        return (ScoringFailure(FailureKind.FAILED, reason),) * len(batch)


NUM_SHOWN = 5


def load_strictly(model_class: Any, name: str, tools: Tools) -> PreTrainedModel:
    """Loads a checkpoint (a directory, or a hub name) for inference, once for all functions with the same tools.
    Transformers initialises a missing weight, such as the head of a reward model, at random with a warning; here it is
    an error."""
    return tools.shared((model_class, name), lambda: _load(model_class, name, tools))


def _load(model_class: Any, name: str, tools: Tools) -> PreTrainedModel:
    try:
        settings, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        raise ValueError(f"options.model={name!r} cannot be loaded ({_first_line(error)}): use a checkpoint") from error
    for part in (settings, *(part for part in settings.values() if isinstance(part, dict))):
        if isinstance(scheme := part.get("quantization_config"), dict):
            # It needs special kernels, and was never compared with its original.
            raise ValueError(
                f"options.model={name!r} is quantised ({scheme.get('quant_method') or scheme}), which is not computed "
                "here: name the checkpoint that it was made from"
            )
    try:
        model, info = model_class.from_pretrained(
            name, dtype=torch_dtype(tools), output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"options.model={name!r} cannot be loaded ({_first_line(error)}): use a checkpoint") from error
    flaws = {"missing": "lacks", "unexpected": "has unknown", "mismatched": "has misshapen"}
    for kind, flaw in flaws.items():
        if keys := info[f"{kind}_keys"]:
            named = (key if isinstance(key, str) else f"{key[0]} {list(key[1])}" for key in keys)
            shown = sorted(named, key=lambda name: (not name.startswith("score."), name))  # name a missing head first
            more = f" and {len(shown) - NUM_SHOWN} more" if len(shown) > NUM_SHOWN else ""
            raise ValueError(
                f"options.model={name!r} {flaw} weights {', '.join(shown[:NUM_SHOWN])}{more}: it is no checkpoint of a "
                f"{type(model).__name__}, so name one that is"
            )
    if tools.device == "cuda" and tools.gpu_share < 1:  # keeps memory for the other roles on the GPU
        torch.cuda.set_per_process_memory_fraction(tools.gpu_share)
    return model.eval().requires_grad_(False).to(tools.device)


def load_processor(processor_class: Any, name: str) -> Any:
    try:
        return processor_class.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{name!r} has no {processor_class.__name__} ({_first_line(error)}): add its files") from error


def torch_dtype(tools: Tools) -> torch.dtype:
    dtype = getattr(torch, tools.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={tools.dtype!r} is none of torch's: use float32, bfloat16 or float16")
    return dtype


def positive_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"options.{name}={value!r} is no number above 0")
    return value


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"options.{name}={value!r} is unknown: use {', '.join(known)}")
    return str(value)


def existing_file(name: str, value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_file():
        raise ValueError(f"options.{name}={value!r} is no file: name one")
    return Path(value)


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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
