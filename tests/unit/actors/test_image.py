"""Images are read whatever their kind is, and damaged ones are refused by name."""

import os
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from data_rows import encoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tokenizer_kinds import chat_of

from mobula.actors.datasets.media import EncodedFile
from mobula.actors.datasets.rows import Row
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
    return chat_of(model, "sampler.max_images_per_prompt=2", device="cuda", **data)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_tensors_are_those_of_the_models_own_processor(chat: ChatProcessor, kind: str) -> None:
    content = KINDS[kind]()
    with Image.open(BytesIO(content)) as opened:
        upright = reference_rgb(opened)
    row = Row("r", "<image>Which digit?", "7", "7", images=(EncodedFile(content, "file"),))
    text = chat.render([("user", row.question + chat._data.prompt_suffix)], is_open=True)
    try:
        own = chat._renderer(text=[text], images=[[upright]], return_tensors="np")
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
    patch = chat._renderer.image_processor.patch_size
    assert prompt.metadata["shown_image_sizes"] == [[columns * patch, rows * patch]]
