"""Images of rows: every form in which they are named, every kind of file, and damage that is refused by name."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_rows import LABEL_KEY, data_config, encoded, read_split, write_rows
from http_servers import MediaServer, media_server
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tokenizer_kinds import chat_of_model

from mobula.actors.datasets.media import (
    DownloadLimits,
    EncodedFile,
    ImageError,
    ImageInputs,
    MediaDownloads,
    WebFile,
    fetch_together,
)
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, RowError, count_by_reason
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.media import check_image, decode_image, measure_image, read_image
from mobula.cluster.errors import MediaError
from mobula.configs.load import load_config
from mobula.learner.policies.tiny import write_tiny

LIMITS = load_config(["experiment=digits", "data.max_image_bytes=100000", "data.max_decoded_pixels=1000000"]).data
SOURCE = Path("image")
ORIENTATION = 0x0112


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def turned(image: Image.Image, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, kind, exif=exif)


def decode(content: bytes) -> Image.Image:
    return decode_image(content, SOURCE, LIMITS)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


UNFIT = {
    "is empty": b"",
    "data.max_image_bytes": b"\x89PNG" + bytes(LIMITS.max_image_bytes),
    "no PNG": b"just some text, not an image",
    "no .* image": b"P3\n1 1\n255\n255 0 0\n",  # an image format that is text
    "no JPEG|no PNG": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "data.max_decoded_pixels": png_header(2_000, 1_000),
    "decompression bomb": png_header(60_000, 60_000),
}


@pytest.mark.parametrize(("message", "content"), UNFIT.items())
def test_an_unfit_file_is_refused_by_its_header(tmp_path: Path, message: str, content: bytes) -> None:
    path = tmp_path / "unfit.png"
    path.write_bytes(content)
    for source in (path, EncodedFile(content, "unfit.png")):
        with pytest.raises(MediaError, match=f"unfit.png.*{message}"):
            check_image(source, LIMITS)
        with pytest.raises(MediaError, match=f"unfit.png.*{message}"):
            decode_image(read_image(source, LIMITS), source, LIMITS)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_that_pillow_only_warns_about_is_refused() -> None:
    with pytest.raises(MediaError, match="data.max_decoded_pixels"):
        measure_image(png_header(10_000, 10_000), SOURCE, LIMITS)


@pytest.mark.parametrize(
    "content", [encoded(noise(64, 64))[:-2000], png_header(100, 100)], ids=["truncated", "too little data"]
)
def test_a_damaged_image_is_refused_when_it_is_decoded(content: bytes) -> None:
    with pytest.raises(MediaError, match="image is corrupt"):
        decode(content)


@given(st.binary(min_size=1, max_size=30), st.integers(0, 2000))
def test_damage_anywhere_gives_an_image_or_a_media_error(damage: bytes, place: int) -> None:
    content = bytearray(encoded(noise(32, 32)))
    place %= len(content)
    content[place : place + len(damage)] = damage
    try:
        assert decode(bytes(content)).mode == "RGB"
    except MediaError as error:
        assert str(SOURCE) in str(error)


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(MediaError, match="8 or 16 bits"):
        decode(encoded(Image.new("F", (2, 2)), "TIFF"))


@pytest.mark.parametrize("read", [check_image, read_image])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, read: object) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent.png", tmp_path, tmp_path / "pipe"):
        with pytest.raises(MediaError, match=f"{path.name} is missing or no regular file"):
            read(path, LIMITS)


def test_a_file_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.png"
    path.write_bytes(encoded(noise(64, 64)))

    def refuse(*_: object) -> None:  # file modes would not do: root may read everything
        raise PermissionError("permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for read in (check_image, read_image):
        with pytest.raises(MediaError, match="locked.png cannot be read .permission denied"):
            read(path, LIMITS)


FAMILIES = (
    "qwen2-vl|qwen2.5-vl|qwen3-vl|qwen3.5|qwen3-vl-moe|internvl3|internvl3.5|llava-onevision|idefics3|smolvlm|glm4v|"
    "gemma3|llava|qwen2.5-omni"
).split("|")


def exif_behind_pixels(orientation: int) -> bytes:
    """A PNG file whose EXIF chunk comes last, as exiftool writes it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    png = encoded(noise(150, 60))
    written = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:-12] + written + png[-12:]


def xmp_only(orientation: int) -> bytes:
    packet = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="{orientation}"/></x:xmpmeta>'
    return encoded(noise(150, 60), "JPEG", xmp=packet.encode())


def grey16(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 0x10000, (height, width), dtype=np.uint16)
    return Image.fromarray(values)


def keyed(image: Image.Image) -> bytes:
    """Pixels that equal the first one are transparent."""
    return encoded(image, transparency=image.getpixel((0, 0)))


def alpha(width: int, height: int) -> Image.Image:
    image = noise(width, height).convert("RGBA")
    image.putalpha(noise(width, height).convert("L"))
    return image


def animated(kind: str) -> bytes:
    return encoded(noise(90, 40), kind, save_all=True, append_images=[Image.new("RGB", (90, 40), "red")])


KINDS: dict[str, Callable[[], bytes]] = {
    **{f"JPEG {n}": lambda n=n: turned(noise(150, 60), "JPEG", n) for n in range(1, 9)},
    **{f"{kind} 6": lambda kind=kind: turned(noise(150, 60), kind, 6) for kind in ("PNG", "WEBP", "TIFF")},
    "TIFF 3": lambda: turned(noise(150, 60), "TIFF", 3),
    "EXIF behind the pixels": lambda: exif_behind_pixels(8),
    "orientation in XMP": lambda: xmp_only(6),
    "orientation out of range": lambda: turned(noise(150, 60), "JPEG", 9),
    "palette": lambda: encoded(noise(70, 50).quantize(16)),
    "palette with transparency": lambda: encoded(noise(70, 50).quantize(16), transparency=3),
    "alpha, turned": lambda: turned(alpha(90, 40), "PNG", 5),
    "alpha WebP": lambda: encoded(alpha(90, 40), "WEBP", lossless=True),
    "grey with alpha": lambda: encoded(alpha(40, 90).convert("LA")),
    "CMYK, turned": lambda: turned(noise(90, 40).convert("CMYK"), "JPEG", 8),
    "grey": lambda: encoded(noise(64, 64).convert("L"), "JPEG"),
    "grey with a transparent one": lambda: keyed(noise(64, 64).convert("L")),
    "a transparent colour": lambda: keyed(noise(64, 64)),
    "16 bits, turned": lambda: turned(grey16(90, 40), "PNG", 6),
    "16 bits of 32": lambda: encoded(Image.fromarray(np.asarray(grey16(90, 40)).astype(np.int32)), "TIFF"),
    "black and white": lambda: encoded(noise(90, 40).convert("1")),
    "GIF": lambda: animated("GIF"),
    "animated WebP": lambda: animated("WEBP"),
    "animated PNG": lambda: animated("PNG"),
    "1 x 1": lambda: encoded(noise(1, 1)),
    "1 x 40": lambda: encoded(noise(1, 40)),
    "40 x 1": lambda: encoded(noise(40, 1)),
    "long, turned": lambda: turned(noise(1500, 20), "JPEG", 6),
    "longer than 200 to 1": lambda: encoded(noise(1500, 5)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    model = write_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed=0)
    data = {"max_prompt_tokens": 100_000, "max_image_bytes": 10**7, "min_pixels": 784, "max_pixels": 50_176}
    return chat_of_model(model, "sampler.max_images_per_prompt=2", device="cuda", **data)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_tensors_are_those_of_the_models_own_processor(chat: ChatProcessor, kind: str) -> None:
    content = KINDS[kind]()
    with Image.open(BytesIO(content)) as opened:
        upright = reference_rgb(opened)
    row = Row("r", "<image>Which digit?", "7", "7", images=(EncodedFile(content, "file"),))
    text = chat.render([("user", row.question + chat._data.prompt_suffix)], is_open=True)
    try:
        own = chat.renderer(text=[text], images=[[upright]], return_tensors="np")
    except Exception:  # the model's own processor takes no such image: the row is left out by name
        with pytest.raises(MediaError, match=r"file is \d+ x \d+"):
            chat.prepare(row, "p")
        return
    prompt = chat.prepare(row, "p")
    np.testing.assert_array_equal(prompt.expanded_ids, own["input_ids"][0])
    assert chat.check(row) == prompt.num_tokens
    inputs = prompt.media[0].reference.inputs
    for name, values in inputs.items():
        expected = np.asarray(own[name])
        np.testing.assert_array_equal(values.reshape(expected.shape), expected)


def reference_rgb(image: Image.Image) -> Image.Image:
    """Upright, transparency on white, 16 bits scaled to 8, written with Pillow's and numpy's functions alone."""
    image.load()
    if image.format != "TIFF":  # which Pillow turns itself
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        return Image.fromarray(np.uint8(np.asarray(image) // 257)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        layers = np.asarray(image.convert("RGBA")).astype(float)
        shares = layers[..., 3:] / 255
        return Image.fromarray(np.uint8(np.rint(layers[..., :3] * shares + 255 * (1 - shares))))
    return image.convert("RGB")


@pytest.mark.parametrize("kind", ["JPEG 1", "JPEG 6", "PNG 6", "TIFF 6", "long, turned", "1 x 40", "grey"])
def test_rewards_know_the_size_of_the_upright_file_and_of_what_the_model_sees(chat: ChatProcessor, kind: str) -> None:
    content = KINDS[kind]()
    with Image.open(BytesIO(content)) as opened:
        upright = reference_rgb(opened)
    prompt = chat.prepare(Row("r", "<image>Which?", "7", "7", images=(EncodedFile(content, "file"),)), "p")
    assert prompt.metadata["image_sizes"] == [list(upright.size)]
    inputs = prompt.media[0].reference.inputs
    if "image_grid_thw" not in inputs:  # it sees tiles, or one size for all
        assert "shown_image_sizes" not in prompt.metadata
        return
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    patch = chat.renderer.image_processor.patch_size
    assert prompt.metadata["shown_image_sizes"] == [[columns * patch, rows * patch]]


PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
CONTENT = encoded(Image.fromarray(PIXELS))
DOWNLOADS = DownloadLimits(max_bytes=10_000, max_bytes_key="data.max_image_bytes", max_redirects=1, timeout_s=10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(CONTENT)
    (tmp_path / "outside.png").write_bytes(CONTENT)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    return folder


def inputs(root: Path, *hosts: str, takes_absolute: bool = False, is_late: bool = False) -> ImageInputs:
    downloads = MediaDownloads(root.parent / "cache", hosts, DOWNLOADS)
    return ImageInputs(root, downloads.later if is_late else downloads.fetch, takes_absolute=takes_absolute)


class Tensor:
    """An array as torch gives it: channels first, no numpy type."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return PIXELS.transpose(2, 0, 1)


BASE64, MIME = base64.b64encode(CONTENT).decode(), base64.encodebytes(CONTENT).decode()
NAME = "sub/a b.png"
MEDIA = ("image", "video", "audio")
FORMS: dict[str, Any] = {
    "path": NAME,
    "path with dots": "sub/../sub/a b.png",
    "path object": Path(NAME),
    "file URL": lambda root: f"file://{root}/sub/a%20b.png",
    "bytes": CONTENT,
    "bytearray": bytearray(CONTENT),
    "data URL": f"data:image/png;base64,{BASE64}",
    "PIL": lambda root: Image.open(root / NAME),
    "array": PIXELS,
    "tensor": Tensor(),
    "mapping with bytes": {"bytes": CONTENT, "path": "elsewhere.png"},
    "mapping with path": {"bytes": None, "path": NAME},
    "OpenAI": {"url": NAME, "detail": "low"},
    "JSON bytes": {"bytes": BASE64},
    "base64 of MIME": f"data:image/png;base64,{MIME}",
    "bare base64": BASE64,
    "bare base64 of MIME": MIME,
    "mapping with empty bytes": {"bytes": b"", "path": NAME},
    "base64 source": {"type": "base64", "data": BASE64},
    "float array": PIXELS / 255,
    "float tensor": torch.tensor(PIXELS).permute(2, 0, 1) / 255,
    "tensor with gradients": (torch.tensor(PIXELS) / 255).requires_grad_(),
    "list": [NAME],
    "nested list": [[NAME]],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels(root: Path, form: str) -> None:
    value = FORMS[form]
    [image] = inputs(root).resolve(value(root) if inspect.isfunction(value) else value, "row")
    assert check_image(image, LIMITS) == (7, 5)
    pixels = np.asarray(decode_image(read_image(image, LIMITS), image, LIMITS))
    np.testing.assert_array_equal(pixels, PIXELS)


def test_tensors_of_bfloat16_are_images_and_those_without_values_are_refused(root: Path) -> None:
    [image] = inputs(root).resolve(torch.full((3, 4, 6), 0.5).bfloat16(), "row")
    assert decode_image(read_image(image, LIMITS), image, LIMITS).getpixel((0, 0)) == (128, 128, 128)
    with pytest.raises(ImageError, match="no values that can be read"):
        inputs(root).resolve(torch.zeros(3, 4, 6, device="meta"), "row")
    for values in (np.full((4, 6), 255.0), np.full((4, 6), -0.1), np.full((4, 6), np.nan)):
        with pytest.raises(ImageError, match=r"bring them to \[0, 1\]"):
            inputs(root).resolve(values, "row")


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_images_of_modes_that_png_does_not_have_are_converted(root: Path, mode: str) -> None:
    image = Image.new("RGB", (6, 4), (200, 100, 50)).convert(mode)
    [resolved] = inputs(root).resolve(image, "row")
    found = decode_image(read_image(resolved, LIMITS), resolved, LIMITS).getpixel((0, 0))
    assert np.abs(np.array(found) - (200, 100, 50)).max() <= 4


def test_lists_keep_their_order_and_nothing_is_no_image(root: Path) -> None:
    black, white = (Image.new("L", (2, 2), colour) for colour in (0, 255))
    images = inputs(root).resolve([black, [white, "sub/a b.png"], b"x"], "row")
    decoded = [decode_image(read_image(p, LIMITS), p, LIMITS).getpixel((0, 0)) for p in images[:2]]
    assert decoded == [(0, 0, 0), (255, 255, 255)]
    assert [str(p) for p in images[1:]] == ["row, image 2", str(root / "sub" / "a b.png"), "row, image 4"]
    assert inputs(root).resolve(None, "row") == inputs(root).resolve([], "row") == ()


def test_grey_alpha_and_one_channel_arrays_are_images(root: Path) -> None:
    for shape in ((4, 6), (4, 6, 1), (4, 6, 4), (1, 4, 6)):
        [image] = inputs(root).resolve(np.zeros(shape, dtype=np.uint8), "row")
        assert check_image(image, LIMITS) == (6, 4)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *[(value, "outside_folder") for value in ("../outside.png", "link.png", "file:///etc/hostname")],
        ("/etc/hostname", "outside_folder"),
        *[(value, "missing_file") for value in ("absent.png", "sub", "a\0.png", "a" * 5000, "loop.png")],
        *[(value, "bad_image") for value in ("data:image/png;base64,%%%", "data:image/png", {"detail": "low"})],
        *[(value, "bad_image") for value in ({"bytes": [b"x", b"y"]}, [["sub/a b.png", ["sub/a b.png"]]], 7)],
        *[(value, "bad_image") for value in (np.full((4, 4), 2.0), np.zeros((4, 4), dtype=np.int64))],
        *[(value, "bad_image") for value in (np.zeros((4, 4, 4, 3), dtype=np.uint8), np.zeros((0, 4), dtype=np.uint8))],
        *[(value, "host_not_allowed") for value in ("https://example.org/a.png", "http://[broken/a.png")],
    ],
)
def test_what_is_no_image_or_may_not_be_read_is_named(root: Path, value: Any, reason: str) -> None:
    with pytest.raises(ImageError) as found:
        inputs(root).resolve(value, "row")
    assert found.value.reason == reason


def test_absolute_paths_below_the_root_are_taken_where_the_root_is_given(root: Path) -> None:
    path = root / "sub" / "a b.png"
    assert inputs(root, takes_absolute=True).resolve(str(path), "row") == (path,)
    with pytest.raises(ImageError, match="leads out of"):
        inputs(root, takes_absolute=True).resolve(str(root.parent / "outside.png"), "row")
    with pytest.raises(ImageError, match="is an absolute path: write it relative to"):
        inputs(root).resolve(str(path), "row")


@pytest.fixture
def server() -> Iterator[MediaServer]:
    """/out leads to another host, /loop to itself."""
    places = {"/out": "http://localhost:{port}/ok", "/loop": "/loop", "/in": "http://127.0.0.1:{port}/ok"}
    with media_server({"/ok": CONTENT, "/large": bytes(20_000)}, redirects=places) as running:
        yield running


def rows_of_large_media(server: MediaServer) -> list[dict[str, str]]:
    return [{"question": f"<{kind}>?", "answer": "7", kind: f"{server.url}/large?{kind}"} for kind in MEDIA]


def test_an_image_of_an_allowed_host_is_downloaded_once(root: Path, server: MediaServer) -> None:
    for _ in range(2):
        for path in ("/ok", "/in"):
            [image] = inputs(root, "127.0.0.1").resolve(server.url + path, "row")
            assert read_image(image, LIMITS) == CONTENT
    assert len(server.asked) == 3, "one and a redirect, then both from the folder"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/out", "host_not_allowed"),
        ("/loop", "download_failed"),
        ("/large", "download_failed"),
        ("/absent", "download_failed"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_download_stays_within_its_limits(
    root: Path, server: MediaServer, is_late: bool, path: str, reason: str
) -> None:
    with pytest.raises(ImageError) as found:
        [image] = inputs(root, "127.0.0.1", is_late=is_late).resolve(server.url + path, "row")
        read_image(pickle.loads(pickle.dumps(image)), LIMITS)
    assert found.value.reason == reason
    assert list((root.parent / "cache").iterdir()) == [], "nothing is left of it"


def test_a_download_has_the_limit_of_its_own_kind_of_media(root: Path, server: MediaServer) -> None:
    """The server's large file is too large an image, and neither too large a video nor too large a sound."""
    rows = rows_of_large_media(server)
    split = read_split(write_rows(root, *rows), max_image_bytes=10_000, allowed_hosts=("127.0.0.1",))
    assert [len(row.videos) + len(row.audios) for row in split.rows] == [1, 1]
    assert count_by_reason(split.skipped) == {"download_failed": 1}
    assert "data.max_image_bytes=10,000" in split.skipped[0].detail


def test_a_late_download_is_made_by_the_process_that_reads_the_file(root: Path, server: MediaServer) -> None:
    [image] = inputs(root, "127.0.0.1", is_late=True).resolve(f"{server.url}/in", "row")
    assert isinstance(image, WebFile) and str(image) == f"{server.url}/in"
    assert len(server.asked) == 0 and not (root.parent / "cache").exists()
    for _ in range(2):
        there = pickle.loads(pickle.dumps(image))
        assert check_image(there, LIMITS) == (7, 5) and read_image(there, LIMITS) == CONTENT
    assert len(server.asked) == 2, "a redirect and a file, then from the folder"


def test_the_host_of_a_late_download_is_checked_before_it_is_made(root: Path, server: MediaServer) -> None:
    for url in ("https://example.org/a.png", server.url.replace("127.0.0.1", "localhost") + "/ok"):
        with pytest.raises(ImageError) as found:
            inputs(root, "127.0.0.1", is_late=True).resolve(url, "row")
        assert found.value.reason == "host_not_allowed"
    assert len(server.asked) == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "../outside.png", "http://localhost/a.png", "ftp://127.0.0.1/a"])
def test_the_reading_process_checks_the_host_as_well(root: Path, url: str) -> None:
    smuggled = WebFile(url, MediaDownloads(root.parent / "cache", ("127.0.0.1",), DOWNLOADS).fetch)
    with pytest.raises(ImageError) as found:
        read_image(smuggled, LIMITS)
    assert found.value.reason == "host_not_allowed"


def test_files_of_one_row_are_downloaded_at_the_same_time_and_each_once(root: Path) -> None:
    paths = [f"/{number}.png" for number in range(4)]
    with media_server(dict.fromkeys(paths, CONTENT), num_together=len(paths)) as server:
        urls = [server.url + path for path in paths]
        found = inputs(root, "127.0.0.1", is_late=True).resolve([*urls, urls[0]], "row")
        fetch_together(found)
        fetch_together(found)
        assert sorted(server.asked) == paths
        [absent] = inputs(root, "127.0.0.1", is_late=True).resolve(f"{server.url}/absent", "row")
        with pytest.raises(ImageError, match="/absent cannot be downloaded"):
            fetch_together([*found, absent])


def test_rows_with_late_downloads_name_their_urls_and_open_no_connection(root: Path, server: MediaServer) -> None:
    rows = rows_of_large_media(server)
    rows += [{"id": "web", "question": "<image>?", "answer": "7", "image": "https://example.org/a.png"}]
    data = data_config(write_rows(root, *rows), max_image_bytes=10_000, allowed_hosts=("127.0.0.1",))
    found = open_split(data, "train", LABEL_KEY, fetches_late=True).rows
    media = [file for place in range(3) for file in (*found[place].images, *found[place].videos, *found[place].audios)]
    assert list(map(str, media)) == [f"{server.url}/large?{kind}" for kind in MEDIA]
    with pytest.raises(RowError, match="data.allowed_hosts does not have"):
        found[3]
    assert len(server.asked) == 0
    with pytest.raises(ImageError, match="data.max_image_bytes=10,000"):
        fetch_together(media[:1])
    fetch_together(media[1:])  # each kind has its own limit


def test_the_name_of_an_image_is_that_of_its_row_or_its_path(root: Path) -> None:
    [named] = inputs(root).resolve({"bytes": CONTENT, "path": "orig/a.png"}, "train.parquet:3")
    [other] = inputs(root).resolve(CONTENT, "train.parquet:3")
    assert (str(named), str(other)) == ("orig/a.png", "train.parquet:3")
    assert isinstance(named, EncodedFile) and "content" not in repr(named)
