"""Tools on ordinary rows: the policy looks at images of its question again, and calls functions of the user."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, Literal, get_args

from PIL import Image, ImageDraw, ImageOps
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mobula.actors.environments.base import (
    IMAGE_MARK,
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Reset,
    Step,
    Tool,
    ToolCall,
    as_png,
    marked_message,
)
from mobula.cluster.user_code import load

IMAGES = "images"  # the parameter of a user's function that is given the images of the episode
MIN_SIDE = 28  # pixels: smaller results are enlarged, as models take none below a patch
MAX_ASPECT = 100  # processors refuse longer images
MAX_ERROR = 1000  # characters of an error that the policy observes
RELATIVE = 1000.0  # the range of relative coordinates
WEB = ("http://", "https://")
Box = list[float]
Coordinates = Literal["shown", "relative", "file"]
Parts = Sequence[str | Image.Image]


class BadCallError(Exception):
    """A call cannot be answered; the policy observes the text."""


@dataclass(frozen=True)
class Callee:
    """A tool and the function that answers its calls with texts and images."""

    tool: Tool
    call: Callable[[Mapping[str, Any]], Parts]


class RowTools:
    """An environment on rows: turns with calls are answered, the first turn without one is the answer.

    The names and arguments of the image tools are those of DeepEyes (arXiv:2505.14362) and Pixel Reasoner
    (arXiv:2505.15966), with which released models were trained. The reward has the part `calls`: the number of answered
    calls.
    """

    def __init__(
        self,
        *,
        image_tools: Sequence[str],
        tools: Sequence[str] = (),
        coordinates: Coordinates = "shown",
        max_calls: int = 4,
        max_pixels: int = 2**20,
        is_deterministic: bool = True,
        blank_results: bool = False,
    ) -> None:
        """`coordinates` of boxes: `shown` are pixels of the image as the model sees it, `relative` go from 0 to 1000,
        `file` are pixels of the file. `max_calls` bounds an episode, `max_pixels` the images of
        one result; larger ones are scaled down. `blank_results` is a control: results are grey.

        Raises:
            ValueError: a tool is unknown, or no function.
        """
        if coordinates not in get_args(Coordinates):
            raise ValueError(f"options.coordinates={coordinates!r} is unknown: use {', '.join(get_args(Coordinates))}")
        self._coordinates, self._max_calls, self._max_pixels = coordinates, max_calls, max_pixels
        self._is_blank = blank_results
        own: dict[str, Callable[..., Any]] = {
            "image_zoom_in_tool": self._zoom,
            "crop_image": self._crop,
            "image_rotate_tool": self._rotate,
            "image_mark_tool": self._mark,
        }
        if unknown := [name for name in image_tools if name not in own]:
            raise ValueError(f"image_tools has {unknown[0]!r}: use {', '.join(own)}")
        made = [self._of_function(own[name], name) for name in image_tools]
        for target in tools:
            if target.startswith(WEB):
                made += _of_server(target)
            else:
                made.append(self._of_function(load(target), target.rpartition(":")[2]))
        self._callees = {callee.tool.name: callee for callee in made}
        if not made or len(self._callees) < len(made):
            names = ", ".join(callee.tool.name for callee in made)
            raise ValueError(f"environment.tools and options.image_tools are {names or 'empty'}: give distinct names")
        listed = tuple(callee.tool for callee in made)
        self.spec = EnvironmentSpec(max_calls + 1, listed, is_deterministic, demonstrates=True, plays_rows=True)
        self.reset(seed=0, options={})

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """`options` has the row: `images` (base64), `shown` sizes [width, height], and `turns` to demonstrate."""
        files = [ImageOps.exif_transpose(_opened(base64.b64decode(text))) for text in options.get(IMAGES, ())]
        self._images = [image.convert("RGB") for image in files]  # of the question, then of results
        self._num_files, self._shown = len(files), list(options.get("shown", ()))
        self._turns = list(options.get("turns", ()))
        self._num_calls = 0
        return Reset((), {})

    def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step((), {"calls": 0.0}, not action.is_truncated, action.is_truncated, {})
        answers = [self._answered(call) for call in action.tool_calls]
        num_ok = sum(is_ok for is_ok, _ in answers)
        return Step(tuple(message for _, message in answers), {"calls": float(num_ok)}, False, False, {})

    def demonstrate(self) -> str:
        return self._turns.pop(0) if self._turns else ""

    def close(self) -> None:
        """Nothing is held."""

    def _answered(self, call: ToolCall) -> tuple[bool, Message]:
        try:
            parts = self._called(call)
        except EpisodeError:
            raise
        except (Exception, SystemExit) as error:  # a tool of the user may raise anything; the policy observes it
            kind = "" if isinstance(error, BadCallError) else f"{type(error).__name__}: "
            return False, Message("tool", _plain(f"error: {kind}{error}")[:MAX_ERROR])
        images = [part for part in parts if isinstance(part, Image.Image)]
        self._images += images
        text = "".join(_plain(part) if isinstance(part, str) else IMAGE_MARK for part in parts)
        return True, marked_message("tool", text, [as_png(image) for image in images])

    def _called(self, call: ToolCall) -> Parts:
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            raise BadCallError(f"no calls are left after {self._max_calls}: give the answer")
        if call.status != "ok":
            raise BadCallError(call.error.removeprefix("error: "))
        parts = self._callees[call.name].call(call.arguments)
        most = self._max_pixels // max(1, sum(isinstance(part, Image.Image) for part in parts))
        return [part if isinstance(part, str) else self._admitted(part, most) for part in parts]

    def _admitted(self, image: Image.Image, max_pixels: int) -> Image.Image:
        """Scales an image to a size that models take. Raises: BadCallError: it is too long."""
        short, long = sorted(image.size)
        if long > MAX_ASPECT * short:
            raise BadCallError(f"the result of {image.width} x {image.height} pixels is too long: ask for another")
        scale = max(min(1.0, math.sqrt(max_pixels / (short * long))), MIN_SIDE / short)
        image = ImageOps.scale(image.convert("RGB"), scale, Image.Resampling.BICUBIC)
        return Image.new("RGB", image.size, (128, 128, 128)) if self._is_blank else image

    def _image(self, number: int) -> Image.Image:
        if not 1 <= number <= len(self._images):
            raise BadCallError(f"there is no image {number}: there are {len(self._images)}")
        return self._images[number - 1]

    def _box(self, given: Box, number: int) -> tuple[int, int, int, int]:
        """Returns the box in pixels of the image, cut at its borders. Raises: BadCallError: it has no area in it."""
        width, height = self._image(number).size
        across, down = float(width), float(height)
        if self._coordinates == "relative":
            across = down = RELATIVE
        elif self._coordinates == "shown" and number <= self._num_files:  # results are shown as they are
            if number > len(self._shown):
                raise EpisodeError(
                    "no_shown_size",
                    "the size in which policy.model sees an image is not known: set environment.options.coordinates "
                    "to relative or file",
                )
            across, down = self._shown[number - 1]
        if len(given) != 4 or not all(map(math.isfinite, given)):
            raise BadCallError(f"bbox_2d={given} is no box: give four finite numbers")
        x1, y1, x2, y2 = given
        left, right = (min(max(x / across * width, 0), width) for x in (x1, x2))
        top, bottom = (min(max(y / down * height, 0), height) for y in (y1, y2))
        if right <= left or bottom <= top:
            raise BadCallError(
                f"bbox_2d={given} has no area in image {number}, which goes from 0 to {across:g} across and to "
                f"{down:g} down: give left, top, right, bottom"
            )
        return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)

    def _zoom(self, bbox_2d: Box, label: str = "", target_image: int = 1) -> Image.Image:
        """Zoom in on a region of an image. bbox_2d is [left, top, right, bottom]; label names its content."""
        return self._crop(bbox_2d, target_image)

    def _crop(self, bbox_2d: Box, target_image: int = 1) -> Image.Image:
        """Crop a region of an image. bbox_2d is [left, top, right, bottom]; target_image counts images from 1."""
        return self._image(target_image).crop(self._box(bbox_2d, target_image))

    def _rotate(self, angle: float, target_image: int = 1) -> Image.Image:
        """Rotate an image by an angle in degrees, counterclockwise."""
        if not math.isfinite(angle):
            raise BadCallError(f"angle={angle} is no angle: give degrees")
        return self._image(target_image).rotate(angle % 360, Image.Resampling.BICUBIC, expand=True)

    def _mark(self, bbox_2d: Box, label: str = "", target_image: int = 1) -> Image.Image:
        """Draw a box on an image. bbox_2d is [left, top, right, bottom]; label is written at it."""
        left, top, right, bottom = self._box(bbox_2d, target_image)
        image = self._image(target_image).copy()
        draw = ImageDraw.Draw(image)
        draw.rectangle((left, top, right - 1, bottom - 1), outline=(255, 0, 0), width=max(1, min(image.size) // 100))
        draw.text((left + 2, top + 2), label, fill=(255, 0, 0))
        return image

    def _of_function(self, function: Callable[..., Any], name: str) -> Callee:
        """The tool of a Python function: arguments from its signature, the description from its docstring. A parameter
        `images` is given the images of the episode.

        Raises:
            ValueError: it has no docstring, or a parameter that has no name or no type with a JSON form.
        """
        if not callable(function) or not (description := inspect.getdoc(function)):
            raise ValueError(f"tool {name}: give a function with a docstring, which says to the policy when to call it")
        parameters = inspect.signature(function, eval_str=True).parameters
        if unnamed := [key for key, p in parameters.items() if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
            raise ValueError(f"tool {name}: arguments are given by name, which {unnamed[0]} does not take: name each")
        fields: dict[str, Any] = {
            key: (Any if p.annotation is p.empty else p.annotation, ... if p.default is p.empty else p.default)
            for key, p in parameters.items()
            if key != IMAGES
        }
        try:
            model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            schema = model.model_json_schema()
        except Exception as error:  # pydantic raises errors of many types
            raise ValueError(f"tool {name}: its types have no JSON schema ({error}): annotate plain ones") from error

        def call(arguments: Mapping[str, Any]) -> Parts:
            try:
                given = dict(model.model_validate(dict(arguments)))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise BadCallError(f"{where}: {first['msg']}, got {first['input']!r:.80}") from None
            if IMAGES in parameters:
                given[IMAGES] = [image.copy() for image in self._images]
            result = function(**given)
            return _parts(asyncio.run(result) if inspect.iscoroutine(result) else result)

        return Callee(_tool(name, description, schema), call)


def _of_server(url: str) -> list[Callee]:
    """The tools of an MCP server at a URL. Each call is a session, so a server that restarts costs nothing.

    Raises:
        ValueError: the server does not answer.
    """
    from mcp import Client, MCPError  # slow import, and an extra

    async def listed() -> list[Any]:
        async with Client(url) as client:
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools

    async def replied(name: str, arguments: Mapping[str, Any]) -> Any:
        async with Client(url) as client:
            return await client.call_tool(name, dict(arguments))

    def call(name: str, arguments: Mapping[str, Any]) -> Parts:
        try:
            reply = asyncio.run(replied(name, arguments))
        except MCPError as error:
            raise BadCallError(str(error)) from error
        except Exception as error:  # the client raises groups of errors of its transports
            raise EpisodeError("server_unreachable", f"the MCP server at {url} does not answer ({error!r})") from error
        if reply.is_error:
            raise BadCallError("".join(part.text for part in reply.content if part.type == "text"))
        return [part for content in reply.content for part in _parts(_of_content(content))]

    try:
        tools = asyncio.run(listed())
    except Exception as error:
        raise ValueError(f"the MCP server at {url} does not list its tools ({error!r}): is it running?") from error
    return [Callee(_tool(t.name, t.description or t.name, t.input_schema), partial(call, t.name)) for t in tools]


def _of_content(content: Any) -> Any:
    if content.type == "image":
        return base64.b64decode(content.data)
    return content.text if content.type == "text" else f"({content.type} is not shown)"


def _tool(name: str, description: str, schema: Mapping[str, Any]) -> Tool:
    properties = {
        key: {k: v for k, v in of.items() if k != "title"} for key, of in schema.get("properties", {}).items()
    }
    parameters = {key: str(of.get("description", of.get("type", "any"))) for key, of in properties.items()}
    return Tool(name, description, parameters, {**schema, "properties": properties})


def _parts(result: Any) -> Parts:
    """Texts and images of a function's result: each of a list or tuple of results, else JSON."""
    if isinstance(result, list | tuple) and any(isinstance(part, Image.Image | bytes) for part in result):
        return [each for part in result for each in _parts(part)]
    if isinstance(result, bytes):
        return [_opened(result)]
    return [result if isinstance(result, str | Image.Image) else json.dumps(result)]


def _plain(text: str) -> str:
    """A text without marks of images and lone surrogates, which no file holds."""
    return text.replace(IMAGE_MARK, "").encode(errors="replace").decode()


def _opened(content: bytes) -> Image.Image:
    image = Image.open(BytesIO(content))
    image.load()
    return image
