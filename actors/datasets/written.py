"""install_dataset: writes a dataset folder atomically, with a marker file that describes the content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.files import install_folder

MARKER = "dataset.json"  # present in complete folders

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # split -> the lines of its JSONL file


def install_dataset(folder: Path, marker: Mapping[str, Any], build: Callable[[Path], Rows]) -> Path:
    """Builds a dataset in a temporary folder and renames it to `folder`, unless `folder` has it already. Of several
    processes that write it concurrently, the first one wins. `marker` holds the arguments that determine the content;
    `build` writes images into a folder and returns the rows. Raises: ValueError: the folder has other content."""

    def write(built: Path) -> None:
        for split, rows in build(built).items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (built / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        (built / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")

    return install_folder(folder, lambda: holds(folder, marker), write)


def holds(folder: Path, marker: Mapping[str, Any]) -> bool:
    """Whether `folder` is this dataset, complete; False for a missing or empty folder. Raises: ValueError: it is
    another."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / MARKER).is_file():
        raise ValueError(
            f"{folder} exists and has no {MARKER}, so it is no {marker['task']} dataset: choose another folder"
        )
    present = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    if present != marker:
        raise ValueError(
            f"{folder} holds {present}, asked for {dict(marker)}: choose another folder or delete this one"
        )
    return True
