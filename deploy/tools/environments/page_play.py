"""Play in the browser: a page on loopback that shows the conversation, pictures and rewards, and takes turns."""

from __future__ import annotations

import asyncio
import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader

from actors.environments.base import place_of
from deploy.tools.environments.game import Game, PlayedEpisode

TEMPLATE = "play.html.j2"
MAX_CHARS = 100_000  # of one turn

Given = Annotated[str, Header(alias="X-Mobula-Play")]
Fields = Annotated[dict[str, Any], Body()]


def make_page(game: Game, name: str, seed: int) -> FastAPI:
    """The page as an ASGI application. A turn needs the word that only the page has: other sites cannot play."""
    word, lock = secrets.token_urlsafe(24), asyncio.Lock()
    templates = Templates(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = templates.get_template(TEMPLATE).render(name=name, word=word, nonce=(nonce := secrets.token_urlsafe(12)))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
    )
    app = FastAPI(title="Mobula play", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def show() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    async def played(given: str, turn: Callable[[], Awaitable[PlayedEpisode]]) -> Response:
        if not hmac.compare_digest(given.encode(), word.encode()):
            return JSONResponse({"detail": "this request is not from the page"}, 403)
        async with lock:  # two clicks are two turns, one after the other
            try:
                return JSONResponse(as_json(game, await turn()))
            except ValueError as error:
                return JSONResponse({"detail": str(error)}, 409)

    @app.post("/begin")
    async def begin(body: Fields, given: Given = "") -> Response:
        wanted = body.get("seed", seed)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
            return JSONResponse({"detail": f"{wanted!r} is no seed: give a whole number"}, 422)
        return await played(given, lambda: game.begin(wanted))

    @app.post("/act")
    async def act(body: Fields, given: Given = "") -> Response:
        text = body.get("text")
        if not isinstance(text, str) or len(text) > MAX_CHARS:
            return JSONResponse({"detail": f"a turn is a text of at most {MAX_CHARS} characters"}, 422)
        return await played(given, lambda: game.act(text))

    @app.post("/policy")
    async def let_policy_act(given: Given = "") -> Response:
        return await played(given, game.let_policy_act)

    return app


def as_json(game: Game, episode: PlayedEpisode) -> dict[str, Any]:
    """Data of the page."""
    return {
        "seed": episode.seed,
        "messages": [
            {
                "role": message.role,
                "text": (message.text.replace(place_of(message), "") if message.pictures else message.text).strip(),
                "pictures": [base64.b64encode(picture).decode("ascii") for picture in message.pictures],
            }
            for message in episode.messages
        ],
        "rewards": episode.rewards,
        "statuses": episode.statuses,
        "total": episode.total,
        "outcome": episode.outcome,
        "failure": episode.failure,
        "max_turns": game.max_turns,
        "has_policy": game.has_player,
    }
