"""What an engine serves: its weight version, its running requests, and its adapters by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from mobula.configs.schema.rollout import ServedAdaptersConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OUTPUT_LAYER = "lm_head"


class ServedVersion:
    """The weight version of new requests; -1 before the first push."""

    def __init__(self) -> None:
        self.number = -1
        self._changed = asyncio.Event()

    def set(self, number: int) -> None:
        self.number = number
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, number: int) -> None:
        """Waits for version `number` or newer, without a deadline."""
        while self.number < number:
            await self._changed.wait()


class RunningRequests:
    """Counts the requests in flight of an engine."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self._num += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num -= 1
            if self._num == 0:
                self._none.set()

    async def ended(self) -> None:
        """Waits until no request is in flight, without a deadline."""
        await self._none.wait()

    async def drained(self, timeout_s: float) -> None:
        """Waits until no request is in flight, at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)


@dataclass(eq=False)
class ServedAdapter:
    """One adapter of an engine. `number` is unique for the lifetime of the engine, from 1."""

    name: str
    number: int
    folder: Path
    adapts_output_layer: bool
    is_ready: bool = False  # loaded, and not being withdrawn
    running: RunningRequests = field(default_factory=RunningRequests)


class ServedAdapters:
    """The adapters of an engine. Weights under a name never change; an adapter that loads or leaves takes a place."""

    def __init__(self, limits: ServedAdaptersConfig) -> None:
        self._limits = limits
        self._adapters: dict[str, ServedAdapter] = {}
        self._num_added = 0

    @contextmanager
    def adding(self, name: str, folder: Path) -> Iterator[ServedAdapter]:
        """Reserves a place for an adapter, which is served once the body has loaded it."""
        limits = self._limits
        if not limits.are_on:
            raise ValueError("the engines serve no adapters: set sampler.adapters.max_served to 1 or more")
        if name in self._adapters:
            raise ValueError(f"adapter {name!r} exists: served weights never change, so give new ones another name")
        if len(self._adapters) >= limits.max_served:
            raise ValueError(
                f"adapter {name!r} is one more than sampler.adapters.max_served={limits.max_served}: withdraw another "
                "adapter, or raise the limit"
            )
        has_output_layer = _checked_folder(name, folder, limits.max_rank)
        self._num_added += 1
        adapter = self._adapters[name] = ServedAdapter(name, self._num_added, folder, has_output_layer)
        try:
            yield adapter
        except BaseException:
            del self._adapters[name]
            raise
        adapter.is_ready = True

    @asynccontextmanager
    async def removing(self, name: str) -> AsyncIterator[ServedAdapter]:
        """Refuses new requests of an adapter and waits for the running ones; its place is free after the body."""
        adapter = self._find(name)
        adapter.is_ready = False
        await adapter.running.ended()
        yield adapter
        del self._adapters[name]

    @contextmanager
    def used(self, name: str | None) -> Iterator[ServedAdapter | None]:
        """Counts a request of an adapter while the body runs. None is the base model."""
        if name is None:
            yield None
            return
        adapter = self._find(name)
        with adapter.running.one_more():
            yield adapter

    def has(self, name: str, folder: Path) -> bool:
        """Returns whether the adapter of a folder is served under this name."""
        adapter = self._adapters.get(name)
        return adapter is not None and adapter.is_ready and adapter.folder == folder

    def with_output_layer(self) -> list[str]:
        return [adapter.name for adapter in self._adapters.values() if adapter.adapts_output_layer]

    def _find(self, name: str) -> ServedAdapter:
        if name not in self._adapters or not self._adapters[name].is_ready:
            names = ", ".join(sorted(adapter.name for adapter in self._adapters.values() if adapter.is_ready))
            raise ValueError(f"adapter {name!r} is not served (served: {names or 'none'}): serve it first")
        return self._adapters[name]


def _checked_folder(name: str, folder: Path, max_rank: int) -> bool:
    """Returns whether the adapter in a folder adapts the output layer."""
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ValueError(f"adapter {name!r}: {folder} has no {file}: export the adapter in PEFT's format")
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    if rank > max_rank:
        raise ValueError(
            f"adapter {name!r} has rank {rank}, and sampler.adapters.max_rank={max_rank}: raise the limit, or train an "
            "adapter of a lower rank"
        )
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as weights:
        return any(OUTPUT_LAYER in key.split(".") for key in weights.keys())  # not a mapping
