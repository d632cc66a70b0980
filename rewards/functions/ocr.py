"""OCR: similarity of the text in a generated image to the requested text."""

from __future__ import annotations

import io
import re
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from rapidfuzz.distance import Levenshtein
from rapidocr import RapidOCR
from rapidocr.ch_ppocr_rec import TextRecOutput
from rapidocr.utils.output import RapidOCROutput

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import check_true_or_false, given_references
from mobula.rewards.tools import Tools

MAX_ASPECT = 100  # longer side / shorter side; the engine scales the shorter side up
LINE_HEIGHT = 48  # pixels; the recognition network scales lines to it
MIN_LINE_WIDTH = 64  # shorter lines are padded to this width in pixels
_QUOTED = re.compile(r'"([^"]+)"|\N{LEFT DOUBLE QUOTATION MARK}([^\N{RIGHT DOUBLE QUOTATION MARK}]+)')


class Ocr:
    """Reads each image of the response with PP-OCRv6 (RapidOCR, whose wheel has the models) and compares the text.

    value = 1 - min(d, n) / n, ignoring white space and case: n is the length of the target, d is 0 if the text contains
    the target, else the edit distance (the reward of Flow-GRPO, Liu et al. 2025). `exact` requires equality instead,
    with value 1 or 0. With several references the most similar counts.

    `layout`: a `page` is searched for lines of text; a `line` is an image filled by one line, which is read directly in
    at most a tenth of the time.

    `target` is the expected text: `reference`, or `quoted_prompt`, the prompt's first text in double quotes. Of several
    images (frames of a video) every `frame_stride`-th is read, starting with the first; the value is the mean, and a
    frame without text counts 0. `num_threads` is the number of threads of the network.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        layout: Literal["page", "line"],
        target: Literal["reference", "quoted_prompt"],
        exact: bool,
        frame_stride: int,
        num_threads: int,
    ) -> None:
        if layout not in ("page", "line"):
            raise ValueError(f"layout={layout!r} is unknown: use page, or line for images of one line of text")
        if target not in ("reference", "quoted_prompt"):
            raise ValueError(f"target={target!r} is unknown: use reference or quoted_prompt")
        check_true_or_false(exact=exact)
        for option, value in {"frame_stride": frame_stride, "num_threads": num_threads}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option}={value!r} is unfit: give a whole number of 1 or more")
        self._is_line = layout == "line"
        self._reads_prompt = target == "quoted_prompt"
        self._in_time = tools.in_time
        self._exact = exact
        self._frame_stride = frame_stride
        threads = {"intra_op_num_threads": num_threads, "inter_op_num_threads": 1}
        params: dict[str, object] = {f"EngineConfig.onnxruntime.{name}": value for name, value in threads.items()}
        if self._is_line:
            params["Rec.rec_img_shape"] = [3, LINE_HEIGHT, MIN_LINE_WIDTH]
        self._engine = RapidOCR(params={"Global.log_level": "error", **params})

    def __call__(self, request: RewardRequest) -> Score:
        targets = self._targets(request)
        frames = request.response.images[:: self._frame_stride]
        if not frames:
            raise RewardError("the response has no image to read")
        texts = [_fold(self._read(frame)) for frame in frames]
        value = sum(max(self._similarity(text, target) for target in targets) for text in texts) / len(texts)
        return Score(value, "" if any(texts) else "no text in the image")

    def _targets(self, request: RewardRequest) -> list[str]:
        if not self._reads_prompt:
            return [folded for folded in map(_fold, given_references(request.references)) if folded]
        quoted = _QUOTED.search(request.prompt_text)
        target = _fold(quoted[1] or quoted[2]) if quoted else ""
        if not target:
            raise RewardError("the prompt has no text in double quotes that an image could show")
        return [target]

    def _read(self, image: bytes) -> str:
        try:
            with Image.open(io.BytesIO(image)) as opened:
                pixels = np.asarray(opened.convert("RGB"))[:, :, ::-1]  # [H, W, BGR], the layout of the engine
        except UnidentifiedImageError as error:
            raise RewardError("an image of the response cannot be opened: it is of no known kind") from error
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise RewardError(f"an image of the response cannot be opened: {error}") from error
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise RewardError(f"an image of the response is {width} x {height}: too narrow to be read")
        return " ".join(self._in_time.call(lambda: self._texts(np.ascontiguousarray(pixels)), "OCR of an image"))

    def _texts(self, pixels: np.ndarray) -> tuple[str, ...]:
        """Returns the lines of text in uint8 [H, W, BGR]."""
        stages = {"use_det": False, "use_cls": False, "use_rec": True} if self._is_line else {}
        read = self._engine(pixels, **stages)
        return read.txts or () if isinstance(read, TextRecOutput | RapidOCROutput) else ()

    def _similarity(self, text: str, target: str) -> float:
        if self._exact:
            return float(text == target)
        if target in text:
            return 1.0
        return 1 - min(Levenshtein.distance(text, target), len(target)) / len(target)


def _fold(text: str) -> str:
    return "".join(text.split()).casefold()
