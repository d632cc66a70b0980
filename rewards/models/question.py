"""Finds the question in a rendered chat prompt, for models with another chat template."""

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

    `pattern` is a regular expression with a group `question`, searched in the rendered prompt, e.g.
    `user\n(?P<question>.*?)<\|im_end\|>`; a dot matches newlines. None takes the whole prompt. Special tokens are
    removed in both cases.

    Raises:
        ValueError: the pattern is not a regular expression or has no group `question`.
    """

    def __init__(self, pattern: str | None) -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"options.question_pattern={pattern!r} is no regular expression ({error})") from error
        if self._pattern is not None and "question" not in self._pattern.groupindex:
            raise ValueError(f"options.question_pattern={pattern!r} has no group (?P<question>...): add it")

    def find(self, request: RewardRequest) -> str:
        """Returns the question.

        Raises:
            RewardError: the prompt does not match the pattern.
        """
        if self._pattern is None:
            return without_markers(request.prompt_text).strip()
        match = self._pattern.search(request.prompt_text)
        if match is None:
            raise RewardError(f"the prompt does not match question_pattern={self._pattern.pattern!r}")
        return without_markers(match["question"] or "").strip()


def decoded_images(request: RewardRequest, source: str, frame_stride: int) -> tuple[Image.Image, ...]:
    """Returns every `frame_stride`-th image of the prompt or of the response, starting with the first, as RGB.

    Raises:
        RewardError: there is no image, or an image cannot be read.
    """
    files = request.prompt_images if source == "prompt" else request.response.images
    if not files:
        hint = "set needs_images for the component" if source == "prompt" else "only generated images can be scored"
        raise RewardError(f"the {source} has no images: {hint}")
    chosen = list(enumerate(files, start=1))[::frame_stride]
    return tuple(decode_image(file, f"image {n} of the {source}") for n, file in chosen)
