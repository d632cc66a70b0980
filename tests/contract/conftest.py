"""Engines that all contract tests share: each is loaded once, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engines import Engine, Model, new_learner, open_model, start_actor
from skipping_engine import SkippingActor

from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

ENGINES = {
    "vllm-untied": ("vllm", "untied"),
    "vllm-tied": ("vllm", "tied"),
    "vllm-bfloat16": ("vllm", "bfloat16"),
    "huggingface": ("huggingface", "untied"),
}


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """One model with an output layer of its own, one that shares it with the input embedding and whose engine keeps the
    KV of running requests over a push, and one that is computed in bfloat16."""
    found = {}
    for name in ("untied", "tied", "bfloat16"):
        folder = tmp_path_factory.mktemp(name)
        write_tiny_qwen2_5_vl(folder / "model", seed=0, tie_word_embeddings=name != "untied")
        kv_cache = "keep" if name == "tied" else "recompute"
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        found[name] = open_model(folder / "model", f"weight_sync.kv_cache={kv_cache}", f"resources.dtype={dtype}")
    return found


@pytest.fixture(scope="package")
def engines(request: pytest.FixtureRequest, local_ray: str, models: dict[str, Model]) -> Iterator[dict[str, Engine]]:
    """The engines that the chosen tests name, loaded side by side."""
    chosen = {item.callspec.params.get("engine_name") for item in request.session.items if hasattr(item, "callspec")}
    started = {
        name: start_actor(models[model], kind, index, SkippingActor)
        for index, (name, (kind, model)) in enumerate(ENGINES.items())
        if name in chosen
    }

    async def load() -> None:
        await asyncio.gather(*(engine.client.start() for engine in started.values()))

    async def close() -> None:
        await asyncio.gather(*(engine.close() for engine in started.values()))

    asyncio.run(load())
    yield started
    asyncio.run(close())


@pytest.fixture
def learner(engine_name: str, models: dict[str, Model]) -> Iterator[Learner]:
    """A learner of the engine's model, with the checkpoint's weights."""
    _, model = ENGINES[engine_name]
    learner = new_learner(models[model])
    yield learner
    learner.close()


@pytest.fixture
async def engine(engine_name: str, engines: dict[str, Engine], learner: Learner) -> Engine:
    """The engine that the test's parameter names, at version 0 with the checkpoint's own weights."""
    await engines[engine_name].serve(learner, version=0)
    return engines[engine_name]
