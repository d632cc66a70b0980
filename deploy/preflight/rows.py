"""Counts what the rows of a run have and training does not use: fields that are not read, references out of reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mobula.actors.datasets.open_split import TRAIN
from mobula.actors.datasets.rows import AnyRow, Row
from mobula.actors.environments.rows import DEMONSTRATION
from mobula.configs.schema import RunConfig
from mobula.configs.schema.rewards import for_label
from mobula.deploy.preflight.findings import PreflightFinding, Severity

ROWS, UNMET, SHARED, FIELD = "rows", "unmet", "shared", "field "  # notes; the last has the name of a field behind it
LONG_REFERENCE = 200  # characters
NUM_SHOWN = 12


class Seen:
    """Notes the rows of a run's splits, and those that are rows of train, too."""

    def __init__(self) -> None:
        self._train: set[int] = set()  # hashes of contents

    def notes(self, config: RunConfig, split: str, row: AnyRow) -> Iterator[str]:
        yield from row_notes(config, row)
        content = hash(replace(row, sample_id=""))  # type: ignore[type-var]
        if split == TRAIN:
            self._train.add(content)
        elif content in self._train:
            yield SHARED


def row_notes(config: RunConfig, row: AnyRow) -> Iterator[str]:
    yield ROWS
    is_demonstrated = config.plays_rows and config.warm_start.num_steps > 0
    yield from (f"{FIELD}{name}" for name in row.unread if not (is_demonstrated and name == DEMONSTRATION))
    if isinstance(row, Row) and _reads_box(config, row) and _is_out_of_reach(row.answer):
        yield UNMET


def find_in_rows(config: RunConfig, notes: Mapping[str, Mapping[str, int]]) -> Iterator[PreflightFinding]:
    """Yields findings on the rows that were checked. Args: notes: split -> note -> number of rows."""
    fields = Counter[str]()
    for split, counts in notes.items():
        fields.update({note.removeprefix(FIELD): num for note, num in counts.items() if note.startswith(FIELD)})
        if num := counts.get(SHARED, 0):
            yield PreflightFinding(
                "data.path",
                f"{num:,} of {counts[ROWS]:,} rows of {split} are rows of train, too, which count in its accuracy",
                "remove them from one of the two splits",
                Severity.WARN,
            )
        if num := counts.get(UNMET, 0):
            yield PreflightFinding(
                "data.columns",
                f"{num:,} of {counts[ROWS]:,} references of {split} are longer than {LONG_REFERENCE} characters, of "
                r"several lines, or a list or an object of texts, and hold no \boxed{}: no boxed answer equals them",
                "name the column of the short answer in data.columns={answer: COLUMN}, write it in a box, or end the "
                "text in a line `#### ANSWER`",
                Severity.WARN,
            )
    if fields:
        shown = ", ".join(f"{name} ({num:,} rows)" for name, num in fields.most_common(NUM_SHOWN))
        more = f" and {len(fields) - NUM_SHOWN} more" if len(fields) > NUM_SHOWN else ""
        readers = "" if config.offline.is_on else ", reward functions get those of rows"
        yield PreflightFinding(
            "data.columns",
            f"fields that training does not read{readers}: {shown}{more}",
            "name the columns that it should read in data.columns={COLUMN OF THE FORMAT: NAME}",
            Severity.NOTE,
        )


def _reads_box(config: RunConfig, row: Row) -> bool:
    recipe = for_label(config.rewards.active_recipes, config.rewards.label_of(row.metadata))
    names = recipe.components if recipe else ()
    return any(component.reads_box for component in config.rewards.components if component.name in names)


def _is_out_of_reach(reference: str) -> bool:
    """Whether a response will hardly repeat the reference in a box."""
    text = reference.strip()
    is_long = len(text) > LONG_REFERENCE or ("\n" in text and "\\begin" not in text)
    return "\\boxed" not in text and (is_long or text.startswith(('["', '{"')))
