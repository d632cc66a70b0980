"""Python environments of reward functions that need other packages, or other versions, than Mobula."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mobula.cluster.files import install_folder
from mobula.cluster.user_code import file_at
from mobula.configs.schema.rewards import RewardComponent, RewardsConfig

TAIL = 15  # lines of the installer
POLL_S = 0.2


def python_of(component: RewardComponent, rewards: RewardsConfig, timeout_s: float) -> str:
    """Returns the Python that runs the component's function, which it installs once a node; empty for Mobula's own.

    Raises:
        ValueError: the Python or the file does not exist, or the packages cannot be installed.
    """
    if component.python:
        if shutil.which(component.python) is None:
            raise ValueError(f"python={component.python} cannot be run: give the path of a Python that every node has")
        return component.python
    if not component.requirements:
        return ""
    try:
        path = file_at(component.requirements)
    except ValueError as error:
        raise ValueError(f"requirements: {error}: give a file that every node has") from error
    digest = hashlib.sha256(b"\0".join([path.read_bytes(), sys.version.encode()])).hexdigest()[:16]
    folder = rewards.environments_path.expanduser().absolute() / digest
    python = folder / "bin" / "python"
    deadline = time.monotonic() + timeout_s
    with _alone(folder.with_suffix(".lock"), deadline):
        install_folder(folder, python.exists, lambda built: _install(path, built, deadline))
    return str(python)


def _install(requirements: Path, folder: Path, deadline: float) -> None:
    uv = _uv()
    python = folder / "bin" / "python"
    _run([uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder)], requirements, deadline)
    _run([uv, "pip", "install", "--python", str(python), "--requirements", str(requirements)], requirements, deadline)


def _uv() -> str:
    if found := shutil.which("uv"):
        return found
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise ValueError("requirements need uv, which is not installed: pip install 'mobula[requirements]'") from error
    return str(find_uv_bin())


def _run(command: list[str], requirements: Path, deadline: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"requirements={requirements} are not installed in time: raise timeouts.start_s") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-TAIL:])
        raise ValueError(f"requirements={requirements} cannot be installed: correct the file. uv says:\n{last}")


@contextmanager
def _alone(path: Path, deadline: float) -> Iterator[None]:
    """Holds the lock of an environment: the first process of a node installs it, the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"{path} was locked by another process, which installs these packages, until the deadline: "
                        "raise timeouts.start_s"
                    ) from None
                time.sleep(POLL_S)
        yield
