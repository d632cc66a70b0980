"""TensorBoardSink: writes scalars, responses and their images to TensorBoard event files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from mobula.cluster.metrics.sinks.base import ScalarSink
from mobula.cluster.metrics.step_records import SampleRecord


class TensorBoardSink(ScalarSink):
    """Writes below `folder`. A run that resumes from `version` makes TensorBoard drop later values."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, version: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=version + 1)

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Writes `samples/best` and other kinds: a text, and the images of its prompt under the same name."""
        for sample in samples:
            name = f"samples/{sample.kind}"
            self._writer.add_text(name, _as_code(sample), sample.step)
            values = [Summary.Value(tag=f"{name}/image_{n}", image=_image(png)) for n, png in enumerate(sample.images)]
            if values:
                self._add(values, sample.step)

    def close(self) -> None:
        self._writer.close()

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        self._add([Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()], step)

    def _add(self, values: Sequence[Summary.Value], step: int) -> None:
        writer = self._writer.file_writer
        writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]  # torch declares it None


def _as_code(sample: SampleRecord) -> str:
    """Formats a sample as Markdown code: each line is indented, so that nothing is interpreted."""
    parts = {
        "prompt": sample.prompt,
        "response": sample.response,
        "references": "\n".join(sample.references),
        "reward": f"{sample.reward:g}",
    }
    return "\n\n".join(
        f"{name}\n\n" + "\n".join(f"    {line}" for line in text.splitlines() or [""]) for name, text in parts.items()
    )


def _image(png: bytes) -> Summary.Image:
    with Image.open(io.BytesIO(png)) as image:
        width, height = image.size
    return Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
