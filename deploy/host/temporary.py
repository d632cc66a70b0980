"""Chooses the session folder of a private Ray cluster if Ray's default cannot be used."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mobula.cluster.errors import PreflightError

VARIABLES = ("RAY_TMPDIR", "TMPDIR")  # as Ray reads them
FALLBACK = Path("/tmp")
SOCKET_BYTES = 107  # of the path of a Unix socket
# Below the folder: /ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store
RAY_BYTES = 72
MIN_FREE_BYTES = 32 << 20  # Ray's processes write their logs there; without space they do not start, and do not say so

_logger = logging.getLogger(__name__)


def ray_folder(environment: Mapping[str, str], fallback: Path = FALLBACK) -> Path | None:
    """Returns None if Ray's default works; else a folder below /tmp, with a warning that names the variable.

    Raises:
        PreflightError: /tmp cannot be used either.
    """
    variable = next((name for name in VARIABLES if name in environment), None)
    unfit = _fault(str(fallback))
    given = "" if variable is None else environment[variable]
    fault = unfit if variable is None else _fault(given)
    if fault is None:
        return None
    if unfit is not None:
        named = "" if variable is None else f"{variable}={given} {fault}, and "
        raise PreflightError(
            f"{named}{fallback} {unfit}: free the disk, or set RAY_TMPDIR to a short path that can be written"
        )
    _logger.warning("%s=%s %s: Ray's session is in %s/ray", variable, given, fault, fallback)
    return fallback / "ray"


def _fault(folder: str) -> str | None:
    """Returns the reason why Ray cannot use a folder; None if it can."""
    most = SOCKET_BYTES - RAY_BYTES
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        return "is no folder that can be written"
    if len(os.fsencode(folder)) > most:
        return f"is longer than the {most} bytes that Ray's sockets leave"
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        return f"is on a disk with {free >> 20} MiB free, less than the {MIN_FREE_BYTES >> 20} MiB of Ray's logs"
    if not folder.isascii() or any(letter.isspace() for letter in folder):
        return "has letters that Ray's processes do not take"
    return None
