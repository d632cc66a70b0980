"""Image files: every mode comes out as the right RGB, and every unfit file as one clear MediaError."""

import os
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mobula.actors.processors.image import ImageLimits, check_image, decode_image, measure_image, read_image
from mobula.cluster.errors import MediaError

LIMITS = ImageLimits(max_image_bytes=100_000, max_decoded_pixels=1_000_000)
SOURCE = Path("image")


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def decode(content: bytes) -> Image.Image:
    return decode_image(content, SOURCE, LIMITS)


def pixels(image: Image.Image) -> list[list[tuple[int, int, int]]]:
    return [[tuple(int(v) for v in pixel) for pixel in row] for row in np.asarray(image)]


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


RED, WHITE, PINK = (255, 0, 0), (255, 255, 255), (255, 127, 127)


def palette_with_transparency() -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    return encode(image, transparency=1)


def two_pixels(mode: str, left: object, right: object) -> Image.Image:
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), left)
    image.putpixel((1, 0), right)
    return image


def sixteen_bit(mode: str) -> Image.Image:
    dtype = {"I;16": np.uint16, "I": np.int32}[mode]
    return Image.fromarray(np.array([[257 * 10, 65535]], dtype=dtype))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(encode(two_pixels("RGB", RED, WHITE)), [RED, WHITE], id="RGB"),
        pytest.param(encode(two_pixels("RGBA", (*RED, 255), (0, 0, 0, 0))), [RED, WHITE], id="RGBA"),
        pytest.param(encode(two_pixels("RGBA", (*RED, 128), (*RED, 0))), [PINK, WHITE], id="half-transparent"),
        pytest.param(encode(two_pixels("LA", (10, 255), (10, 0))), [(10,) * 3, WHITE], id="LA"),
        pytest.param(encode(two_pixels("L", 10, 200)), [(10,) * 3, (200,) * 3], id="L"),
        pytest.param(encode(two_pixels("L", 10, 200), transparency=200), [(10,) * 3, WHITE], id="L-transparent"),
        pytest.param(encode(two_pixels("RGB", RED, (1, 2, 3)), transparency=(1, 2, 3)), [RED, WHITE], id="RGB-keyed"),
        pytest.param(encode(two_pixels("1", 0, 1)), [(0,) * 3, WHITE], id="1"),
        pytest.param(palette_with_transparency(), [RED, WHITE], id="P"),
        pytest.param(encode(two_pixels("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "TIFF"), [RED, WHITE], id="CMYK"),
        pytest.param(encode(sixteen_bit("I;16")), [(10,) * 3, WHITE], id="I;16"),
        pytest.param(encode(sixteen_bit("I"), "TIFF"), [(10,) * 3, WHITE], id="I"),
    ],
)
def test_every_mode_becomes_rgb_on_white(content: bytes, expected: list[tuple[int, int, int]]) -> None:
    image = decode(content)
    assert image.mode == "RGB"
    assert pixels(image) == [expected]


def test_an_image_is_turned_upright_and_its_area_measured_without_decoding() -> None:
    sideways = Image.new("RGB", (40, 20))
    exif = sideways.getexif()
    exif[0x0112] = 6  # shown turned by a quarter
    content = encode(sideways, "JPEG", exif=exif)
    assert decode(content).size == (20, 40)
    assert measure_image(content, SOURCE, LIMITS) == (20, 40)


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(decode(content))[0][0] == RED


def png(num: int = 64) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (num, num, 3), dtype=np.uint8)
    return encode(Image.fromarray(noise))


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
    with pytest.raises(MediaError, match=f"unfit.png.*{message}"):
        check_image(path, LIMITS)
    with pytest.raises(MediaError, match=f"unfit.png.*{message}"):
        decode_image(read_image(path, LIMITS), path, LIMITS)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_that_pillow_only_warns_about_is_refused() -> None:
    with pytest.raises(MediaError, match="data.max_decoded_pixels"):
        measure_image(png_header(10_000, 10_000), SOURCE, LIMITS)


@pytest.mark.parametrize("content", [png()[:-2000], png_header(100, 100)], ids=["truncated", "too little data"])
def test_a_damaged_image_is_refused_when_it_is_decoded(content: bytes) -> None:
    with pytest.raises(MediaError, match="image is corrupt"):
        decode(content)


@given(st.binary(min_size=1, max_size=30), st.integers(0, 2000))
def test_damage_anywhere_gives_an_image_or_a_media_error(damage: bytes, place: int) -> None:
    content = bytearray(png(32))
    place %= len(content)
    content[place : place + len(damage)] = damage
    try:
        assert decode(bytes(content)).mode == "RGB"
    except MediaError as error:
        assert str(SOURCE) in str(error)


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(MediaError, match="8 or 16 bits"):
        decode(encode(Image.new("F", (2, 2)), "TIFF"))


@pytest.mark.parametrize("read", [check_image, read_image])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, read: object) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent.png", tmp_path, tmp_path / "pipe"):
        with pytest.raises(MediaError, match=f"{path.name} is missing or no regular file"):
            read(path, LIMITS)


def test_a_file_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.png"
    path.write_bytes(png())

    def refuse(*_: object) -> None:  # file modes would not do: root may read everything
        raise PermissionError("permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for read in (check_image, read_image):
        with pytest.raises(MediaError, match="locked.png cannot be read .permission denied"):
            read(path, LIMITS)
