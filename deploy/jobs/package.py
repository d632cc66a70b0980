"""Measures a working folder before Ray packs and uploads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes  # the walk that Ray packs by

from mobula.cluster.errors import PreflightError

LIMIT_BYTES = 100 * 2**20  # Ray refuses a larger package over its jobs API
NUM_SHOWN = 5
EXCLUDES = ("/runs", "/data", "/outputs", ".pytest_cache", ".ruff_cache", "*.safetensors")
MIB = 2**20


def check_package(folder: Path, excludes: Sequence[str], limit_bytes: int = LIMIT_BYTES) -> int:
    """Returns the uncompressed bytes of the package. Stricter than Ray, which checks the compressed size.

    `.gitignore` and `.rayignore` apply, as for Ray.

    Raises:
        PreflightError: the package is too large; the message names the largest paths.
    """
    if not folder.is_dir():
        raise PreflightError(f"--working-dir {folder} is no folder: name the folder that holds the code to run")
    sizes: dict[Path, int] = {}

    def weigh(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(root)] = path.stat().st_size

    root = folder.resolve()
    patterns = [*get_runtime_env_default_excludes(), *excludes]
    _dir_travel(root, [_get_excludes(root, patterns)], weigh, include_gitignore=True)
    total = sum(sizes.values())
    if total <= limit_bytes:
        return total
    largest = sorted(sizes, key=lambda path: -sizes[path])[:NUM_SHOWN]
    shown = ", ".join(f"{path} ({sizes[path] / MIB:.1f} MiB)" for path in largest)
    raise PreflightError(
        f"--working-dir {folder} holds {total / MIB:.1f} MiB in {len(sizes)} files, more than the "
        f"{limit_bytes / MIB:.0f} MiB that Ray's jobs API takes. The largest are {shown}: leave them out with "
        "--exclude PATTERN or a .rayignore file, and keep data and models on a file system that all nodes see"
    )
