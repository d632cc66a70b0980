"""Downloads media from allowed hosts, once per URL, with limits of size, redirects and time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import httpx

from mobula.actors.datasets.images import NUM_SHOWN_OF_URL, ImageError, WebFile
from mobula.actors.datasets.videos import FrameList, Video
from mobula.cluster.proxies import ProxiedTransport

MAX_PARALLEL = 8  # downloads of one prompt


@dataclass(frozen=True)
class DownloadLimits:
    """The largest file of a kind of media, `data.max_redirects` and `data.download_timeout_s`."""

    max_bytes: int
    max_bytes_key: str  # configuration key of `max_bytes`
    max_redirects: int
    timeout_s: float


class MediaDownloads:
    """Downloads files into the cache `folder`, named by a hash of the URL."""

    def __init__(self, folder: Path, allowed_hosts: Collection[str], limits: DownloadLimits) -> None:
        self._folder = folder
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._limits = limits

    def fetch(self, url: str) -> Path:
        """Returns the file of a URL; downloads it unless it is cached.

        Raises:
            ImageError: the host (also of a redirect) is not allowed, or the download fails or exceeds a limit.
        """
        self.check(url)
        path = self._folder / hashlib.sha256(url.encode()).hexdigest()
        if not path.is_file():
            try:
                self._download(url, path)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise _failed(url, f"{type(error).__name__}: {error}") from error
        return path

    def check(self, url: str) -> None:
        """Raises: ImageError: the host of the URL is not allowed. Opens no connection."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = None
        self._check_host(parsed, url)

    def _download(self, url: str, path: Path) -> None:
        """Writes the file atomically."""
        limits, deadline = self._limits, time.monotonic() + self._limits.timeout_s
        client = httpx.Client(
            transport=ProxiedTransport(),
            follow_redirects=True,
            max_redirects=limits.max_redirects,
            timeout=limits.timeout_s,
            event_hooks={"request": [lambda request: self._check_host(request.url, url)]},  # also called for redirects
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        with client, client.stream("GET", url) as response:
            response.raise_for_status()
            with NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as draft:
                try:
                    num_bytes = 0
                    for chunk in response.iter_bytes():
                        num_bytes += len(chunk)
                        if num_bytes > limits.max_bytes:
                            raise _failed(url, f"it has more than {limits.max_bytes_key}={limits.max_bytes:,} bytes")
                        if time.monotonic() > deadline:
                            raise _failed(url, f"it took longer than data.download_timeout_s={limits.timeout_s:g}")
                        draft.write(chunk)
                    draft.flush()
                    os.replace(draft.name, path)
                except BaseException:
                    os.unlink(draft.name)
                    raise

    def _check_host(self, url: httpx.URL | None, asked: str) -> None:
        host = url.host.lower() if url is not None else ""
        if url is None or url.scheme not in ("http", "https") or host not in self._allowed:
            raise ImageError(
                "host_not_allowed",
                f"{asked[:NUM_SHOWN_OF_URL]} is on {host or 'no host'}, which data.allowed_hosts does not have: "
                "add the host, or store the file in the data folder",
            )


class LateDownloads:
    """Implements `Downloads`: checks hosts at once, and leaves the download to the process that reads the file."""

    def __init__(self, downloads: MediaDownloads) -> None:
        self._downloads = downloads

    def fetch(self, url: str) -> WebFile:
        """Returns the file of a URL, not downloaded yet.

        Raises:
            ImageError: the host is not allowed.
        """
        self._downloads.check(url)
        return WebFile(url, self._downloads.fetch)


def web_files(media: Iterable[Video]) -> list[WebFile]:
    """The web files among images, videos, frames and sounds; each URL once."""
    files = (file for medium in media for file in (medium.frames if isinstance(medium, FrameList) else (medium,)))
    return list({file.url: file for file in files if isinstance(file, WebFile)}.values())


def fetch_together(media: Iterable[Video]) -> None:
    """Downloads the web files among `media` in parallel.

    Raises:
        ImageError: a file cannot be downloaded.
    """
    files = web_files(media)
    if files:
        with ThreadPoolExecutor(min(len(files), MAX_PARALLEL)) as pool:
            list(pool.map(WebFile.local, files))


def _failed(url: str, reason: str) -> ImageError:
    return ImageError(
        "download_failed", f"{url[:NUM_SHOWN_OF_URL]} cannot be downloaded ({reason}): check the URL, or remove its row"
    )
