"""Questions on pictures of coloured shapes: the public dataset easy-VQA (V. Zhou, 2019, MIT) of the package `easy-vqa`.

    images/train-0.png ... images/test-0.png ...    64x64 pictures of one shape
    train.jsonl validation.jsonl test.jsonl         question, answer: yes, no, a shape or a colour

The test split is the published one. Validation has the last 400 of the 4,000 published training pictures; train has the
others. Three of four answers are yes or no, so a policy that does not look at the picture is right about as often.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mobula.actors.datasets.written import Rows, install_dataset
from mobula.cluster.errors import PreflightError

NUM_VALIDATION = 400  # pictures


def write_easy_vqa(folder: Path) -> Path:
    """Write the dataset into `folder`.

    Raises:
        PreflightError: the package is not installed.
        ValueError: the folder holds something else.
    """
    return install_dataset(folder, {"format_version": 1, "task": "easy_vqa"}, _build)


def _build(folder: Path) -> Rows:
    try:
        import easy_vqa
    except ImportError as error:
        raise PreflightError("data=easy_vqa needs the package easy-vqa: install mobula[easy-vqa]") from error
    (folder / "images").mkdir()
    read = {
        "train": (easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths()),
        "test": (easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths()),
    }
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    for part, (questions, paths) in read.items():
        for number, path in paths.items():
            shutil.copyfile(path, folder / f"images/{part}-{number}.png")
        first_held_out = len(paths) - NUM_VALIDATION if part == "train" else len(paths)
        for index, (text, answer, number) in enumerate(zip(*questions, strict=True)):
            rows["validation" if number >= first_held_out else part].append(
                {
                    "id": f"easy_vqa-{part}-{index:05d}",
                    "question": f"<image>{text}",
                    "answer": answer,
                    "solution": answer,
                    "image": f"images/{part}-{number}.png",
                }
            )
    return rows
