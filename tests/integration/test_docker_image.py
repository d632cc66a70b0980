"""The CPU image of deploy/docker, built on a Debian made here, and commands that run in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from buildah import Buildah, reason_against
from jobs import REPOSITORY

FOLDER = Path("/var/tmp")  # as for buildah: often a disk where /tmp is memory
IMAGE = "localhost/mobula:cpu"
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2400)]


@pytest.fixture
def buildah() -> Iterator[Buildah]:
    reason = reason_against(FOLDER)
    if reason is not None:
        pytest.skip(reason)
    found = Buildah(Path(tempfile.mkdtemp(prefix="mobula-image-", dir=FOLDER)))
    try:
        yield found
    finally:
        found.remove()


def test_the_cpu_image_is_built_and_its_commands_run(buildah: Buildah) -> None:
    dockerfile = REPOSITORY / "deploy" / "docker" / "Dockerfile"
    buildah.build(dockerfile, REPOSITORY, IMAGE, BASE=buildah.make_base(), EXTRA="cpu")
    container = buildah.container(IMAGE)

    def in_container(*words: str) -> str:
        return buildah.run("run", "--isolation=chroot", container, "--", *words)

    assert in_container("mobula", "--version").strip() == f"mobula {metadata.version('mobula')}"
    assert "workers fit this machine" in in_container("mobula", "plan", "resources=laptop")
    assert in_container("id", "-u").strip() == "10001", "not root"
    in_container("python", "-c", "import torch, vllm")
