"""Finds the question in a rendered chat prompt, so that a model with another chat template can be given it."""

from __future__ import annotations

import re

from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest
from mobula.rewards.images import decode_image
from mobula.rewards.markers import without_markers

IMAGES_FROM = ("prompt", "response")


class QuestionFinder:
    r"""Reads the question out of `RewardRequest.prompt_text`.

    `pattern` is a regular expression with a group named `question` that is searched for in the rendered prompt, e.g.
    `user\n(?P<question>.*?)<\|im_end\|>`; a dot matches newlines. None takes the prompt as a whole. Special tokens are
    left out either way.

    Raises:
        ValueError: the pattern is no regular expression or has no such group.
    """

    def __init__(self, pattern: str | None) -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"options.question_pattern={pattern!r} is no regular expression ({error})") from error
        if self._pattern is not None and "question" not in self._pattern.groupindex:
            raise ValueError(f"options.question_pattern={pattern!r} has no group (?P<question>...): add it")

    def find(self, request: RewardRequest) -> str:
        """The question.

        Raises:
            RewardError: the pattern is not in the prompt.
        """
        if self._pattern is None:
            return without_markers(request.prompt_text).strip()
        found = self._pattern.search(request.prompt_text)
        if found is None:
            raise RewardError(f"the prompt does not match question_pattern={self._pattern.pattern!r}")
        return without_markers(found["question"] or "").strip()


def decoded_images(request: RewardRequest, source: str, frame_stride: int) -> tuple[Image.Image, ...]:
    """The images to score, of the prompt or of the response, as RGB; every `frame_stride`-th, from the first on.

    Raises:
        RewardError: there are none, or one cannot be read.
    """
    files = request.prompt_images if source == "prompt" else request.response.images
    if not files:
        hint = "set needs_images for the component" if source == "prompt" else "only generated images can be scored"
        raise RewardError(f"the {source} has no images: {hint}")
    chosen = list(enumerate(files, start=1))[::frame_stride]
    return tuple(decode_image(file, f"image {n} of the {source}") for n, file in chosen)
