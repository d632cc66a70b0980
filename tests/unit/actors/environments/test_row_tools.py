"""Tools on rows: images, functions of the user, MCP servers, and what a row becomes."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from waiting import wait_until

from mobula.actors.environments.adapters.tools import RowTools
from mobula.actors.environments.base import (
    Action,
    EpisodeError,
    Step,
    parse_tool_calls,
    spec_from_json,
    spec_to_json,
)

ALL = ("image_zoom_in_tool", "crop_image", "image_rotate_tool", "image_mark_tool")
WIDTH, HEIGHT = 200, 100


def picture() -> Image.Image:
    """Each pixel tells its place."""
    across, down = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return Image.fromarray(np.stack([across, down, np.zeros_like(down)], -1).astype(np.uint8))


def base64_of(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def started(shown: tuple[int, int] = (WIDTH, HEIGHT), **options: Any) -> RowTools:
    made = RowTools(**{"image_tools": ALL, **options})
    made.reset(seed=0, options={"images": [base64_of(picture())], "shown": [list(shown)]})
    return made


def asked(environment: RowTools, name: str, **arguments: Any) -> Step:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return environment.step(Action(text, parse_tool_calls(text, environment.spec.tools)))


def shown_in(step: Step) -> np.ndarray:
    (message,) = step.observation
    assert message.role == "tool" and len(message.images) == 1, message
    return np.asarray(Image.open(BytesIO(message.images[0])))


def said(step: Step) -> str:
    (message,) = step.observation
    assert not message.images
    return message.text


@pytest.mark.parametrize(
    ("coordinates", "shown", "box"),
    [
        ("shown", (WIDTH, HEIGHT), (40, 20, 100, 60)),
        ("shown", (WIDTH // 2, HEIGHT // 2), (20, 10, 50, 30)),
        ("file", (WIDTH // 2, HEIGHT // 2), (40, 20, 100, 60)),
        ("relative", (28, 28), (200, 200, 500, 600)),
    ],
)
@pytest.mark.parametrize("name", ["image_zoom_in_tool", "crop_image"])
def test_a_box_is_that_of_the_original_in_each_kind_of_coordinates(
    name: str, coordinates: str, shown: tuple[int, int], box: tuple[int, ...]
) -> None:
    step = asked(started(shown, coordinates=coordinates), name, bbox_2d=box)
    np.testing.assert_array_equal(shown_in(step), np.asarray(picture())[20:60, 40:100])
    assert step.reward == {"calls": 1.0} and not (step.terminated or step.truncated)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"bbox_2d": [60, 20, 40, 60]}, "has no area in image 1"),
        ({"bbox_2d": [300, 200, 400, 300]}, "has no area in image 1, which goes from 0 to 200 across"),
        ({"bbox_2d": [1, 2, 3]}, "bbox_2d"),
        ({"bbox_2d": [0, 0, "x", 3]}, "bbox_2d"),
        ({"bbox_2d": [0, 0, math.nan, 3]}, "NaN is no JSON"),
        ({"bbox_2d": [0, 0, 5, 5], "target_image": 4}, "there is no image 4"),
        ({}, "bbox_2d: Field required"),
        ({"bbox_2d": [0, 0, 200, 1]}, "is too long"),
        ({"box": [0, 0, 5, 5]}, "unknown_argument"),
    ],
)
def test_a_bad_call_is_answered_with_its_error(arguments: Mapping[str, Any], why: str) -> None:
    step = asked(started(), "crop_image", **arguments)
    assert said(step).startswith("error: ") and why in said(step)
    assert step.reward == {"calls": 0.0} and not step.terminated


def test_results_are_images_of_later_calls_and_small_ones_are_enlarged() -> None:
    environment = started()
    asked(environment, "crop_image", bbox_2d=[40, 20, 100, 60])
    turned = shown_in(asked(environment, "image_rotate_tool", angle=90, target_image=2))
    np.testing.assert_array_equal(turned, np.rot90(np.asarray(picture())[20:60, 40:100]))
    small = shown_in(asked(environment, "crop_image", bbox_2d=[0, 0, 10, 5]))
    assert small.shape == (28, 56, 3)
    marked = shown_in(asked(environment, "image_mark_tool", bbox_2d=[10, 10, 60, 60], label="a"))
    assert tuple(marked[10, 30]) == (255, 0, 0) and tuple(marked[80, 30]) == (30, 80, 0)


def test_calls_and_pixels_are_bounded_and_a_turn_without_a_call_is_the_answer() -> None:
    environment = started(max_calls=2, max_pixels=3600)
    assert environment.spec.max_turns == 3
    assert shown_in(asked(environment, "crop_image", bbox_2d=[0, 0, 100, 100])).shape == (60, 60, 3)
    assert "there is no tool" in said(asked(environment, "look"))
    assert "no calls are left after 2" in said(asked(environment, "crop_image", bbox_2d=[0, 0, 5, 5]))
    over = environment.step(Action("It is 7."))
    assert over.terminated and over.observation == ()
    assert environment.step(Action("It is", is_truncated=True)).truncated


def test_boxes_need_the_size_in_which_the_model_sees_an_image() -> None:
    environment = started()
    environment.reset(seed=0, options={"images": [base64_of(picture())]})
    with pytest.raises(EpisodeError, match=r"set environment.options.coordinates to relative or file"):
        asked(environment, "crop_image", bbox_2d=[0, 0, 5, 5])


def test_blank_results_are_grey() -> None:
    assert np.unique(shown_in(asked(started(blank_results=True), "crop_image", bbox_2d=[0, 0, 60, 60]))) == [128]


FUNCTIONS = '''
from PIL import Image

def lookup(word: str, times: int = 1) -> str:
    """Look up a word.

    Args:
        word: what to look up
    """
    if word == "fail":
        raise KeyError(word)
    return word.upper() * times

def halves(images, number: int):
    """Split an image in two."""
    image = images[number - 1]
    width, height = image.size
    return ["left:", image.crop((0, 0, width // 2, height)), "right:", image.crop((width // 2, 0, width, height))]

async def later(word: str):
    """Answer later."""
    return word

def blacken(images):
    """Draw on the images that it is given."""
    images[0].paste(0, (0, 0, *images[0].size))
    return "done"

def leave(code: int):
    """Leave."""
    raise SystemExit("\\ud800" * 2000)

def undocumented(word: str):
    return word

def unnamed(*words: str):
    """Take words."""
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "my_tools.py").write_text(FUNCTIONS)
    return str(tmp_path / "my_tools.py")


def test_a_function_is_a_tool_by_its_signature_and_docstring(functions: str) -> None:
    environment = started(image_tools=(), tools=(f"{functions}:lookup", f"{functions}:halves"))
    lookup, halves = environment.spec.tools
    function = lookup.declaration["function"]
    assert function["name"] == "lookup" and "what to look up" in function["description"]
    assert function["parameters"]["required"] == ["word"]
    assert function["parameters"]["properties"]["times"] == {"default": 1, "type": "integer"}
    assert list(halves.parameters) == ["number"], "images are given by the episode"
    assert said(asked(environment, "lookup", word="ab", times=2)) == "ABAB"
    assert said(asked(environment, "lookup", word="fail")) == "error: KeyError: 'fail'"
    assert "times: Input should be a valid integer" in said(asked(environment, "lookup", word="a", times="x"))
    (message,) = asked(environment, "halves", number=1).observation
    assert message.text == "left:<image>right:<image>" and len(message.images) == 2
    assert spec_from_json(json.loads(json.dumps(spec_to_json(environment.spec)))) == environment.spec


def test_a_function_may_be_a_coroutine_and_cannot_harm_the_episode(functions: str) -> None:
    tools = tuple(f"{functions}:{name}" for name in ("later", "blacken", "leave"))
    environment = started(image_tools=["crop_image"], tools=tools)
    assert said(asked(environment, "later", word="a\ufdd2\U0001f600")) == "a\U0001f600"
    assert said(asked(environment, "blacken")) == "done"
    left = said(asked(environment, "leave", code=3))
    assert left.startswith("error: SystemExit: ????") and len(left) == 1000
    shown = shown_in(asked(environment, "crop_image", bbox_2d=[0, 0, WIDTH, HEIGHT]))
    np.testing.assert_array_equal(shown, np.asarray(picture()))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"image_tools": ["zoom"]}, "image_tools has 'zoom': use image_zoom_in_tool"),
        ({"image_tools": []}, "are empty"),
        ({"coordinates": "absolute"}, "options.coordinates='absolute' is unknown: use shown, relative, file"),
        ({"tools": ["{file}:undocumented"]}, "give a function with a docstring"),
        ({"tools": ["{file}:unnamed"]}, "which words does not take: name each"),
        ({"tools": ["{file}:lookup", "{file}:lookup"]}, "distinct names"),
        ({"tools": ["http://127.0.0.1:9/mcp"]}, "does not list its tools"),
    ],
)
def test_tools_that_cannot_be_are_refused(functions: str, options: dict[str, Any], why: str) -> None:
    options = options | {"tools": [each.replace("{file}", functions) for each in options.get("tools", ())]}
    with pytest.raises(ValueError, match=why):
        RowTools(**{"image_tools": ALL, **options})


SERVER = '''
import sys
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test")

@server.tool()
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second

@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(path=sys.argv[2])

@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("no luck")

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
'''


@pytest.fixture
def server(tmp_path: Path, unused_tcp_port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (tmp_path / "server.py").write_text(SERVER)
    picture().save(tmp_path / "drawn.png")
    arguments = [sys.executable, "server.py", str(unused_tcp_port), "drawn.png"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(arguments, cwd=tmp_path, stderr=log) as process:
        try:
            wait_until(lambda: "running on" in (tmp_path / "log").read_text())
            yield f"http://127.0.0.1:{unused_tcp_port}/mcp", process
        finally:
            process.kill()


def test_tools_of_an_mcp_server(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = server
    environment = started(image_tools=(), tools=(url,))
    assert [tool.name for tool in environment.spec.tools] == ["add", "draw", "fail"]
    assert said(asked(environment, "add", first=2, second=3)) == "5"
    np.testing.assert_array_equal(shown_in(asked(environment, "draw")), np.asarray(picture()))
    assert said(asked(environment, "fail")) == "error: Error executing tool fail"
    assert "Field required" in said(asked(environment, "add", first=2))
    environment.reset(seed=0, options={})
    process.kill()
    process.wait()
    with pytest.raises(EpisodeError, match=f"the MCP server at {url} does not answer") as gone:
        asked(environment, "draw")
    assert gone.value.kind == "server_unreachable", "the episode fails: the answer of a dead server is no observation"
