"""Formats responses as table rows for trackers."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from mobula.cluster.metrics.step_records import SampleRecord

TABLE = "samples"
COLUMNS = ("step", "kind", "prompt", "response", "references", "reward")  # images come last


def cells(sample: SampleRecord) -> list[Any]:
    """Returns the values of `COLUMNS`."""
    references = "\n".join(sample.references)
    return [sample.step, sample.kind, sample.prompt, sample.response, references, sample.reward]


def images(sample: SampleRecord) -> list[Image.Image]:
    return [Image.open(io.BytesIO(png)) for png in sample.images]
