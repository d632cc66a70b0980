"""Handwritten digits as a question answering dataset: images or clips and JSONL rows, made from scikit-learn.

The 1,797 images of `sklearn.datasets.load_digits` are the smallest data on which a vision-language policy has
something real to learn. The folder that `write_digits` makes:

    images/digit_0000.png ...   one 56x56 image for each digit; of `digit_clips` clips/digit_0000.gif ...
    train.jsonl validation.jsonl test.jsonl
    dataset.json                what the folder holds; its presence says that the folder is whole
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, NotRequired, TypedDict, get_args

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mobula.actors.datasets.written import install_dataset
from mobula.examples.digits.digit_clips import write_clip
from mobula.examples.digits.digit_pairs import LabelledRow, PairRow, labelled_row, pair_row

DigitsTask = Literal[
    "digits", "digit_sum", "digit_list", "digit_clips", "digit_pairs", "digit_sum_pairs", "digit_labels"
]

FORMAT_VERSION = 1
UPSCALE = 7
WHITE = 16  # the brightest value in load_digits
IMAGE_LABELS = "ABCDEFGHIJKL"  # of a digit_list prompt, which has 1 to 12 images


class DigitRow(TypedDict):
    """One line of a split; `image` has one path for each `<image>` of the question, `video` the path of the `<video>`;
    paths are relative to the JSONL file."""

    id: str
    question: str
    answer: str
    solution: str
    image: NotRequired[str | list[str]]
    video: NotRequired[str]


class Marker(TypedDict):
    """Marker of a finished folder: the arguments that determine its content."""

    format_version: int
    task: str
    seed: int
    num_validation: int
    num_test: int


def write_digits(
    folder: Path, *, task: DigitsTask, seed: int = 0, num_validation: int = 200, num_test: int = 300
) -> Path:
    """Write the dataset of `task` into `folder` and return `folder`.

    `digits` asks which digit one image shows; `digit_sum` asks for the sum of two; `digit_list` asks for a sentence
    on each of 1 to 12 images and one with their sum; `digit_clips` asks which digit of a clip is shown longest.
    `digit_pairs` and `digit_sum_pairs` are the first two for offline jobs: a right answer and a wrong one each;
    `digit_labels` has one of them, with its label.
    Splits are stratified by digit and share no image; train takes what validation and test leave. A split has as many
    rows as images. The same arguments give the same bytes.

    A folder that already holds this very dataset is left alone. The folder appears whole or not at all: it is built
    beside its place and renamed, and of several processes that write it at once the first one wins.

    Raises:
        ValueError: the task is unknown, or the folder holds something else.
    """
    if task not in get_args(DigitsTask):
        raise ValueError(f"task is {task!r}, known are {', '.join(get_args(DigitsTask))}: choose one of them")
    marker = Marker(
        format_version=FORMAT_VERSION, task=task, seed=seed, num_validation=num_validation, num_test=num_test
    )
    return install_dataset(folder, marker, partial(_build, marker=marker))


def _build(
    folder: Path, marker: Marker
) -> Mapping[str, Sequence[DigitRow] | Sequence[PairRow] | Sequence[LabelledRow]]:
    """Write images or clips into a new folder; returns the rows of each split."""
    pixels, labels = load_digits(return_X_y=True)  # [N, 64] in 0..16, [N]
    splits = _split(labels, marker)
    if marker["task"] == "digit_clips":
        _write_clips(folder, marker["seed"], splits, pixels, labels)
    else:
        _write_images(folder, pixels)
    return {split: _rows(marker, split, indices, labels) for split, indices in splits.items()}


def _write_images(folder: Path, pixels: np.ndarray) -> None:
    (folder / "images").mkdir()
    for index, image in enumerate(pixels):
        _to_image(image).save(folder / _image_path(index))


def _write_clips(
    folder: Path, seed: int, splits: Mapping[str, Sequence[int]], pixels: np.ndarray, labels: np.ndarray
) -> None:
    """One clip for each digit, in which it is shown longest; the others are of its split."""
    (folder / "clips").mkdir()
    for indices in splits.values():
        for index in indices:
            write_clip(folder / _clip_path(index), index, indices, pixels, labels, Random(f"{seed} {index}"))


def _to_image(pixels: np.ndarray) -> Image.Image:
    """A grey 56x56 image of one digit, `pixels` [64] in 0..16; every source pixel becomes a 7x7 square."""
    grey = (pixels.reshape(8, 8) * 255 / WHITE).round().astype(np.uint8)  # [8, 8]
    return Image.fromarray(grey.repeat(UPSCALE, axis=0).repeat(UPSCALE, axis=1))


def _split(labels: np.ndarray, marker: Marker) -> dict[str, list[int]]:
    """Image indices of each split, in random order, every split with the same share of each digit."""
    seed = marker["seed"]
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=marker["num_test"], stratify=labels, random_state=seed
    )
    train, validation = train_test_split(
        rest, test_size=marker["num_validation"], stratify=labels[rest], random_state=seed
    )
    return {"train": train.tolist(), "validation": validation.tolist(), "test": test.tolist()}


def _rows(
    marker: Marker, split: str, indices: Sequence[int], labels: np.ndarray
) -> Sequence[DigitRow] | Sequence[PairRow] | Sequence[LabelledRow]:
    """The questions of one split on the images `indices`."""
    random = Random(f"{marker['seed']} {split}")
    if marker["task"] == "digit_pairs":
        return [pair_row(row, range(10), random) for row in _digit_rows(indices, labels)]
    if marker["task"] == "digit_labels":
        return [labelled_row(row, range(10), random) for row in _digit_rows(indices, labels)]
    if marker["task"] == "digit_sum_pairs":
        return [pair_row(row, range(19), random) for row in _sum_rows(indices, labels)]
    if marker["task"] == "digits":
        return _digit_rows(indices, labels)
    if marker["task"] == "digit_sum":
        return _sum_rows(indices, labels)
    if marker["task"] == "digit_clips":
        return _clip_rows(indices, labels)
    return _list_rows(indices, labels, split=split, random=random)


def _digit_rows(indices: Sequence[int], labels: np.ndarray) -> list[DigitRow]:
    """One question for each image."""
    return [
        _row(
            f"digit-{index:04d}",
            r"<image>Which digit is this? Answer in \boxed{}.",
            int(labels[index]),
            _image_path(index),
        )
        for index in indices
    ]


def _sum_rows(indices: Sequence[int], labels: np.ndarray) -> list[DigitRow]:
    """Each image with the next one, the last with the first: every image is once the left and once the right."""
    return [
        _row(
            f"digit_sum-{left:04d}-{right:04d}",
            r"<image><image>What is the sum of these digits? Answer in \boxed{}.",
            int(labels[left] + labels[right]),
            [_image_path(left), _image_path(right)],
        )
        for left, right in zip(indices, [*indices[1:], indices[0]], strict=True)
    ]


def _clip_rows(indices: Sequence[int], labels: np.ndarray) -> list[DigitRow]:
    """One question for each clip."""
    question = r"<video>Which digit is shown longest? Answer in \boxed{}."
    return [
        DigitRow(
            id=f"digit_clips-{index:04d}",
            question=question,
            answer=str(labels[index]),
            solution=rf"\boxed{{{labels[index]}}}",
            video=_clip_path(index),
        )
        for index in indices
    ]


def _list_rows(indices: Sequence[int], labels: np.ndarray, *, split: str, random: Random) -> list[DigitRow]:
    """As many questions as images, each on 1 to 12 of them; every image is used equally often, give or take one.

    A question on n images is drawn with a probability in proportion to 1 / n: most answers are short and some are ten
    times as long, and a policy that cannot read one digit yet meets enough questions on a single one.
    """
    images = _shuffled_forever(indices, random)
    sizes = range(1, len(IMAGE_LABELS) + 1)
    rows = []
    for number, size in enumerate(random.choices(sizes, [1 / size for size in sizes], k=len(indices))):
        shown = [next(images) for _ in range(size)]
        digits = [int(labels[index]) for index in shown]
        question = "".join(f"<image>{label}" for label in IMAGE_LABELS[:size])
        rows.append(
            DigitRow(
                id=f"digit_list-{split}-{number:04d}",
                question=f"{question}\nWhich digits are these? What is the sum?",
                answer=str(sum(digits)),
                solution=_list_answer(digits),
                image=[_image_path(index) for index in shown],
            )
        )
    return rows


def _list_answer(digits: Sequence[int]) -> str:
    """The right answer to a question on images of these digits.

    Example:
        >>> _list_answer([7, 3])
        'Picture A is the digit 7.\\nPicture B is the digit 3.\\nThe sum is 10.'
    """
    named = zip(IMAGE_LABELS, digits, strict=False)
    sentences = [f"Picture {label} is the digit {digit}." for label, digit in named]
    return "\n".join([*sentences, f"The sum is {sum(digits)}."])


def _shuffled_forever(indices: Sequence[int], random: Random) -> Iterator[int]:
    """All of `indices` in random order, then all of them in another one, and so on."""
    while True:
        yield from random.sample(indices, len(indices))


def _row(row_id: str, question: str, answer: int, image: str | list[str]) -> DigitRow:
    return DigitRow(id=row_id, question=question, answer=str(answer), solution=rf"\boxed{{{answer}}}", image=image)


def _image_path(index: int) -> str:
    return f"images/digit_{index:04d}.png"


def _clip_path(index: int) -> str:
    return f"clips/digit_{index:04d}.gif"
