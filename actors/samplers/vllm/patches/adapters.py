"""Patches of vLLM's adapters on CPU, in the engine's process: products by adapter, and prompt logits.

vLLM 0.32 multiplies every row with its own copy of the factors, and rows without an adapter, of index -1, with those
of the last one: a prompt of the base model gets an adapter if another one is in its batch. Here each adapter's rows
are multiplied together, and rows of the base model are left out.

To compute the logits of a prompt, vLLM assigns rows to the requests of the step, not to the tokens of the prompt. With
an output layer that takes adapters the rows do not match. Here the rows of each prompt are assigned to its adapter.
GPU engines are unchanged: `VLLMSampler` refuses there what they would compute wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_prompt_logprobs = GPUModelRunner._get_prompt_logprobs_dict


def shrink(inputs: Tensor, factors: Tensor, outputs: Tensor, indices: Tensor, scaling: float = 1.0) -> None:
    """Sets `outputs` [T, >= r] to the products of `inputs` [T, I] with each row's A, of `factors` [L, 1, r, I]."""
    outputs.zero_()
    for index, rows in _rows_by_adapter(indices):
        product = inputs[rows].to(outputs.dtype) @ _matrix(factors, index).to(outputs.dtype).T
        outputs[rows, : product.shape[1]] = scaling * product


def expand(inputs: Tensor, factors: Tensor, outputs: Tensor, indices: Tensor, add_inputs: bool = True) -> None:
    """Adds the products of `inputs` [T, r] with each row's B, of `factors` [L, 1, O, r], to `outputs` [T, O]."""
    # The LM head of vLLM has rows of padding, the adapter's has not, or the other way round.
    expand_slice(inputs, factors, outputs, indices, 0, min(outputs.shape[1], factors.shape[-2]), add_inputs)


def expand_slice(
    inputs: Tensor,
    factors: Tensor,
    outputs: Tensor,
    indices: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Like `expand`, for the columns [slice_offset, slice_offset + slice_size) of `outputs`."""
    columns = outputs[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for index, rows in _rows_by_adapter(indices):
        matrix = _matrix(factors, index)[:slice_size].to(outputs.dtype)
        columns[rows] += inputs[rows, : matrix.shape[1]].to(outputs.dtype) @ matrix.T


def _rows_by_adapter(indices: Tensor) -> Iterator[tuple[int, Any]]:
    """Yields (slot, rows) of each adapter in a batch, without the rows of the base model."""
    slots = indices.tolist()
    distinct = set(slots)
    for slot in distinct - {-1}:
        yield slot, slice(0, len(slots)) if len(distinct) == 1 else torch.nonzero(indices == slot)[:, 0]


def _matrix(factors: Tensor, index: int) -> Tensor:
    """Returns the factor of one slot, [r, I] or [O, r]."""
    return factors[index].squeeze(0)


def prompt_logprobs(runner: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
    """Computes prompt log-probs request by request, each with its own adapter; arguments and result are vLLM's."""
    asked = runner.num_prompt_logprobs
    if runner.lora_config is None or not asked:
        return _prompt_logprobs(runner, hidden_states, num_scheduled_tokens)
    found: dict[str, Any] = {}
    for request_id in list(asked):
        request, num_tokens = runner.requests[request_id], num_scheduled_tokens.get(request_id, 0)
        num_rows = min(num_tokens, len(request.prompt_token_ids) - request.num_computed_tokens - 1)
        if num_rows > 0:
            adapter = request.lora_request
            rows = (0 if adapter is None else adapter.lora_int_id,) * num_rows
            runner._set_active_loras(rows, rows, set() if adapter is None else {adapter})
        runner.num_prompt_logprobs = {request_id: asked[request_id]}
        found |= _prompt_logprobs(runner, hidden_states, num_scheduled_tokens)
        if not runner.num_prompt_logprobs:  # the prompt is complete
            del asked[request_id]
    runner.num_prompt_logprobs = asked
    return found


def adapt_rows_of_each_adapter() -> None:
    """Patches the CPU engines of this process."""
    modules: tuple[Any, ...] = (lora_ops, punica_cpu)  # which import each function by its name
    for module in modules:
        module.bgmv_shrink = shrink
        module.bgmv_expand = expand
        module.bgmv_expand_slice = expand_slice
    GPUModelRunner._get_prompt_logprobs_dict = prompt_logprobs  # type: ignore[method-assign, assignment]  # a patch of vLLM
