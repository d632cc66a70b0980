"""An engine's adapters have immutable names, a limit on their number, and leave when their requests have ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mobula.actors.samplers.served import ServedAdapters
from mobula.configs.schema.rollout import ServedAdaptersConfig

LIMITS = ServedAdaptersConfig(max_served=2, max_rank=8)


def write(folder: Path, *, rank: int = 4, module: str = "q_proj", **own: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, **own}))
    tensors = {f"base_model.model.{module}.lora_A.weight": torch.zeros(rank, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def add(adapters: ServedAdapters, name: str, folder: Path) -> int:
    with adapters.adding(name, folder) as added:
        return added.number


async def test_a_name_is_taken_once_and_its_successor_has_another_number(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    assert add(adapters, "one", folder) == 1
    assert adapters.has("one", folder)
    assert not adapters.has("one", tmp_path)
    with pytest.raises(ValueError, match="adapter 'one' exists: served weights never change"):
        add(adapters, "one", folder)
    async with adapters.removing("one"):
        pass
    assert add(adapters, "one", folder) == 2


def test_an_adapter_that_loads_takes_a_place_and_is_not_served(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    with adapters.adding("one", folder), adapters.adding("two", folder):
        with pytest.raises(ValueError, match=r"'three' is one more than sampler\.adapters\.max_served=2"):
            add(adapters, "three", folder)
        with pytest.raises(ValueError, match=r"adapter 'one' is not served \(served: none\)"), adapters.used("one"):
            pass
    with adapters.used("one") as one, adapters.used(None) as base:
        assert one is not None
        assert (one.name, base) == ("one", None)


def test_a_failed_load_leaves_no_trace(tmp_path: Path) -> None:
    adapters, folder = ServedAdapters(LIMITS), write(tmp_path / "one")
    with pytest.raises(RuntimeError), adapters.adding("one", folder):
        raise RuntimeError
    assert add(adapters, "one", folder) == 2


async def test_an_adapter_leaves_after_its_last_request(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    add(adapters, "one", write(tmp_path / "one"))

    async def remove() -> None:
        async with adapters.removing("one"):
            pass

    with adapters.used("one"):
        removal = asyncio.create_task(remove())
        await asyncio.sleep(0.01)
        assert not removal.done()
        with pytest.raises(ValueError, match="is not served"), adapters.used("one"):
            pass
    await asyncio.wait_for(removal, 1)


def test_a_folder_without_an_adapter_or_with_too_high_a_rank_is_refused(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        add(adapters, "none", tmp_path)
    for name, own in (("plain", {"rank": 9}), ("pattern", {"rank_pattern": {"q_proj": 9}})):
        with pytest.raises(ValueError, match=r"has rank 9, and sampler\.adapters\.max_rank=8"):
            add(adapters, name, write(tmp_path / name, **own))


def test_the_output_layer_is_found_by_its_name(tmp_path: Path) -> None:
    adapters = ServedAdapters(LIMITS)
    add(adapters, "decoder", write(tmp_path / "decoder"))
    assert adapters.with_output_layer() == []
    add(adapters, "head", write(tmp_path / "head", module="lm_head"))
    assert adapters.with_output_layer() == ["head"]


def test_engines_without_adapters_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set sampler\.adapters\.max_served to 1 or more"):
        add(ServedAdapters(ServedAdaptersConfig()), "one", tmp_path)
