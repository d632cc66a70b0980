"""Rewards over HTTP with aiohttp and nothing else: no schema, limits, deadlines, retries, metrics or lanes.

As a program, `python -m benchmarks.raw.raw_rewards REWARDS.yaml`, it is the server: it says its port and serves until
it is killed. `post_all` is the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

from mobula.cluster.records.trajectory import Response, Reward
from mobula.configs.load import load_rewards
from mobula.rewards.components import RewardScoring
from mobula.rewards.contract import RewardRequest
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TIMEOUT_S = 60.0


def local_scoring(path: Path) -> RewardScoring:
    """The functions of a rewards file, in this process."""
    isolated = IsolatedProcess(timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)
    return RewardScoring(load_rewards(path), None, Tools(isolated, "cpu", "float32"))


async def post_all(url: str, bodies: Sequence[bytes], concurrency: int) -> list[float]:
    """The rewards of all bodies, in order."""
    gate = asyncio.Semaphore(concurrency)

    async def post(session: aiohttp.ClientSession, body: bytes) -> list[float]:
        async with gate, session.post(url, data=body) as reply:
            reply.raise_for_status()
            return json.loads(await reply.read())["rewards"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        answers = await asyncio.gather(*(post(session, body) for body in bodies))
    return [reward for answer in answers for reward in answer]


def _serve(path: Path) -> None:
    scoring = local_scoring(path)

    async def score(request: web.Request) -> web.Response:
        rewards = scoring.rewards([_request(sample) for sample in json.loads(await request.read())["samples"]])
        assert all(isinstance(reward, Reward) for reward in rewards), rewards
        return web.json_response({"rewards": [reward.value for reward in rewards]})

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/score", score)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        sys.stdout.write(f"http://{host}:{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(serve())


def _request(sample: dict) -> RewardRequest:
    response = Response(sample["response"], sample["num_tokens"], sample["is_truncated"])
    return RewardRequest(response, tuple(sample["references"]), sample["metadata"], sample["prompt"])


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
