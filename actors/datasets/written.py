"""install_dataset: a dataset folder that appears whole or not at all, with a marker of what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MARKER = "dataset.json"  # its presence says that the folder is whole

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # split -> the lines of its JSONL file


def install_dataset(folder: Path, marker: Mapping[str, Any], build: Callable[[Path], Rows]) -> Path:
    """`build` writes images below a new folder and returns the rows; the folder is then renamed to its place.

    `marker` holds the arguments that decide the content. A folder that already holds this very dataset is left alone;
    of several processes that write it at once the first one wins.

    Raises:
        ValueError: the folder holds something else.
    """
    if holds(folder, marker):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as staging:
        built = Path(staging) / "dataset"
        built.mkdir()
        for split, rows in build(built).items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (built / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        (built / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        try:
            built.rename(folder)
        except OSError:
            if not holds(folder, marker):
                raise
    return folder


def holds(folder: Path, marker: Mapping[str, Any]) -> bool:
    """Whether `folder` is this dataset, finished; False for a missing or empty folder.

    Raises:
        ValueError: it is anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / MARKER).is_file():
        raise ValueError(
            f"{folder} exists and has no {MARKER}, so it is no {marker['task']} dataset: choose another folder"
        )
    found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    if found != marker:
        raise ValueError(f"{folder} holds {found}, asked for {dict(marker)}: choose another folder or delete this one")
    return True
