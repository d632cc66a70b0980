"""Images built by buildah below one folder, on a Debian that debootstrap makes there, without a registry of images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("buildah", "debootstrap")
SOURCES = Path("/etc/apt")
CERTIFICATES = "/run/certificates.crt"  # in a build: those that this machine trusts
INDEX_SETTINGS = re.compile(r"PIP_|UV_|(HTTPS?|NO)_PROXY$", re.IGNORECASE)
FREE_GIB = 30  # 27 were seen: the installed packages in the container, in two files of its layer, and in the image
BUILD_S = 1500.0
RELEASE = "bookworm"
BASE = "localhost/debian:latest"


def reason_against(folder: Path) -> str | None:
    """Why no image can be built below `folder`."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: buildah, debootstrap)"
    if os.geteuid() != 0:
        return "debootstrap and buildah's chroot isolation need root"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system: every container would be a whole copy of its image"
    free = shutil.disk_usage(folder).free >> 30
    if free < FREE_GIB:
        return f"{free} GiB are free at {folder}, an image of the package takes up to {FREE_GIB} while it is built"
    mirror = debian_mirror()
    if mirror is None:
        return f"no Debian mirror is named in {SOURCES}/sources.list*"
    try:
        urllib.request.urlopen(f"{mirror}/dists/{RELEASE}/Release", timeout=20).close()
    except OSError as error:
        return f"the Debian mirror of {SOURCES} does not have {RELEASE}: {error}"
    return None


def debian_mirror(sources: Path = SOURCES) -> str | None:
    """The mirror of Debian's packages that apt uses here."""
    paths = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]
    for path in paths:
        for line in path.read_text().splitlines() if path.is_file() else ():
            found = re.match(r"(?:URIs:|deb(?: \[.*?\])?) +(https?://\S+/debian)/?(?:\s|$)", line)
            if found:
                return found[1]
    return None


@dataclass(frozen=True)
class Buildah:
    """Containers and images below `folder`, which are gone when it is removed."""

    folder: Path

    def make_base(self) -> str:
        """A minimal Debian as an image; returns its name."""
        root, context = self.folder / "debian", self.folder / "context"
        mirror = debian_mirror()
        assert mirror is not None
        _run(["debootstrap", "--variant=minbase", RELEASE, str(root), mirror], self._env)
        context.mkdir()
        _run(["tar", "-C", str(root), "-cf", str(context / "debian.tar"), "."], self._env)
        shutil.rmtree(root)
        (context / "Containerfile").write_text("FROM scratch\nADD debian.tar /\n")
        self.build(context / "Containerfile", context, BASE)
        shutil.rmtree(context)
        return BASE

    def build(self, file: Path, context: Path, name: str, **arguments: str) -> None:
        """Build `file` with these build arguments and with this machine's settings for package indexes."""
        words = ["build", "--isolation=chroot", "--pull=never", f"--file={file}", f"--tag={name}"]
        words += [f"--build-arg={key}={value}" for key, value in arguments.items()]
        found = {key: value for key, value in os.environ.items() if INDEX_SETTINGS.match(key)}
        settings = {key: value for key, value in found.items() if not value.startswith("/")}  # a build has no such path
        if trusted := os.environ.get("SSL_CERT_FILE"):
            words.append(f"--volume={trusted}:{CERTIFICATES}:ro")
            settings |= {"PIP_CERT": CERTIFICATES, "SSL_CERT_FILE": CERTIFICATES}
        words += [f"--env={key}={value}" for key, value in settings.items()]
        self.run(*words, str(context))

    def run(self, *words: str) -> str:
        """A command of buildah; returns what it prints."""
        places = [f"--root={self.folder / 'storage'}", f"--runroot={self.folder / 'run'}", "--storage-driver=overlay"]
        return _run(["buildah", *places, *words], self._env)

    def container(self, image: str) -> str:
        """A container of this image; returns its name."""
        return self.run("from", "--pull=never", image).strip()

    def remove(self) -> None:
        """Unmount and remove everything."""
        self.run("rm", "--all")
        self.run("rmi", "--all", "--force")
        shutil.rmtree(self.folder)

    @property
    def _env(self) -> Mapping[str, str]:
        temporary = self.folder / "tmp"  # layers are written here
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": str(temporary)}


def _run(command: Sequence[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, f"{' '.join(command[:6])} ...: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
