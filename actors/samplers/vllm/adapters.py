"""Loads and unloads adapters in a vLLM engine.

vLLM ignores factors of modules that it does not adapt (such as those of a vision tower), so each rank is asked for
them after loading. Its prefix cache distinguishes adapters by name and path; the name that it gets contains the
adapter's number, so a name that is served again shares nothing with its earlier weights.
"""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mobula.actors.samplers.adapters import ServedAdapter

MAX_NAMED = 5  # module names in an error message


def lora_request(adapter: ServedAdapter | None) -> LoRARequest | None:
    """Returns how a request names its adapter; None for the base model."""
    if adapter is None:
        return None
    return LoRARequest(f"{adapter.number}:{adapter.name}", adapter.number, str(adapter.folder))


async def load_adapter(engine: AsyncLLM, adapter: ServedAdapter) -> None:
    """Loads an adapter on every rank of the engine.

    Raises:
        ValueError: vLLM refuses the adapter, or would ignore a part of it.
        EngineDeadError: the engine is dead.
    """
    request = lora_request(adapter)
    assert request is not None
    try:
        await engine.add_lora(request)
    except EngineDeadError:
        raise
    except Exception as error:  # vLLM's core answers with a bare Exception
        raise ValueError(f"vLLM cannot serve adapter {adapter.name!r}: {error}") from error
    ranks = await engine.collective_rpc("ignored_adapter_modules", args=(adapter.number,))
    if ignored := sorted({module for rank in ranks for module in rank}):
        await engine.remove_lora(adapter.number)
        raise ValueError(
            f"vLLM would ignore {len(ignored)} modules of adapter {adapter.name!r} "
            f"({', '.join(ignored[:MAX_NAMED])}): train adapters of the language model alone, or use "
            "sampler=huggingface"
        )
